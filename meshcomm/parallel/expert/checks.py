"""What must hold before a layer of experts communicates."""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm.errors import LayoutError, ShapeError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import TensorSplit


def check_split(
    mesh: Mesh, dim: str | None, tensor: TensorSplit, experts: int, slots: int, factor: float | None
) -> None:
    """Sizes of a layer against those of the mesh. Raises ShapeError, LayoutError, UnknownDim."""
    if dim is not None and dim == tensor.dim:
        raise LayoutError(
            f'the dim "{dim}" cannot both spread the experts and split each of them',
            given=f'dim="{dim}", a TensorSplit along "{dim}"',
            expected="two dims of one view: tokens differ along the first and are equal along the second",
            hint=f'views.expert = {{ edp = 1, ep = {mesh.size(dim)} }}, dim="ep"',
        )
    if dim is not None:
        ranks = mesh.size(dim)
        mesh.layout.home((dim, tensor.dim) if tensor.dim else dim)
        if experts % ranks:
            raise ShapeError(
                f'the experts cannot be spread along "{dim}"',
                given=f"{experts} experts, and {ranks} ranks along {dim}",
                expected=f"a multiple of {ranks}; {experts} % {ranks} = {experts % ranks}",
                hint=f"{-(-experts // ranks) * ranks} experts, or a smaller {dim}",
            )
    if not 1 <= slots <= experts:
        raise ShapeError(
            f"a token cannot choose {slots} of {experts} experts",
            given=f"experts_per_token={slots}, experts={experts}",
            expected=f"experts_per_token from 1 to {experts}",
            hint=f"experts_per_token={min(2, experts)}",
        )
    if factor is not None and not factor > 0:
        raise ShapeError(
            "experts without capacity would drop every token",
            given=f"capacity_factor={factor}",
            expected="a number above 0, or None for experts that drop nothing",
            hint="capacity_factor=1.25",
        )


def check_input(mesh: Mesh, x: Tensor, width: int) -> None:
    """Raises ShapeError where `x` is not (samples, tokens, width) or (tokens, width), or is empty."""
    if x.ndim not in (2, 3) or x.shape[-1] != width or not x.numel() or not x.is_floating_point():
        raise ShapeError(
            f"experts on {mesh.label} cannot take this tensor",
            given=f"x of shape {tuple(x.shape)}, {x.dtype}",
            expected=f"(samples, tokens, {width}) or (tokens, {width}), floating point, at least one token",
            hint="x.unflatten(0, (samples, -1)): capacity and balance are reckoned sample by sample",
        )


def check_alike(mesh: Mesh, dim: str, chosen: Tensor, experts: int) -> None:
    """Raises TrainingError, on every rank along `dim`, where they do not route their tokens alike."""
    mine = torch.bincount(chosen.reshape(-1), minlength=experts)
    # A rank's counts next to their negatives: one maximum gives the most and the fewest.
    most, fewest = mesh.all_reduce(dim, torch.stack([mine, -mine]), op="max").unbind()
    if not torch.equal(most, -fewest):
        odd = int((most != -fewest).nonzero()[0])
        raise TrainingError(
            f'ranks along "{dim}" send their tokens to different experts',
            given=f"expert {odd} is chosen {int(mine[odd])} times on {mesh.label}, "
            f"{-int(fewest[odd])} to {int(most[odd])} times along {dim}",
            expected=f"equal tokens and equal router weights along {dim}",
            hint="initialise router.weight, and whatever comes before it, alike along " + dim,
        )
