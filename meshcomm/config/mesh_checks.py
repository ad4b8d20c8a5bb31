"""Everything that can be wrong between the settings of `[mesh]`, in the order in which it is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshcomm.config.backends import backend_problems
from meshcomm.config.mesh_names import merge_problems, option_problems, view_name_problems
from meshcomm.config.mesh_sizes import factorisation_problems, rank_problems, size_problems
from meshcomm.config.problems import Broken, Problem

if TYPE_CHECKING:
    from meshcomm.config.mesh import MeshConfig


def mesh_problems(mesh: MeshConfig, broken: Broken, world: int | None = None) -> Iterator[Problem]:
    """Everything that is wrong with a mesh, on `world` processes where their number is known."""
    if not broken.touches("dims"):
        found = list(factorisation_problems("dims", mesh.dims, "the mesh"))
        yield from found
        lists = [] if broken.touches("ranks") else list(rank_problems(mesh, world))
        yield from lists
        if not found and not lists and not broken.touches("ranks", "rank_order"):
            yield from size_problems(mesh, broken, world)
        if not broken.touches("merge", "views"):
            yield from merge_problems(mesh)
            yield from option_problems(mesh)
    if not broken.touches("views"):
        yield from view_name_problems(mesh)
    yield from backend_problems(mesh, broken)
