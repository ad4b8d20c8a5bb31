"""Experts of a module without knowledge of meshes, packed into a few parameters, distributed along a dim and split along another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import ShapeError
from meshcomm.parallel.expert.routing import counts, dispatched, inverse, move
from meshcomm.parallel.tensor import TensorSplit, local
from meshcomm.parallel.tensor.parameters import FUSED, Parts, joined, kept, parameter_of
from meshcomm.transport.torch_private import outside_graphs

Axes: TypeAlias = Mapping[str, tuple[int, int]]
"""For packed experts: the parameters that are split along the tensor dim -> their axis, and the number of parts in each."""

EXPERTS: Final = "meshcomm_experts"
"""An attribute of modules that have only experts' parameters."""


@final
@dataclass(frozen=True)
class _Spread:
    tensor: TensorSplit
    dim: str | None
    count: int


def spread_experts(
    part: Any, tensor: TensorSplit, dim: str | None, axes: Axes, name: str = "experts"
) -> None:
    """Make `part`, whose parameters all have the experts along axis 0, hold this rank's experts and parts of them, in place.

    Its forward takes (tokens, chosen, weights, ...), of shapes (n, width), (n, slots) and (n, slots), or with more leading
    axes, and returns a weighted sum over each token's chosen experts. It is called with the rows that arrive here, with the
    numbers of this rank's experts, one slot each and weights of one.

    tensor: splits the axes that `axes` names. dim: the dim along which experts are distributed. If None, every rank has all.
    Called by: every rank along both. Raises ShapeError if sizes do not divide, or if a parameter does not cover all experts.
    """
    mesh = tensor.mesh
    ranks = mesh.size(dim) if dim else 1
    sizes = {len(parameter) for parameter in part.parameters()}
    if len(sizes) != 1:
        raise ShapeError(
            f"{name} is not a module of packed experts",
            given=", ".join(f"{key} {tuple(each.shape)}" for key, each in part.named_parameters()),
            expected="parameters that all have the experts along their first axis",
            hint="remove this module from ModelSpec.experts; every rank then has all of its experts",
        )
    (count,) = sizes
    TensorSplit(mesh, dim).share(count, f"the experts of {name}")
    setattr(part, EXPERTS, True)
    if ranks == 1 and tensor.size == 1:
        return
    for key, old in list(part._parameters.items()):
        axis, number = axes.get(key, (None, 1))
        value = old.detach()
        if axis is not None:
            tensor.share(value.shape[axis] // number, f"axis {axis} of {name}.{key}")
            if number > 1:
                parts = Parts((value.shape[axis] // number,) * number, axis)
                value = kept(value, parts)
                setattr(part, FUSED, {**getattr(part, FUSED, {}), key: parts})
        pairs = ((dim, 0), (tensor.dim, axis))
        where = {along: at for along, at in pairs if along and mesh.size(along) > 1}
        for along, at in where.items():
            if at is not None:
                value = value.chunk(mesh.size(along), at)[mesh.coord(along)]
        new = parameter_of(mesh, value.clone(memory_format=torch.contiguous_format), where)
        part._parameters[key] = new.requires_grad_(old.requires_grad)
    # The attribute from which its code reads the number of experts.
    if ranks > 1 and getattr(part, "num_experts", None) == count:
        part.num_experts = count // ranks
    part.meshcomm_spread = _Spread(tensor, dim if ranks > 1 else None, count)
    own = type(part)
    part.__class__ = type(f"Spread{own.__name__}", (SpreadExperts, own), {"__module__": __name__})


class SpreadExperts:
    """A module of packed experts of which this rank has some, or a part of each."""

    meshcomm_spread: _Spread
    meshcomm_computes = False

    @outside_graphs  # the number of sent rows depends on the data, which a graph does not allow
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, *more: Any, **named: Any) -> Tensor:
        """The forward of the module. Backward communicates, as forward does."""
        spread, shape = self.meshcomm_spread, x.shape
        tensor, mesh = spread.tensor, spread.tensor.mesh
        x, chosen, weights = (each.flatten(0, -2) for each in (x, chosen, weights))
        if tensor.size > 1:
            x, weights = (mesh.functional.identity(tensor.dim, each, grad="sum") for each in (x, weights))
        if spread.dim is None:
            y = self._own(x, chosen, weights, *more, **named)
        else:
            slots, flat = chosen.shape[-1], chosen.flatten()
            often = counts(flat.unsqueeze(0), spread.count)[0]
            order = flat.argsort(stable=True)
            back = inverse(order)

            def computed(rows: Tensor, number: Tensor, often: Tensor, known: list[int]) -> Tensor:
                # An expert without rows gets a gradient of zeros, and all ranks take part in the exchange of gradients.
                none = not len(rows)
                if none:
                    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
                    number = number.new_zeros(1)
                one = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
                found = self._own(rows, number.unsqueeze(-1), one, *more, **named)
                return found[:0] if none else found

            done = dispatched(mesh, spread.dim, move(x, order, back, slots), often, computed)
            each = move(done, back, order).unflatten(0, (-1, slots))
            y = (each * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        if tensor.size > 1:
            y = mesh.functional.all_reduce(tensor.dim, y, grad="identity")
        return y if y.shape == shape else y.view(shape)

    def _own(self, *args: Any, **named: Any) -> Tensor:
        self.meshcomm_computes = True
        try:
            return super().forward(*args, **named)  # type: ignore[misc,no-any-return]
        finally:
            self.meshcomm_computes = False

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, nn.Parameter | DTensor) and self.__dict__.get("meshcomm_computes"):
            parts = self.__dict__.get(FUSED, {}).get(name)
            return joined(local(value), parts) if parts else local(value)
        return value


def separate(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters of `module` by name, in order of registration: dense ones, and those of experts.

    Gradients of dense parameters are summed along the data and context dims, those of experts as `Experts` describes. Routers
    are dense.
    """
    parts = [part for part in module.modules() if hasattr(part, EXPERTS)]
    of_experts = {id(parameter) for part in parts for parameter in part.parameters()}
    found: tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]] = ({}, {})
    for name, parameter in module.named_parameters():
        found[id(parameter) in of_experts][name] = parameter
    return found
