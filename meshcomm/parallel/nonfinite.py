"""Where is the gradient that is not finite: on which rank, of which parameter, along which dims?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.config import ParallelConfig
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import local


@torch.no_grad()
def nonfinite(
    mesh: Mesh,
    parallel: ParallelConfig,
    stage: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    loss: Tensor | None,
) -> str:
    """One line or more: the first gradient, as backward computes them, that is not finite, and where it is.

    First is the one nearest to the loss, since backward carries it on to those before it. Gradients that are
    summed along a dim are the same on all its ranks, so there the losses of the ranks' own samples tell more.

    stage:      of the last of `parameters`, which are in the order of the forward pass, gradients summed.
    loss:       of this rank's own samples; None before the last stage.
    Called by:  every rank of the mesh. One gather of objects per dim.
    Returns:    the same text on every rank.
    """
    bad = [
        (index, name, _kind(parameter.grad))
        for index, (name, parameter) in enumerate(parameters)
        if parameter.grad is not None and not _finite(parameter.grad)
    ]
    mine: dict[str, Any] = {
        "rank": mesh.rank,
        "first": [stage, *bad[-1]] if bad else None,
        "more": len(bad) - 1,
        "of": len(parameters),
        "loss": loss is not None and not _finite(loss),
        "weight": next((name for name, parameter in parameters if not _finite(parameter)), None),
    }
    table = [mine]
    for dim in reversed(list(mesh.layout.dims)):
        table = [row for rows in mesh.objects.all_gather(dim, table) for row in rows]
    table.sort(key=lambda row: int(row["rank"]))
    lines = []
    found = [row for row in table if row["first"]]
    if found:
        _, _, name, kind = max(row["first"] for row in found)
        there = [row for row in found if row["first"][2] == name]
        more = (
            f", and of {there[0]['more']} more of its {there[0]['of']} parameters" if there[0]["more"] else ""
        )
        lines.append(f"{_label(mesh, there[0]['rank'])}: {kind} in the gradient of {name}{more}")
        lines += _dims(mesh, parallel, [row["rank"] for row in there])
    else:
        lines.append("every element of every gradient is finite, and their squares are too large to add up")
    if own := [row["rank"] for row in table if row["loss"]]:
        lines.append(f"the loss of its own samples is not finite on rank {fold(own)}")
    if weights := [row for row in table if row["weight"]]:
        rank, name = weights[0]["rank"], weights[0]["weight"]
        lines.append(f"{_label(mesh, rank)}: the weight {name} is not finite itself")
    return "\n".join(lines)


def _dims(mesh: Mesh, parallel: ParallelConfig, ranks: list[int]) -> list[str]:
    """What the ranks have in common, dim by dim, and along which dims a sum has told all of them."""
    parts: dict[str, str] = {dim: part for part, dim in parallel.parts.items()}
    only, summed = [], []
    for dim, size in mesh.layout.dims.items():
        coords = {mesh.coords_of(rank)[dim] for rank in ranks}
        part = f" ({parts[dim]})" if dim in parts else ""
        if size > 1 and len(coords) == 1:
            only.append(f"{dim}={coords.pop()}{part}")
        elif size > 1 and len(coords) == size and dim in parallel.gradient_dims:
            summed.append(f"{dim}{part}")
    lines = [f"only at {' '.join(only)}, on rank {fold(ranks)}"] if only else []
    if summed:
        lines.append(f"alike along {', '.join(summed)}, where gradients are summed")
    return lines


def _finite(tensor: Tensor) -> bool:
    return bool(local(tensor).isfinite().all())


def _kind(tensor: Tensor) -> str:
    return "nan" if bool(local(tensor).isnan().any()) else "inf"


def _label(mesh: Mesh, rank: int) -> str:
    return f"rank {rank} ({' '.join(f'{dim}={coord}' for dim, coord in mesh.coords_of(rank).items())})"
