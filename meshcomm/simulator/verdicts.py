"""Nobody can run: who waits for whom, and which error says it best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from meshcomm.errors import (
    CallMismatchError,
    DeadlockError,
    HandleNotWaited,
    MeshcommError,
    RankFailed,
    UnmatchedMessage,
)
from meshcomm.simulator.circle import find_circle
from meshcomm.simulator.mailbox import Letter
from meshcomm.simulator.scheduler import Actor
from meshcomm.simulator.sites import of_error
from meshcomm.simulator.store import StoreWait, expire
from meshcomm.simulator.wording import (
    AGREED,
    CREATED,
    MET,
    doing,
    listed,
    name_of,
    operation,
    shortened,
    text_of,
)
from meshcomm.simulator.work import SimulatedWork

if TYPE_CHECKING:
    from meshcomm.simulator.world import Ground


@final
class Judge:
    """Called by the scheduler when nobody can run, and at the end for what was left undone.

    timeout_s: of the mesh. A wait in the store that was asked to last less than half of it ends
    itself, as it would when nothing else happens; every other wait would last for ever.
    """

    ground: Ground

    def __init__(self, timeout_s: float) -> None:
        self._short_s = timeout_s / 2

    def __call__(self) -> MeshcommError | None:
        """The error that ends the simulation; None where somebody can run again."""
        if expire(self.ground.scheduler, self.ground.shelf, self._short_s):
            return None
        waiting = {a.rank: a for a in self.ground.scheduler.actors if a.wait is not None}
        return (
            self._failed(waiting)
            or self._mismatch()
            or self.ground.steps.error()
            or self._tags(waiting)
            or self._stuck(waiting)
        )

    def at_the_end(self) -> MeshcommError | None:
        """The error for what ranks that have all ended did wrong, or None."""
        return self._failed({}) or self._unmatched() or self._not_waited()

    # -- one verdict each; None where it does not apply -----------------------------------------

    def _failed(self, waiting: Mapping[int, Actor]) -> RankFailed | None:
        actors = self.ground.scheduler.actors
        failed = {a.rank: a.error for a in actors if a.error is not None}
        if not failed:
            return None
        # Errors that differ in nothing but the rank that they name are told once.
        folded: dict[tuple[str, str], list[int]] = {}
        for rank, error in failed.items():
            text = text_of(error).replace(name_of(actors[rank]), "")
            folded.setdefault((text, of_error(error).line), []).append(rank)
        first = min(failed)
        lines = []
        for (_, line), ranks in folded.items():
            lines += [f"{listed(ranks)} at {line}:", *text_of(failed[ranks[0]]).splitlines()]
        if waiting:
            lines.append(f"{listed(waiting)} waited for others when nothing more could happen")
        who = name_of(actors[first]) if len(failed) == 1 else f"{listed(failed)} of {len(actors)}"
        found = RankFailed(
            f"{who} failed: {text_of(failed[first]).splitlines()[0]}",
            given="\n".join(lines),
            expected="a program that returns on every rank",
            hint="look at the line named above",
        )
        found.by_rank = failed
        found.__cause__ = failed[first]
        return found

    def _mismatch(self) -> CallMismatchError | None:
        for _, meets, _ in self.ground.groups.values():
            for slot in meets.slots.values():
                if slot.bad:
                    return meets.mismatch(slot)
        return None

    def _tags(self, waiting: Mapping[int, Actor]) -> UnmatchedMessage | None:
        """A send and a receive between the same two ranks, whose tags differ, each waited for."""
        letters = [letter for letter in self._unmet() if letter.work.actor.wait is letter.work]
        sends = [letter for letter in letters if letter.work.kind == "send"]
        for recv in letters:
            if recv.work.kind == "send":
                continue
            for send in sends:
                meets = (send.work.label, send.dst) == (recv.work.label, recv.dst)
                if meets and recv.src in (None, send.src):
                    return self._unmatched_error(
                        f"{name_of(send.work.actor)} sends with tag {send.tag}, "
                        f"{name_of(recv.work.actor)} receives with tag {recv.tag}",
                        [send, recv],
                        "equal tags",
                    )
        return None

    def _stuck(self, waiting: Mapping[int, Actor]) -> MeshcommError:
        actors = self.ground.scheduler.actors
        needs = {rank: self._needs(actor) for rank, actor in waiting.items()}
        circle = find_circle(needs)
        if circle:
            lines = [
                f"{name_of(actors[rank])} {doing(actors[rank])}, for rank {following}"
                for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True)
            ]
            rest = sorted(set(waiting) - set(circle))
            error = DeadlockError(
                f"circular wait: {' -> '.join(map(str, [*circle[:8], *(['..'] if len(circle) > 8 else [])]))}"
                f" -> {circle[0]}",
                given="\n".join(
                    [
                        *shortened(lines),
                        *([f"{listed(rest)} {_s(rest, 'waits', 'wait')} for them"] if rest else []),
                    ]
                ),
                expected="calls in one order on all ranks, so that somebody can always go on",
                hint="messages both ways: mesh.exchange or mesh.shift; collectives: the same order of dims",
            )
            error.circle, error.waiting = tuple(circle), tuple(sorted(waiting))
            return error
        # What keeps the others waiting waits for no rank that could still run.
        roots = [rank for rank in waiting if not any(other in waiting for other in needs[rank])]
        gone = sorted({other for rank in roots for other in needs[rank]})
        rest = sorted(set(waiting) - set(roots))
        lines = [self._why(actors[rank], needs[rank]) for rank in sorted(roots)]
        given = "\n".join(
            [*shortened(lines), *([f"{listed(rest)} {_s(rest, 'waits', 'wait')} for them"] if rest else [])]
        )
        messages = all(
            isinstance(on := actors[rank].wait, SimulatedWork) and on.kind != "collective" for rank in roots
        )
        if messages:
            unmatched = UnmatchedMessage(
                f"{listed(gone)} returned while {listed(roots)} {_s(roots, 'waits', 'wait')} for a message",
                given=given,
                expected="a receive for every send, and a send for every receive",
                hint="look at the peers and at the number of messages on both sides",
            )
            unmatched.waiting = tuple(sorted(waiting))
            return unmatched
        stuck = DeadlockError(
            f"{listed(gone)} returned while {listed(roots)} {_s(roots, 'waits', 'wait')}"
            if gone
            else f"{listed(roots)} {_s(roots, 'waits', 'wait')} for a key that no rank sets",
            given=given,
            expected="the same number of calls on every rank"
            if gone
            else "another rank to set what is waited for",
            hint="look for a loop, a return or a branch that depends on the rank"
            if gone
            else "look at the key's name on the rank that sets it",
        )
        stuck.waiting = tuple(sorted(waiting))
        return stuck

    def _unmatched(self) -> UnmatchedMessage | None:
        letters = self._unmet()
        if not letters:
            return None
        ranks = {letter.work.actor.rank for letter in letters}
        return self._unmatched_error(
            f"{listed(ranks)} ended with {len(letters)} message{'s' if len(letters) > 1 else ''} "
            "that never met the other end",
            letters,
            "a receive for every send, and a send for every receive",
        )

    def _unmatched_error(self, what: str, letters: list[Letter], expected: str) -> UnmatchedMessage:
        lines = []
        for letter in letters:
            site = letter.work.site
            assert site is not None
            lines.append(f"{name_of(letter.work.actor)}: {operation(letter.work, site.call)} at {site.line}")
        error = UnmatchedMessage(
            what,
            given="\n".join(shortened(lines)),
            expected=expected,
            hint="look at the peers, the tags and the number of messages on both sides",
        )
        error.waiting = tuple(sorted({letter.work.actor.rank for letter in letters}))
        return error

    def _not_waited(self) -> HandleNotWaited | None:
        lines, ranks = [], []
        for actor in self.ground.scheduler.actors:
            for work in actor.open.values():
                assert work.site is not None
                state = "" if work.done else f"; never complete: {listed(work.absent())} did not come"
                lines.append(
                    f"{name_of(actor)}: {operation(work, work.site.call)} at {work.site.line}{state}"
                )
                ranks.append(actor.rank)
        if not lines:
            return None
        error = HandleNotWaited(
            f"{listed(set(ranks))} ended without waiting for {len(lines)} handle{'s' if len(lines) > 1 else ''}",
            given="\n".join(shortened(lines)),
            expected="handle.wait() for every call with async_op, isend and irecv",
            hint="keep the handle, and wait for it before its tensors are used",
        )
        error.odd_ranks = tuple(sorted(set(ranks)))
        return error

    # -- facts ----------------------------------------------------------------------------------

    def _unmet(self) -> list[Letter]:
        return [letter for _, _, box in self.ground.groups.values() for letter in box.unmet()]

    def _needs(self, actor: Actor) -> list[int]:
        """The ranks that must act before `actor` can go on; [] where nobody can say."""
        on = actor.wait
        if isinstance(on, SimulatedWork):
            return on.absent()
        assert isinstance(on, StoreWait)
        key = on.keys[0]
        expected: set[int] = set()
        if AGREED.fullmatch(key):
            expected = {each.rank for each in self.ground.scheduler.actors}
        elif match := CREATED.fullmatch(key):
            expected = self._members(match["mesh"])
        elif match := MET.fullmatch(key):
            along, first = tuple(match["along"].split(".")), int(match["first"])
            expected = self._members(match["mesh"])
            for (mesh, _, ranks), (group, _, _) in self.ground.groups.items():
                if mesh == match["mesh"] and group.dims == along and ranks[0] == first:
                    expected = set(ranks)
        came = self.ground.shelf.came.get(key.rpartition("/")[0] + "/come", [])
        return sorted(expected - set(came))

    def _members(self, mesh: str) -> set[int]:
        """The ranks of a mesh, as far as its groups show them."""
        return {rank for prefix, _, ranks in self.ground.groups if prefix == mesh for rank in ranks}

    def _why(self, actor: Actor, needs: list[int]) -> str:
        text = f"{name_of(actor)} {doing(actor)}"
        if not needs:
            return text
        verb = "has" if len(needs) == 1 else "have"
        return f"{text}; {listed(needs)} {verb} returned"


def _s(ranks: list[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
