"""A Transport whose other ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from meshcomm.simulator.mailbox import Mailbox
from meshcomm.simulator.rendezvous import Coming, Rendezvous, facts_of
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.sites import Site, here
from meshcomm.simulator.starts import Start, Starts
from meshcomm.simulator.traffic import Ledger
from meshcomm.simulator.wording import name_of
from meshcomm.simulator.work import SimulatedWork
from meshcomm.transport import Transport, Work


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

    def all_reduce_call(
        self, op: str, blocking: bool = True
    ) -> tuple[Callable[[list[Tensor], Any], Work | None], Any]:
        def call(tensors: list[Tensor], options: Any) -> Work | None:
            return self.all_reduce(tensors[0], op, blocking)

        return call, None

    def all_reduce(self, x: Tensor, op: str, blocking: bool) -> Work:
        return self._come("all_reduce", facts_of(x, op=op), blocking, x=x, op=op)

    def reduce(self, x: Tensor, dst: int, op: str, blocking: bool) -> Work:
        return self._come("reduce", facts_of(x, op=op, dst=dst), blocking, x=x, op=op, root=dst)

    def broadcast(self, x: Tensor, src: int, blocking: bool) -> Work:
        return self._come("broadcast", facts_of(x, src=src), blocking, x=x, root=src)

    def all_gather(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        return self._come("all_gather", facts_of(x), blocking, out=out, x=x)

    def gather(self, out: Tensor | None, x: Tensor, dst: int, blocking: bool) -> Work:
        return self._come("gather", facts_of(x, dst=dst), blocking, out=out, x=x, root=dst)

    def scatter(self, out: Tensor, x: Tensor | None, src: int, blocking: bool) -> Work:
        return self._come("scatter", facts_of(out, src=src), blocking, out=out, x=x, root=src)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str, blocking: bool) -> Work:
        return self._come("reduce_scatter", facts_of(x, op=op), blocking, out=out, x=x, op=op)

    def all_to_all(self, out: Tensor, x: Tensor, blocking: bool) -> Work:
        return self._come("all_to_all", facts_of(x), blocking, out=out, x=x)

    def all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_lengths: list[int], x_lengths: list[int], blocking: bool
    ) -> Work:
        facts = {"dtype": facts_of(x)["dtype"]}
        lengths = (x_lengths, out_lengths)
        return self._come("all_to_all_uneven", facts, blocking, out=out, x=x, lengths=lengths)

    def barrier(self, blocking: bool) -> Work:
        return self._come("barrier", {}, blocking)

    def send(self, x: Tensor, dst: int, tag: int) -> Work:
        return self._send(x, dst, tag, here())

    def recv(self, x: Tensor, src: int, tag: int) -> Work:
        return self._recv(x, src, tag, here())

    def recv_any(self, x: Tensor, tag: int) -> Work:
        return self._recv(x, None, tag, here())

    def source_of(self, work: Work) -> int:
        assert isinstance(work, SimulatedWork)
        return work.source

    def exchange(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor, int, int]]
    ) -> Sequence[Work]:
        site = here()
        started = [self._recv(x, src, tag, site) for x, src, tag in recvs]
        return [*started, *(self._send(x, dst, tag, site) for x, dst, tag in sends)]

    def close(self) -> None:
        return None

    # -- inside ---------------------------------------------------------------------------------

    def _come(self, kind: str, facts: dict[str, Any], blocking: bool, **brought: Any) -> SimulatedWork:
        self._scheduler.check_thread(self._actor)
        told, self._told = self._told, None
        self._count += 1
        # A scatter is counted by the part that each rank gets.
        x = brought.get("out") if kind == "scatter" else brought.get("x")
        lengths = brought.get("lengths")
        parts = None if lengths is None or x is None else [n * x.element_size() for n in lengths[0]]
        nbytes = 0 if x is None else x.nbytes
        self._ledger.collective(self._meets, self.coord, kind, nbytes, brought.get("root", -1), parts)
        if self._starts is not None:
            self._in_order(self._starts, kind if told is None else told[1])
        return self._meets.come(self.coord, self._count, Coming(kind, facts, told, **brought), blocking)

    def _in_order(self, starts: Starts, call: str) -> None:
        what = f"{call}, call {self._count} on {self._meets.label} at {here().line}"
        own = Start(self._actor.rank, name_of(self._actor), what)
        error = starts.start((id(self._meets), self._count), self.size, own)
        if error is not None:
            self._scheduler.stop(error)
            self._scheduler.check()

    def _send(self, x: Tensor, dst: int, tag: int, site: Site) -> SimulatedWork:
        self._scheduler.check_thread(self._actor)
        self._scheduler.maybe_pause(self._actor)
        self._ledger.message(self._meets, self.coord, dst, x.nbytes)
        return self._box.send(x, self.coord, dst, tag, site)

    def _recv(self, x: Tensor, src: int | None, tag: int, site: Site) -> SimulatedWork:
        self._scheduler.check_thread(self._actor)
        self._scheduler.maybe_pause(self._actor)
        return self._box.recv(x, src, self.coord, tag, site)
