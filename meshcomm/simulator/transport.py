"""A Transport whose other ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from meshcomm.collectives import SCATTER, Call
from meshcomm.simulator.mailbox import Mailbox
from meshcomm.simulator.rendezvous import Coming, Rendezvous
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.sites import Site, here
from meshcomm.simulator.starts import Start, Starts
from meshcomm.simulator.traffic import Ledger
from meshcomm.simulator.wording import name_of
from meshcomm.simulator.work import SimulatedWork
from meshcomm.transport import Transport, Work
from meshcomm.transport.base import P2P


@final
class SimulatorTransport(Transport):
    """One rank's end of a simulated group. Every call is compared with those of the other ranks.

    name is the backend that the plan names, so that what it refuses is refused here too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        actor: Actor,
        meets: Rendezvous,
        box: Mailbox,
        ledger: Ledger,
        backend: str,
        starts: Starts | None = None,
    ) -> None:
        self.name = backend
        self.size = len(meets.ranks)
        self.coord = meets.ranks.index(actor.rank)
        self.device = torch.device("cpu")
        self.any_source = backend in ("gloo", "mpi")
        self.group_name = ""
        self._scheduler = scheduler
        self._actor = actor
        self._meets = meets
        self._box = box
        self._ledger = ledger
        self._starts = starts
        self._count = 0
        self._told: tuple[str, str, dict[str, Any]] | None = None

    def compares(self, name: str, call: str, facts: dict[str, Any]) -> bool:
        self._told = (name, call, facts)
        return True

    def start(self, call: Call) -> SimulatedWork:
        self._scheduler.check_thread(self._actor)
        told, self._told = self._told, None
        self._count += 1
        row = call.row
        # A scatter is counted by the part that each rank gets.
        x = call.out if row is SCATTER else call.x
        parts = [n * x.element_size() for n in call.lengths[1]] if call.lengths and x is not None else None
        nbytes = 0 if x is None else x.nbytes
        self._ledger.collective(self._meets, self.coord, row.name, nbytes, call.root, parts)
        if self._starts is not None:
            self._in_order(self._starts, row.name if told is None else told[1])
        return self._meets.come(self.coord, self._count, Coming(call, told), call.blocking)

    def start_p2p(self, batch: Sequence[P2P]) -> Sequence[SimulatedWork]:
        site = here()
        return [self._message(message, site) for message in batch]

    def source_of(self, work: Work) -> int:
        assert isinstance(work, SimulatedWork)
        return work.source

    def close(self) -> None:
        return None

    # -- inside ---------------------------------------------------------------------------------

    def _in_order(self, starts: Starts, call: str) -> None:
        what = f"{call}, call {self._count} on {self._meets.label} at {here().line}"
        own = Start(self._actor.rank, name_of(self._actor), what)
        error = starts.start((id(self._meets), self._count), self.size, own)
        if error is not None:
            self._scheduler.stop(error)
            self._scheduler.check()

    def _message(self, message: P2P, site: Site) -> SimulatedWork:
        direction, x, peer, tag = message
        self._scheduler.check_thread(self._actor)
        self._scheduler.maybe_pause(self._actor)
        if direction == "recv":
            return self._box.recv(x, peer, self.coord, tag, site)
        assert peer is not None
        self._ledger.message(self._meets, self.coord, peer, x.nbytes)
        return self._box.send(x, self.coord, peer, tag, site)
