"""Rows that travel to their experts and back, with exact gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshcomm.mesh import Mesh


def exchange(mesh: Mesh, dim: str, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """The first sent[0] rows go to coord 0, the next sent[1] to coord 1, ...; what arrives, in order.

    Shape:      (sum of sent, width) -> (sum of received, width).
    Called by:  every rank along `dim`, with received[c] what coord c has in `sent` for this rank.
    Gradient:   the same exchange back; every rank's backward takes part.
    """
    arrived: Tensor = _Exchange.apply(rows, mesh, dim, sent, received)
    return arrived


def pick(x: Tensor, picked: Tensor, slots: int) -> Tensor:
    """Row picked[i] // slots of x at place i. `picked` has no number twice.

    Shape:    x (tokens, width), picked (n) int64 in 0 .. tokens * slots - 1 -> (n, width).
    Gradient: exact, and the same bits in every run: a token's slots are added in order, where
              indexing's own backward adds them in any order on a GPU.
    """
    rows: Tensor = _Pick.apply(x, picked, slots)
    return rows


def place(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Row i of `rows` at row places[i] of `count` rows, zeros elsewhere. No place stands twice."""
    return rows.new_zeros(count, rows.shape[1]).index_copy(0, places, rows)


def attach(y: Tensor, loss: Tensor, weight: float) -> Tensor:
    """`y`, unchanged; a backward through it gives `loss` the gradient `weight`.

    So `weight * loss` is part of what is differentiated without being handed to wherever the rest of
    the loss is computed, which may be another stage of a pipeline.
    """
    attached: Tensor = _Attach.apply(y, loss, weight)
    return attached


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: Mesh, dim: str, sent: list[int], received: list[int]) -> Tensor:
        ctx.mesh, ctx.dim, ctx.received = mesh, dim, received
        arrived: Tensor = mesh.all_to_all(dim, rows.detach(), splits=sent)
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return ctx.mesh.all_to_all(ctx.dim, dy, splits=ctx.received), None, None, None, None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, picked: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(picked)
        ctx.tokens, ctx.slots = x.shape[0], slots
        return x.index_select(0, picked // slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (picked,) = ctx.saved_tensors
        spread = place(dy, picked, ctx.tokens * ctx.slots)
        return spread.unflatten(0, (ctx.tokens, ctx.slots)).sum(1), None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, (loss.dtype, loss.device)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dtype, device = ctx.like
        return dy, torch.full((), ctx.weight, dtype=dtype, device=device), None
