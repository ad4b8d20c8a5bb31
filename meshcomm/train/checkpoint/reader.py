"""Read a checkpoint's tensors in one process, without running code from the checkpoint.

DCP's metadata is a pickle. The unpickler used here accepts only the few classes that tensor metadata needs, so a
checkpoint from an untrusted source cannot run code.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, ClassVar, Final, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshcomm.errors import TrainingError
from meshcomm.train.checkpoint.folder import METADATA, instead_of, opened, read, size_of
from meshcomm.train.checkpoint.parts import Kind, Part, kind_of, parts_of, untiled
from meshcomm.train.torch_private import CHECKSUM
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.placement import Box
from meshcomm.transfer.tensors import Region

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
# The classes in metadata of tensors. They contain no nested pickles. Entries that are not tensors (BytesStorageMetadata), which
# torch writes for plain numbers, are never read, because reading such an entry would unpickle it.
_KNOWN: Final = {
    "torch.distributed.checkpoint.metadata": {
        *(
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
        ),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {_LOCATION, "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    # The path of the folder when torch wrote it. Nothing reads it.
    **{module: {"PosixPath"} for module in ("pathlib", "pathlib._local")},
    "torch": {
        *("Size", "complex64", "complex128"),
        *(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_NAMES),
    },
}


@final
class Saved:
    """The tensors in the folder of one checkpoint. Raises TrainingError if its metadata is missing or invalid.

    signed: whether the metadata must have the checksum of each part, as those that meshcomm writes.
    kinds: the kind of every tensor, by global name. Entries that are not tensors are omitted.
    """

    def __init__(self, folder: Path, *, signed: bool = True) -> None:
        self.folder, self._signed = folder, signed
        self._way_out = (
            instead_of(folder) if signed else f"save {folder} again, or copy it again from where it was saved"
        )
        path = folder / METADATA
        try:
            metadata = unpickle(read(path))
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of metadata")
            self.kinds = {
                name: Kind(saved.properties.dtype, tuple(saved.size))
                for name, saved in metadata.state_dict_metadata.items()
                if isinstance(saved, TensorStorageMetadata)
            }
        except Exception as error:  # a damaged pickle may raise anything
            said = error if isinstance(error, OSError | pickle.UnpicklingError) else repr(error)
            raise TrainingError(
                "the checkpoint's metadata cannot be read",
                given=f"{path}: {said}",
                expected="tensor metadata as torch.distributed.checkpoint writes it",
                hint=self._way_out,
            ) from error
        self._metadata = metadata

    @property
    def weights(self) -> dict[str, Kind]:
        """The kinds of the model's parameters and buffers, by their names in the module."""
        weights = {name: kind for name, kind in self.kinds.items() if name.startswith("model.")}
        return {name.removeprefix("model."): kind for name, kind in weights.items()}

    def fill(self, state: Mapping[str, Tensor | Kept]) -> None:
        """Fill the tensors of `state` in place, reading only the data that lie on this rank.

        Raises TrainingError if a name, shape or dtype differs, if parts are missing, or if a file is missing, truncated
        or has changed since it was written.
        """
        self.check(state)
        for part, chunk, (begin, end, _) in self._needed(state):
            saved = Region(chunk, self._read(part.name, chunk, part.kind.dtype))
            part.region.write(begin, end, saved.read(begin, end))

    def check(self, state: Mapping[str, Tensor | Kept]) -> None:
        """Raise TrainingError in the same cases as `fill`, except that files are not read, so a changed one is not noticed."""
        for name, tensor in state.items():
            self._check(name, kind_of(tensor), self.kinds.get(name))
        sizes: dict[Path, int] = {}
        for part, chunk, _ in self._needed(state):
            path = self.folder
            try:
                place = self._metadata.storage_data[MetadataIndex(part.name, chunk.begin)]
                path = _file(self.folder, place, self._signed)
                if path not in sizes:
                    sizes[path] = size_of(path)
                if sizes[path] < place.offset + place.length:
                    raise _cut_short(place)
            except Exception as error:
                raise self._damaged(part.name, path, error) from error

    def _needed(self, state: Mapping[str, Tensor | Kept]) -> Iterator[tuple[Part, Box, Any]]:
        """Yield each part of `state` on this rank, with each saved part that it overlaps and their common box."""
        for part in parts_of(state):
            for chunk in self._chunks(part.name):
                if (common := chunk.common(part.box)) is not None:
                    yield part, chunk, common

    def _chunks(self, name: str) -> list[Box]:
        saved: Any = self._metadata.state_dict_metadata[name]
        return [Box.at(chunk.offsets, chunk.sizes) for chunk in saved.chunks]

    def box(self, name: str, box: Box, held: dict[Box, Tensor]) -> Tensor:
        """Return a box of a tensor. held: parts that were read before, which are not read again; those of this box afterwards.

        Raises TrainingError in the same cases as `fill`.
        """
        kind = self.kinds[name]
        self._check(name, kind, kind)
        values = torch.empty(box.shape, dtype=kind.dtype)
        found = {chunk: common for chunk in self._chunks(name) if (common := chunk.common(box)) is not None}
        for chunk in held.keys() - found.keys():
            del held[chunk]
        for chunk, (begin, end, _) in found.items():
            if chunk not in held:
                held[chunk] = self._read(name, chunk, kind.dtype)
            Region(box, values).write(begin, end, Region(chunk, held[chunk]).read(begin, end))
        return values

    def load(self, name: str) -> Tensor:
        """Return one full tensor. Raises TrainingError in the same cases as `fill`."""
        dtype, shape = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.fill({name: tensor})
        return tensor

    def _read(self, name: str, chunk: Box, dtype: torch.dtype) -> Tensor:
        """Return one saved part of a tensor, which torch.save has written as a zip archive inside a larger file."""
        path = self.folder
        try:
            place = self._metadata.storage_data[MetadataIndex(name, chunk.begin)]
            path = _file(self.folder, place, self._signed)
            with opened(path) as file:
                file.seek(place.offset)
                record = io.BytesIO(file.read(place.length))
            if record.getbuffer().nbytes < place.length:
                raise _cut_short(place)
            # The metadata say which bytes belong to this part. A file of another step or run may have the same sizes.
            crc32 = zlib.crc32(record.getbuffer())
            if crc32 != getattr(place, CHECKSUM, crc32):
                # Another tensor of this checkpoint may have these bytes.
                places = self._metadata.storage_data.items()
                raise _OtherBytes(place, crc32, next((i.fqn for i, p in places if p.crc32 == crc32), ""))
            values: Tensor = torch.load(record, map_location="cpu", weights_only=True)
            if type(values) is not Tensor or values.layout != torch.strided:
                raise ValueError(f"holds a {type(values).__name__}, not a dense tensor")
            held, described = Kind(values.dtype, tuple(values.shape)), Kind(dtype, chunk.shape)
            if held != described:
                raise ValueError(f"holds {held}, but the metadata describe {described}")
        except Exception as error:
            raise self._damaged(name, path, error) from error
        return values

    def _damaged(self, name: str, path: Path, error: Exception) -> TrainingError:
        said = error.strerror if isinstance(error, OSError) else None
        return TrainingError(
            f"the checkpoint is damaged: {name} in {path.name}",
            given=f"{path}: {said or error}",
            expected=error.expected
            if isinstance(error, _OtherBytes)
            else "the bytes that were saved, readable on every host",
            hint=self._way_out,
        )

    def _check(self, name: str, kind: Kind, there: Kind | None) -> None:
        given = "no such tensor" if there is None else str(there)
        if there == kind:
            # Without this check, a missing part would go unnoticed: the tensor would keep its old values.
            given = untiled(self._chunks(name), kind.shape)
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


def _cut_short(place: Any) -> ValueError:
    return ValueError(f"ends within the {place.length} bytes from {place.offset} on")


def _file(folder: Path, place: Any, signed: bool) -> Path:
    """Return the file of a record. Raises ValueError for a path outside the folder."""
    name, numbers = place.relative_path, (place.offset, place.length)
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise ValueError(f"{name!r} is not a file of this folder")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} is not an offset and a length")
    if signed and type(getattr(place, CHECKSUM, None)) is not int:
        raise ValueError("the metadata hold no checksum of this part")
    return folder / name


def unpickle(text: bytes) -> Any:
    """Return the metadata in a pickle. Raises UnpicklingError if the pickle contains anything else."""
    return _Plain(io.BytesIO(text)).load()


@final
class _Plain(pickle._Unpickler):
    """Reads metadata, and rejects every class or function that they do not need. It is based on the Python unpickler, because the C unpickler lets a pickle set attributes of classes and of Enum members."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise UnpicklingError for any name that metadata do not need."""
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
        known = {field.name for field in fields(made)} if is_dataclass(type(made)) else set()
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
