"""What happens when the calls of several ranks meet: who waits for whom, for how long, and whether anybody waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from meshcomm.comm.diagnosis import shortest_way
from meshcomm.dryrun.compare import Finding, Members, call_text
from meshcomm.simulator.start_order import Start, StartOrder

if TYPE_CHECKING:
    from meshcomm.comm.spans import Span
    from meshcomm.dryrun.rank import Step

# The seconds that a call takes once all have come: of a group with these ranks, of a message the two ends.
Seconds: TypeAlias = "Callable[[Span, Members], float]"
COMPUTE: Final = "compute"


class Bar(NamedTuple):
    """What one rank did from `began` to `over`, seconds from the step's start.

    lane: "compute", or the dim of the call. name: the pass under way, or the call. late: the part of it until the
    last of the others had come; of what is computed 0.
    """

    rank: int
    lane: str
    name: str
    began: float
    over: float
    late: float = 0.0


class Dim(NamedTuple):
    """Seconds of one rank along one dim. busy: of its transfers. waits: that it stood still for them, of which `late`
    were until the others came, and the rest for the transfer and for those before it on the group.
    """

    busy: float
    waits: float
    late: float


@dataclass
class Replay:
    """The reported part of the ranks that were run. ends: how long each took. bars: what stood in the way, in order, and
    passes.

    early: ranks that exchange messages with ranks that were not run, and so come earlier than they would: nobody waits
    in truth as they do.

    dims: rank -> dim -> sums. stuck: who waits for ever, where nobody can go on; then `ends` has only those that ended.
    """

    ends: dict[int, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    dims: dict[int, dict[str, Dim]] = field(default_factory=dict)
    stuck: list[Finding] = field(default_factory=list)
    early: set[int] = field(default_factory=set)

    @property
    def sound(self) -> list[int]:
        """The ranks whose times count: those that are not early, if there are any."""
        return [rank for rank in self.ends if rank not in self.early] or list(self.ends)

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max((self.ends[rank] for rank in self.sound), default=0.0)


@final
class _Call:
    """A collective under way. came: rank -> when. needs: who has to come. starts, over: when the data move, and are there."""

    __slots__ = ("came", "needs", "over", "starts")

    def __init__(self) -> None:
        self.came: dict[int, float] = {}
        self.needs: tuple[int, ...] = ()
        self.over: float | None = None
        self.starts = 0.0


class _Ends(NamedTuple):
    """The messages of one call by one rank: when it began; (from, to) of each; and of those whose other end was run
    (group, from, to, tag), which one, and whether it is sent.
    """

    began: float
    pairs: list[tuple[int, int]]
    parts: list[tuple[tuple[Members, int, int, int], int, bool]]


@final
class _Rank:
    """One rank's program and how far it is."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.at = 0
        self.now = 0.0
        self.flops = 0
        # Where `events` has no waits, each call is over before the next begins.
        self.calls: dict[int, list[_Call]] = {}
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.began = 0.0


def replay(
    steps: Sequence[Step],
    where: Callable[[int], str],
    *,
    seconds: Seconds = lambda span, members: 0.0,
    flop_s: float = 0.0,
    queued: bool = False,
) -> Replay:
    """Run the calls of all ranks against each other, each rank in its own order.

    A collective is over when all of its ranks that were run have come to it, and `seconds` later; a message when both
    ends have. Ranks that were not run are taken to come in time. Calls on one group are carried out one after the other.
    flop_s: seconds of one floating-point operation. queued: calls are NCCL's: also the order in which ranks start
    those of several groups is looked at, see `StartOrder`.

    Where nobody can go on: the circle of those that wait for each other, or who waits for a rank that has ended.
    """
    ranks = {step.rank: _Rank(step) for step in steps}
    groups: dict[Members, dict[int, _Call]] = defaultdict(dict)
    made: dict[tuple[Members, int], int] = defaultdict(int)
    messages: dict[tuple[Members, int, int, int], tuple[list[float], list[float]]] = defaultdict(
        lambda: ([], [])
    )
    order: dict[tuple[Members, int, int, int, bool], int] = defaultdict(int)
    free: dict[Members, float] = defaultdict(float)
    names: dict[Members, int] = {}
    ends: dict[tuple[int, int], _Ends] = {}
    start_order = StartOrder() if queued else None
    found = Replay()

    def start(rank: _Rank, number: int, span: Span) -> None:
        members = tuple(rank.step.groups[span.group])
        me = rank.step.rank
        if not span.parts:
            place = made[members, me]
            made[members, me] += 1
            call = groups[members].setdefault(place, _Call())
            if start_order is not None and not found.stuck:
                found.stuck += _crossed(
                    start_order,
                    span,
                    (names.setdefault(members, len(names)), place),
                    members,
                    ranks,
                    me,
                    where,
                )
            call.came[me] = rank.now
            call.needs = tuple(each for each in members if each in ranks)
            rank.calls[number] = [call]
            if len(call.came) == len(call.needs):
                call.starts = max(free[members], *call.came.values())
                call.over = free[members] = call.starts + seconds(span, members)
            return
        ends[me, number] = mine = _Ends(rank.now, [], [])
        rank.calls[number] = []
        for direction, peer, tag, _ in span.parts:
            if peer is None:
                continue
            sends = direction == "send"
            pair = (me, members[peer]) if sends else (members[peer], me)
            mine.pairs.append(pair)
            if members[peer] not in ranks:
                found.early.add(me)
                continue
            key = (members, *pair, tag)
            place = order[*key, sends]
            order[*key, sends] += 1
            messages[key][not sends].append(rank.now)
            mine.parts.append((key, place, sends))

    def over(rank: _Rank, number: int, span: Span) -> tuple[float, float, float] | None:
        """When the last of the others came, when the transfer begins, and when it is over; None: not known yet."""
        calls = rank.calls.get(number)
        if calls is None:
            return rank.now, rank.now, rank.now
        if calls:
            call = calls[0]
            return None if call.over is None else (max(call.came.values()), call.starts, call.over)
        mine = ends[rank.step.rank, number]
        last = mine.began
        for key, place, sends in mine.parts:
            others = messages[key][sends]
            if place >= len(others):
                return None
            last = max(last, others[place])
        return last, last, last + max((seconds(span, pair) for pair in mine.pairs), default=0.0)

    def go(rank: _Rank) -> bool:
        """As far as it can go; whether that was anywhere."""
        events, moved = rank.step.events, False
        while rank.at < len(events):
            event = events[rank.at]
            if event.flops > rank.flops:
                until = rank.now + (event.flops - rank.flops) * flop_s
                if flop_s:
                    found.bars.append(Bar(rank.step.rank, COMPUTE, event.during, rank.now, until))
                rank.now, rank.flops = until, event.flops
            if event.kind == "part":
                rank.began = rank.now
                rank.sums.clear()
                rank.at += 1
                moved = True
                continue
            span = rank.step.calls[event.call]
            if event.kind == "start":
                start(rank, event.call, span)
            else:
                known = over(rank, event.call, span)
                if known is None:
                    return moved
                last, starts, end = known
                sums = rank.sums[span.lane]
                sums[0] += max(0.0, end - starts)
                if end > rank.now:
                    late = max(0.0, last - rank.now)
                    sums[1] += end - rank.now
                    sums[2] += late
                    found.bars.append(Bar(rank.step.rank, span.lane, span.call, rank.now, end, late))
                    rank.now = end
            rank.at += 1
            moved = True
        return moved

    waiting = [rank for rank in ranks.values() if rank.step.events]
    while waiting:
        went = [go(rank) for rank in waiting]
        if not any(went):
            found.stuck = _stuck(waiting, ranks, ends, messages, where)
            break
        waiting = [rank for rank in waiting if rank.at < len(rank.step.events)]
    for rank in ranks.values():
        if rank.at == len(rank.step.events):
            rest = rank.step.flops - rank.flops
            if rest > 0 and flop_s:
                found.bars.append(
                    Bar(rank.step.rank, COMPUTE, "between passes", rank.now, rank.now + rest * flop_s)
                )
                rank.now += rest * flop_s
            found.ends[rank.step.rank] = rank.now - rank.began
        found.dims[rank.step.rank] = {dim: Dim(*sums) for dim, sums in rank.sums.items()}
    origin = min((rank.began for rank in ranks.values()), default=0.0)
    found.bars = [
        bar._replace(began=bar.began - origin, over=bar.over - origin)
        for bar in found.bars
        if bar.over > ranks[bar.rank].began or not ranks[bar.rank].began
    ]
    return found


def _stuck(
    waiting: Sequence[_Rank],
    ranks: Mapping[int, _Rank],
    ends: Mapping[tuple[int, int], _Ends],
    messages: Mapping[tuple[Members, int, int, int], tuple[list[float], list[float]]],
    where: Callable[[int], str],
) -> list[Finding]:
    """The circle in which ranks wait for each other; where there is none, each that waits for one that has ended."""
    needs: dict[int, list[int]] = {}
    spans: dict[int, Span] = {}
    for rank in waiting:
        me = rank.step.rank
        event = rank.step.events[rank.at]
        spans[me] = rank.step.calls[event.call]
        calls = rank.calls[event.call]
        if calls:
            needs[me] = [each for each in calls[0].needs if each not in calls[0].came]
        else:
            needs[me] = [
                key[2] if sends else key[1]
                for key, place, sends in ends[me, event.call].parts
                if place >= len(messages[key][sends])
            ]
    stopped = set(needs)
    among = {rank: [each for each in others if each in stopped] for rank, others in needs.items()}
    circle = next((way for rank in among if (way := shortest_way(among, rank, rank))), [])
    if circle:
        pairs = list(pairwise(circle))
        lines = tuple(
            f"{where(one)} waits in {call_text(spans[one])} at {spans[one].site} for {where(other)}"
            for one, other in pairs
        )
        names = ", ".join(str(rank) for rank in circle[:-1])
        first = spans[circle[0]]
        what = f"ranks {names} wait for each other in a circle, {where(circle[0])} in {call_text(first)} at {first.site}"
        return [Finding(what, lines, tuple(circle[:-1]), first.lane)]
    return [
        Finding(
            f"{where(rank)} waits for ever in {call_text(spans[rank])} at {spans[rank].site}",
            tuple(
                f"{where(other)} has ended"
                for other in others
                if ranks[other].at == len(ranks[other].step.events)
            ),
            (rank,),
            spans[rank].lane,
        )
        for rank, others in needs.items()
        if not set(others) & stopped
    ]


def _crossed(
    starts: StartOrder,
    span: Span,
    call: tuple[int, int],
    members: Members,
    ranks: Mapping[int, _Rank],
    me: int,
    where: Callable[[int], str],
) -> list[Finding]:
    """The circle that this start closes among those of several groups, if any."""
    size = sum(each in ranks for each in members)
    if size < 2:
        return []
    what = f"{call_text(span)} along {span.lane} at {span.site}"
    error = starts.start([call], size, Start(me, where(me), what))
    if error is None:
        return []
    return [Finding(error.what, tuple((error.given or "").splitlines()), error.circle, span.lane)]
