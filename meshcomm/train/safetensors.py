"""One file of tensors in the safetensors format: written and read without the package of that name.

    8 bytes    length of the header, little-endian
    header     JSON, padded with spaces to a multiple of 8:
               {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    data       the elements of each tensor, little-endian, in C order, without gaps

As https://github.com/huggingface/safetensors has it (README, "Format"; the checks of its reader): no
holes and no overlaps, 100 MB of header at most. Tensors lie in the order of falling element size, then
name, so that each is aligned.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from meshcomm.errors import TrainingError, UnsupportedOp
from meshcomm.train.saved import Kind

NAMES: Final = {
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
"""How the format calls each dtype."""

_DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}
_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8
_HEADER_LIMIT: Final = 100_000_000
_ELEMENTS_LIMIT: Final = 2**63


class _Entry(NamedTuple):
    kind: Kind
    start: int
    end: int


def write_file(
    path: Path, kinds: Mapping[str, Kind], metadata: Mapping[str, str], load: Callable[[str], Tensor]
) -> int:
    """Write a file of the tensors `kinds`, and return its bytes. One tensor is in memory at a time.

    load: gives the whole tensor of a name; called once for each, in the file's order.
    The file appears under its name when it is whole and on the disk; one that was there is replaced.
    Raises: UnsupportedOp for a dtype that the format does not have, or on a big-endian machine; OSError.
    """
    _little_endian()
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    place = 0
    order = sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))
    for name in order:
        kind = kinds[name]
        if kind.dtype not in NAMES or name == _METADATA:
            raise UnsupportedOp(
                f"a safetensors file cannot hold {name}",
                given=str(kind),
                expected=f"another name than {_METADATA}, and one of {', '.join(map(str, NAMES))}",
            )
        end = place + _bytes_of(kind)
        entries[name] = {"dtype": NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    if len(header) > _HEADER_LIMIT:
        raise UnsupportedOp(
            f"too many tensors for one safetensors file: {len(kinds)}",
            given=f"a header of {len(header)} bytes",
            expected=f"{_HEADER_LIMIT} at most",
        )
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for name in order:
                tensor = load(name)
                assert Kind(tensor.dtype, tuple(tensor.shape)) == kinds[name], name
                if tensor.numel():
                    file.write(_view(tensor.contiguous()))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return _LENGTH_BYTES + len(header) + place


@final
class SafetensorsFile:
    """A file that is open for reading: `kinds` of its tensors and `metadata`, and `load` for one of them.

    Everything that the header says is checked before any of it is used. As a context, it is closed
    when it is left. Raises TrainingError where the file is not there or not as the format has it.
    """

    def __init__(self, path: Path) -> None:
        _little_endian()
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            self._refuse(f"{error.strerror or error}", "a file that can be read")
        try:
            self._entries, self.metadata = self._header()
        except BaseException:
            self._file.close()
            raise
        self.kinds = {name: entry.kind for name, entry in self._entries.items()}

    def load(self, name: str) -> Tensor:
        """The tensor `name`, in memory of its own."""
        entry = self._entries[name]
        tensor = torch.empty(entry.kind.shape, dtype=entry.kind.dtype)
        if tensor.numel():
            self._file.seek(self._data + entry.start)
            view = _view(tensor)
            if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
                self._refuse(f"the data of {name} end early", "the file as it was when it was opened")
        return tensor

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _header(self) -> tuple[dict[str, _Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_HEADER_LIMIT, size - _LENGTH_BYTES):
            self._refuse(
                f"a file of {size} bytes whose first 8 say that its header has {length}",
                f"a header of at most {_HEADER_LIMIT} bytes, in the file",
            )
        text = self._file.read(length)
        try:
            facts = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            self._refuse(f"a header that cannot be read: {error}", "a JSON object in UTF-8, no key twice")
        if not isinstance(facts, dict) or not text.startswith(b"{"):
            self._refuse(f"a header that begins with {text[:8]!r}", "a JSON object")
        metadata = facts.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            self._refuse(f"{_METADATA} = {_short(metadata)}", "a table of text to text")
        entries = {name: self._entry(name, fact) for name, fact in facts.items()}
        self._data = _LENGTH_BYTES + length
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1][1:]):
            if entry.start != end:
                what = "overlaps another tensor" if entry.start < end else "leaves a gap before it"
                self._refuse(f"{name} at [{entry.start}, {entry.end}] {what}", f"it to begin at {end}")
            end = entry.end
        if self._data + end != size:
            self._refuse(f"{size - self._data} bytes of data", f"{end}, where the last tensor ends")
        return entries, metadata

    def _entry(self, name: str, fact: Any) -> _Entry:
        expected = '{"dtype": text, "shape": [sizes], "data_offsets": [begin, end]}'
        if not isinstance(fact, dict) or fact.keys() != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"{name} = {_short(fact)}", expected)
        shape, offsets = fact["shape"], fact["data_offsets"]
        if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
            self._refuse(f"{name} = {_short(fact)}", expected)
        dtype = _DTYPES.get(fact["dtype"]) if isinstance(fact["dtype"], str) else None
        if dtype is None:
            self._refuse(f"{name} of dtype {_short(fact['dtype'])}", "one of " + ", ".join(_DTYPES))
        kind = Kind(dtype, tuple(shape))
        start, end = offsets
        if math.prod(shape) >= _ELEMENTS_LIMIT or end - start != _bytes_of(kind):
            self._refuse(
                f"{name} of {fact['dtype']} {_short(shape)} in {end - start} bytes",
                f"{_bytes_of(kind)} bytes",
            )
        return _Entry(kind, start, end)

    def _refuse(self, given: str, expected: str) -> NoReturn:
        raise TrainingError(
            f"{self._path} cannot be read as a safetensors file",
            given=given,
            expected=expected,
            hint="a file that `meshcomm export` wrote; or copy it again, if it was cut short",
        )


def _view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor with elements."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _bytes_of(kind: Kind) -> int:
    return math.prod(kind.shape) * kind.dtype.itemsize


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _little_endian() -> None:
    if sys.byteorder != "little":
        raise UnsupportedOp(
            "safetensors files are written and read on little-endian machines only",
            given=f"a {sys.byteorder}-endian one",
            expected="x86, Arm, or another that puts the lowest byte first",
        )
