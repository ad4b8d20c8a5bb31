"""Distributes the packed experts of a mesh-unaware module along one dim, and splits each expert along another dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import ShapeError
from meshcomm.parallel.become import become
from meshcomm.parallel.expert.routing import count_choices, each_choice
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.parallel.tensor.apply import Around, Running
from meshcomm.parallel.tensor.parameters import split_parameter
from meshcomm.transfer.fused import FUSED, Parts, joined, kept
from meshcomm.transport.torch_private import outside_graphs

Axes: TypeAlias = Mapping[str, tuple[int, int]]
"""For packed experts: parameters that are split along the tensor dim -> (the split axis, the number of parts)."""

EXPERTS: Final = "meshcomm_experts"
"""The attribute that marks modules that contain only experts' parameters."""


def spread_experts(
    part: Any, tensor: TensorSplit, dim: str | None, axes: Axes, name: str = "experts"
) -> None:
    """Reduce `part` to this rank's experts, or to parts of them, in place. All its parameters must have the experts along axis
    0.

    Its forward takes (tokens, chosen, weights, ...) of shapes (n, width), (n, slots) and (n, slots), or with more leading
    axes, and returns a weighted sum over each token's chosen experts. It is called with the rows that this rank receives,
    the indices of this rank's experts (one slot per row), and weights that are all 1.

    tensor: splits the axes in `axes`. dim: the dim along which experts are distributed. If None, every rank holds all experts.
    Called by: every rank along both dims. Raises ShapeError if sizes are not divisible, or if a parameter does not cover all
               experts.
    """
    mesh = tensor.mesh
    ranks = mesh.size(dim) if dim else 1
    sizes = {len(parameter) for parameter in part.parameters()}
    if len(sizes) != 1:
        raise ShapeError(
            f"{name} is not a module of packed experts",
            given=", ".join(f"{key} {tuple(parameter.shape)}" for key, parameter in part.named_parameters()),
            expected="parameters that all have the experts along their first axis",
            hint="remove this module from ModelSpec.experts; every rank then has all of its experts",
        )
    (count,) = sizes
    TensorSplit(mesh, dim).share(count, f"the experts of {name}")
    setattr(part, EXPERTS, True)
    part.meshcomm_count = count
    part.register_forward_pre_hook(_count)
    if ranks == 1 and tensor.size == 1:
        return
    for key, old in list(part._parameters.items()):
        axis, number = axes.get(key, (None, 1))
        value: Tensor = old
        if axis is not None:
            tensor.share(value.shape[axis] // number, f"axis {axis} of {name}.{key}")
            if number > 1:
                parts = Parts((value.shape[axis] // number,) * number, axis)
                value = kept(value.detach(), parts).requires_grad_(old.requires_grad)
                setattr(part, FUSED, {**getattr(part, FUSED, {}), key: parts})
        pairs = ((dim, 0), (tensor.dim, axis))
        part._parameters[key] = split_parameter(mesh, value, {along: axis for along, axis in pairs if along})
    # The module's code reads the number of experts from this attribute.
    if ranks > 1 and getattr(part, "num_experts", None) == count:
        part.num_experts = count // ranks
    part.meshcomm_split, part.meshcomm_running = tensor, Running()
    part.meshcomm_dim = dim if ranks > 1 else None
    become(part, SpreadExperts, prefix="Spread")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count(part: nn.Module, args: tuple[Any, ...]) -> None:
    if len(args) > 1:
        count_choices(part, args[1])


class SpreadExperts(Around):
    """A module of packed experts. This rank holds some of the experts, or a part of each."""

    meshcomm_dim: str | None
    meshcomm_count: int

    @outside_graphs  # the number of sent rows depends on the data, which a graph does not allow
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, *more: Any, **named: Any) -> Tensor:
        """Run the module's forward. Forward and backward communicate."""
        tensor, dim, shape = self.meshcomm_split, self.meshcomm_dim, x.shape
        mesh = tensor.mesh
        x, chosen, weights = (choices.flatten(0, -2) for choices in (x, chosen, weights))
        if tensor.size > 1:
            x, weights = (
                mesh.functional.identity(tensor.dim, choices, grad="sum") for choices in (x, weights)
            )
        if dim is None:
            y: Tensor = super().forward(x, chosen, weights, *more, **named)
        else:

            def computed(
                rows: Tensor, number: Tensor | None, often: Tensor, known: list[int] | None
            ) -> Tensor:
                assert number is not None
                # Without rows, compute on a row of zeros: experts then get zero gradients, and all ranks exchange gradients.
                none = not len(rows)
                if none:
                    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
                    number = number.new_zeros(1)
                ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
                outputs: Tensor = super(SpreadExperts, self).forward(
                    rows, number.unsqueeze(-1), ones, *more, **named
                )
                return outputs[:0] if none else outputs

            choices = each_choice(mesh, dim, x, chosen, self.meshcomm_count, computed)
            choices = choices.unflatten(0, (-1, chosen.shape[-1]))
            y = (choices * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        if tensor.size > 1:
            y = mesh.functional.all_reduce(tensor.dim, y, grad="identity")
        return y if y.shape == shape else y.view(shape)

    def __getattr__(self, name: str) -> Any:
        value, parts = super().__getattr__(name), self.__dict__.get(FUSED, {}).get(name)
        return joined(value, parts) if parts and not isinstance(value, DTensor) else value


def separate(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the dense parameters of `module` and the experts' parameters, each by name, in registration order.

    Gradients of dense parameters are summed along the data and context dims. Gradients of experts' parameters are summed as
    `Experts` describes. Routers are dense.
    """
    parts = [part for part in module.modules() if hasattr(part, EXPERTS)]
    of_experts = {id(parameter) for part in parts for parameter in part.parameters()}
    of_kind: tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]] = ({}, {})
    for name, parameter in module.named_parameters():
        of_kind[id(parameter) in of_experts][name] = parameter
    return of_kind
