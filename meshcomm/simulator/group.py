"""One simulated group: its ranks meet in collectives and messages, and the last to come moves the data."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.collectives import Call
from meshcomm.comm.mismatch import mismatch
from meshcomm.errors import CallMismatchError
from meshcomm.layout import Group
from meshcomm.layout.sizes import fold
from meshcomm.simulator.gloo_order import reduced
from meshcomm.simulator.scheduler import Scheduler
from meshcomm.simulator.work import Callsite, SimulatedWork, callsite_of, here
from meshcomm.transport.base import P2P
from meshcomm.transport.support import name_of


class Contribution(NamedTuple):
    """What one rank brings to a collective.

    told: the call as the user made it (dim, call, facts), where that is known.
    """

    call: Call
    told: tuple[str, str, dict[str, Any]] | None
    work: SimulatedWork

    def compared(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks: dtype, elements, operation and root first."""
        row, x, out, op, root, lengths, _ = self.call
        tensor = out if row.root == "src" and out is not None else x
        dtype = None if tensor is None else tensor.dtype
        elements = None if tensor is None or lengths else tensor.numel()
        told = None if self.told is None else self.told[1:]
        return dtype, elements, op, None if row.root is None else root, row, not lengths, told

    def facts(self) -> dict[str, Any]:
        """The call as errors show it."""
        if self.told is not None:
            found = self.told[2]
        else:
            dtype, elements, op, root, row, _, _ = self.compared()
            values = {"dtype": dtype and name_of(dtype), "elements": elements, "op": op, str(row.root): root}
            found = {name: value for name, value in values.items() if value is not None}
        if not self.call.lengths:
            return found
        return {**found, "sends": self.call.lengths[1], "expects": self.call.lengths[0]}


@final
class PendingCollective:
    """One collective of a group, from its first rank to its last. contributions: by coord.

    mismatched: whether the calls differ. It ends the simulation when all have come or nobody can run,
    so that the error can name the majority.
    """

    __slots__ = ("compared", "contributions", "group", "mismatched", "number")

    def __init__(self, group: SimulatedGroup, number: int) -> None:
        self.group = group
        self.number = number
        self.contributions: dict[int, Contribution] = {}
        self.compared: tuple[Any, ...] = ()
        self.mismatched = False

    def absent(self) -> list[int]:
        """The global ranks that have not come."""
        return [rank for coord, rank in enumerate(self.group.ranks) if coord not in self.contributions]

    def error(self) -> CallMismatchError:
        """The error for ranks that came with different calls; those that did not come are named."""
        calls = []
        came = sorted(self.contributions.items())
        for _, contribution in came:
            work = contribution.work
            site = work.site or (here() if work.actor.wait is None else callsite_of(work.actor))
            calls.append([work.call, contribution.facts(), site.line])
        told = next((each.told for each in self.contributions.values() if each.told is not None), None)
        name = self.group.label if told is None else told[0]
        error = mismatch(name, self.number, [self.group.ranks[coord] for coord, _ in came], calls)
        if absent := self.absent():
            error.given = f"{error.given}\nrank {fold(absent)}: did not come"
        return error


class PendingMessage(NamedTuple):
    """One end of a message that has not met the other. Coords; src None: from any source."""

    x: Tensor
    src: int | None
    dst: int
    tag: int
    work: SimulatedWork
    order: int

    def line(self) -> str:
        """The end for an error about two that do not fit."""
        shape = f"({', '.join(map(str, self.x.shape))}) {name_of(self.x.dtype)}"
        at = "" if self.work.site is None else self.work.site.line
        return f"rank {self.work.actor.rank}: {self.work.call} of {shape}, tag {self.tag}, at {at}"


@final
class SimulatedGroup:
    """The collectives and messages of one group, shared by its ranks. ranks: global, by coord.

    A send is done when its receive has begun: nothing is buffered, as on Gloo and NCCL.
    """

    def __init__(self, scheduler: Scheduler, group: Group) -> None:
        self.name, self.dims, self.ranks, self.label = group.name, group.dims, group.ranks, group.label
        self.pending: dict[int, PendingCollective] = {}
        self._scheduler = scheduler
        self._sends: dict[tuple[int | None, int, int], deque[PendingMessage]] = defaultdict(deque)
        self._recvs: dict[tuple[int | None, int, int], deque[PendingMessage]] = defaultdict(deque)
        self._messages = 0

    def start(
        self, coord: int, number: int, call: Call, told: tuple[str, str, dict[str, Any]] | None
    ) -> SimulatedWork:
        """Coord `coord` starts its collective with sequence number `number`; see Contribution."""
        scheduler = self._scheduler
        scheduler.check()
        pending = self.pending.get(number)
        if pending is None:
            pending = self.pending[number] = PendingCollective(self, number)
        work = SimulatedWork(
            scheduler,
            scheduler.actors[self.ranks[coord]],
            "collective",
            call.row.name if told is None else told[1],
            self.label,
            pending.absent,
            None if call.blocking else here(),
            number,
        )
        contribution = Contribution(call, told, work)
        compared = contribution.compared()
        contributions = pending.contributions
        if not contributions:
            pending.compared = compared
        elif compared != pending.compared:
            pending.mismatched = True
        contributions[coord] = contribution
        if len(contributions) == len(self.ranks):
            calls = [contributions[each].call for each in range(len(self.ranks))]
            if pending.mismatched or not (compared[-2] or _lengths_fit(calls)):
                scheduler.stop(pending.error())
                scheduler.check()
            del self.pending[number]
            # Above any mode that the rank that happens to be last is in.
            with torch.inference_mode():
                call.row.value(calls, reduced)
            for each in contributions.values():
                each.work.complete()
        return work

    def start_message(self, coord: int, message: P2P, site: Callsite) -> SimulatedWork:
        """Coord `coord` sends or receives."""
        scheduler = self._scheduler
        scheduler.check()
        direction, x, peer, tag = message
        self._messages += 1
        rank = self.ranks[coord]
        peers = [other for other in self.ranks if other != rank] if peer is None else [self.ranks[peer]]
        work = SimulatedWork(
            scheduler,
            scheduler.actors[rank],
            direction,
            site.call,
            self.label,
            lambda: peers,
            site,
            peer=None if peer is None else self.ranks[peer],
            tag=tag,
        )
        if direction == "send":
            assert peer is not None
            mine = PendingMessage(x, coord, peer, tag, work, self._messages)
            waiting = [q for src in (coord, None) if (q := self._recvs.get((src, peer, tag)))]
            if waiting:
                self._deliver(mine, min(waiting, key=lambda queue: queue[0].order).popleft())
            else:
                self._sends[coord, peer, tag].append(mine)
        else:
            mine = PendingMessage(x, peer, coord, tag, work, self._messages)
            sources = range(len(self.ranks)) if peer is None else (peer,)
            waiting = [q for src in sources if (q := self._sends.get((src, coord, tag)))]
            if waiting:
                chosen = scheduler.choose(len(waiting)) if len(waiting) > 1 else 0
                self._deliver(waiting[chosen].popleft(), mine)
            else:
                self._recvs[peer, coord, tag].append(mine)
        return work

    def unmatched(self) -> list[PendingMessage]:
        """Ends that wait for the other, in the order in which they were posted."""
        found = [each for queues in (self._sends, self._recvs) for q in queues.values() for each in q]
        return sorted(found, key=lambda message: message.order)

    def _deliver(self, send: PendingMessage, recv: PendingMessage) -> None:
        if send.x.shape != recv.x.shape or send.x.dtype != recv.x.dtype:
            receiver = recv.work.actor.rank
            error = CallMismatchError(
                f"rank {send.work.actor.rank} sends another tensor along {self.label} than rank {receiver} receives",
                given=f"{send.line()}\n{recv.line()}",
                expected="a buffer of the sender's shape and dtype",
                hint="send with handshake=True and receive without out, where only the sender knows them",
            )
            error.mismatched_ranks = (receiver,)
            self._scheduler.stop(error)
            self._scheduler.check()
        if send.x.numel():
            with torch.inference_mode():
                recv.x.view(-1).copy_(send.x.view(-1))
        assert send.src is not None
        recv.work.source = send.src
        send.work.complete()
        recv.work.complete()


def _lengths_fit(calls: list[Call]) -> bool:
    """Whether each coord sends each other what that expects. The calls: by coord, all with lengths."""
    lengths = [call.lengths for call in calls if call.lengths]
    return all(
        sends == lengths[theirs][0][mine]
        for mine, (_, leaving) in enumerate(lengths)
        for theirs, sends in enumerate(leaving)
    )
