"""Run a schedule on counters, to check that it is an all-reduce and to measure its cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshcomm.algorithms import Receive, Schedule, ScheduleStep, Send
from meshcomm.algorithms.schedule import bounds
from meshcomm.errors import LayoutError

# Bits of a chunk's number for each rank's contribution: enough to count every repetition.
_BITS = 32


class Traffic(NamedTuple):
    """The cost of a schedule's run.

    steps:      the length of the longest chain of dependent messages; path_bytes: the most bytes in any chain.
    sent:       bytes that each rank sends, by coord; messages: their number, without empty ones.
    """

    steps: int
    path_bytes: int
    sent: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def busiest_bytes(self) -> int:
        """The most bytes that any rank sends."""
        return max(self.sent)

    @property
    def total_bytes(self) -> int:
        """The bytes that all ranks send together."""
        return sum(self.sent)


def interpret(schedule: Schedule, size_bytes: int, element_bytes: int = 1) -> Traffic:
    """Run `schedule` on data of `size_bytes` (a multiple of `element_bytes`), and count.

    Raises LayoutError with the step and the ranks if a message has no receiver or no sender, or if a step overwrites data that it
    also sends. Raises LayoutError, too, if a rank does not end with every rank's contribution to every chunk exactly once.
    """
    n, cuts = schedule.size, [c * element_bytes for c in bounds(size_bytes // element_bytes, schedule.chunks)]
    programs = [schedule.of(coord) for coord in range(n)]
    for coord, program in enumerate(programs):
        if len(program) != schedule.steps:
            raise _wrong(schedule, f"coord {coord} has {len(program)} steps, not {schedule.steps}")
    held = [[1 << (_BITS * coord)] * schedule.chunks for coord in range(n)]
    # Messages and bytes of the longest chain that has ended at each rank.
    steps, path = [0] * n, [0] * n
    sent, messages = [0] * n, [0] * n
    for number in range(schedule.steps):
        steps_before, path_before = steps[:], path[:]
        # A step sends the values from before the step.
        moving = [
            (*pair, held[pair[0]][pair[2].first : pair[2].last])
            for pair in _pairs(schedule, programs, number)
        ]
        for source, target, send, receive, values in moving:
            size = cuts[send.last] - cuts[send.first]
            if size == 0:
                continue
            sent[source] += size
            messages[source] += 1
            count = max(steps_before[source], steps_before[target]) + 1
            moved = max(path_before[source], path_before[target]) + size
            for end in (source, target):
                steps[end] = max(steps[end], count)
                path[end] = max(path[end], moved)
            own = held[target]
            for c, value in enumerate(values, send.first):
                own[c] = value + own[c] if receive.reduce else value
    everyone = sum(1 << (_BITS * coord) for coord in range(n))
    for coord in range(n):
        for c in range(schedule.chunks):
            if held[coord][c] != everyone and cuts[c + 1] > cuts[c]:
                raise _wrong(
                    schedule, f"coord {coord} ends with chunk {c} made of {_parts(held[coord][c], n)}"
                )
    return Traffic(max(steps), max(path), tuple(sent), tuple(messages))


def _pairs(
    schedule: Schedule, programs: list[tuple[ScheduleStep, ...]], number: int
) -> Iterator[tuple[int, int, Send, Receive]]:
    """The messages of one step as (source, target, send, receive), in the order of each rank's receives."""
    leaving: dict[tuple[int, int], list[Send]] = {}
    for coord, program in enumerate(programs):
        for send in program[number].sends:
            leaving.setdefault((coord, send.peer), []).append(send)
    for coord, program in enumerate(programs):
        sends, receives = program[number]
        for receive in receives:
            # The n-th send between two ranks matches the n-th receive, as on a backend without tags.
            queue = leaving.get((receive.peer, coord), [])
            met = queue.pop(0) if queue else None
            if met is None or met[1:] != (receive.first, receive.last):
                raise _wrong(
                    schedule,
                    f"in step {number} coord {receive.peer} sends {met} and {coord} expects {receive}",
                )
            if not receive.reduce and any(
                send.first < receive.last and receive.first < send.last for send in sends
            ):
                raise _wrong(schedule, f"in step {number} coord {coord} overwrites what it sends")
            yield receive.peer, coord, met, receive
    for (source, target), rest in leaving.items():
        if rest:
            raise _wrong(schedule, f"in step {number} coord {target} does not receive {rest[0]} of {source}")


def _wrong(schedule: Schedule, what: str) -> LayoutError:
    return LayoutError(f"not an all-reduce: {schedule.name} over {schedule.size} ranks: {what}")


def _parts(value: int, n: int) -> str:
    counts = [(value >> (_BITS * r)) & ((1 << _BITS) - 1) for r in range(n)]
    return ", ".join(f"{count} x coord {r}" for r, count in enumerate(counts) if count) or "nothing"
