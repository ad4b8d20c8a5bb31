"""Linear layers and embeddings whose weights are split, for models of one's own and for those that a plan splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshcomm.errors import ShapeError
from meshcomm.parallel.autocast import as_autocast
from meshcomm.parallel.recompute import added_up, once
from meshcomm.parallel.tensor.parameters import FUSED, joined, local
from meshcomm.parallel.tensor.split import TensorSplit


def entered(x: Tensor) -> Tensor:
    """`x`, which has come through `enter` before."""
    return x


def held(module: Any, name: str) -> Any:
    """What this rank holds of a parameter of `module`; None where it has none. Parts of one in their order."""
    parameter = getattr(module, name)
    if parameter is None:
        return None
    sizes = getattr(module, FUSED, {}).get(name)
    return joined(local(parameter), sizes) if sizes else local(parameter)


class Column:
    """y = x W^T + b with outputs split: x (..., n_in), whole or split along the sequence -> (..., n_out / ranks)."""

    meshcomm_split: TensorSplit
    meshcomm_entry: Callable[[Tensor], Tensor]
    meshcomm_output = "split"

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        y = F.linear(self.meshcomm_entry(x), held(self, "weight"), held(self, "bias"))
        split = self.meshcomm_split
        if self.meshcomm_output == "whole" and split.size > 1:
            return split.mesh.functional.all_gather(split.dim, y, -1, grad="slice")
        return y


class Row:
    """y = x W^T + b with inputs split: x (..., n_in / ranks) -> (..., n_out), whole or split along the sequence."""

    meshcomm_split: TensorSplit

    def forward(self, x: Tensor) -> Tensor:
        """One all_reduce (reduce_scatter) in forward, none (all_gather) in backward; the bias is added once."""
        split = self.meshcomm_split
        if split.size > 1 and not torch.compiler.is_compiling():
            with added_up():
                y = F.linear(x, held(self, "weight"))
        else:
            y = F.linear(x, held(self, "weight"))
        y = split.leave(y)
        bias = held(self, "bias")
        return y if bias is None else y + bias.to(y.dtype)


class Vocab:
    """An embedding with rows split: ids (...) int64 -> (..., width), whole or split along the sequence."""

    meshcomm_split: TensorSplit
    meshcomm_dtype: torch.dtype | None = None
    padding_idx: int | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """0 <= ids < vocab, or ShapeError; where a look would wait for the device, such rows are nan."""
        split, table, padding = self.meshcomm_split, held(self, "weight"), self.padding_idx
        dtype = self.meshcomm_dtype or table.dtype
        if split.size == 1 and not split.mesh.asynchronous:
            return F.embedding(ids, table, padding).to(dtype)
        outside = outside_of(split, ids, table.shape[0] * split.size, "an embedding's ids")
        row, mine = owned(ids, table.shape[0], split.coord)
        found = F.embedding(row, table).to(dtype)
        if padding is not None:
            # Not F.embedding's padding_idx: row 0 also stands for ids of other ranks.
            found = found.detach().where((ids == padding).unsqueeze(-1), found)
        # Rows of other ranks are zeros, which leaving sums up.
        found = found * mine.unsqueeze(-1)
        if outside is not None:
            found = found.masked_fill(outside.unsqueeze(-1), torch.nan)
        return split.leave(found)


class ColumnParallel(Column, nn.Module):
    """y = x W^T + b, W (n_out, n_in) and b split over n_out: x (..., n_in), whole -> (..., n_out / ranks).

    `x` must have come through `split.enter`, once for all column-parallel layers that read it.
    """

    def __init__(self, split: TensorSplit, n_in: int, n_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.meshcomm_split, self.meshcomm_entry = split, entered
        self.weight = split.parameter(n_out, n_in, axis=0)
        self.bias = split.parameter(n_out, axis=0) if bias else None


class RowParallel(Row, nn.Module):
    """y = x W^T + b, W (n_out, n_in) split over n_in: x (..., n_in / ranks) -> (..., n_out), whole.

    With sequence_parallel y is this rank's slice of the sequence, and the gradient of b partial.
    """

    def __init__(self, split: TensorSplit, n_in: int, n_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.meshcomm_split = split
        self.weight = split.parameter(n_out, n_in, axis=1)
        self.bias = split.parameter(n_out, axis=None) if bias else None
        split.partial(self, "bias")


class VocabParallelEmbedding(Vocab, nn.Module):
    """Rows of a (vocab, width) table split over vocab: ids (...) int64 -> (..., width), whole.

    With sequence_parallel: ids (batch, sequence), whole -> this rank's slice of the sequence.
    dtype: of what travels and is returned; None: the weight's. Rows are not rounded by being summed.
    Raises ShapeError for ids outside of 0 .. vocab - 1; their rows are nan where a look would wait for the device.
    """

    def __init__(
        self, split: TensorSplit, vocab: int, width: int, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.meshcomm_split, self.meshcomm_dtype = split, dtype
        self.weight = split.parameter(vocab, width, axis=0)


def owned(ids: Tensor, rows: int, coord: int) -> tuple[Tensor, Tensor]:
    """Local row of each id, 0 where another rank owns it, and which ids are this rank's."""
    row = ids - coord * rows
    mine = (row >= 0) & (row < rows)
    return row.where(mine, 0), mine


def outside_of(split: TensorSplit, ids: Tensor, vocab: int, what: str) -> Tensor | None:
    """Which ids no rank holds, bool like ids, where a look would wait for the device; None: all are held.

    Raises ShapeError where a look costs nothing, for ids outside of 0 .. vocab - 1.
    """
    if torch.compiler.is_compiling() or split.mesh.asynchronous:
        return (ids < 0) | (ids >= vocab)
    if not ids.numel():
        return None
    lowest, highest = ids.aminmax()
    if lowest < 0 or highest >= vocab:
        raise ShapeError(
            f"{what} are outside of the vocabulary on {split.mesh.label}",
            given=f"{int(lowest)} to {int(highest)}",
            expected=f"0 to {vocab - 1}, the {vocab} rows that the ranks along {split.dim} hold together",
            hint="the tokenizer's size for the table, or ignore_index for targets that do not count",
        )
    return None


def columns(split: TensorSplit, x: Tensor, *layers: ColumnParallel) -> tuple[Tensor, ...]:
    """What each of `layers` makes of `x`, which has not come through `enter`: one entry for all of them.

    With `split.overlap` the slices of the sequence go around a ring: while one is multiplied with
    every layer's weight, the next travels; in backward the sum of the input's gradients travels
    while those of the weights are computed. Equal to the plain way up to rounding. Inside
    torch.compile it is the plain way.
    """
    if not (split.sequence_parallel and split.overlap) or torch.compiler.is_compiling():
        x = split.enter(x)
        return tuple(layer(x) for layer in layers)
    weights = [local(layer.weight) for layer in layers]
    # Here, where autograd sees it: inside of a Function autocast does not reach the backward.
    x, weights = as_autocast(x), [as_autocast(weight) for weight in weights]
    ys: tuple[Tensor, ...] = _GatherLinears.apply(split, x, *weights)
    biases = [layer.bias for layer in layers]
    return tuple(
        y if bias is None else y + local(bias).to(y.dtype) for y, bias in zip(ys, biases, strict=True)
    )


class _GatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: TensorSplit, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        own = x.detach().contiguous()
        gathered, *ys = once(lambda: _around_a_ring(split, own, weights), own)
        ctx.split = split
        ctx.save_for_backward(gathered, *weights)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        split: TensorSplit = ctx.split
        x, *weights = ctx.saved_tensors
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx += dy @ weight
        leaving = split.mesh.reduce_scatter(split.dim, dx, split.axis, async_op=True)
        rows = x.flatten(0, -2)
        dws = [
            dy.flatten(0, -2).mT @ rows if needed else None
            for dy, needed in zip(dys, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, leaving.wait(), *dws


def _around_a_ring(split: TensorSplit, held: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The whole sequence, and its product with each weight; `held` is this rank's slice."""
    mesh, n, coord = split.mesh, split.size, split.coord
    slices: list[Tensor] = [held] * n
    made: list[list[Tensor]] = [[held] * n for _ in weights]
    for turn in range(n):
        source = (coord - turn) % n
        coming = None
        if turn < n - 1:
            sends = [(held, (coord + 1) % n)]
            recvs = [(torch.empty_like(held), (coord - 1) % n)]
            coming = mesh.exchange(split.dim, sends, recvs, async_op=True)
        slices[source] = held
        for blocks, weight in zip(made, weights, strict=True):
            blocks[source] = F.linear(held, weight)
        if coming is not None:
            (held,) = coming.wait()
    return [torch.cat(slices, split.axis), *(torch.cat(blocks, split.axis) for blocks in made)]
