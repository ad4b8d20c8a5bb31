"""Does every part of training have a dim that can play it, and every dim a part?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, count

from meshcomm.config.architecture import ModelConfig
from meshcomm.config.mesh import MeshConfig
from meshcomm.config.parallel import PARTS, ParallelConfig, Part
from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup
from meshcomm.config.wording import toml, whole_toml
from meshcomm.layout.names import nearest_name


def unknown_parts(mesh: MeshConfig, parallel: ParallelConfig, model: ModelConfig) -> Iterator[Problem]:
    """Parts on dims that cannot play them, because they are none or not of the right factorisation."""
    for part, dim in parallel.parts.items():
        if part == "expert":
            # A dim that plays two parts is reported by the section itself.
            if list(parallel.parts.values()).count(dim) == 1:
                yield from _expert_dim(mesh, parallel, model, dim)
        elif dim not in mesh.dims:
            yield _unknown_dim(mesh, part, dim)


def _unknown_dim(mesh: MeshConfig, part: Part, dim: str) -> Problem:
    near = nearest_name(dim, mesh.dims)
    of_view = any(dim in sizes for sizes in mesh.views.values())
    what = (
        f"{dim} is a merged dim"
        if dim in mesh.merge
        else f"{dim} is a view's dim"
        if of_view
        else f"no dim {dim}"
    )
    ways = [f'parallel.{part} = "{near}"'] if near is not None else []
    if dim not in mesh.merge and not of_view:
        ways.append(f"mesh.dims = {whole_toml({dim: 1, **mesh.dims})}")
    return Problem(
        f"parallel.{part}",
        what,
        given=f"{part} = {toml(dim)}, mesh.dims = {toml(mesh.dims)}",
        expected="one of mesh.dims: " + ", ".join(mesh.dims),
        hint=either([*ways, f"remove parallel.{part}"]),
    )


def _expert_dim(
    mesh: MeshConfig, parallel: ParallelConfig, model: ModelConfig, dim: str
) -> Iterator[Problem]:
    homes = [view for view, sizes in mesh.views.items() if dim in sizes]
    of_views = list(dict.fromkeys(n for sizes in mesh.views.values() for n in sizes if n not in mesh.dims))
    if len(homes) == 1 and dim not in mesh.dims:
        return
    ways = []
    if dim in mesh.dims:
        what = f"{dim} is one of mesh.dims, along which all weights would be split"
    elif len(homes) > 1:
        what = f"{dim} is in {len(homes)} views: {', '.join(homes)}"
    else:
        what = f"{dim} is a merged dim" if dim in mesh.merge else f"no dim {dim} in a view"
    others = [name for name in of_views if name != dim]
    near = nearest_name(dim, others) if not homes else None
    if near is not None:
        ways.append(f'parallel.expert = "{near}"')
    elif not others and not homes:
        taken = dim in mesh.dims or dim in mesh.merge
        name = _free("ep", mesh) if taken else dim
        view = fitting_view(mesh, parallel, model, name)
        if view is not None:
            change = f" and parallel.expert = {toml(name)}" if taken else ""
            ways.append(f"mesh.views.{_free('expert', mesh)} = {whole_toml(view)}{change}")
    elif others and not homes:
        ways.extend(f'parallel.expert = "{name}"' for name in others)
    yield Problem(
        "parallel.expert",
        what,
        given=f"expert = {toml(dim)}, mesh.dims = {toml(mesh.dims)}, mesh.views = {toml(mesh.views)}",
        expected="a dim of one of mesh.views that is no dim of mesh.dims"
        + (f": {', '.join(others)}" if others else ", such as ep"),
        hint=either([*ways, "remove parallel.expert"]),
    )


def unused_dims(mesh: MeshConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    """Dims of the base that no part uses. A view's dims say only how its part lies."""
    # Experts are on a view's dim, and no weights are sharded beside them: see combination_checks.
    barred = {"expert"} if parallel.expert is None else {"expert", "shard"}
    free = [part for part in PARTS if part not in parallel.parts and part not in barred]
    used = [dim for part, dim in parallel.parts.items() if part != "expert"]
    for dim, size in mesh.dims.items():
        if size > 1 and dim not in used:
            played = ", ".join(f"{part} = {toml(name)}" for part, name in parallel.parts.items())
            yield Problem(
                f"mesh.dims.{dim}",
                f"no part of the training uses {dim}: its {size} ranks would all do the same",
                given=f"dims.{dim} = {size}; parallel has {played or 'no part'}",
                expected=f"size 1, or a part that {dim} plays",
                hint=either([f"mesh.dims.{dim} = 1", *(f'parallel.{part} = "{dim}"' for part in free)]),
            )


def expert_view_problems(setup: Setup) -> Iterator[Problem]:
    """An expert's view without the dims that it must hold."""
    mesh, parallel = setup.mesh, setup.parallel
    view = parallel.expert_view(mesh.views)
    if view is None or parallel.expert is None or parallel.expert in mesh.dims:
        return
    sizes = mesh.views[view]
    kept: tuple[Part, ...] = ("pipeline", "tensor")
    gone = [part for part in kept if part in parallel.parts and setup.dim(part) not in sizes]
    for part in gone:
        dim = setup.dim(part)
        fit = fitting_view(mesh, parallel, setup.model, parallel.expert, view)
        yield Problem(
            f"mesh.views.{view}",
            f"does not hold {dim}, which plays {part}",
            given=f"views.{view} = {toml(sizes)}, mesh.dims = {toml(mesh.dims)}, {part} = {toml(dim)}",
            expected=f"{dim} = {mesh.dims[dim]} in its place: experts lie along {part} as all weights do",
            hint=either([f"mesh.views.{view} = {whole_toml(fit)}"] if fit is not None else []),
        )


def fitting_view(
    mesh: MeshConfig, parallel: ParallelConfig, model: ModelConfig, expert: str, view: str | None = None
) -> Mapping[str, int] | None:
    """A view in which the dim `expert` takes the ranks along data, shard and context.

    view: the one that it would replace. None where no view can: those dims do not lie side by
    side, or the size of one of the others is open.
    """
    parts = (parallel.pipeline, parallel.tensor)
    kept = {dim: mesh.dims[dim] for dim in parts if dim is not None}
    # Other dims of size 1 need not be there.
    order = [dim for dim, size in mesh.dims.items() if size != 1 or dim in kept]
    inside = [index for index, dim in enumerate(order) if dim not in kept]
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    between = [dim for dim in order[first : last + 1] if dim in kept]
    if any(kept[dim] != 1 for dim in between) or any(size < 1 for size in kept.values()):
        return None
    split = [mesh.dims[order[index]] for index in inside]
    ranks = -1 if -1 in split else math.prod(split)
    size = ranks if ranks < 1 or not model.experts else math.gcd(ranks, model.experts)
    replaced = {} if view is None else mesh.views[view]
    beside = next((n for n in replaced if n not in mesh.dims and n != expert), None) or _free("edp", mesh)
    return {
        **{dim: kept[dim] for dim in order[:first]},
        beside: 1 if ranks < 1 else ranks // size,
        expert: size,
        **{dim: kept[dim] for dim in (*between, *order[last + 1 :])},
    }


def _free(name: str, mesh: MeshConfig) -> str:
    """`name`, or one like it that the mesh does not use yet."""
    used = {*mesh.dims, *mesh.merge, *mesh.views, *(dim for sizes in mesh.views.values() for dim in sizes)}
    return next(new for new in chain([name], (f"{name}{n}" for n in count(2))) if new not in used)
