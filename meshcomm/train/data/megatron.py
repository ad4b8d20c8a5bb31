"""Megatron-LM's indexed datasets: the tokens of a .bin file, with the type and documents that its .idx file states."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAGIC: Final = b"MMIDIDX\0\0"
_TYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_HEADER: Final = struct.Struct("<9sQBQQ")
# The number of sequences that are checked together, to save memory.
_AT_ONCE: Final = 1 << 20


def indexed(path: Path, index: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the memory-mapped tokens of a .bin file, and the position after each document, by its index.

    The index has a magic, its version, a code of the type, and the numbers of sequences and of bounds of documents; then the
    length of each sequence (int32), its place in bytes (int64), and the first sequence of each document (int64).
    Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py. Raises ValueError and OSError.
    """
    with index.open("rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size or not start.startswith(_MAGIC):
        raise ValueError(f"{index} begins with {start[:9]!r}, not with {_MAGIC!r}")
    _, version, code, sequences, bounds = _HEADER.unpack(start)
    if version != 1 or code not in _TYPES:
        raise ValueError(f"{index} has version {version} and type code {code}, not version 1 and code 1 to 8")
    size, wanted = index.stat().st_size, _HEADER.size + 12 * sequences + 8 * bounds
    if size != wanted:
        why = ", so it also has the modes of multimodal data" if size == wanted + sequences else ""
        raise ValueError(f"{index} has {size} bytes, but its header states {wanted}{why}")
    kind, body = np.dtype(_TYPES[code]), np.memmap(index, np.uint8, mode="r")
    lengths, places, documents = (
        np.frombuffer(body, dtype, count, _HEADER.size + offset)
        for dtype, count, offset in (
            ("<i4", sequences, 0),
            ("<i8", sequences, 4 * sequences),
            ("<i8", bounds, 12 * sequences),
        )
    )
    end = 0
    for first in range(0, sequences, _AT_ONCE):
        ends = end + np.cumsum(lengths[first : first + _AT_ONCE], dtype=np.int64) * kind.itemsize
        if lengths[first : first + _AT_ONCE].min() < 0 or not np.array_equal(
            places[first : first + _AT_ONCE], np.concatenate([[end], ends[:-1]])
        ):
            raise ValueError(f"{index} has sequences that do not follow one another")
        end = int(ends[-1])
    if path.stat().st_size != end:
        raise ValueError(f"{path.stat().st_size} bytes, but {index} describes {end} bytes of {kind}")
    if not bounds or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise ValueError(f"{index} has documents that do not cover its {sequences} sequences in order")
    tokens: NDArray[Any] = np.memmap(path, kind, mode="r")
    return tokens, np.append(places, end)[documents[1:]] // kind.itemsize
