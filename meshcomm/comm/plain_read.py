"""How do bytes become a Python object again? Nothing in them can run code or ask for more memory than they are."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NoReturn, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from meshcomm.comm.plain_write import ALIGNMENT, MAX_AXES, MAX_DEPTH
from meshcomm.errors import ObjectError


def broken(why: str) -> NoReturn:
    """Raise for bytes that no writer wrote."""
    raise ObjectError(
        f"what arrived is not a whole object: {why}",
        expected="bytes as another rank of the same meshcomm version wrote them",
        hint="look whether all ranks run the same meshcomm, and make the same calls in the same order",
    )


Collected = TypeVar("Collected", set[Any], frozenset[Any], dict[Any, Any])


@final
class Reader:
    """Reads the value that a Writer wrote.

    Args:
        tree: the writer's tree.
        blobs: uint8 of shape (n,), what the writer's blobs were copied into; on any device.
        device: where tensors go.

    Every length is compared with what is left before memory is asked for.
    """

    def __init__(self, tree: memoryview, blobs: Tensor, device: torch.device) -> None:
        self._tree = tree
        self._at = 0
        self._blobs = blobs
        self._end = 0
        self._device = device
        self._seen: list[Any] = []

    def read(self) -> Any:
        """The one value, which must end where the bytes end. Raises ObjectError."""
        value = self._value(0)
        if self._at != len(self._tree) or self._end != self._blobs.numel():
            broken("bytes are left over behind it")
        return value

    # -- values ---------------------------------------------------------------------------------

    def _value(self, depth: int) -> Any:
        tag = self._tag(depth)
        simple = _SIMPLE.get(tag)
        if simple is not None:
            return simple(self)
        if tag == b"r":
            place = self._count()
            if place >= len(self._seen):
                broken("a reference to nothing")
            return self._seen[place]
        shared = _SHARED.get(tag)
        if shared is None:
            broken(f"unknown tag {bytes(tag)!r}")
        value = shared(self, depth)
        self._seen.append(value)
        return value

    def _key(self, depth: int) -> Any:
        tag = self._tag(depth)
        if tag in (b"t", b"z"):
            elements = [self._key(depth + 1) for _ in range(self._length())]
            return tuple(elements) if tag == b"t" else _distinct(frozenset(elements), len(elements))
        if tag not in _KEYS:
            broken(f"tag {bytes(tag)!r} in a key")
        key = _SIMPLE[tag](self)
        if isinstance(key, np.void):
            broken("a NumPy record in a key")
        return key

    def _tag(self, depth: int) -> bytes:
        if depth > MAX_DEPTH + 1:
            broken(f"deeper than {MAX_DEPTH} levels")
        return bytes(self._take(1))

    def _none(self) -> None:
        return None

    def _true(self) -> bool:
        return True

    def _false(self) -> bool:
        return False

    def _int(self) -> int:
        return int.from_bytes(self._take(self._length()), "little", signed=True)

    def _float(self) -> float:
        number: float = struct.unpack("<d", self._take(8))[0]
        return number

    def _complex(self) -> complex:
        return complex(*struct.unpack("<dd", self._take(16)))

    def _str(self) -> str:
        try:
            return str(self._take(self._length()), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            broken(f"text that is not UTF-8: {error.reason}")

    def _bytes(self) -> bytes:
        return bytes(self._take(self._length()))

    def _numpy_str(self) -> np.str_:
        return np.str_(self._str())

    def _numpy_bytes(self) -> np.bytes_:
        return np.bytes_(self._bytes())

    def _size(self) -> torch.Size:
        return torch.Size(self._shape())

    def _dtype(self) -> torch.dtype:
        name = self._str()
        found = _dtypes().get(name)
        if found is None:
            broken(f"a dtype {name[:40]!r} that this torch does not have")
        return found

    def _bytearray(self, depth: int) -> bytearray:
        return bytearray(self._take(self._length()))

    def _list(self, depth: int) -> list[Any]:
        return [self._value(depth + 1) for _ in range(self._length())]

    def _tuple(self, depth: int) -> tuple[Any, ...]:
        return tuple([self._value(depth + 1) for _ in range(self._length())])

    def _set(self, depth: int) -> set[Any]:
        elements = [self._key(depth + 1) for _ in range(self._length())]
        return _distinct(set(elements), len(elements))

    def _frozenset(self, depth: int) -> frozenset[Any]:
        elements = [self._key(depth + 1) for _ in range(self._length())]
        return _distinct(frozenset(elements), len(elements))

    def _dict(self, depth: int) -> dict[Any, Any]:
        count = self._length()
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self._key(depth + 1)
            found[key] = self._value(depth + 1)
        return _distinct(found, count)

    # -- tensors and arrays ---------------------------------------------------------------------

    def _tensor(self, depth: int) -> Tensor:
        if bytes(self._take(1)) != b"D":
            broken("a tensor without dtype")
        dtype = self._dtype()
        shape = self._shape()
        memory = self._blob(_numel(shape) * dtype.itemsize)
        # Memory of its own, so that one tensor does not keep the whole message alive.
        own = memory.to(self._device, copy=True)
        try:
            return own.view(dtype).view(shape)
        except (RuntimeError, TypeError) as error:
            broken(f"a tensor of shape {shape}: {str(error).splitlines()[0]}")

    def _array(self, depth: int) -> np.ndarray[Any, Any]:
        return self._values()

    def _scalar(self) -> Any:
        values = self._values()
        if values.ndim:
            broken("a NumPy scalar with axes")
        return values[()]

    def _values(self) -> np.ndarray[Any, Any]:
        inner = Reader(self._tree, self._blobs[:0], self._device)
        inner._at = self._at
        described = inner._value(MAX_DEPTH // 2)
        self._at = inner._at
        if isinstance(described, str) and len(described) > 64:
            broken("a NumPy dtype of more than 64 letters")
        try:
            dtype = np.lib.format.descr_to_dtype(described)
        except Exception as error:  # whatever NumPy makes of a description that it did not write
            broken(f"a NumPy dtype: {type(error).__name__}")
        if not isinstance(dtype, np.dtype) or dtype.hasobject or dtype.subdtype is not None:
            broken("a NumPy dtype that is not plain")
        shape = self._shape()
        memory = self._blob(_numel(shape) * dtype.itemsize)
        try:
            values: np.ndarray[Any, Any] = np.ndarray(shape, dtype)
        except (ValueError, OverflowError, MemoryError) as error:
            broken(f"an array of shape {shape}: {error}")
        if memory.numel():
            values.reshape(-1).view(np.uint8)[:] = memory.cpu().numpy()
        return values

    def _blob(self, nbytes: int) -> Tensor:
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._blobs.numel():
            broken(f"{nbytes} bytes of values where {max(0, self._blobs.numel() - start)} are left")
        self._end = start + nbytes
        return self._blobs[start : self._end]

    def _shape(self) -> tuple[int, ...]:
        axes = self._length()
        if axes > MAX_AXES:
            broken(f"a shape of {axes} axes")
        return tuple([self._count() for _ in range(axes)])

    # -- bytes ----------------------------------------------------------------------------------

    def _length(self) -> int:
        """A count of things that take at least one byte each."""
        count = self._count()
        if count > len(self._tree) - self._at:
            broken(f"{count} more elements in {len(self._tree) - self._at} bytes")
        return count

    def _count(self) -> int:
        number = shift = 0
        while True:
            byte = self._take(1)[0]
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 63:
                broken("a count of more than 63 bits")
        if number >> 63:
            broken("a count of more than 63 bits")
        return number

    def _take(self, count: int) -> memoryview:
        taken = self._tree[self._at : self._at + count]
        if len(taken) < count:
            broken("it ends in the middle of a value")
        self._at += count
        return taken


def _distinct(found: Collected, count: int) -> Collected:
    if len(found) != count:
        broken("an element or key that occurs twice")
    return found


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    if numel >> 62:
        broken(f"a shape of 2^{numel.bit_length() - 1} elements")
    return numel


@cache
def _dtypes() -> dict[str, torch.dtype]:
    """Every dtype of this torch by the name that it prints itself with."""
    found = (getattr(torch, name) for name in dir(torch))
    return {
        str(each).removeprefix("torch."): each
        for each in found
        if isinstance(each, torch.dtype) and not str(each).startswith(("torch.qint", "torch.quint"))
    }


_SIMPLE: Final[dict[bytes, Callable[[Reader], Any]]] = {
    b"N": Reader._none,
    b"T": Reader._true,
    b"F": Reader._false,
    b"i": Reader._int,
    b"f": Reader._float,
    b"c": Reader._complex,
    b"s": Reader._str,
    b"b": Reader._bytes,
    b"u": Reader._numpy_str,
    b"y": Reader._numpy_bytes,
    b"n": Reader._scalar,
    b"Z": Reader._size,
    b"D": Reader._dtype,
}
_KEYS: Final = frozenset(_SIMPLE) - {b"Z", b"D"}
_SHARED: Final[dict[bytes, Callable[[Reader, int], Any]]] = {
    b"B": Reader._bytearray,
    b"l": Reader._list,
    b"t": Reader._tuple,
    b"d": Reader._dict,
    b"S": Reader._set,
    b"z": Reader._frozenset,
    b"x": Reader._tensor,
    b"a": Reader._array,
}
