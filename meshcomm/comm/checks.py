"""What is wrong with a call before it moves a byte? Each door uses the same functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.errors import AutogradError, LayoutError, ShapeError


def check_tensor(x: object, kinds: tuple[str, ...], where: Callable[[], str]) -> None:
    """A dense, local tensor on a device that the group serves.

    Calls of torch would take others and fail late, or give the parts of a DTensor a meaning of
    their own.
    """
    if type(x) is Tensor and x.layout is torch.strided and x.device.type in kinds:
        return
    if isinstance(x, DTensor):
        raise ShapeError(
            f"{where()} was given a DTensor",
            given=f"a DTensor of shape {tuple(x.shape)}, placements {x.placements}",
            expected="the tensor of this rank",
            hint="x.to_local(), or x.redistribute(...), which is DTensor's own communication",
        )
    if not isinstance(x, Tensor):
        raise ShapeError(
            f"{where()} was given a {type(x).__name__}",
            given=type(x).__name__,
            expected="a tensor",
            hint="torch.as_tensor(x), or mesh.objects for plain Python objects",
        )
    if x.layout != torch.strided or x.device.type not in kinds:
        raise ShapeError(
            f"{where()} cannot carry this tensor",
            given=f"a tensor of shape {tuple(x.shape)}, {x.layout}, on {x.device}",
            expected=f"a dense tensor on {' or '.join(kinds)}",
            hint="x.to_dense()" if x.layout != torch.strided else "x.to(mesh.device)",
        )


def check_in_place(x: Tensor, where: Callable[[], str], functional: str) -> None:
    """In-place collectives do not touch what autograd watches."""
    if x.requires_grad and torch.is_grad_enabled():
        raise AutogradError(
            f"{where()} would change a tensor that needs gradients",
            given=f"a tensor of shape {tuple(x.shape)} with requires_grad=True",
            expected="a tensor without gradients, or torch.no_grad()",
            hint=f"mesh.functional.{functional}, which returns a new tensor and has a gradient",
        )


def normal_axis(x: Tensor, axis: int, where: Callable[[], str]) -> int:
    """`axis` counted from the front."""
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(
            f"{where()} has no axis {axis}",
            given=f"x of shape {tuple(x.shape)}, axis {axis}",
            expected=f"{-x.ndim} to {x.ndim - 1}" if x.ndim else "a tensor with an axis; this one is 0-dim",
            hint="x.unsqueeze(0)" if x.ndim == 0 else "axis=0 or axis=-1",
        )
    return axis % x.ndim


def check_divisible(
    x: Tensor, axis: int, size: int, where: Callable[[], str], who: Callable[[], str]
) -> None:
    """Axis `axis` of `x` must split into `size` equal parts."""
    length = x.shape[axis]
    if length % size:
        raise ShapeError(
            f"{where()} cannot split axis {axis}",
            given=f"x of shape {tuple(x.shape)} on {who()}",
            expected=f"a size of axis {axis} divisible by {size}, got {length}",
            hint=f"pad axis {axis} to {-(-length // size) * size}",
        )


def check_coord(coord: int, size: int, what: str, where: Callable[[], str]) -> None:
    """A peer or root is a coord of the dim, never a global rank."""
    if isinstance(coord, bool) or not isinstance(coord, int) or not 0 <= coord < size:
        raise LayoutError(
            f"{where()}: {what}={coord!r} is not a coord",
            given=f"{what}={coord!r}",
            expected=f"a coord from 0 to {size - 1}; peers and roots are coords along the dim",
            hint=f"mesh.coord(...) gives this rank's own; {what} counts along the dim, not in the world",
        )


def check_peer(coord: int, own: int, size: int, what: str, where: Callable[[], str]) -> None:
    """A message goes to another rank."""
    if type(coord) is int and 0 <= coord < size and coord != own:
        return
    check_coord(coord, size, what, where)
    if coord == own:
        raise LayoutError(
            f"{where()}: {what}={coord} is this rank itself",
            given=f"{what}={coord}, own coord {own}",
            expected="another coord of the dim",
            hint="x.clone(), or shift, which copies where the peer is the rank itself",
        )
