"""What is a schedule, and is it an all-reduce? Steps, what a rank sends and receives in each, and a run on bookkeeping that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshcomm.errors import LayoutError

# Each rank's contribution has this many bits of a chunk's number: enough to count every double.
_BITS = 32


class Send(NamedTuple):
    """Chunks `first` to `last - 1`, as they were before the step, go to coord `peer`."""

    peer: int
    first: int
    last: int


class Receive(NamedTuple):
    """Chunks `first` to `last - 1` come from coord `peer`.

    reduce: they are combined with this rank's own, the operand of the lower coord on the left;
            False: they replace this rank's own.
    """

    peer: int
    first: int
    last: int
    reduce: bool


class ScheduleStep(NamedTuple):
    """What one rank does in one step: all messages at once, then the receives take effect in this order.

    Between two ranks the first send of a step meets the first receive, and so on.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


IDLE = ScheduleStep()


@dataclass(frozen=True, slots=True)
class Schedule:
    """An all-reduce over `size` ranks of data in `chunks` pieces, see `bounds`, in `steps` steps; there is no barrier.

    A rank's program depends on the arguments alone, so that each rank makes its own: `of(coord)`.
    """

    name: str
    size: int
    chunks: int
    steps: int
    program: Callable[[int], tuple[ScheduleStep, ...]]

    def of(self, coord: int) -> tuple[ScheduleStep, ...]:
        """What rank `coord` does: `steps` Steps, some of them idle."""
        if not 0 <= coord < self.size:
            raise LayoutError(
                f"the {self.name} all-reduce has no coord {coord}",
                given=f"coord {coord}",
                expected=f"0 to {self.size - 1}",
            )
        return self.program(coord)


def bounds(length: int, chunks: int) -> list[int]:
    """Where `length` elements are cut into `chunks` pieces: chunk i is [bounds[i], bounds[i + 1]).

    The first pieces are one longer where they cannot all be equal; pieces may be empty.

    >>> bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    even, more = divmod(length, chunks)
    return [i * even + min(i, more) for i in range(chunks + 1)]


def check_counts(name: str, size: int, chunks: int = 1) -> None:
    """Raise LayoutError unless `size` ranks and `chunks` pieces are whole numbers of 1 or more."""
    for what, value in (("ranks", size), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LayoutError(
                f"no {name} all-reduce over {value!r} {what}",
                given=f"{what}: {value!r}",
                expected="a whole number, 1 or more",
            )


def check_inner(size: int, inner: int) -> None:
    """Raise LayoutError unless `size` ranks form equal groups of `inner`."""
    check_counts("two_level", size)
    check_counts("two_level", inner)
    if size % inner:
        raise LayoutError(
            f"no two_level all-reduce over {size} ranks in groups of {inner}",
            given=f"{size} ranks, {inner} in a group",
            expected=f"a group size that divides {size}",
        )


class Traffic(NamedTuple):
    """What a run of a schedule costs.

    steps:      the longest chain of messages in which each waits for the one before; path_bytes: the most bytes of one.
    sent:       bytes that each rank sends, by coord; messages: how many, empty ones left out.
    """

    steps: int
    path_bytes: int
    sent: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def busiest_bytes(self) -> int:
        """Bytes that the rank sends that sends most."""
        return max(self.sent)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks send together."""
        return sum(self.sent)


def interpret(schedule: Schedule, size_bytes: int, element_bytes: int = 1) -> Traffic:
    """Run `schedule` on data of `size_bytes`, whole elements of `element_bytes`, and count.

    Raises LayoutError, naming step and ranks, where a message is sent that nobody receives or the
    other way round, where a step overwrites what it also sends, and where a rank does not end with
    every rank's contribution to every chunk exactly once.
    """
    n, cuts = schedule.size, [c * element_bytes for c in bounds(size_bytes // element_bytes, schedule.chunks)]
    programs = [schedule.of(coord) for coord in range(n)]
    for coord, program in enumerate(programs):
        if len(program) != schedule.steps:
            raise _wrong(schedule, f"coord {coord} has {len(program)} steps, not {schedule.steps}")
    held = [[1 << (_BITS * coord)] * schedule.chunks for coord in range(n)]
    # Messages, and bytes, of the longest chain that has ended at each rank.
    steps, path = [0] * n, [0] * n
    sent, messages = [0] * n, [0] * n
    for number in range(schedule.steps):
        steps_before, path_before = steps[:], path[:]
        # What is sent is what was there before anything of this step arrived.
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
    """The messages of one step as (source, target, send, receive), receives in each rank's order."""
    leaving: dict[tuple[int, int], list[Send]] = {}
    for coord, program in enumerate(programs):
        for send in program[number].sends:
            leaving.setdefault((coord, send.peer), []).append(send)
    for coord, program in enumerate(programs):
        sends, receives = program[number]
        for receive in receives:
            # Between two ranks the n-th send meets the n-th receive, as on a backend without tags.
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
