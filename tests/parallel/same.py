"""Compare the results of several ranks with one process.

Everything is in float64. Only the order of additions differs, by a few 1e-15, so a tolerance of 1e-12 leaves room
but hides no real mistake.
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
    """Random numbers that are the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(mesh: Mesh, dim: str, x: Tensor, axis: int) -> Tensor:
    """This rank's slice of a whole tensor, or all of it if the mesh has no such dim."""
    if dim not in mesh.layout.names:
        return x
    return x.chunk(mesh.size(dim), axis)[mesh.coord(dim)]
