"""What went wrong when no rank can run any more, or when all have ended: who waits for whom, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, final

from meshcomm.errors import (
    DeadlockError,
    HandleNotWaited,
    MeshcommError,
    RankFailed,
    UnmatchedMessage,
)
from meshcomm.layout.sizes import fold
from meshcomm.simulator.group import PendingMessage
from meshcomm.simulator.scheduler import Actor
from meshcomm.simulator.store import StoreWait
from meshcomm.simulator.work import SimulatedWork, callsite_of, raised_at

if TYPE_CHECKING:
    from meshcomm.simulator.world import SharedState

# Lines of one kind that an error shows; the rest is counted.
_SHOWN: Final = 16
_PAIRS: Final = "a receive for every send, and a send for every receive"

# Where the mesh itself waits in the store. The prefix names the mesh by its number of opening.
_AGREE: Final = re.compile(r"(?P<mesh>meshcomm\d+)/agree/.*")
_CREATE: Final = re.compile(r"(?P<mesh>meshcomm\d+)/create/(?P<name>.*)/[^/]+")
_BARRIER: Final = re.compile(
    r"(?P<mesh>meshcomm\d+)/mesh/barrier/(?P<along>[^/]*)/(?P<first>\d+)/\d+/outcome"
)
_USER: Final = re.compile(r"meshcomm\d+/mesh/user/")


@final
class Diagnosis:
    """Called by the scheduler when no rank can run, and at the end for what was left undone.

    timeout_s: of the mesh. A store wait with less than half of it as its timeout expires when nothing
    else can happen; every other wait would last for ever.
    """

    shared: SharedState

    def __init__(self, timeout_s: float) -> None:
        self._short_s = timeout_s / 2

    def __call__(self) -> MeshcommError | None:
        """The error that ends the simulation; None where a rank can run again."""
        shared = self.shared
        if shared.store.expire(shared.scheduler, self._short_s):
            return None
        waiting = {actor.rank: actor for actor in shared.scheduler.actors if actor.wait is not None}
        pending = (each for group in shared.groups.values() for each in group.pending.values())
        return (
            self._failed(waiting)
            or next((each.error() for each in pending if each.mismatched), None)
            or shared.steps.error()
            or self._tags_differ()
            or self._stuck(waiting)
        )

    def at_the_end(self) -> MeshcommError | None:
        """The error for what ranks that have all ended did wrong, or None."""
        return self._failed({}) or self._left_over() or self._not_waited()

    # -- one error each; None where it does not apply -------------------------------------------

    def _failed(self, waiting: Mapping[int, Actor]) -> RankFailed | None:
        actors = self.shared.scheduler.actors
        failed = {actor.rank: actor.error for actor in actors if actor.error is not None}
        if not failed:
            return None
        # Errors that differ in nothing but the rank that they name are told once.
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, error in failed.items():
            alike.setdefault((_text(error).replace(actors[rank].name, ""), raised_at(error)), []).append(rank)
        lines = []
        for (_, line), ranks in alike.items():
            lines += [f"{_ranks(ranks)} at {line}:", *_text(failed[ranks[0]]).splitlines()]
        if waiting:
            lines.append(f"{_ranks(waiting)} waited for others when nothing more could happen")
        first = min(failed)
        who = actors[first].name if len(failed) == 1 else f"{_ranks(failed)} of {len(actors)}"
        found = RankFailed(
            f"{who} failed: {_text(failed[first]).splitlines()[0]}",
            given="\n".join(lines),
            expected="a program that returns on every rank",
            hint="look at the line named above",
        )
        found.by_rank = failed
        found.__cause__ = failed[first]
        return found

    def _tags_differ(self) -> UnmatchedMessage | None:
        """A send and a receive between the same two ranks, whose tags differ, each waited for."""
        messages = [each for each in self._unmatched() if each.work.actor.wait is each.work]
        sends = [each for each in messages if each.work.kind == "send"]
        for recv in messages:
            for send in sends if recv.work.kind == "recv" else ():
                meet = (send.work.label, send.dst) == (recv.work.label, recv.dst)
                if meet and recv.src in (None, send.src):
                    what = f"{send.work.actor.name} sends with tag {send.tag}, {recv.work.actor.name} receives with tag {recv.tag}"
                    return _unmatched_error(what, [send, recv], "equal tags")
        return None

    def _circular(self, waiting: Mapping[int, Actor], circle: Sequence[int]) -> DeadlockError:
        following = [*circle[1:], circle[0]]
        lines = [
            f"{waiting[rank].name} {_doing(waiting[rank])}, for rank {other}"
            for rank, other in zip(circle, following, strict=True)
        ]
        path = [*circle[:8], *([".."] if len(circle) > 8 else []), circle[0]]
        error = DeadlockError(
            f"circular wait: {' -> '.join(map(str, path))}",
            given=_with_rest(lines, set(waiting) - set(circle)),
            expected="calls in one order on all ranks, so that somebody can always go on",
            hint="messages both ways: mesh.exchange or mesh.shift; collectives: the same order of dims",
        )
        error.circle, error.waiting = tuple(circle), tuple(sorted(waiting))
        return error

    def _stuck(self, waiting: Mapping[int, Actor]) -> MeshcommError:
        """For ranks that wait in a circle or, if only through others, for ranks that have returned or for a key."""
        needs = {rank: self._needs(actor) for rank, actor in waiting.items()}
        if circle := find_circle(needs):
            return self._circular(waiting, circle)
        roots = sorted(rank for rank in waiting if not any(other in waiting for other in needs[rank]))
        gone = sorted({other for rank in roots for other in needs[rank]})
        lines = []
        for rank in roots:
            returned = needs[rank]
            why = (
                f"; {_ranks(returned)} {'has' if len(returned) == 1 else 'have'} returned" if returned else ""
            )
            lines.append(f"{waiting[rank].name} {_doing(waiting[rank])}{why}")
        given = _with_rest(lines, set(waiting) - set(roots))
        on = [waiting[rank].wait for rank in roots]
        error: UnmatchedMessage | DeadlockError
        if all(isinstance(wait, SimulatedWork) and wait.kind != "collective" for wait in on):
            error = UnmatchedMessage(
                f"{_ranks(gone)} returned while {_wait(roots)} for a message",
                given=given,
                expected=_PAIRS,
                hint="look at the peers and at the number of messages on both sides",
            )
        elif gone:
            error = DeadlockError(
                f"{_ranks(gone)} returned while {_wait(roots)}",
                given=given,
                expected="the same number of calls on every rank",
                hint="look for a loop, a return or a branch that depends on the rank",
            )
        else:
            error = DeadlockError(
                f"{_wait(roots)} for a key that no rank sets",
                given=given,
                expected="another rank to set what is waited for",
                hint="look at the key's name on the rank that sets it",
            )
        error.waiting = tuple(sorted(waiting))
        return error

    def _left_over(self) -> UnmatchedMessage | None:
        messages = self._unmatched()
        if not messages:
            return None
        ranks = _ranks({each.work.actor.rank for each in messages})
        what = f"{ranks} ended with {_count(messages, 'message')} that never met the other end"
        return _unmatched_error(what, messages, _PAIRS)

    def _not_waited(self) -> HandleNotWaited | None:
        lines, ranks = [], set()
        for actor in self.shared.scheduler.actors:
            for work in actor.unwaited.values():
                state = "" if work.done else f"; never complete: {_ranks(work.absent())} did not come"
                lines.append(f"{_started(work)}{state}")
                ranks.add(actor.rank)
        if not lines:
            return None
        error = HandleNotWaited(
            f"{_ranks(ranks)} ended without waiting for {_count(lines, 'handle')}",
            given="\n".join(_shortened(lines)),
            expected="handle.wait() for every call with async_op, isend and irecv",
            hint="keep the handle, and wait for it before its tensors are used",
        )
        error.mismatched_ranks = tuple(sorted(ranks))
        return error

    # -- facts ----------------------------------------------------------------------------------

    def _unmatched(self) -> list[PendingMessage]:
        return [each for group in self.shared.groups.values() for each in group.unmatched()]

    def _needs(self, actor: Actor) -> list[int]:
        """The ranks that must act before `actor` can go on; [] where nobody can say."""
        on = actor.wait
        if isinstance(on, SimulatedWork):
            return on.absent()
        assert isinstance(on, StoreWait)
        key = on.keys[0]
        expected: set[int] = set()
        if _AGREE.fullmatch(key):
            expected = {each.rank for each in self.shared.scheduler.actors}
        elif match := _CREATE.fullmatch(key):
            expected = self._members(match["mesh"])
        elif match := _BARRIER.fullmatch(key):
            along, first = tuple(match["along"].split(".")), int(match["first"])
            expected = self._members(match["mesh"])
            for (mesh, _, ranks), group in self.shared.groups.items():
                if mesh == match["mesh"] and group.dims == along and ranks[0] == first:
                    expected = set(ranks)
        came = self.shared.store.writers.get(key.rpartition("/")[0] + "/come", [])
        return sorted(expected - set(came))

    def _members(self, mesh: str) -> set[int]:
        """The ranks of a mesh, as far as its groups show them."""
        return {rank for prefix, _, ranks in self.shared.groups if prefix == mesh for rank in ranks}


def find_circle(waits: Mapping[int, Sequence[int]]) -> list[int]:
    """Ranks that wait each for the next and the last for the first; [] where there are none.

    waits: rank -> the ranks that it waits for. A shortest circle through the lowest rank of the circle
    that following the waits from the lowest rank leads into.
    """
    left, before = dict(waits), len(waits) + 1
    # Who waits for nobody that is left is in no circle.
    while len(left) < before:
        before = len(left)
        left = {rank: others for rank, others in left.items() if any(other in left for other in others)}
    if not left:
        return []
    walk = [min(left)]
    while (following := next(other for other in left[walk[-1]] if other in left)) not in walk:
        walk.append(following)
    start = min(walk[walk.index(following) :])
    # Breadth first: the first way back is a shortest one.
    came: dict[int, int] = {}
    front = [start]
    for rank in front:
        for other in left[rank]:
            if other == start:
                path = [rank]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if other in left and other not in came:
                came[other] = rank
                front.append(other)
    raise AssertionError("a circle without a way back")


def _doing(actor: Actor) -> str:
    """What it waits in: a verb and what belongs to it."""
    on, site = actor.wait, callsite_of(actor)
    if isinstance(on, SimulatedWork):
        begun = on.site
        start = f", begun by {begun.call} at {begun.line}" if begun and begun.line != site.line else ""
        return f"waits in {on.described(site.call)} at {site.line}{start}"
    assert isinstance(on, StoreWait)
    key = on.keys[0]
    if _AGREE.fullmatch(key):
        what = "init"
    elif match := _CREATE.fullmatch(key):
        what = f'create of "{match["name"]}"'
    elif match := _BARRIER.fullmatch(key):
        what = f"barrier along {match['along'].replace('.', ', ')}"
    else:
        keys = ", ".join(f'"{_USER.sub("", each)}"' for each in on.keys[:4])
        what = f"store.{site.call} for key {keys}"
    return f"waits in {what} at {site.line}"


def _started(work: SimulatedWork) -> str:
    assert work.site is not None
    return f"{work.actor.name}: {work.described(work.site.call)} at {work.site.line}"


def _unmatched_error(what: str, messages: Sequence[PendingMessage], expected: str) -> UnmatchedMessage:
    error = UnmatchedMessage(
        what,
        given="\n".join(_shortened([_started(each.work) for each in messages])),
        expected=expected,
        hint="look at the peers, the tags and the number of messages on both sides",
    )
    error.waiting = tuple(sorted({each.work.actor.rank for each in messages}))
    return error


# -- words -----------------------------------------------------------------------------------------


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {fold(found)}"


def _wait(ranks: Iterable[int]) -> str:
    """`rank 3 waits` or `ranks 0-2 wait`."""
    found = list(ranks)
    return f"{_ranks(found)} {'waits' if len(found) == 1 else 'wait'}"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) > 1 else ''}"


def _shortened(lines: Sequence[str]) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - _SHOWN
    return [*lines] if more <= 1 else [*lines[:_SHOWN], f"and {more} more"]


def _with_rest(lines: Sequence[str], rest: set[int]) -> str:
    return "\n".join([*_shortened(lines), *([f"{_wait(rest)} for them"] if rest else [])])


def _text(error: BaseException) -> str:
    """`ValueError: what it says`."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
