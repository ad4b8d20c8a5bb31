"""A Transport between ranks that are threads of this process. The last rank to arrive at a call moves all ranks' data."""

from __future__ import annotations

import copy
import sys
import sysconfig
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from traceback import walk_tb
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.collectives import (
    ALL_GATHER,
    BROADCAST,
    GATHER,
    REDUCE_SCATTER,
    SCATTER,
    Call,
    Reduce,
    write_results,
)
from meshcomm.errors import CallMismatchError
from meshcomm.layout.sizes import ranks_text
from meshcomm.lines import source_line
from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.start_order import StartOrder
from meshcomm.transport.base import P2P
from meshcomm.transport.support import name_of
from meshcomm.watching.callsite import is_ours, thread_frames
from meshcomm.watching.matcher import Collective, Collectives, Messages
from meshcomm.watching.verdict import ToldCall, mismatch

# The user's call: its dim, its name and its arguments as errors show them.
Told: TypeAlias = tuple[str, str, dict[str, Any]]


class Callsite(NamedTuple):
    """A line of the user's program (file:line), and the meshcomm or torch function that it called. Errors show its text."""

    call: str
    line: str

    def __str__(self) -> str:
        return self.line


_STDLIB = sysconfig.get_paths()["stdlib"]
_UNKNOWN = Callsite("?", "an unknown line")


def here() -> Callsite:
    """Return the line of the user's program that the calling thread is at."""
    return _walk(sys._getframe(1))


def callsite_of(actor: Actor) -> Callsite:
    """Return the line of the user's program that a rank is at, whether it is running or not."""
    frame = thread_frames().get(actor.ident)
    return _UNKNOWN if frame is None else _walk(frame)


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's program in an exception's traceback."""
    passed = ((frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))
    lines = [source_line(file, line) for file, line in passed if not is_ours(file)]
    return lines[-1] if lines else _UNKNOWN.line


def _walk(frame: Any) -> Callsite:
    call = "?"
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if is_ours(file):
            # torch wraps its functions.
            call = call if frame.f_code.co_name == "wrapper" else frame.f_code.co_name
        elif not file.startswith(_STDLIB) or "site-packages" in file:
            break
        frame = frame.f_back
    return Callsite(call, source_line(frame.f_code.co_filename, frame.f_lineno))


@final
@dataclass(slots=True, eq=False)
class SimulatedWork:
    """An operation that a rank has started. It completes when the rank's peers have started theirs.

    kind:   "opening" is the creation of a group. call: the operation, such as `all_reduce`.
    site:   where the operation was started; None for a blocking call, because the rank is still at that line.
    absent: returns the global ranks that the operation still waits for.
    finish: copies the result to where the caller wants it.
    of_torch: whether code outside the mesh made the call. Such a call has to complete, but nobody has to wait for it.
    number: a collective's sequence number in its group. peer: the global rank at the other end of a message, or
            None for a receive from any source. source: the coord from which a receive got its message.
    error:  the error of an operation whose result could not be computed.
    """

    group: SimulatedGroup
    actor: Actor
    kind: Literal["opening", "collective", "send", "recv"]
    call: str
    site: Callsite | None
    absent: Callable[[], list[int]] = list
    number: int = 0
    peer: int | None = None
    tag: int = 0
    done: bool = False
    error: Exception | None = None
    source: int = -1
    finish: Callable[[], None] | None = None
    of_torch: bool = False

    def __post_init__(self) -> None:
        if self.site is not None:
            self.actor.unwaited[self] = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the other ranks run until the operation is done. `timeout` is ignored, because no simulated time passes."""
        if self.site is not None:
            self.actor.unwaited.pop(self, None)
        if not self.done and not self.group.gone:
            self.group.scheduler.wait(self.actor, self)
        if not self.done:
            raise broken(self.group.label)
        if self.error is not None:
            raise copy.copy(self.error)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is done. If it is not, let other ranks run first, so that polling makes progress."""
        if not self.done and not self.group.gone:
            self.group.scheduler.poll(self.actor, self)
        return self.done or self.group.gone

    def then(self, finish: Callable[[], None]) -> None:
        """Call `finish` when the operation is done, which may be now."""
        self.finish = finish
        if self.done:
            self._finish()

    def belongs_to_torch(self) -> None:
        """See `of_torch`."""
        self.of_torch = True
        if self.done:
            self.actor.unwaited.pop(self, None)

    def _finish(self) -> None:
        if self.finish is not None:
            with torch.inference_mode():
                self.finish()
            self.finish = None

    def complete(self, error: Exception | None = None) -> None:
        """Record that the operation is done, and wake its rank if it is waiting. error: why it has no result."""
        self.done, self.error = True, error
        if self.finish is not None and error is None:
            try:
                self._finish()
            except Exception as caught:
                # The calling rank is another one.
                self.error = caught
        if self.of_torch:
            self.actor.unwaited.pop(self, None)
        # Release the tensors of all ranks, to which `absent` refers.
        self.absent = list
        if self.actor.wait is self:
            self.group.scheduler.wake(self.actor)

    def described(self, call: str) -> str:
        """Return text such as `all_reduce, call 3 on tp[dp=0]` or `send to rank 1, tag 2, on tp[dp=0]`.

        call: the name of the function that the user called.
        """
        if self.kind == "opening":
            return f"{self.call if call == '?' else call}, creation of {self.group.label}"
        if self.kind == "collective":
            name = self.call if call in (self.call, "?") else f"{call} ({self.call})"
            return f"{name}, call {self.number} on {self.group.label}"
        end = "send to" if self.kind == "send" else "receive from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        tag = "" if self.tag == 0 else f", tag {self.tag}"
        text = f"{end} {peer}{tag}, on {self.group.label}"
        return text if call in (self.kind, "?") else f"{call} ({text})"


def unversioned(x: Any) -> Any:
    """Return a tensor on the same memory. Autograd does not count writes to it, like those that Gloo makes from C++.

    A sparse tensor is returned itself, as a write replaces its entries.
    """
    return x if x is None or x.is_sparse else x.data


def broken(label: str) -> RuntimeError:
    """Return the error that a real backend would raise if a rank of the group was lost."""
    return RuntimeError(f"connection closed: a rank of {label} was lost")


class Contribution(NamedTuple):
    """One rank's input to a collective. told: None for a call outside the mesh."""

    call: Call
    told: Told | None
    work: SimulatedWork

    def compared(self) -> tuple[Any, ...]:
        """Return the properties that must be equal on all ranks, beginning with dtype, elements, operation and root.

        What the callers said is compared apart, as not all callers say the same.
        """
        row, x, out, op, root, lengths, _ = self.call
        tensor = out if row.root == "src" and out is not None else x
        dtype = None if tensor is None else tensor.dtype
        elements = None if tensor is None or lengths else tensor.numel()
        return dtype, elements, op, None if row.root is None else root, row, not lengths

    def facts(self) -> dict[str, Any]:
        """Return the call's properties as errors show them."""
        dtype, elements, op, root, row, _ = self.compared()
        if self.told is not None:
            # A hook does not know the reduction.
            facts = self.told[2] if op is None else {**self.told[2], "op": self.told[2].get("op", op)}
        else:
            values = {"dtype": dtype and name_of(dtype), "elements": elements, "op": op, str(row.root): root}
            facts = {name: value for name, value in values.items() if value is not None}
        if not self.call.lengths:
            return facts
        return {**facts, "sends": self.call.lengths[1], "expects": self.call.lengths[0]}


@final
@dataclass(slots=True, eq=False)
class PendingCollective:
    """What is known of a collective that not all ranks of its group have reached yet. contributions: by coord.

    sent: a broadcast's data, as the source brought it. told: what any rank has said of its call, by name.
    mismatched: whether the calls differ. If they do, the simulation ends only when all ranks have arrived or none can run,
    so that the error can tell which calls are in the majority.
    """

    group: SimulatedGroup
    call: Collective[Contribution]
    compared: tuple[Any, ...] = ()
    told: dict[str, Any] = field(default_factory=dict)
    mismatched: bool = False
    sent: Tensor | None = None

    @property
    def contributions(self) -> dict[int, Contribution]:
        return self.call.came

    def absent(self, needed: Collection[int] | None = None) -> list[int]:
        """Return the global ranks that have not arrived, of the coords in `needed` or of all."""
        return [self.group.ranks[coord] for coord in self.call.absent(needed)]

    def let_go(self, coord: int) -> None:
        """Move the data of a broadcast, gather or scatter that `coord` has joined, and complete it where it has ended: a rank
        may go on, and change its tensors, before all ranks have arrived.
        """
        calls = {sender: contribution.call for sender, contribution in self.contributions.items()}
        row, root = calls[coord].row, calls[coord].root
        if root not in calls:
            return
        source = calls[root].x
        if coord == root and row is BROADCAST and source is not None:
            self.sent = source.clone()
        with torch.inference_mode():
            for each in calls if coord == root else (coord,):
                # Any: a row says which of the two a rank has.
                x: Any = calls[each].x
                out: Any = calls[root if row is GATHER else each].out
                if row is GATHER:
                    out.view(len(self.group.ranks), -1)[each].copy_(x.view(-1))
                elif row is SCATTER and source is not None:
                    out.view(-1).copy_(source.view(len(self.group.ranks), -1)[each])
                elif each != root and self.sent is not None:
                    x.view(-1).copy_(self.sent.view(-1))
        for each, contribution in self.contributions.items():
            if row.needs(each, root, len(self.group.ranks)) <= calls.keys() and not contribution.work.done:
                contribution.work.complete()

    def error(self) -> CallMismatchError:
        """Return the error for ranks that made different calls. The error also names the ranks that did not arrive."""
        came = sorted(self.contributions.items())
        calls = [
            ToldCall(each.work.call, each.facts(), str(each.work.site or callsite_of(each.work.actor)))
            for _, each in came
        ]
        name = next(
            (contribution.told[0] for _, contribution in came if contribution.told is not None),
            self.group.label,
        )
        error = mismatch(name, self.call.number, [self.group.ranks[coord] for coord, _ in came], calls)
        if absent := self.absent():
            error.given = f"{error.given}\n{ranks_text(absent)}: did not arrive"
        return error


class End(NamedTuple):
    """What a rank has brought to one end of a message. single: see Transport.start_p2p."""

    x: Tensor
    work: SimulatedWork
    single: bool

    def line(self) -> str:
        """Return a line that describes this end, for an error about two ends that do not match."""
        work, shape = self.work, f"({', '.join(map(str, self.x.shape))}) {name_of(self.x.dtype)}"
        return f"rank {work.actor.rank}: {work.call} of {shape}, tag {work.tag}, at {work.site or ''}"


@final
class SimulatedGroup:
    """The collectives and messages of one group, shared by its ranks. ranks: the global ranks, by coord. label: how errors
    name the group.

    As on Gloo and NCCL, messages are not buffered: a send completes when the matching receive has started.
    """

    def __init__(self, scheduler: Scheduler, ranks: tuple[int, ...], label: str) -> None:
        self.ranks, self.scheduler, self.label = ranks, scheduler, label
        # The dims of a mesh's group.
        self.dims: tuple[str, ...] = ()
        # The ranks that have opened the group, by coord.
        self.actors: dict[int, Actor] = {}
        self._openings: Collectives[SimulatedWork] = Collectives(range(len(ranks)))
        # The calls by coord.
        self._collectives: Collectives[Contribution] = Collectives(range(len(ranks)))
        self.pending: dict[int, PendingCollective] = {}
        self.messages: Messages[End] = Messages()
        # Used only for NCCL, which runs a group's calls one after another.
        self.order = StartOrder(messages=True)
        # Whether ranks were lost since the group was created. If so, no call completes.
        self.gone = False

    def give_up(self) -> None:
        """Record that ranks were lost."""
        self.gone = True
        self.pending.clear()
        self.messages = Messages()

    def meet(self, coord: int) -> None:
        """Let other ranks run until all members have opened the group, as Gloo connects them (measured with torch 2.15)."""
        self.scheduler.check()
        work = SimulatedWork(self, self.actors[coord], "opening", "new_group", None)
        opening = self._openings.join(coord, work)
        work.absent = lambda: [self.ranks[each] for each in opening.absent()]
        if opening.complete:
            for each in opening.came.values():
                each.complete()
        work.wait()

    def start(self, coord: int, call: Call, told: Told | None, reduce: Reduce) -> SimulatedWork:
        """Record that the rank at `coord` starts its next collective; see Contribution."""
        if call.row not in (ALL_GATHER, REDUCE_SCATTER) and call.op != "avg":
            # Gloo copies the results of the other calls with torch, which counts the write.
            call = call._replace(x=unversioned(call.x), out=unversioned(call.out))
        scheduler = self.scheduler
        scheduler.check()
        if self.gone:
            raise broken(self.label)
        name, site = call.row.name if told is None else told[1], None if call.blocking else here()
        work = SimulatedWork(self, self.actors[coord], "collective", name, site)
        contribution = Contribution(call, told, work)
        joined = self._collectives.join(coord, contribution)
        number = work.number = joined.number
        pending = self.pending.get(number)
        compared = contribution.compared()
        if pending is None:
            pending = self.pending[number] = PendingCollective(self, joined, compared)
        elif compared != pending.compared:
            pending.mismatched = True
        # Calls of the mesh and of torch say different things; what both say must be equal.
        facts = {} if told is None else {"call": name, **told[2]}
        for fact, value in facts.items():
            pending.mismatched |= pending.told.setdefault(fact, value) != value
        work.absent = partial(pending.absent, call.row.needs(coord, call.root, len(self.ranks)))
        partly = call.row in (BROADCAST, GATHER, SCATTER)
        if partly and not pending.mismatched:
            pending.let_go(coord)
        if joined.complete:
            calls = [joined.came[each].call for each in range(len(self.ranks))]
            if pending.mismatched or not _lengths_fit(calls):
                scheduler.fail(pending.error())
            del self.pending[number]
            if partly:
                return work
            error: Exception | None = None
            try:
                # Results must not depend on the grad mode of the rank that happens to arrive last.
                # A sparse tensor would keep parts of the result.
                with torch.no_grad() if call.x is not None and call.x.is_sparse else torch.inference_mode():
                    write_results(calls, reduce)
            except Exception as caught:
                error = caught
            for each in joined.came.values():
                each.work.complete(error)
        return work

    def start_message(self, coord: int, message: P2P, site: Callsite, single: bool) -> SimulatedWork:
        """Record that the rank at `coord` sends or receives a message. single: see Transport.start_p2p."""
        scheduler, rank = self.scheduler, self.ranks[coord]
        scheduler.check()
        if self.gone:
            raise broken(self.label)
        direction, x, peer, tag = message
        other = None if peer is None else self.ranks[peer]
        peers = [each for each in self.ranks if each != rank] if other is None else [other]
        work = SimulatedWork(
            self, self.actors[coord], direction, site.call, site, lambda: peers, peer=other, tag=tag
        )
        mine = End(x, work, single)
        if direction == "send":
            assert peer is not None
            found = self.messages.send(coord, peer, tag, mine)
        else:
            found = self.messages.receive(peer, coord, tag, mine, scheduler.choose)
        if found.sent is not None and found.received is not None:
            self._deliver(found.source, found.sent, found.received)
        return work

    def _deliver(self, source: int | None, send: End, recv: End) -> None:
        if send.single != recv.single:
            error = CallMismatchError(
                f"the two ends of a message use different communicators along {self.label}",
                given=f"{send.line()}\n{recv.line()}",
                expected="send and recv, or exchange and shift, on both ends: NCCL uses different communicators for these",
                hint="mesh.exchange(dims, sends=[(x, dst)]) and mesh.exchange(dims, recvs=[(out, src)])",
                mismatched_ranks=(send.work.actor.rank, recv.work.actor.rank),
            )
            self.scheduler.fail(error)
        if send.x.shape != recv.x.shape or send.x.dtype != recv.x.dtype:
            receiver = recv.work.actor.rank
            error = CallMismatchError(
                f"rank {send.work.actor.rank} sends a different tensor along {self.label} than rank {receiver} receives",
                given=f"{send.line()}\n{recv.line()}",
                expected="a buffer of the sender's shape and dtype",
                hint="send with handshake=True and receive without out, if only the sender knows them",
                mismatched_ranks=(receiver,),
            )
            self.scheduler.fail(error)
        if send.x.numel():
            with torch.inference_mode():
                unversioned(recv.x).view(-1).copy_(send.x.view(-1))
        assert source is not None
        recv.work.source = source
        send.work.complete()
        recv.work.complete()


def _lengths_fit(calls: list[Call]) -> bool:
    """Return whether every rank sends every other rank the size that the receiver expects. calls: the calls by coord."""
    lengths = [call.lengths for call in calls if call.lengths]
    return all(
        sends == lengths[theirs][0][mine]
        for mine, (_, leaving) in enumerate(lengths)
        for theirs, sends in enumerate(leaving)
    )
