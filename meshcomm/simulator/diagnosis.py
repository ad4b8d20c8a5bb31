"""Explains why no rank can run, or what went wrong in a run that ended: which ranks wait for which others, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from meshcomm.errors import DeadlockError, HandleNotWaited, MeshcommError, RankFailed, UnmatchedMessage
from meshcomm.layout.sizes import ranks_text
from meshcomm.show.units import count
from meshcomm.simulator.scheduler import Actor, Sleep
from meshcomm.simulator.transport import SimulatedWork, callsite_of, raised_at
from meshcomm.simulator.world import SharedState, StoreWait
from meshcomm.watching.verdict import alike
from meshcomm.watching.waits import find_circle

# An error shows this many lines of each kind and gives the number of omitted lines.
_SHOWN: Final = 16
_PAIRS: Final = "a receive for every send, and a send for every receive"
_CALL: Final = (
    "mesh.exchange or mesh.shift for messages in both directions; the same order of dims for collectives"
)
_CREATE: Final = "create all groups in the same order on their ranks, before the first call: Gloo connects a group's ranks then"

# The store keys that the mesh itself waits for. The prefix contains the mesh's number, in the order of opening.
_OF_THE_MESH: Final = re.compile(
    r"(?P<mesh>meshcomm\d+)/(?:(?P<agree>agree)/.*|create/(?P<name>.*)/[^/]+"
    r"|mesh/barrier/(?P<along>[^/]*)/(?P<first>\d+)/\d+/outcome)"
)
_USER: Final = re.compile(r"meshcomm\d+/mesh/user/")


def diagnose(shared: SharedState) -> MeshcommError | None:
    """Called when no rank can run. Return the error that ends the simulation, or None if a rank can run again.

    If nothing else can happen, a store wait whose timeout is shorter than half the mesh's timeout expires, and a rank sleeps if no
    other rank waits that would give up meanwhile. Every other wait would last forever.
    """
    losses = shared.losses
    if losses is not None and losses.expects():
        error = losses.look(patient=False)
        if error is not None or shared.scheduler.can_run:
            return error
    waiting = {actor.rank: actor for actor in shared.scheduler.actors if actor.wait is not None}
    in_store = (actor.wait for actor in waiting.values() if isinstance(actor.wait, StoreWait))
    shortest = min(in_store, key=attrgetter("timeout_s"), default=None)
    if shortest is not None and shortest.timeout_s < shared.timeout_s / 2:
        shortest.expired = True
        shared.scheduler.wake(shortest.actor)
        return None
    asleep = [actor for actor in waiting.values() if isinstance(actor.wait, Sleep)]
    soonest = min(asleep, key=lambda actor: actor.wait.seconds, default=None)
    if soonest is not None and all(_may_last(actor, soonest.wait.seconds) for actor in waiting.values()):
        shared.scheduler.wake(soonest)
        return None
    pending = (call for group in shared.groups.values() for call in group.pending.values())
    return (
        _failed(shared, waiting)
        or next((call.error() for call in pending if call.mismatched), None)
        or next(filter(None, (shared.desync(*group) for group in shared.recorders)), None)
        or _tags_differ(shared)
        or _stuck(shared, waiting)
    )


def unyielding(shared: SharedState, actor: Actor) -> MeshcommError | None:
    """Return the error for an `actor` that has run for the mesh's timeout while other ranks could not continue, or None."""
    others = [other.rank for other in shared.scheduler.actors if not other.ended and other is not actor]
    if not others:
        return None
    return DeadlockError(
        f"{actor.name} has run for {shared.timeout_s:g} s without letting other ranks run",
        given=f"{actor.name} is at {callsite_of(actor)}; {ranks_text(others)} cannot continue meanwhile",
        expected="a call on the mesh, or time.sleep, within the mesh's timeout: a simulated rank runs until it waits",
        hint="mesh.store.wait or mesh.barrier instead of a loop that polls for a file; or a longer mesh.timeout_s",
    )


def at_the_end(shared: SharedState) -> MeshcommError | None:
    """Return the error if all ranks have ended and any of them did something wrong, or None."""
    return _failed(shared, {}) or _left_over(shared) or _not_waited(shared)


# -- each returns one error, or None if it does not apply -----------------------------------


def _failed(shared: SharedState, waiting: Mapping[int, Actor]) -> RankFailed | None:
    actors = shared.scheduler.actors
    names = {actor.rank: actor.name for actor in actors if actor.error is not None}
    failed = {actor.rank: actor.error for actor in actors if actor.error is not None}
    if not failed:
        return None
    # Errors that differ only in the rank's name are shown once.
    said = {rank: (_text(error).replace(names[rank], ""), raised_at(error)) for rank, error in failed.items()}
    lines = []
    for ranks in alike([*failed], said):
        lines += [f"{ranks_text(ranks)} at {said[ranks[0]][1]}:", *_text(failed[ranks[0]]).splitlines()]
    if waiting:
        lines.append(f"{ranks_text(sorted(waiting))} waited for others when no rank could continue")
    first = min(failed)
    who = names[first] if len(failed) == 1 else f"{ranks_text(sorted(failed))} of {len(actors)}"
    found = RankFailed(
        f"{who} failed: {_text(failed[first]).splitlines()[0]}",
        given="\n".join(lines),
        expected="a program that returns on every rank",
        hint="check the line named above",
        by_rank=failed,
    )
    found.__cause__ = failed[first]
    return found


def _tags_differ(shared: SharedState) -> UnmatchedMessage | None:
    """Return the error if two ranks wait for each other in a send and a receive with different tags, or None."""
    waiting = [work for work in _unmatched(shared) if work.actor.wait is work]
    sends = [work for work in waiting if work.kind == "send"]
    for recv in waiting:
        for send in sends if recv.kind == "recv" else ():
            meet = send.group is recv.group and send.peer == recv.actor.rank and send.tag != recv.tag
            if meet and recv.peer in (None, send.actor.rank):
                what = f"{send.actor.name} sends with tag {send.tag}, {recv.actor.name} receives with tag {recv.tag}"
                return _unmatched_error(what, [send, recv], "equal tags")
    return None


def _circular(waiting: Mapping[int, Actor], circle: Sequence[int]) -> DeadlockError:
    following = [*circle[1:], circle[0]]
    lines = [
        f"{waiting[rank].name} {_doing(waiting[rank])}, for rank {other}"
        for rank, other in zip(circle, following, strict=True)
    ]
    creates = any(getattr(waiting[rank].wait, "kind", "") == "opening" for rank in circle)
    path = [*circle[:8], *([".."] if len(circle) > 8 else []), circle[0]]
    return DeadlockError(
        f"circular wait: {' -> '.join(map(str, path))}",
        given=_with_rest(lines, set(waiting) - set(circle)),
        expected="the same order of calls on all ranks, so that some rank can always continue",
        hint=_CREATE if creates else _CALL,
        circle=tuple(circle),
        waiting=tuple(sorted(waiting)),
    )


def _stuck(shared: SharedState, waiting: Mapping[int, Actor]) -> MeshcommError:
    """Return the error for ranks that wait in a cycle or wait, directly or indirectly, for returned ranks or for a key."""
    needs = {rank: _needs(shared, actor) for rank, actor in waiting.items()}
    if circle := find_circle(needs):
        return _circular(waiting, circle)
    if asleep := [rank for rank, actor in waiting.items() if isinstance(actor.wait, Sleep)]:
        return _asleep(shared, waiting, asleep)
    roots = sorted(rank for rank in waiting if not any(other in waiting for other in needs[rank]))
    gone = sorted({other for rank in roots for other in needs[rank]})
    lines = []
    for rank in roots:
        returned = needs[rank]
        why = (
            f"; {ranks_text(returned)} {'has' if len(returned) == 1 else 'have'} returned" if returned else ""
        )
        lines.append(f"{waiting[rank].name} {_doing(waiting[rank])}{why}")
    given = _with_rest(lines, set(waiting) - set(roots))
    facts: Any = {"given": given, "waiting": tuple(sorted(waiting))}
    on = [waiting[rank].wait for rank in roots]
    if all(isinstance(wait, SimulatedWork) and wait.kind in ("send", "recv") for wait in on):
        return UnmatchedMessage(
            f"{ranks_text(gone)} returned while {_wait(roots)} for a message",
            expected=_PAIRS,
            hint="check the peers and the number of messages on both sides",
            **facts,
        )
    if gone:
        return DeadlockError(
            f"{ranks_text(gone)} returned while {_wait(roots)}",
            expected="the same number of calls on every rank",
            hint="look for a loop, a return or a branch that depends on the rank",
            **facts,
        )
    return DeadlockError(
        f"{_wait(roots)} for a key that no rank sets",
        expected="another rank to set the key",
        hint="check the key's name on the rank that sets it",
        **facts,
    )


def _may_last(actor: Actor, seconds: float) -> bool:
    """Return whether the wait of an actor lasts for so many seconds without an error."""
    on = actor.wait
    return isinstance(on, Sleep) or (isinstance(on, StoreWait) and on.timeout_s > seconds)


def _asleep(shared: SharedState, waiting: Mapping[int, Actor], asleep: Sequence[int]) -> DeadlockError:
    """Return the error for ranks that sleep for so long that the waits of the others fail."""
    others = sorted(set(waiting) - set(asleep))
    lines = _shortened([f"{waiting[rank].name} {_doing(waiting[rank])}" for rank in asleep])
    lines += _shortened([f"{waiting[rank].name} {_doing(waiting[rank])}" for rank in others])
    return DeadlockError(
        f"{ranks_text(asleep)} {'sleeps' if len(asleep) == 1 else 'sleep'} for longer than the timeout, while {_wait(others)}",
        given="\n".join(lines),
        expected=f"a sleep of less than mesh.timeout_s, {shared.timeout_s:g} s, while other ranks wait",
        hint="mesh.barrier or mesh.store.wait in place of the sleep; or a longer mesh.timeout_s",
        waiting=tuple(sorted(waiting)),
    )


def _left_over(shared: SharedState) -> UnmatchedMessage | None:
    messages = _unmatched(shared)
    if not messages:
        return None
    ranks = ranks_text(sorted({work.actor.rank for work in messages}))
    what = f"{ranks} ended with {count(len(messages), 'unmatched message')}"
    return _unmatched_error(what, messages, _PAIRS)


def _not_waited(shared: SharedState) -> HandleNotWaited | None:
    lines, ranks = [], set()
    for actor in shared.scheduler.actors:
        for work in actor.unwaited:
            state = "" if work.done else f"; it never completes: {ranks_text(work.absent())} did not arrive"
            lines.append(f"{_started(work)}{state}")
            ranks.add(actor.rank)
    if not lines:
        return None
    return HandleNotWaited(
        f"{ranks_text(sorted(ranks))} ended without waiting for {count(len(lines), 'handle')}",
        given="\n".join(_shortened(lines)),
        expected="handle.wait() for every call with async_op, isend and irecv",
        hint="keep the handle, and wait for it before its tensors are used",
        mismatched_ranks=tuple(sorted(ranks)),
    )


# -- facts ----------------------------------------------------------------------------------


def _unmatched(shared: SharedState) -> list[SimulatedWork]:
    """Return the messages of all groups that lack an end, in the order in which a group's were posted."""
    messages = [message for group in shared.groups.values() for message in group.messages.unmatched()]
    return [end.work for message in messages if (end := message.sent or message.received) is not None]


def _needs(shared: SharedState, actor: Actor) -> list[int]:
    """Return the ranks that must act before `actor` can continue, or [] if they are unknown."""
    on = actor.wait
    if isinstance(on, SimulatedWork):
        return on.absent()
    if isinstance(on, Sleep):
        return []
    assert isinstance(on, StoreWait)
    match = _OF_THE_MESH.fullmatch(on.keys[0])
    if match is None:
        return []
    of_mesh = [group for (name, *_), group in shared.groups.items() if name.startswith(f"{match['mesh']}/")]
    # The ranks of the mesh, as far as they are known from its groups.
    expected = {rank for group in of_mesh for rank in group.ranks}
    if match["agree"]:
        expected = {each.rank for each in shared.scheduler.actors}
    elif match["along"] is not None:
        for group in of_mesh:
            if group.dims == tuple(match["along"].split(".")) and group.ranks[0] == int(match["first"]):
                expected = set(group.ranks)
    came = shared.writers.get(on.keys[0].rpartition("/")[0] + "/come", [])
    return sorted(expected - set(came))


def _doing(actor: Actor) -> str:
    """Return text that describes the call in which an actor is waiting, and where."""
    on, site = actor.wait, callsite_of(actor)
    if isinstance(on, SimulatedWork):
        begun = on.site
        start = f", begun by {begun.call} at {begun}" if begun and begun.line != site.line else ""
        return f"waits in {on.described(site.call)} at {site}{start}"
    if isinstance(on, Sleep):
        return f"sleeps for {on.seconds:g} s at {site}"
    assert isinstance(on, StoreWait)
    match = _OF_THE_MESH.fullmatch(on.keys[0])
    if match is None:
        keys = ", ".join(f'"{_USER.sub("", each)}"' for each in on.keys[:4])
        what = f"store.{site.call} for key {keys}"
    elif match["along"] is not None:
        what = f"barrier along {match['along'].replace('.', ', ')}"
    else:
        what = "init" if match["agree"] else f'create of "{match["name"]}"'
    return f"waits in {what} at {site}"


def _started(work: SimulatedWork) -> str:
    assert work.site is not None
    return f"{work.actor.name}: {work.described(work.site.call)} at {work.site}"


def _unmatched_error(what: str, messages: Sequence[SimulatedWork], expected: str) -> UnmatchedMessage:
    return UnmatchedMessage(
        what,
        given="\n".join(_shortened([_started(work) for work in messages])),
        expected=expected,
        hint="check the peers, the tags and the number of messages on both sides",
        waiting=tuple(sorted({work.actor.rank for work in messages})),
    )


# -- words -----------------------------------------------------------------------------------------


def _wait(ranks: Iterable[int]) -> str:
    """Return `rank 3 waits` or `ranks 0-2 wait`."""
    listed = list(ranks)
    return f"{ranks_text(sorted(listed))} {'waits' if len(listed) == 1 else 'wait'}"


def _shortened(lines: Sequence[str]) -> list[str]:
    """Return the first lines, followed by the number of omitted lines."""
    more = len(lines) - _SHOWN
    return [*lines] if more <= 1 else [*lines[:_SHOWN], f"and {more} more"]


def _with_rest(lines: Sequence[str], rest: set[int]) -> str:
    return "\n".join([*_shortened(lines), *([f"{_wait(rest)} for them"] if rest else [])])


def _text(error: BaseException) -> str:
    """Return an error's type and text, such as `ValueError: invalid shape`."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
