"""A launcher's policy when processes of ranks are lost: new processes, or a smaller mesh until these start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, final

from meshcomm.config.elastic import ElasticConfig
from meshcomm.launch.places import Places, Sizes
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh.generation import Announcement, announce, have_met, is_waiting, may_grow
from meshcomm.mesh.rank_failure import Failure
from meshcomm.mesh.rendezvous import state_of_rank

# Exit codes with which a new process would end too: a misused library, or an interrupt.
_FINAL: Final = (2, 130)


@final
class Replacing:
    """The processes of a job, of which some are lost. It starts none: a launcher asks which to start.

    count: number of the job's ranks, by which the processes are numbered. sizes: alternative sizes of the mesh; None if the
    mesh keeps its size. store: the job's store; if None, nothing can be announced, and the first loss ends the job. now:
    seconds of a clock.
    say: prints lines; None for stderr.
    due: for each ended process, when to start a new one. coming: for each new process that does not take part yet, the
    generation that it was started for.
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
        # By awaited process: until when, and the generation that announces it.
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
        """Whether another process may be started for a lost one."""
        return self._left > 0

    @property
    def down(self) -> Collection[int]:
        """The processes that have ended and have no new process yet."""
        return {*range(self.places.count)} - self._alive - {*self.coming}

    def lost(self, failures: Mapping[int, Failure], ended: bool) -> bool:
        """Handle the end of these processes. Return whether the job continues. `starts` returns the processes to start.

        ended: whether a rank has completed, as such a rank could not meet the others again.
        """
        # A process that gave up because it lost a peer, or because of misuse, would do so again.
        if (
            ended
            or self.store is None
            or any(each.follows or each.code in _FINAL for each in failures.values())
        ):
            return False
        elastic, members = self._elastic, [each for each in failures if each in self.places.processes]
        returning = sorted(failures, key=lambda each: each not in members)[: self._left]
        at_once = self.places.sizes is None or elastic.delay_s <= elastic.patience_s
        waits = {*members} <= {*returning} and at_once
        places: Places | None = self.places
        if members and not waits:
            places = self.places.filled(self._ready() - {*failures})
        if places is None or (places.sizes is None and len(returning) < len(failures)):
            return False
        self._left -= len(returning)
        self._how |= {each: failure.what for each, failure in failures.items()}
        self._alive -= {*failures}
        for each in failures:
            self.coming.pop(each, None)
            self._awaited.pop(each, None)
        if members:
            self.last = {each: failures[each] for each in members}
            lost = {each: failures[each].what for each in members}
            self._announce(places, lost, members if waits else ())
        self.due |= dict.fromkeys(returning, self._now() + elastic.delay_s)
        if waits:
            self._awaited |= dict.fromkeys(members, (self._now() + elastic.patience_s, self.number))
        what = f"replaced, replacements left: {self._left}" if waits else f"continues with {self._size()}"
        if not members:
            what = "it was not in the mesh"
        for failure in failures.values():
            lines = [failure.text] if failure.text else []
            self._say(*lines, f"meshcomm: {failure.summary}; {what}")
        return True

    def starts(self) -> list[int]:
        """Return the processes to start now. A launcher calls `started` for each once it has started it."""
        now = self._now()
        found = [each for each, due in self.due.items() if due <= now]
        for each in found:
            del self.due[each]
        return found

    def started(self, process: int) -> int:
        """Record that a new process replaces a lost one; return the generation that it is started for, to be passed to it."""
        number = self._awaited.pop(process, (0.0, 0))[1]
        if number:
            self._alive.add(process)
        else:
            number = self.coming[process] = self.number + 1
        return number

    def lose_patience(self) -> None:
        """Make the others continue without new processes that have not started in time."""
        late = [each for each, (until, _) in self._awaited.items() if until < self._now()]
        if late and (places := self.places.filled(self._ready() - {*late})) is not None:
            self._announce(places, {each: self._how[each] for each in late}, ())
            self._say(
                f"meshcomm: no new process for {ranks_text(sorted(late))} in time; continues with {self._size()}"
            )

    def unmet(self, ended: Collection[int]) -> Mapping[int, Failure]:
        """Return the processes that were lost last, if no rank can meet the new ones because others had ended
        before; otherwise {}.

        ended: the processes that have completed. A process that has opened no mesh is not waited for.
        """
        if not ended or not self.number or have_met(self.store, self.number):
            return {}
        return self.last if any(state_of_rank(self.store, each) for each in ended) else {}

    def grow(self, ended: bool) -> None:
        """Let the mesh grow if new processes wait for it. ended: as in `lost`."""
        if ended or not self.coming or self.store is None:
            return
        places = self.places.filled(self._ready())
        if places is not None and places.size > self.places.size and may_grow(self.store, self.number + 1):
            self._announce(places, {}, ())
            new = sorted(places.processes.index(each) for each in self._last_new)
            self._say(f"meshcomm: new processes for {ranks_text(new)}; continues with {self._size()}")

    def numbered(self, failures: Mapping[int, Failure]) -> list[Failure]:
        """Return the failures in the present mesh, numbered by its ranks."""
        ranks = {process: rank for rank, process in enumerate(self.places.processes)}
        return [
            replace(failure, rank=ranks[process]) for process, failure in failures.items() if process in ranks
        ]

    def notes(self, failed: Collection[Failure], ended: Collection[int], root: int) -> list[str]:
        """Return the lines on why the job has ended and did not continue. failed: as from `numbered`. ended: ranks
        that had completed.
        """
        lines = []
        if self.is_elastic and ended and root not in ended:
            lines.append(
                f"{ranks_text(sorted(ended))} had already completed: new processes can no longer meet all ranks"
            )
        if left := sorted(failure.rank for failure in failed if failure.what.startswith("RankLost")):
            way = "a program continues with mesh.reopen(error), a Trainer by itself"
            lines.append(f"{ranks_text(left)} ended by RankLost: {way}")
        if self.number and not any(state_of_rank(self.store, each) for each in range(self.places.count)):
            lines.append(
                "no rank had opened a mesh: only a program that reopens one, or a Trainer, can continue"
            )
        return lines

    def _announce(self, places: Places, lost: Mapping[int, str], again: Collection[int]) -> None:
        """again: the processes of `lost` that this generation replaces."""
        coming = {each for each in self.coming if each in places.processes}
        new = {each: self._how[each] for each in places.processes if each in coming or each in again}
        for each in coming:
            del self.coming[each]
        self._alive |= coming
        # A process that has no place in a smaller mesh any more is not waited for.
        self._awaited = {each: told for each, told in self._awaited.items() if each in places.processes}
        self.places, self.number, self._last_new = places, self.number + 1, [*new]
        whole = places.processes == tuple(range(places.count))
        announcement = Announcement(lost, new, () if whole else places.processes, places.dims)
        announce(self.store, self.number, announcement)

    def _ready(self) -> set[int]:
        """Return the processes that could take part now."""
        return self._alive | {
            each for each, number in self.coming.items() if is_waiting(self.store, number, each)
        }

    def _size(self) -> str:
        sizes = self.places.sizes
        return f"{sizes.dim}={self.places.size}" if sizes is not None else "new ones"


def _say(*lines: str) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
