"""What is a parameter here: a DTensor that layers compute on locally; a plain part in the simulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from meshcomm.mesh import Mesh

_PART = "meshcomm_part"


class Part(NamedTuple):
    """Where a plain tensor lies in the whole one: slice `coord` of `axis` along `dim`."""

    mesh: Mesh
    dim: str
    axis: int


def remember(parameter: Tensor, *parts: Part) -> None:
    """Note on a plain parameter that it is a part, where no DTensor can say so; once for each dim."""
    setattr(parameter, _PART, parts)


def parts_of(parameter: Tensor) -> tuple[Part, ...]:
    """What `remember` noted."""
    found: tuple[Part, ...] = getattr(parameter, _PART, ())
    return found


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, sharing its memory; gradients flow back into it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole(tensor: Tensor, of: Tensor | None = None) -> Tensor:
    """The whole tensor, gathered where it is split; every rank that holds a part calls this.

    of: the parameter that `tensor` is the gradient or the optimiser's state of. Needed only in the
        simulator, where parameters are plain tensors and only they know that they are parts.
    """
    values = tensor.detach()
    if isinstance(values, DTensor):
        return values.full_tensor()
    for part in parts_of(tensor if of is None else of):
        values = part.mesh.all_gather(part.dim, values, part.axis)
    return values


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, however it is split. Nothing is communicated."""
    shape = list(parameter.shape)
    for part in parts_of(parameter):
        shape[part.axis] *= part.mesh.size(part.dim)
    return tuple(shape)


@torch.no_grad()
def assign(parameter: Tensor, value: Tensor) -> None:
    """Write this rank's part of the whole `value` into `parameter`. Nothing is communicated."""
    if isinstance(parameter, DTensor):
        spread: Any = distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        value = spread.to_local()
    for part in parts_of(parameter):
        value = value.chunk(part.mesh.size(part.dim), part.axis)[part.mesh.coord(part.dim)]
    local(parameter).copy_(value)
