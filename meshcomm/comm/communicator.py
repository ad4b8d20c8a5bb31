"""Collectives along one dim, or along several dims merged into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter as clock
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.collectives import BARRIER, REDUCE, Collective
from meshcomm.comm.agree import agree
from meshcomm.comm.caller import Caller
from meshcomm.comm.check_call import check
from meshcomm.comm.checks import apart, is_plain, value_of
from meshcomm.comm.handle import Handle
from meshcomm.comm.p2p import Messages
from meshcomm.comm.request import Request
from meshcomm.comm.shapes import CARRIED
from meshcomm.comm.torch_private import unobserved
from meshcomm.comm.wire import carry_out, finish, load, start
from meshcomm.layout import Dims
from meshcomm.reductions import REDUCTIONS
from meshcomm.transport import Transport
from meshcomm.transport.torch_private import written
from meshcomm.watching.callsite import users_frame
from meshcomm.watching.counters import CallCounter, counter_of
from meshcomm.watching.recorder import FlightRecorder


class Ready(NamedTuple):
    """A prepared kind of call for one dtype.

    start, options: the backend's method and its options. counter: the counter of these calls. device: the
    tensors' device. gets: whether this rank receives a result. divides: whether backends divide x in place by an operator,
    which refuses an inference tensor outside of inference mode.
    """

    start: Callable[..., Any]
    options: Any
    counter: CallCounter
    device: torch.device
    gets: bool
    divides: bool


@final
class Communicator(Caller):
    """The collectives along `name`. This class defines the shape rules for all transports.

    A call takes one of two paths. The first call of its kind is a Request, which is checked, compared with the other
    ranks' calls, and prepared. Later calls go straight to the backend if every tensor is `usable`.

    name, who: the dim or dims, and this rank with its coords, for error messages.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        who: str,
        recorder: FlightRecorder | None = None,
    ) -> None:
        recorder = recorder or FlightRecorder(name, [])
        super().__init__(name, transport, who, recorder)
        # Prepared calls hold no reference to this object, so its last outside reference frees it and its group.
        self._ready: dict[tuple[object, ...], Ready] = {}
        self.recorder.quick.append(self._ready)
        self.messages = Messages(name, transport, who, self.recorder)

    def collective(
        self,
        row: Collective,
        x: Tensor | None,
        async_op: bool = False,
        op: Any = None,
        root: int = -1,
        axis: int = 0,
        concat: int = 0,
        out: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run any collective; with `async_op`, return a Handle. `Mesh` documents the collectives, Request the arguments.

        The fast path supports no options: a call with any option goes through all stages.
        """
        if not options:
            try:
                ready = self._ready.get((row, op, root, async_op, x.dtype))  # type: ignore[union-attr]
            except (AttributeError, TypeError):  # not a tensor, or op is not a string: reported later
                ready = None
            if (
                ready is not None
                # True, 1.0 and NumPy's 1 hash like 1, so check types. Which axis a negative number selects depends on ndim.
                and type(root) is type(axis) is type(concat) is int
                and not (axis or concat)
                and (found := self._fast_path(row, ready, x, out, async_op)) is not NotImplemented
            ):
                return found
        x, out = value_of(x), value_of(out)
        request = Request(self, row, x, async_op, op, root, axis, concat, out, **options)
        check(request)
        counter = counter_of(self.recorder.counters, self.name, request.name)
        known = request.common
        nbytes = 0 if known is None else row.moved(known.nbytes, self.size)
        with self.recorder.call(self, counter, nbytes, known, op, root):
            agree(request)
            load(request)
            if request.repeatable:
                self._keep(request)
            if not async_op:
                return carry_out(request)
            works, made = start(request), partial(finish, request)
            return Handle(works, self, row.name, made, pending=self.recorder.later())

    def barrier(self, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank of the group has arrived."""
        found: Handle[None] | None = self.collective(BARRIER, None, async_op)
        return found

    @contextmanager
    def named(
        self, call: str, group: bool = True, root: int = -1, facts: dict[str, Any] | None = None
    ) -> Iterator[tuple[Communicator, Callable[[int], None]]]:
        """Combine several calls into one. Only the combined call, named `call`, is recorded, compared and counted.

        Yields a communicator for the parts, whose calls are not compared and may use reserved tags, and a function to
        call with the number of bytes moved.
        group: whether every rank in the group makes the call. If so, the call has a sequence number.
        facts: the properties of the call that must be equal on all participating ranks.
        """
        recorder, where = self.recorder, self.where(call)
        counter, began, moved = counter_of(recorder.counters, self.name, call), clock(), [0]
        parts = FlightRecorder(
            recorder.label, recorder.ranks, lambda _, __, error: recorder.inquire(recorder, where, error)
        )
        parts.messages = recorder.messages
        parts.under_way = True
        made = Communicator(self.name, self.transport, self.who, parts)
        if group:
            with recorder.call(self, counter, 0, None, root=root):
                recorder.announce_call(self.name, call, facts or {})
                yield made, recorder.set_bytes
            return
        try:
            yield made, moved.append
        finally:
            counter.calls += 1
            counter.nbytes += moved[-1]
            counter.seconds += clock() - began

    # -- the fast path --------------------------------------------------------------------------

    def _fast_path(self, row: Collective, ready: Ready, x: Any, out: Tensor | None, async_op: bool) -> Any:
        """Make a call of a prepared kind. Return NotImplemented if the tensors cannot be sent unchanged."""
        start, options, counter, device, gets, divides = ready
        if not unobserved() or not is_plain(x, device):
            return NotImplemented
        sent = made = x
        came = None
        if row.in_place:
            if divides and x.is_inference():
                return NotImplemented
            if row is REDUCE:
                sent = made = x.clone()
            written([sent])
        else:
            shape: tuple[int, ...] = x.shape
            if not shape or (row.splits and shape[0] % self.size):
                return NotImplemented
            if row.splits != row.joins:
                length = shape[0] * self.size if row.joins else shape[0] // self.size
                shape = (length, *shape[1:])
            if not gets:
                pass
            elif out is None:
                came = made = x.new_empty(shape)
            elif (
                is_plain(out, device)
                and out.dtype is x.dtype
                and out.shape == shape
                and not out.is_inference()
            ):
                into, leaving = out.data_ptr(), x.data_ptr()
                # Received data must not overwrite data that is still to be sent.
                if (
                    into < leaving + x.nbytes
                    and leaving < into + out.nbytes
                    and not apart(out, x, self.coord)
                ):
                    return NotImplemented
                written([out])
                came = made = out
            else:
                return NotImplemented
        recorder = self.recorder
        nbytes = x.nbytes * self.size if row.whole else x.nbytes
        recorder.begin(self, counter, nbytes, x, users_frame(3))
        try:
            work = start(*row.arguments(sent, came, self.size, ()), options)
            if recorder.ordered:
                recorder.queued(work)
            result = made if gets else None
            if async_op:
                works = () if work is None else (work,)
                return Handle(works, self, row.name, result=result, pending=recorder.later(), held=sent)
            if work is not None:
                work.wait()
            return result
        except RuntimeError as error:
            work = works = None  # a stored error keeps this frame alive; it must not keep the group
            raise self.failed(row.name, error) from error
        finally:
            recorder.end()

    def _keep(self, request: Request) -> None:
        """Prepare calls of this kind for the fast path, once they are no longer compared or traced."""
        row, op, root, async_op = request.row, request.op, request.root, request.async_op
        dtype, recorder = request.x.dtype, self.recorder
        if recorder.check is None and recorder.spans is None and dtype in CARRIED:
            prepared = self.transport.prepare(row, op, root, not async_op)
            if prepared is not None:
                counter = counter_of(recorder.counters, self.name, row.name)
                device, gets = request.x.device, request.gets
                divides = row.reduces and REDUCTIONS[op].wire.divided
                self._ready[row, op, root, async_op, dtype] = Ready(*prepared, counter, device, gets, divides)


@final
class CommunicatorCache(dict[Dims, Communicator]):
    """Maps dims to their communicator. This is a dictionary, so that the hot path needs only one lookup.

    `explain(dims)` is called for dims that are missing: it returns a communicator that they can share, or raises
    UnknownDim, MeshClosed or NotMember.
    """

    def __init__(self, explain: Callable[[Dims], Communicator]) -> None:
        super().__init__()
        self._explain = explain

    def along(self, dims: Dims) -> Communicator:
        """Return `self[dims]`. An unhashable key, such as a list, raises the same error as an unknown dim."""
        try:
            return self[dims]
        except TypeError:
            return self._explain(dims)

    def __missing__(self, dims: Dims) -> Communicator:
        found = self._explain(dims)
        self[dims] = found
        return found
