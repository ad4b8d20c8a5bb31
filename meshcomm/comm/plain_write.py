"""How does a Python object become bytes? Plain data and tensors only; anything else is named and refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from meshcomm.errors import ObjectError

MAX_DEPTH: Final = 100
MAX_AXES: Final = 64
ALIGNMENT: Final = 64  # of each tensor's bytes in a message, so that any dtype can be viewed in place

EXPECTED: Final = (
    "plain data and tensors: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, "
    "frozenset, torch.Tensor, torch.Size, torch.dtype, NumPy arrays and scalars"
)
_PICKLE: Final = "pickle=True on every rank of the call"

Blob = Tensor | np.ndarray[Any, Any]


@final
class Refusal(Exception):
    """Why an object cannot be written; the path to it grows while the writer backs out of it."""

    def __init__(self, why: str, hint: str, same_as: int | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint
        self.same_as = same_as  # how many steps from the root lies the object that it contains
        self.steps: list[tuple[str, str]] = []  # innermost first: what to write before and behind

    def error(self) -> ObjectError:
        """As the user sees it."""
        steps = self.steps[::-1]
        why = self.why
        if self.same_as is not None:
            why = f"is {_path(steps[: self.same_as])} again: {why}"
        return ObjectError(f"{_path(steps)} {why}", expected=EXPECTED, hint=self.hint)


def _path(steps: list[tuple[str, str]]) -> str:
    if len(steps) > 12:
        steps = [*steps[:5], ("", "..."), *steps[-5:]]
    text = "obj"
    for before, behind in steps:
        text = f"{before}{text}{behind}"
    return text


@final
class Writer:
    """Writes one value as a tree of tagged bytes, and lists the tensors and arrays to be copied behind it.

    tree:   the structure, with everything small.
    blobs:  (offset, tensor or array), offsets counted from the first blob and multiples of ALIGNMENT.
    end:    where the last blob ends.

    An object that occurs twice is written once and referred to, so that it is one object again.
    """

    def __init__(self) -> None:
        self.tree = bytearray()
        self.blobs: list[tuple[int, Blob]] = []
        self.end = 0
        self._seen: dict[int, int] = {}
        self._open: dict[int, int] = {}

    def write(self, x: object) -> None:
        """Append `x`. Raises ObjectError naming the path to what cannot be written."""
        try:
            self._value(x, 0)
        except Refusal as refusal:
            raise refusal.error() from None

    # -- values ---------------------------------------------------------------------------------

    def _value(self, x: Any, depth: int) -> None:
        kind = type(x)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            simple(self, x)
            return
        shared = _SHARED.get(kind)
        if shared is None:
            if isinstance(x, np.generic):
                self._scalar(x)
                return
            raise _refused(x)
        seen = self._seen.get(id(x))
        if seen is not None:
            self.tree += b"r"
            self._count(seen)
            return
        if id(x) in self._open:
            raise Refusal("a cycle", "break the cycle, or " + _PICKLE, self._open[id(x)])
        if depth > MAX_DEPTH:
            raise Refusal(f"lies deeper than {MAX_DEPTH} levels", "flatten it, or " + _PICKLE)
        self._open[id(x)] = depth
        shared(self, x, depth)
        del self._open[id(x)]
        self._seen[id(x)] = len(self._seen)

    def _key(self, x: Any, depth: int) -> None:
        """What a dict or a set finds its elements by: compared by value, and never a reference."""
        if type(x) in _KEYS:
            _SIMPLE[type(x)](self, x)
        elif isinstance(x, np.generic) and not isinstance(x, np.void):
            self._scalar(x)
        elif type(x) in (tuple, frozenset):
            if depth > MAX_DEPTH:
                raise Refusal(f"lies deeper than {MAX_DEPTH} levels", "flatten it, or " + _PICKLE)
            self._elements(b"t" if type(x) is tuple else b"z", x, depth, self._key)
        else:
            refusal = _refused(x)
            if type(x) in _SIMPLE or type(x) in _SHARED:
                refusal.why += ", which cannot be a key or an element of a set"
                refusal.hint = "a key of numbers, text, or tuples of them, or " + _PICKLE
            raise refusal

    def _none(self, x: None) -> None:
        self.tree += b"N"

    def _bool(self, x: bool) -> None:
        self.tree += b"T" if x else b"F"

    def _int(self, x: int) -> None:
        self._bytes(x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True), b"i")

    def _float(self, x: float) -> None:
        self.tree += struct.pack("<cd", b"f", x)

    def _complex(self, x: complex) -> None:
        self.tree += struct.pack("<cdd", b"c", x.real, x.imag)

    def _str(self, x: str) -> None:
        self._bytes(x.encode("utf-8", "surrogatepass"), b"s")

    def _bytes(self, x: bytes | bytearray, tag: bytes = b"b") -> None:
        self.tree += tag
        self._count(len(x))
        self.tree += x

    def _size(self, x: torch.Size) -> None:
        self.tree += b"Z"
        self._shape(x)

    def _dtype(self, x: torch.dtype) -> None:
        self._bytes(str(x).removeprefix("torch.").encode(), b"D")

    def _bytearray(self, x: bytearray, depth: int) -> None:
        self._bytes(x, b"B")

    def _list(self, x: list[Any], depth: int) -> None:
        self._elements(b"l", x, depth, self._value)

    def _tuple(self, x: tuple[Any, ...], depth: int) -> None:
        self._elements(b"t", x, depth, self._value)

    def _set(self, x: set[Any], depth: int) -> None:
        self._elements(b"S", x, depth, self._key)

    def _frozenset(self, x: frozenset[Any], depth: int) -> None:
        self._elements(b"z", x, depth, self._key)

    def _elements(self, tag: bytes, x: Any, depth: int, write: Callable[[Any, int], None]) -> None:
        self.tree += tag
        self._count(len(x))
        place = 0
        try:
            for place, each in enumerate(x):  # noqa: B007 - the except clause reads it
                write(each, depth + 1)
        except Refusal as refusal:
            ordered = isinstance(x, (list, tuple))
            refusal.steps.append(("", f"[{place}]") if ordered else ("list(", f")[{place}]"))
            raise

    def _dict(self, x: dict[Any, Any], depth: int) -> None:
        self.tree += b"d"
        self._count(len(x))
        place, key, in_key = 0, None, True
        try:
            for place, (key, value) in enumerate(x.items()):  # noqa: B007 - as above
                in_key = True
                self._key(key, depth + 1)
                in_key = False
                self._value(value, depth + 1)
        except Refusal as refusal:
            refusal.steps.append(("list(", f")[{place}]") if in_key else ("", f"[{_short(key)}]"))
            raise

    # -- tensors and arrays ---------------------------------------------------------------------

    def _tensor(self, x: Tensor, depth: int) -> None:
        if x.layout is not torch.strided or x.is_quantized or x.is_nested or x.device.type == "meta":
            kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
            kind = "meta" if x.device.type == "meta" else kind.removeprefix("torch.")
            raise Refusal(f"is a {kind} tensor", "a dense tensor with values, as from x.to_dense()")
        if x.requires_grad and torch.is_grad_enabled():
            raise Refusal(
                "is a tensor that needs gradients, and no gradient crosses with an object",
                "x.detach(), or the call under torch.no_grad()",
            )
        self.tree += b"x"
        self._dtype(x.dtype)
        self._shape(x.shape)
        self._blob(x.numel() * x.itemsize, x)

    def _array(self, x: np.ndarray[Any, Any], depth: int) -> None:
        self._values(b"a", x)

    def _scalar(self, x: np.generic) -> None:
        if isinstance(x, np.str_):
            self._bytes(str.encode(x, "utf-8", "surrogatepass"), b"u")
        elif isinstance(x, np.bytes_):
            self._bytes(b"".join([x]), b"y")
        else:
            self._values(b"n", np.asarray(x))

    def _values(self, tag: bytes, x: np.ndarray[Any, Any]) -> None:
        self.tree += tag
        # NumPy's own description of a dtype, and only where NumPy reads the same dtype out of it.
        described: Any = x.dtype.str
        if x.dtype.names is not None:
            described = np.lib.format.dtype_to_descr(x.dtype)
        if x.dtype.hasobject or np.lib.format.descr_to_dtype(described) != x.dtype:
            raise Refusal(f"is NumPy data of dtype {x.dtype}", "a dtype of numbers, text or times")
        Writer._value(self._inner(), described, MAX_DEPTH // 2)
        self._shape(x.shape)
        self._blob(x.nbytes, x)

    def _inner(self) -> Writer:
        """A writer of the same tree whose objects are not referred to from outside."""
        inner = Writer()
        inner.tree = self.tree
        return inner

    def _blob(self, nbytes: int, x: Blob) -> None:
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.blobs.append((start, x))
        self.end = start + nbytes

    def _shape(self, shape: tuple[int, ...] | torch.Size) -> None:
        if len(shape) > MAX_AXES:
            raise Refusal(f"has {len(shape)} axes, more than {MAX_AXES}", "reshape it")
        self._count(len(shape))
        for size in shape:
            self._count(size)

    def _count(self, n: int) -> None:
        while n >= 128:
            self.tree.append(n & 127 | 128)
            n >>= 7
        self.tree.append(n)


_SIMPLE: Final[dict[type, Callable[[Writer, Any], None]]] = {
    type(None): Writer._none,
    bool: Writer._bool,
    int: Writer._int,
    float: Writer._float,
    complex: Writer._complex,
    str: Writer._str,
    bytes: Writer._bytes,
    torch.Size: Writer._size,
    torch.dtype: Writer._dtype,
}
_KEYS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_SHARED: Final[dict[type, Callable[[Writer, Any, int], None]]] = {
    bytearray: Writer._bytearray,
    list: Writer._list,
    tuple: Writer._tuple,
    dict: Writer._dict,
    set: Writer._set,
    frozenset: Writer._frozenset,
    Tensor: Writer._tensor,
    np.ndarray: Writer._array,
}


def _refused(x: object) -> Refusal:
    kind = type(x)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    why = f"is {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(x, Tensor):
        return Refusal(why, f"x.detach() for a parameter, the plain tensor of a subclass, or {_PICKLE}")
    for base in (dict, list, tuple, set, str, int, float, np.ndarray):
        if isinstance(x, base):
            plain = "numpy.asarray" if base is np.ndarray else base.__name__
            return Refusal(why, f"{plain}(x), if its own type need not cross, or {_PICKLE}")
    return Refusal(why, f"send what it holds as plain data, or {_PICKLE}")


def _short(key: object) -> str:
    text = f'"{key}"' if isinstance(key, str) and key.isprintable() and '"' not in key else repr(key)
    return text if len(text) <= 60 else text[:57] + "..."
