"""The message that carries one Python object: a header, the object's tree, the bytes of its tensors."""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from meshcomm.comm.pickled import read_pickle, write_pickle
from meshcomm.comm.plain_read import Reader, broken
from meshcomm.comm.plain_write import ALIGNMENT, EXPECTED, MAX_DEPTH, Blob, Writer
from meshcomm.errors import ObjectError

__all__ = ["EXPECTED", "MAX_DEPTH", "Message", "decode", "encode"]

VERSION: Final = 1

# magic, version, kind, 0, checksum of the tree, bytes of the tree, bytes of what lies behind it
_HEADER: Final = struct.Struct("<4sBBHIQQ")
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"MCOB"
_PLAIN, _PICKLED = 0, 1


@final
class Message:
    """An object ready to be copied into one flat tensor. The object must not change before that.

    nbytes: length of the message.
    """

    def __init__(self, head: bytearray, blobs: list[tuple[int, Blob]], nbytes: int) -> None:
        self._head = head
        self._blobs = blobs
        self.nbytes = nbytes

    def tensor(self, device: torch.device, length: int | None = None) -> Tensor:
        """The message as uint8 of shape (nbytes,), or of (length,) with unwritten bytes behind it."""
        out = torch.empty(self.nbytes if length is None else length, dtype=torch.uint8, device=device)
        out[: len(self._head)].copy_(torch.frombuffer(self._head, dtype=torch.uint8))
        first = _padded(len(self._head))
        for start, blob in self._blobs:
            place = out[first + start :]
            if not blob.nbytes:
                continue
            if isinstance(blob, Tensor):
                _put_tensor(place, blob)
            else:
                _put_array(place[: blob.nbytes], blob)
        return out


def encode(x: object, pickle: bool = False) -> Message:
    """`x` as a message; with `pickle`, by pickle. Raises ObjectError naming what cannot cross."""
    writer = Writer()
    if pickle:
        with torch.no_grad():
            writer.write(write_pickle(x))
    else:
        writer.write(x)
    tree = writer.tree
    kind = _PICKLED if pickle else _PLAIN
    head = bytearray(_HEADER.pack(_MAGIC, VERSION, kind, 0, zlib.crc32(tree), len(tree), writer.end))
    head += tree
    nbytes = _padded(len(head)) + writer.end if writer.end else len(head)
    return Message(head, writer.blobs, nbytes)


def decode(data: Tensor, device: torch.device, pickle: bool = False) -> Any:
    """The object of a message, in new memory; its tensors on `device`.

    data:   uint8 of shape (nbytes,), on any device.
    pickle: whether a message that was made by pickle may be unpickled, which runs code from it.
    Raises: ObjectError for bytes that are no message, or a pickled message without `pickle`.
    """
    head = _bytes(data[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        broken(f"{len(head)} bytes, less than a header's {HEADER_BYTES}")
    magic, version, kind, reserved, checksum, tree_bytes, blob_bytes = _HEADER.unpack(head)
    if magic != _MAGIC:
        broken("it does not begin like one")
    if version != VERSION:
        broken(f"it is in format {version}, this meshcomm reads format {VERSION}")
    end = HEADER_BYTES + tree_bytes
    first = _padded(end) if blob_bytes else end
    if first + blob_bytes != data.numel():
        broken(f"{data.numel()} bytes came, its header says {first + blob_bytes}")
    tree = _bytes(data[HEADER_BYTES:end])
    if zlib.crc32(tree) != checksum:
        broken("its checksum differs")
    if kind not in (_PLAIN, _PICKLED) or reserved:
        broken(f"unknown kind {kind}, {reserved}")
    if kind == _PICKLED and not pickle:
        raise ObjectError(
            "what arrived is a pickle, and nothing of it was run",
            given="an object sent with pickle=True",
            expected=f"{EXPECTED}; a pickle can run any code on this rank",
            hint="pickle=True on this rank too, where every sender is trusted",
        )
    found = Reader(tree, data[first:], device).read()
    if kind == _PLAIN:
        return found
    if not _is_pickle(found):
        broken("a pickled message without a pickle")
    return read_pickle(*found)


def _is_pickle(found: Any) -> bool:
    return (
        isinstance(found, tuple)
        and [type(part) for part in found] == [bytes, list]
        and all(
            isinstance(pair, tuple) and [type(part) for part in pair] == [Tensor, bool] for pair in found[1]
        )
    )


def _bytes(data: Tensor) -> memoryview:
    return data.cpu().numpy().data if data.numel() else memoryview(b"")


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _put_tensor(place: Tensor, x: Tensor) -> None:
    """Copy the values of `x`, whatever its strides and device, to the beginning of `place`: one copy."""
    x = x.detach()
    if x.dtype.is_complex:
        x = x.resolve_conj()
    x = x.resolve_neg()
    # As whole numbers of the same width: exact, and every dtype has it.
    bits = torch.view_as_real(x).view(torch.int64) if x.itemsize == 16 else x.view(_BITS[x.itemsize])
    place[: bits.numel() * bits.itemsize].view(bits.dtype).view(bits.shape).copy_(bits)


def _put_array(place: Tensor, x: np.ndarray[Any, Any]) -> None:
    staged = (
        place if place.device.type == "cpu" else torch.empty(place.shape, dtype=torch.uint8, device="cpu")
    )
    if x.dtype.names is not None:
        staged.zero_()  # NumPy leaves the bytes between fields as they are
    staged.numpy().view(x.dtype).reshape(x.shape)[...] = x
    if staged is not place:
        place.copy_(staged)
