"""A launcher's policy for lost ranks: start new processes, or use a smaller mesh until new processes have started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import Config, load_config
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.layout.sizes import ranks_text, toml_dims
from meshcomm.rendezvous.generation import (
    Announcement,
    announce,
    has_ended,
    have_met,
    hung_in,
    is_waiting,
    may_grow,
)
from meshcomm.rendezvous.processes import is_claimed
from meshcomm.watching.ending import Failure

SAVED: Final = os.EX_TEMPFAIL
"""Exit code 75, "try again": of a rank that stopped on a signal after saving a checkpoint, and of a job with such ranks."""

# Exit codes with which a new process would also end, because of misuse, an interrupt, or a request to stop.
_FINAL: Final = (2, 130, SAVED)


class Sizes(NamedTuple):
    """The sizes that a mesh may have: `dims`, with the size of `dim` optionally replaced by one of `fewer`, largest first.

    shards: whether ranks with different coords along `dim` hold different parts of the model, and not copies of it.
    """

    dims: Mapping[str, int]
    dim: str
    fewer: Sequence[int]
    shards: bool = False

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
    smallest = settings.elastic.min
    if not smallest:
        return None
    dims = settings.mesh.sizes(world_size)
    dim, least = next(iter(smallest.items()))
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
            given=f"elastic.min = {toml_dims(smallest)}, mesh.dims = {toml_dims(dims)}; with {dims[dim] - 1}: {refused}",
            expected=f"a smaller {dim} that fits the rest of the configuration",
            hint="use a train.global_batch_size that smaller sizes divide, use -1 in a view, or remove elastic.min",
        )
    parallel = settings.parallel
    return Sizes(dims, dim, fewer, parallel is not None and parallel.shard == dim)


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

        The replicas of the model that lack the fewest processes are kept; of shards, as many different ones as possible. Other
        processes fill the gaps.
        """
        sizes, alive = self.sizes, {*alive}
        if len(alive) == self.count:
            return Places.first(self.count, sizes)
        if sizes is None:
            return None
        per_index = self.count // sizes.dims[sizes.dim]
        size = next((size for size in sizes.fewer if size * per_index <= len(alive)), 0)
        if not size:
            return None
        replicas = sizes.replicas(self.processes, self.size)
        lost = ~np.isin(replicas, [*alive])
        filled = np.full((size, per_index), -1)
        if sizes.shards:
            # Processes of as many coords as possible, so that each shard is left. Positions with few processes choose first.
            used = np.zeros(len(replicas))
            for position in np.argsort(-lost.sum(axis=0), kind="stable"):
                coords = np.flatnonzero(~lost[:, position])
                coords = np.sort(coords[np.argsort(used[coords], kind="stable")[:size]])
                used[coords] += 1
                filled[: len(coords), position] = replicas[coords, position]
        else:
            indices = np.sort(np.argsort(lost.sum(axis=1), kind="stable")[:size])
            filled[: len(indices)] = np.where(lost[indices], -1, replicas[indices])
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


@final
class Replacing:
    """Tracks the processes of a job when some are lost. It starts no processes itself; a launcher asks it which to start.

    count: the number of ranks. Each process is identified by its initial rank.
    sizes: alternative sizes of the mesh; None if the mesh keeps its size.
    store: the job's store. If None, nothing can be announced, and the first loss ends the job.
    now: a clock in seconds.
    say: a function that prints lines. If None, lines go to stderr.
    left: how many further processes may be replaced.
    due: for each ended process, when to start its replacement.
    coming: for each new process that has not joined the mesh yet, the generation that it was started for.
    """

    def __init__(
        self,
        count: int,
        elastic: ElasticConfig,
        sizes: Sizes | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        say: Callable[..., None] | None = None,
    ) -> None:
        self._elastic, self._now, self._say = elastic, now, say or _say
        self.left = elastic.replace
        self._alive = set(range(count))
        self.due: dict[int, float] = {}
        # For each awaited process, the deadline and the generation that announces the process.
        self._awaited: dict[int, tuple[float, int]] = {}
        self.coming: dict[int, int] = {}
        self._how: dict[int, str] = {}
        self.places = Places.first(count, sizes)
        self.number = 0
        self.last: dict[int, Failure] = {}
        self.store: Any = None

    @property
    def is_elastic(self) -> bool:
        """Whether the job can continue without a lost rank."""
        return bool(self._elastic.replace or self.places.sizes)

    def lost(self, failures: Mapping[int, Failure], ended: bool) -> bool:
        """Handle the loss of the given processes. Return whether the job continues. `starts` returns the processes to start.

        ended: whether any rank has completed. If one has, the job ends, because that rank cannot meet the other ranks again.
        The same applies once all work is done.
        """
        # A process that ended because it lost a peer, or because of misuse, would end the same way again.
        if (
            ended
            or self.store is None
            or self.has_ended
            or any(failure.follows or failure.code in _FINAL for failure in failures.values())
        ):
            return False
        elastic = self._elastic
        members = [process for process in failures if process in self.places.processes]
        # Members of the mesh come first.
        returning = sorted(failures, key=lambda process: process not in members)[: self.left]
        at_once = self.places.sizes is None or elastic.delay_s <= elastic.patience_s
        waits = {*members} <= {*returning} and at_once
        places: Places | None = self.places
        if members and not waits:
            places = self.places.filled(self._ready() - {*failures})
        if places is None or (places.sizes is None and len(returning) < len(failures)):
            return False
        self.left -= len(returning)
        self._how |= {process: failure.what for process, failure in failures.items()}
        self._alive -= {*failures}
        for process in failures:
            self.coming.pop(process, None)
            self._awaited.pop(process, None)
        if members:
            self.last = {process: failures[process] for process in members}
            lost = {process: failures[process].what for process in members}
            self._announce(places, lost, members if waits else ())
        self.due |= dict.fromkeys(returning, self._now() + elastic.delay_s)
        if waits:
            self._awaited |= dict.fromkeys(members, (self._now() + elastic.patience_s, self.number))
        what = "it was not in the mesh" if not members else f"continues with {self._size()}"
        replacements_left = self.left + len(returning)
        for process, failure in failures.items():
            if members and waits and process in returning:
                replacements_left -= 1
                what = f"replaced, replacements left: {replacements_left}"
            lines = [failure.text] if failure.text else []
            self._say(*lines, f"meshcomm: {failure.summary}; {what}")
        return True

    def hung(self) -> Mapping[int, str]:
        """Return the processes of the mesh for which others waited until the timeout, with the activity of each.

        The launcher ends these processes. They are then lost.
        """
        if self.store is None or not (self.left or self.places.sizes):
            return {}
        members = {*self.places.processes} & self._alive
        reported = hung_in(self.store, self.number)
        return {process: f"hung: it {what}" for process, what in reported.items() if process in members}

    @property
    def has_ended(self) -> bool:
        """Whether all work is done, so that the end of a process by a signal loses nothing."""
        return self.store is not None and has_ended(self.store)

    def starts(self) -> list[int]:
        """Return the processes to start now. The launcher calls `started` after it has started each process."""
        now = self._now()
        ready = [process for process, due in self.due.items() if due <= now]
        for process in ready:
            del self.due[process]
        return ready

    def started(self, process: int) -> int:
        """Record that a new process replaces a lost one. Return the generation to pass to the new process."""
        number = self._awaited.pop(process, (0.0, 0))[1]
        if number:
            self._alive.add(process)
        else:
            number = self.coming[process] = self.number + 1
        return number

    def lose_patience(self) -> None:
        """Let the other ranks continue without the new processes that have not started in time."""
        late = [process for process, (until, _) in self._awaited.items() if until < self._now()]
        if late and (places := self.places.filled(self._ready() - {*late})) is not None:
            self._announce(places, {process: self._how[process] for process in late}, ())
            self._say(
                f"meshcomm: no new process for {ranks_text(sorted(late))} in time; continues with {self._size()}"
            )

    @property
    def recent(self) -> Mapping[int, Failure]:
        """The most recently lost processes; {} once all ranks have met again, so that a later failure is not blamed on them."""
        return {} if not self.number or have_met(self.store, self.number) else self.last

    def unmet(self, ended: Collection[int]) -> Mapping[int, Failure]:
        """Return the most recently lost processes if their replacements cannot meet all ranks because some ranks had already
        completed; otherwise {}.

        ended: the processes that have completed. Processes that have never opened a mesh are ignored.
        """
        recent = self.recent if ended else {}
        # Once all work is done, nobody meets again.
        if not recent or self.has_ended:
            return {}
        return recent if any(is_claimed(self.store, process) for process in ended) else {}

    def grow(self, ended: bool) -> None:
        """Let the mesh grow if new processes are waiting to join. ended: see `lost`."""
        if ended or not self.coming or self.store is None:
            return
        places = self.places.filled(self._ready())
        if places is not None and places.size > self.places.size and may_grow(self.store, self.number + 1):
            self._announce(places, {}, ())
            new = sorted(places.processes.index(process) for process in self._last_new)
            self._say(f"meshcomm: new processes for {ranks_text(new)}; continues with {self._size()}")

    def _announce(self, places: Places, lost: Mapping[int, str], again: Collection[int]) -> None:
        """Announce a new generation. again: the processes in `lost` that this generation replaces."""
        coming = {process for process in self.coming if process in places.processes}
        new = {
            process: self._how[process]
            for process in places.processes
            if process in coming or process in again
        }
        for process in coming:
            del self.coming[process]
        self._alive |= coming
        # Do not wait for processes that have no place in a smaller mesh.
        self._awaited = {
            process: told for process, told in self._awaited.items() if process in places.processes
        }
        self.places, self.number, self._last_new = places, self.number + 1, [*new]
        whole = places.processes == tuple(range(places.count))
        announcement = Announcement(lost, new, () if whole else places.processes, places.dims)
        announce(self.store, self.number, announcement)

    def _ready(self) -> set[int]:
        """Return the processes that could join a mesh now."""
        return self._alive | {
            process for process, number in self.coming.items() if is_waiting(self.store, number, process)
        }

    def _size(self) -> str:
        sizes = self.places.sizes
        return f"{sizes.dim}={self.places.size}" if sizes is not None else "new ones"


def _say(*lines: str) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
