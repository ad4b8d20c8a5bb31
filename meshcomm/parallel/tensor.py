"""Tensor parallelism: layers whose weights are split along one dim of the mesh.

A column-parallel weight keeps a slice of its outputs on each rank, a row-parallel one a slice of
its inputs; one after the other they need a single sum in forward (after the row-parallel layer,
`leave`) and a single one in backward (before the column-parallel layers, `enter`). The scheme is
that of Megatron-LM (Shoeybi et al. 2019), where `enter` is called f and `leave` g.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh


@final
class TensorSplit:
    """Along which dim of the mesh weights are split; None, or a dim of size 1, splits nothing.

    Args:
        mesh: an open mesh.
        dim: one dim of it.
        dtype: of the parameters made here.
    """

    def __init__(self, mesh: Mesh, dim: str | None, dtype: torch.dtype = torch.float32) -> None:
        self.mesh = mesh
        self.dim = dim or ""
        self.dtype = dtype
        self.device = mesh.device
        self.size = mesh.size(dim) if dim else 1
        self.coord = mesh.coord(dim) if dim else 0
        self._device_mesh = mesh[self.dim] if self.size > 1 else None

    def parameter(self, *shape: int, axis: int | None) -> nn.Parameter:
        """A parameter of the whole `shape`, its memory not yet written.

        It is a DTensor on `mesh[dim]`: Shard(axis), or Replicate where axis is None. So optimisers
        and checkpoints see the whole tensor and layers compute on `local(parameter)`. Where
        nothing is split it is a plain tensor.
        """
        local = list(shape)
        placement: Placement = Replicate()
        if axis is not None:
            local[axis] = self.share(shape[axis], f"axis {axis} of a weight of shape {shape}")
            placement = Shard(axis)
        data = torch.empty(local, dtype=self.dtype, device=self.device)
        if self._device_mesh is not None:
            data = DTensor.from_local(data, self._device_mesh, [placement], run_check=False)
        return nn.Parameter(data)

    def share(self, whole: int, what: str) -> int:
        """What one rank gets of `whole`. Raises ShapeError where it does not divide."""
        if whole % self.size:
            raise ShapeError(
                f'{what} cannot be split along "{self.dim}"',
                given=f"{whole}, and {self.size} ranks along {self.dim}",
                expected=f"a multiple of {self.size}; {whole} % {self.size} = {whole % self.size}",
                hint=f"{-(-whole // self.size) * self.size}, or a smaller {self.dim}",
            )
        return whole // self.size

    def enter(self, x: Tensor) -> Tensor:
        """`x`, equal on all ranks, before it meets split outputs; its gradient is summed."""
        return x if self.size == 1 else self.mesh.functional.identity(self.dim, x, grad="sum")

    def leave(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, after split inputs; the gradient passes unchanged."""
        return x if self.size == 1 else self.mesh.functional.all_reduce(self.dim, x, grad="identity")


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, sharing its memory; gradients flow back into it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered where it is split; every rank that holds a part calls this."""
    values = tensor.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Write this rank's part of the whole `value` into `parameter`. Nothing is communicated."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()
    local(parameter).copy_(value)


class ColumnParallel(nn.Module):
    """y = x W^T, W (n_out, n_in) split over n_out: x (..., n_in), whole -> (..., n_out / ranks).

    `x` must have come through `split.enter`, once for all column-parallel layers that read it.
    """

    def __init__(self, split: TensorSplit, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = split.parameter(n_out, n_in, axis=0)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return F.linear(x, local(self.weight))


class RowParallel(nn.Module):
    """y = x W^T, W (n_out, n_in) split over n_in: x (..., n_in / ranks) -> (..., n_out), whole."""

    def __init__(self, split: TensorSplit, n_in: int, n_out: int) -> None:
        super().__init__()
        self.split = split
        self.weight = split.parameter(n_out, n_in, axis=1)

    def forward(self, x: Tensor) -> Tensor:
        """See the class. One all_reduce in forward, none in backward."""
        return self.split.leave(F.linear(x, local(self.weight)))


class VocabParallelEmbedding(nn.Module):
    """Rows of a (vocab, width) table split over vocab: ids (...) int64 -> (..., width), whole."""

    def __init__(self, split: TensorSplit, vocab: int, width: int) -> None:
        super().__init__()
        self.split = split
        self.weight = split.parameter(vocab, width, axis=0)

    def forward(self, ids: Tensor) -> Tensor:
        """See the class. 0 <= ids < vocab. A rank gives zeros for ids that another one holds."""
        table = local(self.weight)
        if self.split.size == 1:
            return F.embedding(ids, table)
        row, mine = _owned(ids, table.shape[0], self.split.coord)
        return self.split.leave(F.embedding(row, table) * mine.unsqueeze(-1))


def cross_entropy(split: TensorSplit, logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[target] with logits split over the vocabulary.

    Shape:      logits (..., vocab / ranks), targets (...) int64 in 0 .. vocab - 1 -> ().
    Called by:  every rank along the dim, with equal targets; each gets the same value.
    Gradient:   exact, for this rank's logits. Two small all_reduces in forward (the maximum; the
                sum and the target's logit together), none in backward; logits are never gathered.
    """
    if split.size == 1:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    loss: Tensor = _CrossEntropy.apply(logits, targets, split)
    return loss


def _owned(ids: Tensor, rows: int, coord: int) -> tuple[Tensor, Tensor]:
    """Local row of each id, 0 where another rank owns it, and which ids are this rank's."""
    row = ids - coord * rows
    mine = (row >= 0) & (row < rows)
    return row.where(mine, 0), mine


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, split: TensorSplit) -> Tensor:
        highest = split.mesh.all_reduce(split.dim, logits.amax(-1), op="max")
        shifted = logits - highest.unsqueeze(-1)
        row, mine = _owned(targets, logits.shape[-1], split.coord)
        target = shifted.gather(-1, row.unsqueeze(-1)).squeeze(-1).where(mine, 0)
        exp = shifted.exp_()
        both = split.mesh.all_reduce(split.dim, torch.stack([exp.sum(-1), target]), op="sum")
        total, target = both.unbind()
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), row, mine)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, row, mine = ctx.saved_tensors
        # The saved softmax is not written to: backward may run twice over a retained graph.
        part = softmax.scatter_add(-1, row.unsqueeze(-1), -mine.unsqueeze(-1).to(softmax.dtype))
        return part.mul_(grad / row.numel()), None, None
