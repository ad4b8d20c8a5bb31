"""Python objects as bytes and back: JSON for the structure, followed by raw bytes; pickle only on request."""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from meshcomm.comm.checks import value_of
from meshcomm.comm.shapes import as_bytes
from meshcomm.errors import ObjectError

MAX_DEPTH: Final = 100
EXPECTED: Final = (
    "plain data and tensors: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, "
    "frozenset, torch.Tensor, torch.Size, torch.dtype, NumPy arrays and scalars"
)

# The header: message kind, checksum of the structure, size of the structure in bytes.
_HEADER: Final = struct.Struct("<4sIQ")
HEADER_BYTES: Final = _HEADER.size
_PLAIN, _PICKLED = b"MCO2", b"MCP2"

# The path to a value: its level, the path to its container, and the step from the container to the value.
_Path: TypeAlias = "tuple[int, _Path | None, str, object]"
_ROOT: Final[_Path] = (0, None, "obj", None)


def encode(x: object, pickle: bool = False) -> Tensor:
    """Encode `x` as a uint8 tensor of shape (n,) in host memory; with `pickle`, pickle it.

    Raises ObjectError, which names the path to a value that cannot be encoded.
    """
    writer = _Writer()
    if pickle:
        text = _pickled(x)
    else:
        tree = writer.value(x, _ROOT)
        text = json.dumps(tree, ensure_ascii=False, check_circular=False, separators=(",", ":")).encode()
    head = _HEADER.pack(_PICKLED if pickle else _PLAIN, zlib.crc32(text), len(text))
    return torch.cat([torch.frombuffer(bytearray(head + text), dtype=torch.uint8), *writer.blobs])


def decode(data: Tensor, device: torch.device, pickle: bool = False) -> Any:
    """Return the object that `encode` turned into `data`, in new memory, with its tensors on `device`.

    data:   a uint8 tensor of shape (n,), on any device.
    pickle: whether a pickled message may be unpickled, which runs code from the message.
    Raises: ObjectError for bytes that are not a message, or for a pickled message without `pickle`.
    """
    if data.numel() < HEADER_BYTES:
        _broken(f"{data.numel()} bytes, fewer than the {HEADER_BYTES} of a header")
    kind, checksum, length = _HEADER.unpack(_bytes(data[:HEADER_BYTES]))
    if kind not in (_PLAIN, _PICKLED):
        _broken("they do not begin like an object of this meshcomm version")
    reader = _Reader(data[HEADER_BYTES:], device)
    text = reader.take(length)
    if zlib.crc32(text) != checksum:
        _broken("the checksum differs")
    if kind == _PICKLED:
        if not pickle:
            raise ObjectError(
                "the received object is a pickle, and none of it was executed",
                given="an object sent with pickle=True",
                expected=f"{EXPECTED}; a pickle can run any code on this rank",
                hint="pickle=True on this rank too, if every sender is trusted",
            )
        return _unpickled(text, device)
    try:
        value = reader.value(json.loads(text.decode()))
    except ObjectError:
        raise
    except Exception as error:  # whatever Python, NumPy or torch raises for malformed bytes
        _broken(f"{type(error).__name__}: {str(error)[:80]}")
    if reader.left.numel():
        _broken(f"{reader.left.numel()} bytes are left over at the end")
    return value


def _broken(why: str) -> NoReturn:
    raise ObjectError(
        f"the received bytes are not a complete object: {why}",
        expected="bytes written by another rank with the same meshcomm version",
        hint="check that all ranks run the same meshcomm version, and make the same calls in the same order",
    )


def _bytes(data: Tensor) -> bytes:
    content: bytes = data.cpu().numpy().tobytes()
    return content


# -- to bytes ---------------------------------------------------------------------------------------


@final
class _Writer:
    """Turns one value into JSON: a scalar, or a list of a tag and its contents.

    blobs: uint8 tensors with the bytes to append after the structure, in the order of the values.

    An object that occurs twice is written once and then referenced by index, so that it is decoded as one object.
    """

    def __init__(self) -> None:
        self.blobs: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._open: dict[int, _Path] = {}

    def value(self, x: Any, path: _Path, key: bool = False) -> Any:
        """Return `x`, found at `path`, as JSON. Raises ObjectError.

        key: `x` is a dict key or a set element, which is compared by value and therefore never a reference.
        """
        tag = _TAGS.get(type(x))
        if tag is None:
            if (value := value_of(x)) is not x:
                return self.value(value, path, key)
            return self._leaf(x, path)
        if key and tag not in "tz":
            raise _refused(x, path, ", which cannot be a key or an element of a set")
        if not key and id(x) in self._seen:
            return ["r", self._seen[id(x)]]
        if id(x) in self._open:
            raise _refused(x, path, f", {_text(self._open[id(x)])} again: a cycle")
        if path[0] > MAX_DEPTH:
            raise _refused(x, path, f" deeper than {MAX_DEPTH} levels")
        self._open[id(x)] = path
        node: list[Any] = [tag]
        depth = path[0] + 1
        if tag == "d":
            for place, (name, value) in enumerate(x.items()):
                node.append(self.value(name, (depth, path, "list({})[{}]", place), True))
                node.append(self.value(value, (depth, path, "{}[{}]", name)))
        elif tag in "ltSz":
            step, inner = ("{}[{}]", key) if tag in "lt" else ("list({})[{}]", True)
            node += [
                self.value(element, (depth, path, step, place), inner) for place, element in enumerate(x)
            ]
        elif tag == "B":
            node.append(self._blob(x))
        else:
            node += self._tensor(x, path) if tag == "x" else self._array(x, path)
        del self._open[id(x)]
        if not key:
            self._seen[id(x)] = len(self._seen)
        return node

    def _leaf(self, x: Any, path: _Path) -> Any:
        kind = type(x)
        if x is None or kind is bool:
            return x
        if kind is int:
            return x if -(1 << 63) <= x < 1 << 63 else ["i", hex(x)]
        if kind is float:
            return x if math.isfinite(x) else ["f", struct.pack("<d", x).hex()]
        if kind is str:
            try:
                x.encode()
            except UnicodeEncodeError:  # lone surrogates
                return ["s", x.encode("utf-8", "surrogatepass").hex()]
            return x
        if kind is bytes:
            return ["b", self._blob(x)]
        if kind is complex:
            return ["c", struct.pack("<dd", x.real, x.imag).hex()]
        if kind is torch.dtype:
            return ["D", _name(x)]
        if kind is torch.Size:
            return ["Z", *x]
        if kind is np.str_:
            return ["u", self._leaf("".join(x), path)]  # str(x) drops zeros at the end
        if kind is np.bytes_:
            return ["y", self._blob(b"".join([x]))]
        if isinstance(x, np.generic):
            return ["n", *self._array(np.asarray(x), path)]
        raise _refused(x, path)

    def _tensor(self, x: Tensor, path: _Path) -> list[Any]:
        form = "quantized" if x.is_quantized else "nested" if x.is_nested else _name(x.layout)
        form = "meta" if x.device.type == "meta" else form
        if form != "strided":
            raise _refused(x, path, f", and {form}", "a dense tensor with values, as from x.to_dense()")
        if x.requires_grad and torch.is_grad_enabled():
            why = " that requires gradients, and objects carry no gradients"
            raise _refused(x, path, why, "x.detach(), or the call under torch.no_grad()")
        values = x.detach().resolve_neg()
        # Copied as integers, because not every dtype can be copied directly.
        if x.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        bits = values.view(_BITS[values.itemsize]).cpu().contiguous()
        self.blobs.append(as_bytes(bits.view(-1)))
        return [_name(x.dtype), *x.shape]

    def _array(self, x: np.ndarray[Any, Any], path: _Path) -> list[Any]:
        # Use NumPy's own description of the dtype, provided NumPy reads the same dtype back from it.
        described: Any = x.dtype.str
        if x.dtype.names is not None:
            described = np.lib.format.dtype_to_descr(x.dtype)
        if x.dtype.hasobject or np.lib.format.descr_to_dtype(described) != x.dtype:
            raise _refused(x, path, f" of dtype {x.dtype}", "a dtype for numbers, text or times")
        if x.dtype.names is not None:  # the padding between fields is undefined memory
            original, x = x, np.zeros(x.shape, x.dtype)
            x[...] = original
        self._blob(x.tobytes())
        return [_Writer().value(described, _ROOT), *x.shape]

    def _blob(self, data: bytes | bytearray) -> int:
        if data:
            self.blobs.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return len(data)


# Types whose objects have identity: an object that occurs twice is decoded as one object.
_TAGS: Final[dict[type, str]] = {
    list: "l", tuple: "t", dict: "d", set: "S", frozenset: "z", bytearray: "B", Tensor: "x", np.ndarray: "a"
}  # fmt: skip
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _refused(x: object, path: _Path, more: str = "", hint: str = "") -> ObjectError:
    kind = type(x)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    name = "lambda" if getattr(x, "__name__", "") == "<lambda>" else name
    return ObjectError(
        f"{_text(path)} is {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{more}",
        expected=EXPECTED,
        hint=hint or "plain data with the same content, or pickle=True on every rank of the call",
    )


def _text(path: _Path) -> str:
    _, parent, step, name = path
    if parent is None:
        return step
    plain = isinstance(name, str) and name.isprintable() and '"' not in name
    text = f'"{name}"' if plain else repr(name)
    return step.format(_text(parent), text if len(text) <= 60 else text[:57] + "...")


def _name(x: object) -> str:
    return str(x).removeprefix("torch.")


# -- and back ---------------------------------------------------------------------------------------


@final
class _Reader:
    """Decodes the value that a _Writer wrote.

    left:   the unread bytes after the structure, as a uint8 tensor of shape (n,) on any device.
    device: the device of decoded tensors.

    Memory is allocated only after the lengths have been checked against the number of unread bytes. Malformed
    bytes raise some exception and are never executed.
    """

    def __init__(self, left: Tensor, device: torch.device) -> None:
        self.left = left
        self._device = device
        self._seen: list[Any] = []

    def value(self, node: Any, depth: int = 0, key: bool = False) -> Any:
        """Return the decoded value. key: whether the value is inside a dict key or a set element."""
        if type(node) is not list:
            if type(node) is dict:
                _broken("a value without a tag")
            return node
        if depth > MAX_DEPTH + 1:
            _broken(f"deeper than {MAX_DEPTH} levels")
        tag, fields = node[0], node[1:]
        if tag in _LEAVES:
            return _LEAVES[tag](self, *fields)
        if tag == "r":
            if key:  # nested tuples of references would take forever to hash
                _broken("a reference in a key")
            return self._seen[fields[0]]
        value: Any
        if tag == "d":
            value = {}
            for place in range(0, len(fields), 2):
                name = self.value(fields[place], depth + 1, True)
                value[name] = self.value(fields[place + 1], depth + 1)
            if 2 * len(value) != len(fields):
                _broken("a key that occurs twice")
        elif tag in _CONTAINERS:
            elements = [self.value(field, depth + 1, key or tag in "Sz") for field in fields]
            value = _CONTAINERS[tag](elements)
            if len(value) != len(elements):
                _broken("an element that occurs twice")
        else:
            value = _BUFFERS[tag](self, *fields)
        if not key:
            self._seen.append(value)
        return value

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes after the structure."""
        return _bytes(self._next(nbytes))

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return the next tensor."""
        dtype = _dtype(name)
        # A copy, so that one tensor does not keep the whole message alive.
        flat = self._next(_numel(shape) * dtype.itemsize).to(self._device, copy=True)
        return flat.view(dtype).view(shape)

    def array(self, described: Any, *shape: int) -> np.ndarray[Any, Any]:
        """Return the next array."""
        described = _Reader(self.left[:0], self._device).value(described)
        if isinstance(described, str) and len(described) > 64:
            _broken("a NumPy dtype with more than 64 letters")
        dtype = np.lib.format.descr_to_dtype(described)
        if dtype.hasobject or dtype.subdtype is not None:
            _broken("a NumPy dtype that is not plain")
        return np.ndarray(shape, dtype, bytearray(self.take(_numel(shape) * dtype.itemsize)))

    def _next(self, nbytes: int) -> Tensor:
        if not 0 <= nbytes <= self.left.numel():
            _broken(f"{nbytes} bytes are needed and {self.left.numel()} are left")
        part, self.left = self.left[:nbytes], self.left[nbytes:]
        return part


def _numel(shape: Sequence[int]) -> int:
    if len(shape) > 64 or math.prod(shape) >> 62:
        _broken("a shape with more than 64 axes or 2^62 elements")
    return math.prod(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch)[name]
    if not isinstance(dtype, torch.dtype):
        _broken("a dtype that this version of torch does not have")
    return dtype


_CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {"l": list, "t": tuple, "S": set, "z": frozenset}
_BUFFERS: Final[dict[str, Callable[..., Any]]] = {
    "B": lambda reader, length: bytearray(reader.take(length)),
    "x": _Reader.tensor,
    "a": _Reader.array,
}
_LEAVES: Final[dict[str, Callable[..., Any]]] = {
    "i": lambda reader, text: int(text, 16),
    "f": lambda reader, text: struct.unpack("<d", bytes.fromhex(text))[0],
    "c": lambda reader, text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    "s": lambda reader, text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "b": _Reader.take,
    "D": lambda reader, name: _dtype(name),
    "Z": lambda reader, *sizes: torch.Size(sizes),
    "u": lambda reader, text: np.str_(reader.value(text, MAX_DEPTH)),
    "y": lambda reader, length: np.bytes_(reader.take(length)),
    "n": lambda reader, *described: reader.array(*described)[()],
}


# -- pickle -----------------------------------------------------------------------------------------


def _pickled(x: object) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(x, file)
    except Exception as error:  # the object's own code ran, and may raise anything
        raise ObjectError(
            f"obj cannot be pickled: {type(error).__name__}: {error}",
            expected="an object that torch.save accepts",
            hint="look for a lambda, an open file or a process group inside it",
        ) from error
    return file.getvalue()


def _unpickled(data: bytes, device: torch.device) -> Any:
    """Unpickle the object, which runs code from the bytes. The caller has checked that the user allowed pickle.

    Tensors from an accelerator are loaded onto `device`: loading them onto the sender's device would create a context
    on every device in every process.
    """

    def place(storage: Any, location: str) -> Any:
        return torch.serialization.default_restore_location(
            storage, "cpu" if location == "cpu" else str(device)
        )

    try:
        return torch.load(io.BytesIO(data), map_location=place, weights_only=False)
    except Exception as error:
        raise ObjectError(
            f"the received object cannot be unpickled: {type(error).__name__}: {error}",
            expected="a pickle whose modules this rank can import",
            hint="check that all ranks run the same code",
        ) from error
