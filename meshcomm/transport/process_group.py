"""Transport through a torch process group: Gloo, NCCL, or any registered backend."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist

from meshcomm.collectives import Call, Collective
from meshcomm.reductions import WIRE_OPS
from meshcomm.transport.base import P2P, Prepared, Transport, Work
from meshcomm.transport.support import STREAM_ORDERED, backend_on
from meshcomm.transport.torch_changes import has_completed, is_receive, wait_at_most
from meshcomm.transport.torch_private import abort, bindings, give_back, source_rank, timeout_of

# The most memory that a group keeps for messages that have ended.
_KEPT_BYTES: Final = 1 << 22
# How many seconds after a group's timeout the NCCL watchdog aborts.
MARGIN_S: Final = 60.0


class ProcessGroupTransport(Transport):
    """Calls the process group's own methods, with option objects created once.

    This skips the argument checks, group lookups and global-rank translation of `torch.distributed.all_reduce` and similar
    functions, because the communicator has already done this work.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: str,
        device: torch.device,
        owned: bool,
        timeout_s: float | None = None,
    ) -> None:
        self.group = group
        self.name = backend_on(backend, device)
        # Gloo carries host memory on every mesh device. Its messages carry nothing else, but its collectives copy tensors from
        # other devices.
        with_gloo = backend_on(backend, torch.device("cpu")) == "gloo"
        self.kinds = tuple(dict.fromkeys((device.type, "cpu"))) if with_gloo else (device.type,)
        self.message_kinds = ("cpu",) if self.name == "gloo" else self.kinds
        self.group_name = str(group.group_name)
        self.size = group.size()
        self.coord = group.rank()
        self.device = device
        # The plan's timeout, and the timeout that torch reports now, to which the group's creator may have added time.
        self._planned = timeout_s, timeout_of(group, device)
        self.any_source = self.name in ("gloo", "mpi")
        self.owned = owned
        self.ordered = self.name in STREAM_ORDERED
        self._methods: dict[str, Callable[..., Work]] = {}
        # The previous messages, if they are small. Gloo's thread has often not left a message when its wait returns. Releasing
        # the message then calls sched_yield until the thread has left, which costs a time slice if ranks share cores.
        self._kept: Sequence[Work] = ()
        # Receives that the program has dropped. Gloo cancels a receive whose Work is released, and later calls of the group then fail.
        self._dropped: deque[tuple[Work, object]] = deque(maxlen=256)
        # Blocks until these coords, or all coords if none are given, are about to make their first call to each other.
        self.meet: Callable[[tuple[int, ...]], None] | None = None
        self._met: set[tuple[int, ...]] = set()

    @property
    def timeout_s(self) -> float:
        """Seconds until the group's calls time out: the plan's timeout unless `torch.distributed.set_timeout` changed it."""
        planned, made = self._planned
        now = timeout_of(self.group, self.device) if hasattr(self, "group") else made
        if now == made:
            return made if planned is None else planned
        # A backend that ends the process does this after the diagnosis.
        return now - min(MARGIN_S, now / 10) if self.ordered else now

    def start(self, call: Call) -> Work | None:
        row = call.row
        start, options = self.prepare(row, call.op, call.root, call.blocking)
        return start(*row.arguments(call.x, call.out, self.size, call.lengths), options)

    def prepare(self, row: Collective, op: str | None, root: int, blocking: bool) -> Prepared:
        method = self._methods.get(row.name)
        if method is None:
            self._connects()
            name = next(name for name in row.methods if hasattr(self.group, name))
            method = self._methods[row.name] = getattr(self.group, name)
        device = self.device if row.name == "barrier" else None
        return Prepared(method, _options(row.options, blocking, op, root, device))

    def start_p2p(self, batch: Sequence[P2P], single: bool = False) -> Sequence[Work]:
        if not self.ordered:
            works, kept = [], 0
            for message in batch:
                works.append(self._message(message))
                kept += message.x.untyped_storage().nbytes()
            self._kept = works if kept <= _KEPT_BYTES else ()
            return works
        if single:
            ((_, _, peer, _),) = batch
            assert peer is not None
            self._connects(*sorted((self.coord, peer)))
            return (self._message(batch[0]),)
        # NCCL runs coalesced calls as one kernel. Separate calls could wait for each other.
        self.group._start_coalescing(self.device)
        try:
            for message in batch:
                self._message(message)
        except BaseException:
            # Otherwise, NCCL would hold back every later call of this thread.
            with suppress(RuntimeError):
                self.group._end_coalescing(self.device)
            raise
        return [self.group._end_coalescing(self.device)]

    def _connects(self, *coords: int) -> None:
        if self.meet is not None and coords not in self._met:
            self.meet(coords)
            self._met.add(coords)

    def _message(self, message: P2P) -> Work:
        direction, x, peer, tag = message
        if direction == "send":
            assert peer is not None
            return self.group.send([x], peer, tag)
        if peer is not None:
            return self.group.recv([x], peer, tag)
        # Gloo refuses only this kind of receive if no data will arrive (torch 2.13). An empty message, which is announced and
        # answered like any other, also fits into a larger buffer.
        room = x if x.numel() else torch.empty(1, dtype=torch.uint8, device=x.device)
        return self.group.recv_anysource([room], tag)

    def source_of(self, work: Work) -> int:
        return source_rank(work)

    def has_completed(self, work: Work) -> bool:
        return work.is_completed() if self.ordered else has_completed(work)

    def dropped(self, works: Sequence[Work], memory: object) -> None:
        if not self.ordered and hasattr(self, "group"):
            self._dropped.extend((work, memory) for work in works if is_receive(work))

    def wait_within(self, work: Work, timeout_s: float, last: bool) -> None:
        if not self.ordered:
            wait_at_most(work, timedelta(seconds=timeout_s), last)
            return
        # NCCL's own wait aborts the communicator at its timeout.
        ends = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > ends:
                raise TimeoutError(f"timed out: not complete after {timeout_s:g} s; it stays queued")
            time.sleep(0.001)
        work.wait()

    def abort(self) -> None:
        # Another thread may have closed the group.
        group = getattr(self, "group", None)
        if self.ordered and self.owned and group is not None:
            abort(group)

    def close(self) -> None:
        """Release the group. Its sockets and threads end when the last reference is gone.

        Objects kept from a failed call, such as a traceback, keep this transport alive longer than the mesh.
        """
        if self.owned:
            give_back(self.group)
        self._methods.clear()
        self._kept = ()
        self._dropped.clear()
        del self.group


@cache
def _options(kind: str, blocking: bool, op: str | None, root: int, device: torch.device | None) -> Any:
    """Return an option object, created once and never changed."""
    options = getattr(bindings, kind)()
    options.asyncOp = not blocking
    if op is not None:
        options.reduceOp = getattr(dist.ReduceOp, WIRE_OPS[op].reduce_op)
    if root >= 0:
        options.rootRank = root
    if device is not None:
        options.device = device
    return options
