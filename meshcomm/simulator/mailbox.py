"""Messages of one group: a send and a receive meet, in order, by coords and tag."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple, final

import torch
from torch import Tensor

from meshcomm.errors import CallMismatchError
from meshcomm.simulator.scheduler import Scheduler
from meshcomm.simulator.sites import Site
from meshcomm.simulator.work import SimulatedWork
from meshcomm.transport.support import name_of


class Letter(NamedTuple):
    """One end of a message that has not met the other. Coords; src None: from whoever comes first."""

    x: Tensor
    src: int | None
    dst: int
    tag: int
    work: SimulatedWork
    order: int


@final
class Mailbox:
    """The messages of one group; all ranks of the group share it.

    A send is done when its receive has begun: nothing is buffered, as on Gloo and NCCL.
    """

    def __init__(self, scheduler: Scheduler, label: str, ranks: tuple[int, ...]) -> None:
        self.label = label
        self.ranks = ranks
        self._scheduler = scheduler
        self._sends: dict[tuple[int, int, int], deque[Letter]] = defaultdict(deque)
        self._recvs: dict[tuple[int | None, int, int], deque[Letter]] = defaultdict(deque)
        self._count = 0

    def send(self, x: Tensor, src: int, dst: int, tag: int, site: Site) -> SimulatedWork:
        """Coord `src` sends."""
        letter = self._letter("send", x, src, dst, tag, site)
        waiting = [
            queue[0]
            for queue in (self._recvs.get((src, dst, tag)), self._recvs.get((None, dst, tag)))
            if queue
        ]
        if waiting:
            other = min(waiting, key=lambda each: each.order)
            self._recvs[other.src, dst, tag].popleft()
            self._meet(letter, other)
        else:
            self._sends[src, dst, tag].append(letter)
        return letter.work

    def recv(self, x: Tensor, src: int | None, dst: int, tag: int, site: Site) -> SimulatedWork:
        """Coord `dst` receives."""
        letter = self._letter("recv", x, src, dst, tag, site)
        sources = range(len(self.ranks)) if src is None else (src,)
        waiting = [queue for queue in (self._sends.get((coord, dst, tag)) for coord in sources) if queue]
        if waiting:
            queue = waiting[self._scheduler.choose(len(waiting)) if len(waiting) > 1 else 0]
            self._meet(queue.popleft(), letter)
        else:
            self._recvs[src, dst, tag].append(letter)
        return letter.work

    def unmet(self) -> list[Letter]:
        """Ends that wait for the other, in the order in which they were posted."""
        found = [letter for queues in (self._sends, self._recvs) for q in queues.values() for letter in q]
        return sorted(found, key=lambda letter: letter.order)

    def _letter(self, kind: str, x: Tensor, src: int | None, dst: int, tag: int, site: Site) -> Letter:
        self._scheduler.check()
        mine, peer = (src, dst) if kind == "send" else (dst, src)
        assert mine is not None
        self._count += 1
        peers = [self.ranks[peer]] if peer is not None else [r for c, r in enumerate(self.ranks) if c != mine]
        work = SimulatedWork(
            self._scheduler,
            self._scheduler.actors[self.ranks[mine]],
            "send" if kind == "send" else "recv",
            site.call,
            self.label,
            lambda: peers,
            site,
            peer=None if peer is None else self.ranks[peer],
            tag=tag,
            shape=f"({', '.join(map(str, x.shape))}) {name_of(x.dtype)}",
        )
        return Letter(x, src, dst, tag, work, self._count)

    def _meet(self, send: Letter, recv: Letter) -> None:
        if send.x.shape != recv.x.shape or send.x.dtype != recv.x.dtype:
            self._scheduler.stop(self._unequal(send, recv))
            self._scheduler.check()
        if send.x.numel():
            with torch.inference_mode():
                recv.x.view(-1).copy_(send.x.view(-1))
        assert send.src is not None
        recv.work.source = send.src
        send.work.complete()
        recv.work.complete()

    def _unequal(self, send: Letter, recv: Letter) -> CallMismatchError:
        source, target = send.work, recv.work
        assert source.site is not None and target.site is not None
        error = CallMismatchError(
            f"rank {source.actor.rank} sends another tensor along {self.label} than rank "
            f"{target.actor.rank} receives",
            given=f"rank {source.actor.rank}: {source.call} of {source.shape}, tag {source.tag}, at "
            f"{source.site.line}\nrank {target.actor.rank}: {target.call} of {target.shape}, tag "
            f"{target.tag}, at {target.site.line}",
            expected="a buffer of the sender's shape and dtype",
            hint="send with handshake=True and receive without out, where only the sender knows them",
        )
        error.odd_ranks = (target.actor.rank,)
        return error
