"""Parameters that are split along several dims of a view, and the dims that are left."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.parameters import Part, remember


def split_parameter(
    mesh: Mesh, shape: tuple[int, ...], axes: Mapping[str, int], dtype: torch.dtype
) -> nn.Parameter:
    """A parameter of the whole `shape`, its memory not yet written, split along dims of one view.

    axes:    dim -> the axis that is split along it, which its size divides.
    Returns: a DTensor on `mesh[dims]`, so that optimisers and checkpoints see the whole tensor. Where
             no dim is larger than 1, and in the simulator, which has no torch process groups: a plain
             tensor that is this rank's part.
    """
    part = list(shape)
    split = {dim: axis for dim, axis in axes.items() if mesh.size(dim) > 1}
    for dim, axis in split.items():
        part[axis] //= mesh.size(dim)
    data: Tensor = torch.empty(part, dtype=dtype, device=mesh.device)
    if split:
        try:
            device_mesh = mesh[tuple(split)]
        except UnsupportedOp:
            made = nn.Parameter(data)
            remember(made, *(Part(mesh, dim, axis) for dim, axis in split.items()))
            return made
        placements = [Shard(axis) for axis in split.values()]
        data = DTensor.from_local(data, device_mesh, placements, run_check=False)
    return nn.Parameter(data)


def expert_gradient_dims(
    mesh: Mesh, dim: str, *, tensor: str | None = None, pipeline: str | None = None
) -> tuple[str, ...]:
    """Dims along which the gradients of experts split along `dim` are summed, such as ("edp",).

    Those of the view that `dim` belongs to (or of the base) other than `dim`, where tokens of all its
    ranks have reached the expert already, and those of tensor and pipeline, whose ranks hold the same
    tokens. Raises UnknownDim where the dims do not belong to one view.
    """
    own = [name for name in (dim, tensor, pipeline) if name is not None]
    for name in own:
        mesh.size(name)
    home = mesh.layout.home(tuple(own))
    sizes = mesh.layout.views[home] if home else mesh.layout.dims
    return tuple(name for name in sizes if name not in own)
