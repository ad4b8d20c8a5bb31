"""Choose the processes of a mesh after some are lost, so that complete replicas of the model along one dim continue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple, final

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.layout.sizes import toml_dims


class Sizes(NamedTuple):
    """The sizes that a mesh may have: `dims`, with the size of `dim` optionally replaced by one of `fewer`, largest first."""

    dims: Mapping[str, int]
    dim: str
    fewer: Sequence[int]


def sizes_of(settings: Config, world_size: int) -> Sizes | None:
    """Return the sizes that `[elastic]` allows and that the training supports; None if the mesh keeps its size.

    Raises ConfigError if no smaller size is possible.
    """
    wanted = settings.elastic.min
    if not wanted:
        return None
    dims = settings.mesh.sizes(world_size)
    dim, least = next(iter(wanted.items()))
    fewer, refused = [], ""
    for size in range(dims[dim] - 1, least - 1, -1):
        smaller = {**dims, dim: size}
        try:
            load_config(settings, [f"mesh.dims={toml_dims(smaller)}"]).resolved(prod(smaller.values()))
        except MeshcommError as error:
            refused = refused or str(error)
        else:
            fewer.append(size)
    if not fewer:
        raise ConfigError(
            f"the mesh cannot continue with fewer ranks along {dim}: no size from {least} to {dims[dim] - 1} fits",
            given=f"elastic.min = {toml_dims(wanted)}, mesh.dims = {toml_dims(dims)}; with {dims[dim] - 1}: {refused}",
            expected=f"a smaller {dim} that fits the rest of the configuration",
            hint="use a train.global_batch_size that smaller sizes divide, use -1 in a view, or remove elastic.min",
        )
    return Sizes(dims, dim, fewer)


@final
@dataclass(frozen=True)
class Places:
    """The processes of a job in rank order. Each process is identified by its initial rank.

    count: the number of processes in the job. sizes: None if the mesh keeps its size. processes, size: the processes and
    the size of the current mesh.
    """

    count: int
    sizes: Sizes | None
    processes: tuple[int, ...]
    size: int

    @classmethod
    def first(cls, count: int, sizes: Sizes | None = None) -> Places:
        """Return a Places with all processes at their initial ranks."""
        return cls(count, sizes, tuple(range(count)), 0 if sizes is None else sizes.dims[sizes.dim])

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of the mesh; {} if they are the same as in the configuration."""
        sizes = self.sizes
        whole = sizes is None or self.size == sizes.dims[sizes.dim]
        return {} if sizes is None or whole else {**sizes.dims, sizes.dim: self.size}

    def filled(self, alive: Collection[int]) -> Places | None:
        """Return the largest mesh that the processes in `alive` can form; None if there are too few.

        The replicas of the model that lack the fewest processes are kept. Processes from the other replicas fill the gaps.
        """
        sizes = self.sizes
        if len({*alive}) == self.count:
            return Places.first(self.count, sizes)
        if sizes is None:
            return None
        others = self.count // sizes.dims[sizes.dim]
        size = next((each for each in sizes.fewer if each * others <= len({*alive})), 0)
        if not size:
            return None
        now = _copies(self.processes, {**sizes.dims, sizes.dim: self.size}, sizes.dim)
        copies = [[each if each in alive else None for each in copy] for copy in now]
        kept = sorted(sorted(range(len(copies)), key=lambda at: copies[at].count(None))[:size])
        copies = [copies[at] for at in kept] + [[None] * others for _ in range(size - len(kept))]
        free = sorted({*alive} - {each for copy in copies for each in copy if each is not None})
        first = _copies(range(self.count), sizes.dims, sizes.dim)
        place = {each: at for copy in first for at, each in enumerate(copy)}
        for copy in copies:
            for at, each in enumerate(copy):
                if each is None:
                    # A process with this position in another replica holds the same parts.
                    taken = next((one for one in free if place[one] == at), free[0])
                    free.remove(taken)
                    copy[at] = taken
        coords = _coords({**sizes.dims, sizes.dim: size}, sizes.dim)
        processes = (copies[which][at] for which, at in coords)
        return Places(self.count, sizes, tuple(each for each in processes if each is not None), size)


def _coords(dims: Mapping[str, int], dim: str) -> list[tuple[int, int]]:
    """For each rank, in row-major order, return its replica (the coord along `dim`) and its position in the replica."""
    names = list(dims)
    along, found, seen = names.index(dim), [], dict.fromkeys(range(dims[dim]), 0)
    for coords in product(*(range(size) for size in dims.values())):
        found.append((coords[along], seen[coords[along]]))
        seen[coords[along]] += 1
    return found


def _copies(processes: Sequence[int], dims: Mapping[str, int], dim: str) -> list[list[int]]:
    """Return the processes of each replica, in the order of the replicas' coords along `dim`."""
    found: list[list[int]] = [[] for _ in range(dims[dim])]
    for process, (copy, _) in zip(processes, _coords(dims, dim), strict=True):
        found[copy].append(process)
    return found
