"""Replay the calls of several ranks together, to find which ranks wait for which others, for how long, and whether any rank
waits forever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from meshcomm.dryrun.compare import DryRunFinding, Members, call_text, post
from meshcomm.watching.matcher import Collective, Collectives, Message, Messages
from meshcomm.watching.waits import find_circle

if TYPE_CHECKING:
    from meshcomm.dryrun.rank import Event, RankStep
    from meshcomm.watching.spans import Span

# Returns the seconds that a call takes once all ranks have arrived. Members: the group's ranks, or a message's two ends.
Seconds: TypeAlias = "Callable[[Span, Members], float]"


class Dim(NamedTuple):
    """How many seconds one rank was blocked along one dim. waits: the total. late: the part before the other ranks
    arrived. The rest was spent on the transfer itself and on earlier transfers in the same group.
    """

    waits: float
    late: float


@dataclass
class Replay:
    """The times of the reported part of the program on the ranks that were run, in seconds.

    ends:     the duration on each rank that reached the end. computed: the part of it spent on computation.
    dims:     rank -> dim -> the totals along this dim.
    stuck:    ranks that wait forever.
    early:    ranks with neighbors that were not run. They arrive too early, so their waits are not real.
    """

    ends: dict[int, float] = field(default_factory=dict)
    computed: dict[int, float] = field(default_factory=dict)
    dims: dict[int, dict[str, Dim]] = field(default_factory=dict)
    stuck: list[DryRunFinding] = field(default_factory=list)
    early: set[int] = field(default_factory=set)

    @property
    def sound(self) -> list[int]:
        """The ranks whose times are used: those that are not early, or all ranks if every rank is early."""
        return [rank for rank in self.ends if rank not in self.early] or list(self.ends)

    @property
    def seconds(self) -> float:
        """The number of seconds until the last rank finishes."""
        return max((self.ends[rank] for rank in self.sound), default=0.0)


class _Messages(NamedTuple):
    """The messages of one call by one rank. began: the start time. pairs: the (sender, receiver) of each message.

    parts: the messages whose peers were run, with the times at which their ends started.
    """

    began: float
    pairs: list[tuple[int, int]]
    parts: list[Message[float]]


@final
class _Rank:
    """One rank's program and its progress. calls: the calls that have started, by their index in the step."""

    def __init__(self, step: RankStep) -> None:
        self.step = step
        self.number = step.rank
        self.at = 0
        self.now = 0.0
        self.worked = 0.0
        self.calls: dict[int, Collective[float] | _Messages] = {}
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.began = self.computed = 0.0

    @property
    def ended(self) -> bool:
        return self.at == len(self.step.events)


def replay(
    steps: Sequence[RankStep],
    where: Callable[[int], str],
    *,
    seconds: Seconds = lambda span, members: 0.0,
    flop_s: float = 0.0,
    byte_s: float = 0.0,
) -> Replay:
    """Run the calls of all ranks against each other. Each rank makes its calls in order.

    A collective ends `seconds` after the last of its ranks has arrived, and a message `seconds` after both of its ends
    have. Ranks that were not run are assumed to arrive in time. Calls on the same group run one after another.
    flop_s: seconds per floating-point operation. byte_s: seconds per byte that other operators read or write.

    If no rank can continue, `stuck` describes the ranks that wait for each other in a cycle, or for a rank that has ended.
    """
    return _Replayer(steps, where, seconds, flop_s, byte_s).run()


@final
class _Replayer:
    """See `replay`."""

    def __init__(
        self,
        steps: Sequence[RankStep],
        where: Callable[[int], str],
        seconds: Seconds,
        flop_s: float,
        byte_s: float,
    ) -> None:
        self.where, self.seconds, self.flop_s, self.byte_s = where, seconds, flop_s, byte_s
        self.ranks = {step.rank: _Rank(step) for step in steps}
        self.found = Replay()
        # Per group: the calls, with the times at which ranks started them, and when the last transfer ends.
        self.collectives: dict[Members, Collectives[float]] = {}
        self.messages: dict[Members, Messages[float]] = defaultdict(Messages)
        self.busy: dict[Members, float] = defaultdict(float)
        # When the transfers of complete collectives end.
        self.ends: dict[Collective[float], float] = {}

    def run(self) -> Replay:
        """Advance the ranks in turn until all of them have ended or none can continue."""
        waiting = [rank for rank in self.ranks.values() if rank.step.events]
        while waiting:
            advanced = [self.advance(rank) for rank in waiting]
            if not any(advanced):
                self.found.stuck = self.stuck(waiting)
                break
            waiting = [rank for rank in waiting if not rank.ended]
        for rank in self.ranks.values():
            if rank.ended:
                self.compute(rank, rank.step)
                self.found.ends[rank.number] = rank.now - rank.began
            self.found.computed[rank.number] = rank.computed
            self.found.dims[rank.number] = {dim: Dim(*sums) for dim, sums in rank.sums.items()}
        return self.found

    def advance(self, rank: _Rank) -> bool:
        """Advance one rank until it blocks. Return whether it made progress."""
        first = rank.at
        while not rank.ended:
            event = rank.step.events[rank.at]
            self.compute(rank, event)
            if event.kind == "part":
                rank.began, rank.computed = rank.now, 0.0
                rank.sums.clear()
            elif event.kind == "start":
                self.start(rank, event.call)
            elif not self.wait(rank, event.call):
                break
            rank.at += 1
        return rank.at > first

    def compute(self, rank: _Rank, done: Event | RankStep) -> None:
        """Advance the rank's time until it has computed what `done` says in total."""
        worked = done.flops * self.flop_s + done.moved * self.byte_s
        if worked > rank.worked:
            rank.now, rank.computed = rank.now + worked - rank.worked, rank.computed + worked - rank.worked
            rank.worked = worked

    def start(self, rank: _Rank, number: int) -> None:
        """Record the start of a call."""
        span = rank.step.calls[number]
        members = tuple(rank.step.groups[span.group])
        rank.calls[number] = (
            self.start_messages(rank, span, members)
            if span.parts
            else self.start_collective(rank, span, members)
        )

    def start_collective(self, rank: _Rank, span: Span, members: Members) -> Collective[float]:
        """Record that one rank has arrived. The last rank to arrive starts the transfer."""
        if members not in self.collectives:
            self.collectives[members] = Collectives([member for member in members if member in self.ranks])
        call = self.collectives[members].join(rank.number, rank.now)
        if call.complete:
            starts = max(self.busy[members], *call.came.values())
            self.ends[call] = self.busy[members] = starts + self.seconds(span, members)
        return call

    def start_messages(self, rank: _Rank, span: Span, members: Members) -> _Messages:
        """Record that one rank has started its messages. Messages with ranks that were not run are not matched."""
        call = _Messages(rank.now, [], [])
        for direction, peer, tag, _ in span.parts:
            if peer is None:
                continue
            sends = direction == "send"
            pair = (rank.number, members[peer]) if sends else (members[peer], rank.number)
            call.pairs.append(pair)
            if members[peer] not in self.ranks:
                self.found.early.add(rank.number)
                continue
            call.parts.append(post(self.messages[members], sends, *pair, tag, rank.now))
        return call

    def wait(self, rank: _Rank, number: int) -> bool:
        """Wait for a call. Return False if it is not known yet when the call ends."""
        span = rank.step.calls[number]
        ready = self.over(rank.calls[number], span)
        if ready is None:
            return False
        last, over = ready
        sums = rank.sums[span.lane]
        if over > rank.now:
            sums[0] += over - rank.now
            sums[1] += max(0.0, last - rank.now)
            rank.now = over
        return True

    def over(self, call: Collective[float] | _Messages, span: Span) -> tuple[float, float] | None:
        """Return when the last peer arrived and when the transfer ends, or None if that is not known yet."""
        if isinstance(call, Collective):
            return (max(call.came.values()), self.ends[call]) if call.complete else None
        last = call.began
        for message in call.parts:
            if message.sent is None or message.received is None:
                return None
            last = max(last, message.sent, message.received)
        return last, last + max((self.seconds(span, pair) for pair in call.pairs), default=0.0)

    def missing(self, call: Collective[float] | _Messages) -> list[int]:
        """Return the ranks that a call still waits for."""
        if isinstance(call, Collective):
            return call.absent()
        return [rank for part in call.parts if not part.complete and (rank := part.lacks()) is not None]

    def stuck(self, waiting: Sequence[_Rank]) -> list[DryRunFinding]:
        """Return a finding for the ranks that wait for each other in a cycle. If there is no cycle, return one finding for
        each rank that waits for a rank that has ended.
        """
        calls = {rank.number: rank.step.events[rank.at].call for rank in waiting}
        spans = {rank.number: rank.step.calls[calls[rank.number]] for rank in waiting}
        needs = {rank.number: self.missing(rank.calls[calls[rank.number]]) for rank in waiting}
        circle = find_circle(needs)
        if not circle:
            return [
                DryRunFinding(
                    f"{self.where(rank)} waits forever in {call_text(spans[rank])} at {spans[rank].site}",
                    tuple(f"{self.where(other)} has ended" for other in others if self.ranks[other].ended),
                    (rank,),
                    spans[rank].lane,
                )
                for rank, others in needs.items()
                if needs.keys().isdisjoint(others)
            ]
        lines = tuple(
            f"{self.where(one)} waits in {call_text(spans[one])} at {spans[one].site} for {self.where(other)}"
            for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
        )
        names, first = ", ".join(map(str, circle)), spans[circle[0]]
        place = f"{self.where(circle[0])} in {call_text(first)} at {first.site}"
        what = f"ranks {names} wait for each other in a cycle: {place}"
        return [DryRunFinding(what, lines, tuple(circle), first.lane)]
