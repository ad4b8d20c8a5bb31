"""The dim along which weights are split, and the communication at the start and end of split layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.parameters import local, parameter_of, split_parameter

_PARTIAL = "meshcomm_partial_gradients"


def as_autocast(x: Tensor) -> Tensor:
    """If autocast is on, return `x` in the dtype in which autocast multiplies matrices. Its gradient has x's dtype.

    Callers use this function to send a tensor in that dtype. Like autocast, this function does not cast float64 or integers.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


@final
class TensorSplit:
    """The dim along which weights are split. If `dim` is None or its size is 1, nothing is split.

    Args:
        dim: a dim of the mesh.
        dtype: the dtype of the parameters that this object creates.
        sequence_parallel: between `leave` and the next `enter`, each rank holds a slice of the sequence. Between those two
            calls, memory and work are divided by the number of ranks (Korthikanti et al. 2022). The number of bytes sent
            does not change, because reduce_scatter and all_gather are the two halves of an all_reduce. Parameters that are
            applied to slices have partial gradients (see `partial`).
        axis: the sequence axis of activations (batch, sequence, width), counted from the front.
        overlaps: `columns` may sum gradients while it computes others. A pipeline schedule that splits the backward pass
            needs False.

    size, coord: the dim's size and this rank's coord. sequence_parallel: False if nothing is split.
    """

    def __init__(
        self,
        mesh: Mesh,
        dim: str | None,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        axis: int = 1,
        overlaps: bool = True,
    ) -> None:
        self.mesh, self.device, self.dtype = mesh, mesh.device, dtype
        self.dim = dim or ""
        self.size, self.coord = (mesh.size(dim), mesh.coord(dim)) if dim else (1, 0)
        self.sequence_parallel = sequence_parallel and self.size > 1
        self.axis = axis
        self.overlaps = overlaps and self.size > 1
        # Equal for splits with the same `enter`.
        self.entry = (mesh, dim, self.sequence_parallel, axis) if self.size > 1 else ()

    def __str__(self) -> str:
        return f"{self.dim or 'no dim'} (sequence_parallel={self.sequence_parallel}, axis={self.axis})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSplit:
        """Return self, because a copy of a module is on the same mesh."""
        return self

    # -- parameters -----------------------------------------------------------------------------

    def parameter(self, *shape: int, axis: int | None, uneven: bool = False) -> nn.Parameter:
        """Return an uninitialized parameter with the full `shape`. uneven: see `rows`.

        The parameter is a DTensor on `mesh[dim]`: Shard(axis), or Replicate if axis is None. Optimizers and checkpoints
        therefore see the full tensor, and layers compute with `local(parameter)`. If nothing is split, it
        is a plain tensor.
        """
        part = list(shape)
        if axis is not None and uneven:
            part[axis] = self.rows(shape[axis])[1]
        elif axis is not None:
            part[axis] = self.share(shape[axis], f"axis {axis} of a weight of shape {shape}")
        data = torch.empty(part, dtype=self.dtype, device=self.device)
        return parameter_of(self.mesh, data, self._axes(axis), shape)

    def parameter_from(self, value: Tensor, axis: int | None, uneven: bool = False) -> nn.Parameter:
        """Like `parameter`, but copy this rank's part of `value`, in the dtype and on the device of `value`."""
        if axis is not None and not uneven:
            self.share(value.shape[axis], f"axis {axis} of a weight of shape {tuple(value.shape)}")
        return split_parameter(self.mesh, value, self._axes(axis))

    def _axes(self, axis: int | None) -> dict[str, int | None]:
        return {self.dim: axis} if self.size > 1 else {}

    def share(self, whole: int, what: str) -> int:
        """Return one rank's part of `whole`. Raises ShapeError if the size is not divisible."""
        if whole % self.size:
            raise ShapeError(
                f'{what} cannot be split along "{self.dim}"',
                given=f"{whole}, and {self.size} ranks along {self.dim}",
                expected=f"a multiple of {self.size}; {whole} % {self.size} = {whole % self.size}",
                hint=f"{-(-whole // self.size) * self.size}, or a smaller {self.dim}",
            )
        return whole // self.size

    def rows(self, whole: int) -> tuple[int, int]:
        """Return the first and the number of this rank's rows of a table of `whole` rows. As with torch.chunk, the last rank has
        fewer if the ranks do not divide the number. Raises ShapeError if it has none.
        """
        most = -(-whole // self.size)
        if whole and most * (self.size - 1) >= whole:
            raise ShapeError(
                f'a vocabulary cannot be split along "{self.dim}"',
                given=f"{whole} rows, and {self.size} ranks along {self.dim}",
                expected="at least one row for the last rank",
                hint=f"a smaller {self.dim}",
            )
        return self.coord * most, min(most, whole - self.coord * most)

    def shares_heads(self, heads: int) -> bool:
        """Return whether a layer's heads are fewer than the ranks, so that several ranks compute each. 0: no heads."""
        return 0 < heads < self.size and self.size % heads == 0

    def share_heads(self, module: Any, heads: int, rows: int) -> None:
        """Make a column-parallel layer, which every rank holds in full, compute this rank's one of `heads` heads, with its part
        of all `rows` rows. Its gradients are partial, also without sequence_parallel.
        """
        each, head = rows // heads, self.coord * heads // self.size
        module.meshcomm_rows = slice(head * each, (head + 1) * each)
        self.partial(module, "weight", "bias", always=True)

    # -- activations ----------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """Return `x`, equal on all ranks, for layers with split outputs. Its gradient is summed over the ranks.

        With sequence_parallel, `x` is this rank's slice of the sequence. The full sequence is returned, and the
        gradient is this rank's slice of the sum. Under autocast, both are sent in the matmul dtype.
        """
        if self.size == 1:
            return x
        x = as_autocast(x)
        if self.sequence_parallel:
            return self.mesh.functional.all_gather(self.dim, x, self.axis, grad="reduce_scatter")
        return self.mesh.functional.identity(self.dim, x, grad="sum")

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, after a layer with split inputs. The gradient passes through unchanged.

        With sequence_parallel, return this rank's slice of the sum; the gradient is gathered. Raises ShapeError if the
        sequence length is not divisible.
        """
        if self.size == 1:
            return x
        if self.sequence_parallel:
            return self.mesh.functional.reduce_scatter(self.dim, x, self.axis)
        return self.mesh.functional.all_reduce(self.dim, x, grad="identity")

    def leave_while(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to sum `x`, which has no gradient and no other use, as `leave` does. Return a function that waits for the sum."""
        if self.sequence_parallel:
            return self.mesh.reduce_scatter(self.dim, x, self.axis, async_op=True).wait
        return self.mesh.all_reduce(self.dim, x, async_op=True).wait

    def gather(self, x: Tensor, axis: int | None = None) -> Tensor:
        """Return the full sequence, for a part of the model that every rank computes in full. Without
        sequence_parallel, return `x`.

        The gradient is this rank's slice. Parameters in such a part have complete gradients.
        """
        if not self.sequence_parallel:
            return x
        axis = self.axis if axis is None else axis
        return self.mesh.functional.all_gather(self.dim, x, axis, grad="slice")

    def scatter(self, x: Tensor, axis: int | None = None) -> Tensor:
        """Return this rank's slice of a sequence that is equal on all ranks. Without sequence_parallel, return `x`.

        This is the inverse of `gather`. The gradient is gathered. Raises ShapeError if the sequence length is not
        divisible.
        """
        if not self.sequence_parallel:
            return x
        return self.mesh.functional.slice(self.dim, x, self.axis if axis is None else axis)

    def positions(self, sequence_local: int) -> Tensor:
        """Return the positions of this rank's tokens between split layers: int64 (sequence_local,).

        sequence_local: the number of tokens in x between split layers. With context parallelism, the positions index
            the rank's part along the context dim: `context.positions(...)[split.positions(...)]`.
        """
        first = self.coord * sequence_local if self.sequence_parallel else 0
        return torch.arange(first, first + sequence_local, device=self.device)

    # -- gradients ------------------------------------------------------------------------------

    def partial(self, module: nn.Module, *names: str, always: bool = False) -> None:
        """Mark parameters of `module` that operate on slices of the sequence, such as a norm's weight.

        Each rank's gradients of marked parameters cover only its own tokens; `finish_gradients` sums them. Modules are marked
        by parameter name, so marks stay valid when fully_shard replaces parameters.

        always: also mark the parameters without sequence_parallel, because they operate on slices of the outputs of
                column-parallel layers, such as this rank's heads.
        """
        if self.sequence_parallel or (always and self.size > 1):
            marked = set(getattr(module, _PARTIAL, ())) | set(names)
            setattr(module, _PARTIAL, tuple(sorted(marked)))

    def partial_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the marked parameters in `module` by name, each once."""
        by_id: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, part in module.named_modules():
            for name in getattr(part, _PARTIAL, ()):
                parameter = part._parameters.get(name)
                if parameter is not None:
                    by_id.setdefault(id(parameter), (f"{prefix}.{name}".lstrip("."), parameter))
        return dict(by_id.values())

    def finish_gradients(self, module: nn.Module) -> None:
        """Sum the gradients of marked parameters over the ranks, in place, in one message per dtype.

        Called by: every rank along the dim, once per step, after the last backward pass and after gradients are summed
                   over other dims, but before norms, clipping and the optimizer step.
        """
        if self.size == 1:
            return
        grads = [
            local(parameter.grad)
            for parameter in self.partial_parameters(module).values()
            if parameter.grad is not None
        ]
        if grads:
            self.mesh.all_reduce(self.dim, grads)
