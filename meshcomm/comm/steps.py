"""What a rank called on one group in each step of its program, noted so that the ranks can be compared."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias, final
from zlib import crc32

from meshcomm.comm.ledger import Total
from meshcomm.comm.site import line_of

# Of so many steps it is remembered what all calls up to there were.
SUMS: Final = 512
# Of so many runs of steps that are all alike it is remembered what was called.
RUNS: Final = 256

# As comm/recorder.py has them.
_Entry: TypeAlias = tuple[Total, int, CodeType, int, float]
# The call, its place in the program, how often.
_Listing: TypeAlias = tuple[tuple[str, CodeType, int, int], ...]


class _Run(NamedTuple):
    """Steps, one after the other, in which a rank made the same calls on the group.

    first: the first of them, by this rank's own count. ahead: what the program's numbers are more than
    that. calls, nbytes: in each. digest: of the calls in their order, with their bytes where those are
    equal on all ranks. before: the sum of all steps before.
    """

    first: int
    ahead: int
    calls: int
    digest: int
    nbytes: int
    before: int
    listing: _Listing


def sum_after(before: int, calls: int, digest: int) -> int:
    """The sum of all steps up to one with these calls; see Steps.sums."""
    return crc32(b"%d %d" % (calls, digest), before)


@final
class Steps:
    """What was called on one group, step by step. Written by `mesh.step`, read by other threads too.

    step: the last one noted, 0 before there is one. sums: by step, a digest of all calls from the first
    step to the end of that one: where those of two ranks are equal, so is all that they did before.
    """

    __slots__ = ("_runs", "_since", "_started", "_sum", "step", "sums")

    def __init__(self) -> None:
        self.step = 0
        self.sums: dict[int, int] = {}
        self._sum = 0
        self._since = 0
        self._started = 0
        self._runs: deque[_Run] = deque(maxlen=RUNS)

    def note(
        self,
        step: int,
        number: int,
        ring: Sequence[_Entry | None],
        started: int,
        refused: Collection[int],
        apart: bool,
    ) -> None:
        """Step `step` is over, which the program calls `number`; `started` calls were made up to now.

        ring: the last calls, by their number. Of a step with more calls than it holds, the digest is of
        the last ones, on every rank alike. refused: numbers of calls that were refused before anything
        was sent. apart: the calls of this step are not compared.
        """
        calls, nbytes, digest = started - self._started, 0, 0
        entries: list[_Entry] = []
        self._started = started
        if apart:
            calls = 0
        elif calls:
            kept = len(ring)
            numbers: Sequence[int] = range(started - min(calls, kept) + 1, started + 1)
            if refused:
                numbers = [each for each in numbers if each not in refused]
            entries = [entry for each in numbers if (entry := ring[each % kept]) is not None]
            facts = [fact for entry in entries for fact in (entry[0].sign, entry[1] * entry[0].alike)]
            digest, nbytes = crc32(array("q", facts).tobytes()), sum(facts[1::2])
        before, self._sum = self._sum, sum_after(self._sum, calls, digest)
        last = self._runs[-1] if self._runs else None
        ahead = number - step
        if last is None or (last.calls, last.digest, last.ahead) != (calls, digest, ahead):
            listing = _listing(entries)
            if last is not None and last.listing == listing:
                listing = last.listing
            self._runs.append(_Run(step, ahead, calls, digest, nbytes, before, listing))
        self._since = self._since or step
        self.sums[step] = self._sum
        self.sums.pop(step - SUMS, None)
        # Last: whoever reads from another thread begins with it.
        self.step = step

    def told(self, most: int = RUNS) -> dict[str, Any] | None:
        """The last `most` runs as plain data; None before the first step.

        step: the last one. since: the first that was noted. runs: each as (first step, what the program's
        numbers are more, calls, digest, bytes, sum before, which of `listings`). listings: each of (call,
        file:line, how often).
        """
        step = self.step
        if not step:
            return None
        runs = [run for run in tuple(self._runs) if run.first <= step][-most:]
        listings: dict[_Listing, int] = {}
        rows = [[*run[:-1], listings.setdefault(run.listing, len(listings))] for run in runs]
        return {
            "step": step,
            "since": self._since,
            "runs": rows,
            "listings": [
                [
                    [call, f"{code.co_filename}:{line_of(code, at)}", times]
                    for call, code, at, times in listing
                ]
                for listing in listings
            ],
        }


def _listing(entries: Sequence[_Entry]) -> _Listing:
    """What was called from where, in the order of the first calls."""
    counts: dict[tuple[str, CodeType, int], int] = {}
    for total, _, code, instruction, _ in entries:
        key = (total.call, code, instruction)
        counts[key] = counts.get(key, 0) + 1
    return tuple((*key, times) for key, times in counts.items())
