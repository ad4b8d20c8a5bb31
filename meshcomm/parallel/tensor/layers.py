"""Layers for a model that is written with a TensorSplit at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.errors import ShapeError
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.split import TensorSplit


class ColumnParallel(nn.Module):
    """y = x W^T + b, W (n_out, n_in) and b split over n_out: x (..., n_in), whole -> (..., n_out / ranks).

    `x` must have come through `split.enter`, once for all column-parallel layers that read it.
    """

    def __init__(self, split: TensorSplit, n_in: int, n_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = split.parameter(n_out, n_in, axis=0)
        self.bias = split.parameter(n_out, axis=0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowParallel(nn.Module):
    """y = x W^T + b, W (n_out, n_in) split over n_in: x (..., n_in / ranks) -> (..., n_out), whole.

    With sequence_parallel y is this rank's slice of the sequence, and the gradient of b partial.
    """

    def __init__(self, split: TensorSplit, n_in: int, n_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.split = split
        self.weight = split.parameter(n_out, n_in, axis=1)
        self.bias = split.parameter(n_out, axis=None) if bias else None
        split.partial(self, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """See the class. One all_reduce (reduce_scatter) in forward, none (all_gather) in backward."""
        y = self.split.leave(F.linear(x, local(self.weight)))
        return y if self.bias is None else y + local(self.bias)


class VocabParallelEmbedding(nn.Module):
    """Rows of a (vocab, width) table split over vocab: ids (...) int64 -> (..., width), whole.

    With sequence_parallel: ids (batch, sequence), whole -> this rank's slice of the sequence.
    """

    def __init__(self, split: TensorSplit, vocab: int, width: int) -> None:
        super().__init__()
        self.split = split
        self.weight = split.parameter(vocab, width, axis=0)

    def forward(self, ids: Tensor) -> Tensor:
        """See the class. 0 <= ids < vocab, or ShapeError (on CPU); elsewhere such rows are zeros."""
        return self.split.leave(look_up(self.split, ids, local(self.weight)))


def look_up(split: TensorSplit, ids: Tensor, table: Tensor, padding: int | None = None) -> Tensor:
    """Rows of a split table, zeros for ids that another rank holds: what `leave` makes whole.

    padding: the id whose row gets no gradient.
    """
    if split.size == 1:
        return F.embedding(ids, table, padding)
    check_ids(split, ids, table.shape[0] * split.size, "an embedding's ids")
    row, mine = owned(ids, table.shape[0], split.coord)
    if padding is not None:
        # Not F.embedding's padding_idx: row 0 also stands for ids of other ranks.
        padded = (ids == padding).unsqueeze(-1)
        found = F.embedding(row, table)
        return found.detach().where(padded, found) * mine.unsqueeze(-1)
    return F.embedding(row, table) * mine.unsqueeze(-1)


def owned(ids: Tensor, rows: int, coord: int) -> tuple[Tensor, Tensor]:
    """Local row of each id, 0 where another rank owns it, and which ids are this rank's."""
    row = ids - coord * rows
    mine = (row >= 0) & (row < rows)
    return row.where(mine, 0), mine


def check_ids(split: TensorSplit, ids: Tensor, vocab: int, what: str) -> None:
    """Raises ShapeError for ids that no rank holds. Only on CPU: elsewhere a look would stop the device."""
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or not ids.numel():
        return
    lowest, highest = ids.aminmax()
    if lowest < 0 or highest >= vocab:
        raise ShapeError(
            f"{what} are outside of the vocabulary on {split.mesh.label}",
            given=f"{int(lowest)} to {int(highest)}",
            expected=f"0 to {vocab - 1}, the {vocab} rows that the ranks along {split.dim} hold together",
            hint="the tokenizer's size for the table, or ignore_index for targets that do not count",
        )
