"""A Transport whose other ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from meshcomm.collectives import SCATTER, Call
from meshcomm.simulator.group import SimulatedGroup
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.start_order import Start, StartOrder
from meshcomm.simulator.traffic import Traffic
from meshcomm.simulator.work import SimulatedWork, here
from meshcomm.transport import Transport, Work
from meshcomm.transport.base import P2P


@final
class SimulatorTransport(Transport):
    """One rank's end of a simulated group. Every call is compared with those of the other ranks.

    backend: the one that the plan names, so that what it refuses is refused here too.
    start_order: of all NCCL groups; None where the backend is another one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        actor: Actor,
        group: SimulatedGroup,
        traffic: Traffic,
        backend: str,
        start_order: StartOrder | None = None,
    ) -> None:
        self.name = backend
        self.size = len(group.ranks)
        self.coord = group.ranks.index(actor.rank)
        self.device = torch.device("cpu")
        self.any_source = backend in ("gloo", "mpi")
        self.group_name = ""
        self._scheduler = scheduler
        self._actor = actor
        self._group = group
        self._traffic = traffic
        self._start_order = start_order
        self._number = 0
        self._told: tuple[str, str, dict[str, Any]] | None = None

    def compares(self, name: str, call: str, facts: dict[str, Any]) -> bool:
        self._told = (name, call, facts)
        return True

    def start(self, call: Call) -> SimulatedWork:
        self._scheduler.check_thread(self._actor)
        told, self._told = self._told, None
        self._number += 1
        row = call.row
        # A scatter is counted by the part that each rank gets.
        x = call.out if row is SCATTER else call.x
        parts = tuple(n * x.element_size() for n in call.lengths[1]) if call.lengths and x is not None else ()
        self._traffic.add(self._group, self.coord, row, 0 if x is None else x.nbytes, call.root, parts)
        if self._start_order is not None:
            name = row.name if told is None else told[1]
            what = f"{name}, call {self._number} on {self._group.label} at {here().line}"
            start = Start(self._actor.rank, self._actor.name, what)
            error = self._start_order.start((id(self._group), self._number), self.size, start)
            if error is not None:
                self._scheduler.stop(error)
                self._scheduler.check()
        return self._group.start(self.coord, self._number, call, told)

    def start_p2p(self, batch: Sequence[P2P]) -> Sequence[SimulatedWork]:
        site = here()
        works = []
        for message in batch:
            self._scheduler.check_thread(self._actor)
            self._scheduler.maybe_pause(self._actor)
            if message.direction == "send":
                assert message.peer is not None
                self._traffic.add(self._group, self.coord, None, message.x.nbytes, message.peer)
            works.append(self._group.start_message(self.coord, message, site))
        return works

    def source_of(self, work: Work) -> int:
        assert isinstance(work, SimulatedWork)
        return work.source

    def close(self) -> None:
        return None
