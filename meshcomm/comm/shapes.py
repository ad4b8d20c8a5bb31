"""Tensors as a group sees them: dense in memory, and split or joined along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor

from meshcomm.errors import ShapeError
from meshcomm.reductions import WIRE_OPS
from meshcomm.transport.support import WIDENED, name_of
from meshcomm.transport.torch_private import written

# The dtypes that every backend supports directly.
CARRIED: Final = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)
_INTS: Final = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}

_MOST_AXES: Final = 14
# A fixed order, the same on every rank of one torch version: a dtype is sent as its index. float32 is first, because
# a dry run reads zeros.
_DTYPES: Final = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)},
    key=lambda d: (d != torch.float32, str(d)),
)


def materialised(x: Tensor) -> Tensor:
    """Return `x` itself if its memory holds its values contiguously, otherwise a copy that does."""
    if x.is_complex():
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    return x.contiguous()


def leaving(x: Tensor) -> Tensor:
    """Return `x` in the form in which it is sent, dense and detached; `x` itself if it already has that form."""
    if type(x) is Tensor and not (x.requires_grad or x.is_neg() or x.is_complex()) and x.is_contiguous():
        return x
    return materialised(x.detach())


def buffer_for(out: Tensor) -> Tensor:
    """Return `out` itself if a backend can write to it, otherwise new memory of its shape.

    Gloo writes with operators, some of them in the wait, and these refuse an inference tensor outside of inference mode.
    """
    if out.is_contiguous() and not (out.is_conj() or out.is_neg() or out.is_inference()):
        return out
    with torch.inference_mode(False):
        return out.new_empty(out.shape)


def into(out: Tensor, buffer: Tensor) -> Tensor:
    """Copy the values of `buffer` into `out` unless both are the same tensor, and return `out`."""
    if buffer is out:
        written([out])
    else:
        with unwatched(out):
            out.copy_(buffer)
    return out


def unwatched(*outs: Tensor) -> AbstractContextManager[object]:
    """Return a context in which `outs` may be written. Calls are checked when they are made, but the wait may run in
    another autograd mode.
    """
    return torch.inference_mode() if any(map(Tensor.is_inference, outs)) else torch.no_grad()


def split(x: Tensor, axis: int, size: int) -> Tensor:
    """Split (..., size*s, ...) -> (size, ..., s, ...), dense; slice c of `axis` is element c."""
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return materialised(x.reshape(shape).movedim(axis, 0))


def join(parts: Tensor, axis: int) -> Tensor:
    """Join (size, ..., s, ...) -> (..., size*s, ...): the inverse of `split`; no copy for axis 0."""
    shape = list(parts.shape[1:])
    shape[axis] *= parts.shape[0]
    return parts.movedim(0, axis).reshape(shape)


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of a flat buffer with the shapes of `like`."""
    parts = flat.split_with_sizes(list(map(Tensor.numel, like)))
    return [part if x.ndim == 1 else part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return all values in one flat buffer of new memory."""
    return torch.cat([x if x.ndim == 1 else x.reshape(-1) for x in tensors])


def rest_of(x: Tensor, axis: int) -> list[int]:
    """Return the sizes of all axes but `axis`. Their product is the size of what one index holds, also if there is no index."""
    return [*x.shape[:axis], *x.shape[axis + 1 :]]


# -- the form in which a tensor is sent ------------------------------------------------------------


def wire(x: Tensor, added: bool = False) -> Tensor:
    """Return the memory of `x`, which is dense, as a flat tensor in a dtype that backends support.

    added: return a dtype that backends can add: complex numbers as pairs, bool as bytes. If False, a dtype that
    backends do not support is sent as bytes, which is exact.
    """
    flat = x.view(-1)
    if x.dtype in CARRIED:
        return flat
    if not added:
        return as_bytes(flat)
    if x.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if x.dtype == torch.bool else flat


def as_bytes(flat: Tensor) -> Tensor:
    """Return the same memory as bytes. `flat` has one axis and is contiguous.

    A slice of one element is contiguous with any stride, but torch cannot view it as bytes with every stride.
    """
    if flat.numel() < 2:
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def sent_as(dtype: torch.dtype, op: str) -> str | None:
    """Return how the values of a reduction are sent, if that is not their own dtype."""
    if _is_ordered(dtype, op):
        return "ordered integers"
    return name_of(WIDENED[dtype]) if dtype in WIDENED else None


def as_reduced(x: Tensor, op: str) -> Tensor:
    """Return the values of `x` in the form in which a reduction sends them; `x` itself if that is its own."""
    if _is_ordered(x.dtype, op):
        return _ordered(x, op)
    return x.to(WIDENED[x.dtype]) if x.dtype in WIDENED else x


def from_reduced(came: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Return the values of a received tensor, in `dtype` or a wider dtype."""
    if not _is_ordered(dtype, op):
        return came
    kind = _INTS[dtype]
    keys = came.to(kind)
    return torch.where(keys < 0, keys ^ torch.iinfo(kind).max, keys).view(dtype)


def _is_ordered(dtype: torch.dtype, op: str) -> bool:
    """Return whether floats are sent as `_ordered`: backends disagree on whether NaN is less than a number."""
    return WIRE_OPS[op].nan is not None and dtype in _INTS


def _ordered(x: Tensor, op: str) -> Tensor:
    """Return integers that sort like the floats in `x`. NaN sorts last for max and first for min.

    The bits of floats, read as integers, are ordered except below zero, where all bits but the sign are inverted. So
    -0.0 is below 0.0, and a NaN on any rank appears in the result, as with torch.minimum and torch.maximum.
    """
    kind = _INTS[x.dtype]
    bits = x.detach().view(kind)
    limits = torch.iinfo(kind)
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    keys.masked_fill_(x.isnan(), limits.max if WIRE_OPS[op].nan == "greatest" else limits.min)
    # No backend reduces 16-bit integers.
    return keys.to(torch.int32) if kind is torch.int16 else keys


# -- dtype and shape as a message ------------------------------------------------------------------


def blank_header(device: torch.device) -> Tensor:
    """Return a buffer for a header."""
    return torch.zeros(_MOST_AXES + 2, dtype=torch.int64, device=device)


def header_of(x: Tensor, where: str) -> Tensor:
    """Return dtype, number of axes and sizes, which a receiver needs to allocate memory.

    Raises ShapeError for too many axes.
    """
    if x.ndim > _MOST_AXES:
        raise ShapeError(
            f"{where}: a handshake cannot describe {x.ndim} axes",
            given=f"x of shape {tuple(x.shape)}, {x.dtype}",
            expected=f"at most {_MOST_AXES} axes",
            hint="x.flatten()",
        )
    header = blank_header(x.device)
    facts = [_DTYPES.index(x.dtype), x.ndim, *x.shape]
    header[: len(facts)] = torch.tensor(facts, dtype=torch.int64, device="cpu")
    return header


def described_by(header: Tensor) -> Tensor:
    """Return new memory for the tensor that a header describes."""
    kind, ndim, *sizes = header.tolist()
    return torch.empty(sizes[:ndim], dtype=_DTYPES[kind], device=header.device)
