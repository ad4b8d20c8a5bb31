"""Collectives of one group: ranks come, calls are compared, and the last to come moves the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from meshcomm.comm.validation import mismatch
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import fold
from meshcomm.simulator.reduction import reduced
from meshcomm.simulator.scheduler import Scheduler
from meshcomm.simulator.sites import here, of_thread
from meshcomm.simulator.work import SimulatedWork
from meshcomm.transport.base import as_bytes
from meshcomm.transport.support import name_of


@dataclass(slots=True)
class Coming:
    """What one rank brings to a collective.

    kind, facts: what must be equal on all ranks; told: the call as the user made it (dim, call, facts),
    where that is known. root: the coord that has or gets the whole, or -1.
    lengths: for an uneven all_to_all, what goes to and comes from each coord.
    """

    kind: str
    facts: dict[str, Any]
    told: tuple[str, str, dict[str, Any]] | None
    out: Tensor | None = None
    x: Tensor | None = None
    op: str = ""
    root: int = -1
    lengths: tuple[list[int], list[int]] | None = None

    def same(self, other: Coming) -> bool:
        """Whether both belong to one call."""
        mine = None if self.told is None else self.told[1:]
        theirs = None if other.told is None else other.told[1:]
        return self.kind == other.kind and self.facts == other.facts and mine == theirs


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
        call = coming.kind if coming.told is None else coming.told[1]

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
                _MOVE[coming.kind]([slot.coming[c] for c in range(len(self.ranks))])
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
            if coming.lengths is not None:
                facts = {**facts, "sends": coming.lengths[0], "expects": coming.lengths[1]}
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
    if all(each.lengths is None for each in coming.values()):
        return True
    for mine, own in coming.items():
        for theirs, other in coming.items():
            if own.lengths is not None and other.lengths is not None:
                sends, expects = own.lengths[0][theirs], other.lengths[1][mine]
                if sends != expects:
                    return False
    return True


def facts_of(x: Tensor | None, **more: object) -> dict[str, Any]:
    """What every rank must bring alike."""
    found = {"elements": x.numel(), "dtype": name_of(x.dtype)} if x is not None else {}
    return {**found, **more}


# -- moving the data: `coming` is by coord ------------------------------------------------------


def _bytes(x: Tensor | None) -> Tensor:
    assert x is not None
    return as_bytes(x.reshape(-1))


def _added(x: Tensor | None) -> Tensor:
    """The same memory, flat, as numbers that can be added."""
    assert x is not None
    flat = x.view(-1)
    if x.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8) if x.dtype == torch.bool else flat


def _all_reduce(coming: list[Coming]) -> None:
    parts = [_added(each.x) for each in coming]
    total = reduced(parts, coming[0].op)
    for part in parts:
        part.copy_(total)


def _reduce(coming: list[Coming]) -> None:
    parts = [_added(each.x) for each in coming]
    parts[coming[0].root].copy_(reduced(parts, coming[0].op))


def _reduce_scatter(coming: list[Coming]) -> None:
    total = reduced([_added(each.x) for each in coming], coming[0].op)
    for each, part in zip(coming, total.view(len(coming), -1), strict=True):
        _added(each.out).copy_(part)


def _broadcast(coming: list[Coming]) -> None:
    source = _bytes(coming[coming[0].root].x)
    for coord, each in enumerate(coming):
        if coord != coming[0].root:
            _bytes(each.x).copy_(source)


def _all_gather(coming: list[Coming]) -> None:
    whole = torch.cat([_bytes(each.x) for each in coming])
    for each in coming:
        _bytes(each.out).copy_(whole)


def _gather(coming: list[Coming]) -> None:
    _bytes(coming[coming[0].root].out).copy_(torch.cat([_bytes(each.x) for each in coming]))


def _scatter(coming: list[Coming]) -> None:
    whole = _bytes(coming[coming[0].root].x)
    for each, part in zip(coming, whole.view(len(coming), -1), strict=True):
        _bytes(each.out).copy_(part)


def _all_to_all(coming: list[Coming]) -> None:
    rows = [_bytes(each.x).view(len(coming), -1) for each in coming]
    for coord, each in enumerate(coming):
        _bytes(each.out).copy_(torch.cat([row[coord] for row in rows]))


def _all_to_all_uneven(coming: list[Coming]) -> None:
    parts = []
    for each in coming:
        assert each.lengths is not None and each.x is not None
        parts.append(each.x.split(each.lengths[0]))
    for coord, each in enumerate(coming):
        assert each.out is not None
        if each.out.numel():
            _bytes(each.out).copy_(torch.cat([_bytes(part[coord]) for part in parts]))


def _barrier(coming: list[Coming]) -> None:
    return None


_MOVE: Final[dict[str, Callable[[list[Coming]], None]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all_uneven,
    "barrier": _barrier,
}
