"""Choose the processes of a mesh after some are lost, so that complete replicas of the model along one dim continue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.layout.sizes import toml_dims


class Sizes(NamedTuple):
    """The sizes that a mesh may have: `dims`, with the size of `dim` optionally replaced by one of `fewer`, largest first."""

    dims: Mapping[str, int]
    dim: str
    fewer: Sequence[int]

    @property
    def axis(self) -> int:
        """The position of `dim` among the dims."""
        return [*self.dims].index(self.dim)

    def replicas(self, processes: Sequence[int], size: int) -> NDArray[np.int_]:
        """Return the processes of each replica of the model, in the order of the replicas' coords along `dim`.

        processes: in rank order, for a mesh with `size` ranks along `dim`.
        """
        ranks = np.reshape(processes, [*{**self.dims, self.dim: size}.values()])
        return np.moveaxis(ranks, self.axis, 0).reshape(size, -1)


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
        sizes, alive = self.sizes, {*alive}
        if len(alive) == self.count:
            return Places.first(self.count, sizes)
        if sizes is None:
            return None
        others = self.count // sizes.dims[sizes.dim]
        size = next((size for size in sizes.fewer if size * others <= len(alive)), 0)
        if not size:
            return None
        replicas = sizes.replicas(self.processes, self.size)
        lost = ~np.isin(replicas, [*alive])
        kept = np.sort(np.argsort(lost.sum(axis=1), kind="stable")[:size])
        filled = np.full((size, others), -1)
        filled[: len(kept)] = np.where(lost[kept], -1, replicas[kept])
        free = sorted(alive - {*filled.flat})
        first = sizes.replicas(range(self.count), sizes.dims[sizes.dim])
        for replica, position in np.argwhere(filled < 0):
            # A process with this position in another replica holds the same parts.
            same = [process for process in free if process in first[:, position]]
            filled[replica, position] = (same or free)[0]
            free.remove(filled[replica, position])
        # Back to the order of ranks.
        shape = [size for dim, size in sizes.dims.items() if dim != sizes.dim]
        ranks = np.moveaxis(filled.reshape(size, *shape), 0, sizes.axis)
        return Places(self.count, sizes, tuple(ranks.ravel().tolist()), size)
