"""Tensors as a group sees them: dense in memory, and cut or joined along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from meshcomm.transport.torch_private import written


def materialised(x: Tensor) -> Tensor:
    """`x` itself where its memory holds its values one after the other, else a copy that does."""
    if x.is_complex():
        x = x.resolve_conj()
    if x.is_neg():
        x = x.resolve_neg()
    return x.contiguous()


def leaving(x: Tensor) -> Tensor:
    """`x` as it is sent: dense, and out of autograd's sight; `x` itself where it is that already."""
    if type(x) is Tensor and not (x.requires_grad or x.is_neg() or x.is_complex()) and x.is_contiguous():
        return x
    return materialised(x.detach())


def buffer_for(out: Tensor) -> Tensor:
    """`out` itself where bytes can be received into it, else new memory of its shape."""
    if out.is_contiguous() and not out.is_conj() and not out.is_neg():
        return out
    return out.new_empty(out.shape)


def into(out: Tensor, buffer: Tensor) -> Tensor:
    """`out` with the values of its buffer, which may be `out` itself."""
    if buffer is out:
        written([out])
    else:
        with unwatched(out):
            out.copy_(buffer)
    return out


def unwatched(*outs: Tensor) -> AbstractContextManager[object]:
    """Where `outs` may be written: a call is checked when it is made, and may be waited for in another mode."""
    return torch.inference_mode() if any(out.is_inference() for out in outs) else torch.no_grad()


def split(x: Tensor, axis: int, size: int) -> Tensor:
    """(..., size*s, ...) -> (size, ..., s, ...), dense; slice c of `axis` is element c."""
    shape = (*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
    return materialised(x.reshape(shape).movedim(axis, 0))


def join(parts: Tensor, axis: int) -> Tensor:
    """(size, ..., s, ...) -> (..., size*s, ...): the inverse of `split`; no copy for axis 0."""
    shape = list(parts.shape[1:])
    shape[axis] *= parts.shape[0]
    return parts.movedim(0, axis).reshape(shape)


def cut(x: Tensor, axis: int, sizes: Sequence[int]) -> list[Tensor]:
    """Dense slices of `axis` with these sizes."""
    return [materialised(part) for part in x.split(list(sizes), axis)]


def unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat buffer with the shapes of `like`, one after the other."""
    parts = flat.split([x.numel() for x in like])
    return [part if x.ndim == 1 else part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All values in one flat buffer of new memory."""
    return torch.cat([x if x.ndim == 1 else x.reshape(-1) for x in tensors])


def without(x: Tensor, axis: int) -> Tensor:
    """`x` with one index left of `axis`, whose size may differ between ranks; values do not matter."""
    return x.new_empty(0).expand(0) if x.ndim == 0 else x.narrow(axis, 0, 0)


def filled(out: Tensor | None, result: Tensor) -> Tensor:
    """`result`, in `out` where there is one."""
    return result if out is None else into(out, result)
