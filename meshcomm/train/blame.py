"""Which dim of a mesh makes its training differ from that of one process?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias, final

from meshcomm.config import Config, load
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.train.differences import Difference

Run: TypeAlias = Callable[[Config], Sequence[Difference]]

# What belongs to the ranks of the whole mesh and has no place on a part of it.
_OF_ALL_RANKS: Final = ("rank_order", "ranks")


@final
@dataclass(frozen=True)
class Blame:
    """The dims that make a difference: one alone, two together, or none, where only all of them do.

    ranks:      of the mesh with only these dims.
    difference: the worst on it; None where that run failed, or where only all dims together differ.
    """

    dims: tuple[str, ...]
    ranks: int
    difference: Difference | None

    @property
    def words(self) -> str:
        """One line: `first dim to blame: tp (alone, 2 ranks: weight of norm.weight, 3.1e-02)`."""
        if not self.dims:
            return "first dim to blame: none alone and no two: only all together"
        what = "the run failed"
        if self.difference is not None:
            one = self.difference
            what = f"{one.words}, {one.note or format(one.absolute, '.1e')}"
        how = "alone" if len(self.dims) == 1 else "together, neither alone"
        which = "first dim" if len(self.dims) == 1 else "first dims"
        return f"{which} to blame: {' and '.join(self.dims)} ({how}, {self.ranks} ranks: {what})"


def blame(config: Config, run: Run, tolerance: float) -> Blame:
    """Try the mesh with only one dim above 1 after the other, then with two.

    config: with every size known; its own run differs.
    run:    the differences of a configuration's mesh from the reference, worst over all ranks. A
            MeshcommError of it counts as a difference.
    """
    suspects = suspected(config)
    if len(suspects) == 1:
        return _tried(config, suspects, run, tolerance) or Blame((), 0, None)
    for count in (1, 2):
        if count == len(suspects):
            break
        for dims in combinations(suspects, count):
            found = _tried(config, dims, run, tolerance)
            if found is not None:
                return found
    return Blame((), 0, None)


def suspected(config: Config) -> tuple[str, ...]:
    """The dims that can be to blame: those of the base above 1, then the experts'."""
    dims = [dim for dim, size in config.mesh.dims.items() if size > 1]
    expert = None if config.parallel is None else config.parallel.expert
    if expert is not None and any(sizes.get(expert, 1) > 1 for sizes in config.mesh.views.values()):
        dims.append(expert)
    return tuple(dims)


def only(config: Config, dims: Iterable[str]) -> Config:
    """The same training on a smaller mesh, where only `dims` are above 1.

    The expert's dim is not one of the base but made of others: with it, the data's dim gets the size
    that it needs besides, and its view the rest. Without it, experts are not split.

    Raises ConfigError where there is no such mesh.
    """
    kept = set(dims)
    parallel = config.parallel
    if parallel is None:
        raise ConfigError(
            "a configuration without training has no dim to blame",
            given=f"{config.source} without [parallel]",
            expected="all of [parallel] [model] [data] [train]",
        )
    facts: dict[str, Any] = config.model_dump(exclude_unset=True)
    facts.pop("topology", None)
    mesh = {key: value for key, value in facts["mesh"].items() if key not in _OF_ALL_RANKS}
    mesh.pop("views", None)
    sizes = {dim: size if dim in kept else 1 for dim, size in config.mesh.dims.items()}
    expert, name = parallel.expert, config.expert_view
    section = dict(facts["parallel"])
    if expert in kept and expert is not None and name is not None:
        view = config.mesh.views[name]
        shared = (parallel.pipeline, parallel.tensor)
        carriers = [dim for dim in sizes if dim not in shared]
        more = view[expert] // math.gcd(view[expert], math.prod(sizes[dim] for dim in carriers))
        carrier = parallel.data if parallel.data in carriers else carriers[0]
        sizes[carrier or ""] *= more
        left = math.prod(sizes[dim] for dim in carriers) // view[expert]
        made = {}
        for dim in view:
            if dim in shared:
                made[dim] = sizes[dim]
            elif dim == expert:
                made[dim] = view[dim]
            else:
                made[dim], left = left, 1
        mesh["views"] = {name: made}
    else:
        section.pop("expert", None)
    known = {dim for dim, size in sizes.items() if size > 1} | set(config.mesh.merge)
    known |= set(mesh.get("views", {}).get(name, ()))
    options = {dim: value for dim, value in mesh.pop("options", {}).items() if dim in known}
    if options:
        mesh["options"] = options
    return load({**facts, "mesh": {**mesh, "dims": sizes}, "parallel": section})


def _tried(config: Config, dims: Sequence[str], run: Run, tolerance: float) -> Blame | None:
    try:
        part = only(config, dims)
    except ConfigError:
        # This training cannot run so; then it cannot be told either.
        return None
    ranks = math.prod(part.mesh.dims.values())
    try:
        found = max(run(part), key=lambda one: one.relative)
    except MeshcommError:
        return Blame(tuple(dims), ranks, None)
    return Blame(tuple(dims), ranks, found) if found.relative > tolerance else None
