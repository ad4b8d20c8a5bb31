"""What it means that a parallel computation is that of one process.

float64 throughout: what is left of a difference is the order of additions, a few 1e-15, so 1e-12
leaves room and no real mistake fits into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshcomm.mesh import Mesh


def close(actual: Tensor | None, expected: Tensor | None, what: str = "") -> None:
    assert actual is not None and expected is not None, what
    torch.testing.assert_close(
        actual.detach(), expected.detach(), rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}"
    )


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(mesh: Mesh, dim: str, x: Tensor, axis: int) -> Tensor:
    """This rank's slice of a whole tensor; all of it where the mesh has no such dim."""
    if dim not in mesh.layout.names:
        return x
    return x.chunk(mesh.size(dim), axis)[mesh.coord(dim)]
