"""Collectives of one group: ranks come, calls are compared, and the last to come moves the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch

from meshcomm.collectives import Call
from meshcomm.comm.validation import mismatch
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import fold
from meshcomm.simulator.reduction import reduced
from meshcomm.simulator.scheduler import Scheduler
from meshcomm.simulator.sites import here, of_thread
from meshcomm.simulator.work import SimulatedWork
from meshcomm.transport.support import name_of


class Coming(NamedTuple):
    """What one rank brings to a collective.

    told: the call as the user made it (dim, call, facts), where that is known.
    """

    call: Call
    told: tuple[str, str, dict[str, Any]] | None

    @property
    def facts(self) -> dict[str, Any]:
        """What every rank must bring alike."""
        row, x, out, op, root, lengths, _ = self.call
        found: dict[str, Any] = {}
        tensor = out if row.root == "src" and out is not None else x
        if tensor is not None:
            found = {"dtype": name_of(tensor.dtype)}
            if not lengths:
                found["elements"] = tensor.numel()
        if op is not None:
            found["op"] = op
        if row.root is not None:
            found[row.root] = root
        return found

    def same(self, other: Coming) -> bool:
        """Whether both belong to one call."""
        mine = None if self.told is None else self.told[1:]
        theirs = None if other.told is None else other.told[1:]
        return (
            self.call.row is other.call.row
            and bool(self.call.lengths) == bool(other.call.lengths)
            and self.facts == other.facts
            and mine == theirs
        )


@final
class Slot:
    """One collective of a group, from its first rank to its last. works, coming: by coord."""

    __slots__ = ("bad", "coming", "number", "works")

    def __init__(self, number: int) -> None:
        self.number = number
        self.coming: dict[int, Coming] = {}
        self.works: dict[int, SimulatedWork] = {}
        self.bad = False


@final
class Rendezvous:
    """The collectives of one group. ranks: global, by coord; all ranks of the group share it."""

    def __init__(self, scheduler: Scheduler, name: str, label: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.label = label
        self.ranks = ranks
        self.slots: dict[int, Slot] = {}
        self._scheduler = scheduler

    def come(self, coord: int, number: int, coming: Coming, blocking: bool) -> SimulatedWork:
        """Rank `coord` comes to the group's collective `number`."""
        self._scheduler.check()
        slot = self.slots.get(number)
        if slot is None:
            slot = self.slots[number] = Slot(number)
        actor = self._scheduler.actors[self.ranks[coord]]
        site = None if blocking else here()
        call = coming.call.row.name if coming.told is None else coming.told[1]

        def absent() -> list[int]:
            return [rank for c, rank in enumerate(self.ranks) if c not in slot.coming]

        work = SimulatedWork(
            self._scheduler, actor, "collective", call, self.label, absent, site, number=number
        )
        if slot.coming:
            first = next(iter(slot.coming.values()))
            slot.bad = slot.bad or not coming.same(first)
        slot.coming[coord] = coming
        slot.works[coord] = work
        if len(slot.coming) == len(self.ranks):
            if slot.bad or not _lengths_fit(slot.coming):
                self._scheduler.stop(self.mismatch(slot))
                self._scheduler.check()
            del self.slots[number]
            # Above any mode that the rank that happens to be last is in.
            with torch.inference_mode():
                coming.call.row.value([slot.coming[c].call for c in range(len(self.ranks))], reduced)
            for other in slot.works.values():
                other.complete()
        return work

    def mismatch(self, slot: Slot) -> CallMismatchError:
        """The error for ranks that came with different calls; those that did not come are named."""
        calls = []
        coords = sorted(slot.coming)
        for coord in coords:
            coming, work = slot.coming[coord], slot.works[coord]
            facts = coming.facts if coming.told is None else coming.told[2]
            if coming.call.lengths:
                facts = {**facts, "sends": coming.call.lengths[1], "expects": coming.call.lengths[0]}
            site = work.site or (here() if work.actor.wait is None else of_thread(work.actor.ident))
            calls.append([work.call, facts, site.line])
        name = next((c.told[0] for c in slot.coming.values() if c.told is not None), self.label)
        error = mismatch(name, slot.number, [self.ranks[coord] for coord in coords], calls)
        absent = [rank for coord, rank in enumerate(self.ranks) if coord not in slot.coming]
        if absent:
            error.given = f"{error.given}\nrank {fold(absent)}: did not come"
        return error


def _lengths_fit(coming: Mapping[int, Coming]) -> bool:
    """Whether each coord sends each other what that expects, where lengths are told at all."""
    lengths = {coord: each.call.lengths for coord, each in coming.items() if each.call.lengths}
    return all(
        sends[theirs] == lengths[theirs][0][mine]
        for mine, (_, sends) in lengths.items()
        for theirs in lengths
    )
