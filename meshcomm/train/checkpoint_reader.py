"""Read a checkpoint's tensors in one process, without running code from the checkpoint.

DCP's metadata is a pickle. The unpickler used here accepts only the few classes that tensor metadata needs, so a
checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, Metadata
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshcomm.errors import TrainingError
from meshcomm.parallel.tensor.parameters import Kept, Piece
from meshcomm.train.checkpoint_folder import METADATA, instead_of
from meshcomm.train.torch_private import CHECKSUM

SAFETENSORS_NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The dtypes that a checkpoint can hold, apart from complex ones, with their names in the safetensors format."""

# The location of a record. meshcomm adds the record's checksum.
_LOCATION: Final = "_StorageInfo"
# The classes in plans and metadata of tensors. They contain no nested pickles. Entries that are not
# tensors (BytesStorageMetadata) are excluded, because reading such an entry would unpickle it.
_KNOWN: Final = {
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {_LOCATION, "_StoragePrefix"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        *("Size", "complex64", "complex128"),
        *(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_NAMES),
    },
}


# Offsets and sizes of a part of a tensor.
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Kind(NamedTuple):
    """The dtype and shape of a full tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@final
class Saved:
    """The tensors in the folder of one checkpoint. Raises TrainingError if its metadata is missing or invalid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            metadata = unpickle(path.read_bytes())
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of metadata")
        except Exception as error:  # a damaged pickle may raise anything
            said = error if isinstance(error, OSError | pickle.UnpicklingError) else repr(error)
            raise TrainingError(
                "the checkpoint's metadata cannot be read",
                given=f"{path}: {said}",
                expected="tensor metadata as torch.distributed.checkpoint writes it",
                hint=instead_of(folder),
            ) from error
        self._metadata = metadata

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of every tensor, by global name. Entries that are not tensors are omitted."""
        return {
            name: Kind(saved.properties.dtype, tuple(saved.size))
            for name, saved in self._metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def fill(self, state: Mapping[str, Tensor | Kept]) -> None:
        """Fill the tensors of `state`, DTensors or unsharded ones, reading only the data that they need.

        Raises TrainingError if a name, shape or dtype differs, if parts are missing, or if a file is missing, truncated
        or has changed since it was written.
        """
        kinds = self.kinds
        for name, tensor in state.items():
            dtype = tensor.tensor.dtype if isinstance(tensor, Kept) else tensor.dtype
            self._check(name, Kind(dtype, tuple(tensor.shape)), kinds.get(name))
            if isinstance(tensor, Kept):
                for piece in tensor.pieces():
                    self._fill_piece(name, piece, dtype)
        state = {name: each for name, each in state.items() if not isinstance(each, Kept)}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(state), self._metadata, True)
        for item in planner.create_local_plan().items:
            saved = self._read(item.storage_index, kinds[item.storage_index.fqn].dtype)
            part = tuple(
                slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True)
            )
            planner.resolve_tensor(item).detach().copy_(saved[part])

    def _fill_piece(self, name: str, piece: Piece, dtype: torch.dtype) -> None:
        values = torch.empty(piece.shape, dtype=dtype)
        saved: Any = self._metadata.state_dict_metadata[name]
        for chunk in saved.chunks:
            at, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if not _overlap((at, sizes), (piece.at, piece.shape)):
                continue
            ends = [min(a + n, b + m) for a, n, b, m in zip(at, sizes, piece.at, piece.shape, strict=True)]
            begins = [max(a, b) for a, b in zip(at, piece.at, strict=True)]
            pairs = list(zip(begins, ends, strict=True))
            there = tuple(slice(begin - a, end - a) for (begin, end), a in zip(pairs, at, strict=True))
            here = tuple(slice(begin - a, end - a) for (begin, end), a in zip(pairs, piece.at, strict=True))
            values[here] = self._read(MetadataIndex(name, chunk.offsets), dtype)[there]
        piece.write(values.to(piece.held.device))

    def load(self, name: str) -> Tensor:
        """Return one full tensor. Raises TrainingError in the same cases as `fill`."""
        dtype, shape = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.fill({name: tensor})
        return tensor

    def _read(self, index: MetadataIndex, dtype: torch.dtype) -> Tensor:
        """Return one saved part of a tensor, which torch.save has written as a zip archive inside a larger file."""
        path = self.folder
        try:
            place = self._metadata.storage_data[index]
            path = _file(self.folder, place)
            with path.open("rb") as file:
                file.seek(place.offset)
                record = io.BytesIO(file.read(place.length))
            if record.getbuffer().nbytes < place.length:
                raise ValueError(f"ends within the {place.length} bytes from {place.offset} on")
            # The metadata say which bytes belong to this part. A file of another step or run may have the same sizes.
            crc32 = zlib.crc32(record.getbuffer())
            if crc32 != place.crc32:
                raise _OtherBytes(place, crc32, self._with_checksum(crc32))
            found: Tensor = torch.load(record, map_location="cpu", weights_only=True)
            if type(found) is not Tensor or found.layout != torch.strided:
                raise ValueError(f"holds a {type(found).__name__}, not a dense tensor")
            chunks: Any = self._metadata.state_dict_metadata[index.fqn]
            sizes = next(tuple(each.sizes) for each in chunks.chunks if tuple(each.offsets) == index.offset)
            held, described = Kind(found.dtype, tuple(found.shape)), Kind(dtype, sizes)
            if held != described:
                raise ValueError(f"holds {held}, but the metadata describe {described}")
        except Exception as error:
            said = error.strerror if isinstance(error, OSError) else None
            raise TrainingError(
                f"the checkpoint is damaged: {index.fqn} in {path.name}",
                given=f"{path}: {said or error}",
                expected=error.expected
                if isinstance(error, _OtherBytes)
                else "the bytes that were saved, readable on every host",
                hint=instead_of(self.folder),
            ) from error
        return found

    def _with_checksum(self, crc32: int) -> str:
        """Return the name of the tensor that the bytes with this checksum belong to; "" if they belong to no tensor here."""
        found = (index.fqn for index, place in self._metadata.storage_data.items() if place.crc32 == crc32)
        return next(found, "")

    def _check(self, name: str, kind: Kind, there: Kind | None) -> None:
        given = "no such tensor" if there is None else str(there)
        if there == kind:
            # Without this check, a missing part would go unnoticed: the tensor would keep its old values.
            saved: Any = self._metadata.state_dict_metadata[name]
            given = _untiled([(tuple(each.offsets), tuple(each.sizes)) for each in saved.chunks], kind.shape)
            if not given:
                return
        raise TrainingError(
            f"the checkpoint does not fit: {name}",
            given=f"{given} in {self.folder}",
            expected=str(kind),
            hint="resume with the checkpoint's configuration, which is in its lock.json",
        )


class _OtherBytes(ValueError):
    """A record does not hold the bytes that were saved. of: the tensor that its bytes belong to, "" if unknown."""

    def __init__(self, place: Any, crc32: int, of: str) -> None:
        super().__init__(
            f"the {place.length} bytes from {place.offset} on have the CRC-32 {crc32:08x}"
            + (f", like {of}" if of else "")
        )
        self.expected = f"the bytes that were saved, with the CRC-32 {place.crc32:08x}: not changed, and of the same step and run"


def _file(folder: Path, place: Any) -> Path:
    """Return the file of a record. Raises ValueError for a path outside the folder."""
    name, numbers = place.relative_path, (place.offset, place.length)
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise ValueError(f"{name!r} is not a file of this folder")
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError(f"{numbers} is not an offset and a length")
    if type(getattr(place, CHECKSUM, None)) is not int:
        raise ValueError("the metadata hold no checksum of this part")
    return folder / name


def _untiled(chunks: list[Box], shape: tuple[int, ...]) -> str:
    """Return why the chunks do not cover a tensor of this shape without gaps and overlaps; "" if they do."""
    for offsets, sizes in chunks:
        within = len(offsets) == len(sizes) == len(shape) and all(
            type(at) is int and type(size) is int and at >= 0 and size >= 0 and at + size <= whole
            for at, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not within:
            return f"a part of shape {sizes} at {offsets}, outside shape {shape},"
    parts, whole = sum(math.prod(sizes) for _, sizes in chunks), math.prod(shape)
    if parts != whole:
        return f"parts of {parts} of {whole} elements"
    boxes = [(at, sizes) for at, sizes in chunks if math.prod(sizes)]
    # Along the axis with the most cuts, each chunk has few neighbors to compare with.
    axis = max(range(len(shape)), key=lambda axis: len({at[axis] for at, _ in boxes}), default=0)
    met: list[Box] = []
    for at, sizes in sorted(boxes, key=lambda box: box[0][axis : axis + 1]):
        met = [box for box in met if box[0][axis] + box[1][axis] > at[axis]] if shape else met
        if any(_overlap((at, sizes), other) for other in met):
            return f"parts that overlap at {at}"
        met.append((at, sizes))
    return ""


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other, strict=True))


def unpickle(text: bytes) -> Any:
    """Return the plan or metadata in a pickle. Raises UnpicklingError if the pickle contains anything else."""
    return _Plain(io.BytesIO(text)).load()


@final
class _Plain(pickle._Unpickler):
    """Reads plans and metadata, and rejects every class or function that they do not need. It is based on the Python
    unpickler, because the C unpickler lets a pickle set attributes of classes and of Enum members.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Raise UnpicklingError for any name that plans and metadata do not need."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickle the member of an Enum this way
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint of tensors")
        return super().find_class(module, name)

    def _build(self) -> None:
        """Set the fields of a newly created object, and nothing else."""
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state, made = stack.pop(), stack[-1]
        if type(made) is TensorProperties and isinstance(state, tuple):
            made.__setstate__(state)
            return
        # Set fields of objects only, never of classes: only a class from find_class creates an object.
        known = {each.name for each in fields(made)} if is_dataclass(type(made)) else set()
        if type(made).__name__ == _LOCATION:
            known.add(CHECKSUM)
        if not isinstance(state, dict) or not known or not known >= state.keys():
            kind = getattr(made, "__name__", type(made).__name__)
            raise pickle.UnpicklingError(f"the state of a {kind} is not allowed in a checkpoint of tensors")
        vars(made).update(state)

    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item]


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an Enum, and no other attribute that getattr could reach."""
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{kind!r}.{name} is not allowed in a checkpoint of tensors")
    found: Enum = kind[name]
    return found
