"""Rows that travel to their experts and back, with exact gradients, and their load, counted in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.mesh import Mesh
from meshcomm.parallel.recompute import once


class Load(NamedTuple):
    """The load of one layer by one rank's tokens since the last `take_load`. Plain sums: adding the loads of
    all ranks along the data's and the context's dims gives the load of the step.

    Fields:
        passes: backward passes; the same on every rank, so not to be added.
        balance: sum over the passes of the balance loss, 0-dim float64; where samples are split along
            a context dim, this rank's share of it. The mean over the step's samples is the sum over
            all ranks / (passes * size of the data's dims).
        chosen: (experts) int64: choices of each expert, dropped ones included.
        dropped: (experts) int64: choices beyond its capacity.
    """

    passes: int
    balance: Tensor
    chosen: Tensor
    dropped: Tensor


def attach(y: Tensor, loss: Tensor, weight: float, count: Callable[[], None]) -> Tensor:
    """`y`, unchanged; a backward through it gives `loss` the gradient `weight`, and calls `count`.

    So `weight * loss` is part of the loss, whose rest may be computed on another stage of a pipeline. Counted in
    backward, a forward that is run again to save memory does not count twice.
    """
    attached: Tensor = _Attach.apply(y, loss, weight, count)
    return attached


def exchange(mesh: Mesh, dim: str, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """The first sent[0] rows go to coord 0, the next sent[1] to coord 1, ...; what arrives, in order.

    Shape:      (sum of sent, width) -> (sum of received, width).
    Called by:  every rank along `dim`, with received[c] the entry of coord c's `sent` for this rank.
    Gradient:   the same exchange back; every rank's backward takes part, and asks for no sizes.
    """
    arrived: Tensor = _Exchange.apply(rows, mesh, dim, sent, received)
    return arrived


def move(x: Tensor, there: Tensor, back: Tensor, slots: int = 1, blanks: bool = False) -> Tensor:
    """Row there[i] // slots of x at place i; zeros where that is the number of rows of x.

    Shape:    x (n, width), there (m) int64 in 0 .. n * slots, each number below n * slots at most once -> (m, width).
              back (n * slots) int64: the place of number j in `there`, m where it has none.
    blanks:   whether there is a number n * slots in `there`, or an m in `back`.
    Gradient: exact, and the same bits in every run: a row's slots are added in order, where indexing's own
              backward adds them in any order on a GPU.
    """
    moved: Tensor = _Move.apply(x, there, back, slots, blanks)
    return moved


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: Mesh, dim: str, sent: list[int], received: list[int]) -> Tensor:
        ctx.mesh, ctx.dim, ctx.sent, ctx.received = mesh, dim, sent, received
        held = rows.detach()
        (arrived,) = once(
            lambda: [mesh.all_to_all(dim, held, input_split_sizes=sent, output_split_sizes=received)], held
        )
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = ctx.mesh.all_to_all(ctx.dim, dy, input_split_sizes=ctx.received, output_split_sizes=ctx.sent)
        return dx, None, None, None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, slots: int, blanks: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.slots, ctx.blanks = slots, blanks
        return _rows(x, there if slots == 1 else there // slots, blanks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        dx = _rows(dy, back, ctx.blanks)
        return dx if ctx.slots == 1 else dx.unflatten(0, (-1, ctx.slots)).sum(1), None, None, None, None


def _rows(x: Tensor, which: Tensor, blanks: bool) -> Tensor:
    """x[which], where the number behind the last row stands for zeros."""
    return (torch.cat([x, x.new_zeros(1, x.shape[1])]) if blanks else x).index_select(0, which)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: float, count: Callable[[], None]) -> Tensor:
        ctx.gradient, ctx.count = (torch.full_like(loss, weight) if weight else None), count
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ctx.count()
        return dy, ctx.gradient, None, None
