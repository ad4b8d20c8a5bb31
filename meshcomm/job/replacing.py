"""A launcher's policy for lost ranks: start new processes, or use a smaller mesh until new processes have started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, final

from meshcomm.config.elastic import ElasticConfig
from meshcomm.job.places import Places, Sizes
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.rank_failure import Failure
from meshcomm.rendezvous.generation import (
    Announcement,
    announce,
    has_ended,
    have_met,
    hung_in,
    is_waiting,
    may_grow,
)
from meshcomm.rendezvous.processes import state_of_rank

SAVED: Final = os.EX_TEMPFAIL
"""Exit code 75, "try again": of a rank that stopped on a signal after saving a checkpoint, and of a job with such ranks."""

# Exit codes with which a new process would also end, because of misuse, an interrupt, or a request to stop.
_FINAL: Final = (2, 130, SAVED)


@final
class Replacing:
    """Tracks the processes of a job when some are lost. It starts no processes itself; a launcher asks it which to start.

    count: the number of ranks. Each process is identified by its initial rank.
    sizes: alternative sizes of the mesh; None if the mesh keeps its size.
    store: the job's store. If None, nothing can be announced, and the first loss ends the job.
    now: a clock in seconds.
    say: a function that prints lines. If None, lines go to stderr.
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
        self._left = elastic.replace
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

    @property
    def may_replace(self) -> bool:
        """Whether another lost process may be replaced."""
        return self._left > 0

    def lost(self, failures: Mapping[int, Failure], ended: bool) -> bool:
        """Handle the loss of the given processes. Return whether the job continues. `starts` returns the processes to start.

        ended: whether any rank has completed. If one has, the job ends, because that rank cannot meet the other ranks again.
        """
        # A process that ended because it lost a peer, or because of misuse, would end the same way again.
        if (
            ended
            or self.store is None
            or any(failure.follows or failure.code in _FINAL for failure in failures.values())
        ):
            return False
        elastic = self._elastic
        members = [process for process in failures if process in self.places.processes]
        # Members of the mesh come first.
        returning = sorted(failures, key=lambda process: process not in members)[: self._left]
        at_once = self.places.sizes is None or elastic.delay_s <= elastic.patience_s
        waits = {*members} <= {*returning} and at_once
        places: Places | None = self.places
        if members and not waits:
            places = self.places.filled(self._ready() - {*failures})
        if places is None or (places.sizes is None and len(returning) < len(failures)):
            return False
        self._left -= len(returning)
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
        left = self._left + len(returning)
        for process, failure in failures.items():
            if members and waits and process in returning:
                left -= 1
                what = f"replaced, replacements left: {left}"
            lines = [failure.text] if failure.text else []
            self._say(*lines, f"meshcomm: {failure.summary}; {what}")
        return True

    def hung(self) -> Mapping[int, str]:
        """Return the processes of the mesh that others have waited for in vain, with what each does.

        The launcher ends these processes. They are then lost.
        """
        if self.store is None or not (self._left or self.places.sizes):
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
        return recent if recent and any(state_of_rank(self.store, process) for process in ended) else {}

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
