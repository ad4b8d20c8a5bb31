"""Collectives along one dim, or along several dims merged into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter as clock
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.collectives import BARRIER, REDUCE, SCATTER, Collective
from meshcomm.comm.caller import Caller
from meshcomm.comm.check_call import check
from meshcomm.comm.checks import apart, axis_or_dim, is_plain
from meshcomm.comm.facts import facts_of_call
from meshcomm.comm.handle import Handle
from meshcomm.comm.p2p import Messages
from meshcomm.comm.request import NO_OPTIONS, Checked, Options, Request
from meshcomm.comm.shapes import CARRIED
from meshcomm.comm.torch_private import unobserved
from meshcomm.comm.wire import finish, load
from meshcomm.errors import MeshcommError
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

    A call takes one of two paths. The first call of its kind goes through stages, each of which makes a new value:

    | stage   | file               | takes -> returns |
    |---|---|---|
    | check   | check_call.py      | Request -> Checked |
    | compare | facts.py           | Checked -> its facts, for the comparison with the other ranks |
    | load    | wire.py, uneven.py | Checked -> Loaded |
    | start   | caller.py          | Loaded -> Works |
    | finish  | wire.py            | Loaded -> the result |

    Later calls go straight to the backend if every tensor is plain.

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
        axis: int | None = None,
        concat: int = 0,
        out: Tensor | None = None,
        dim: int | None = None,
        options: Options | None = None,
    ) -> Any:
        """Run any collective; with `async_op`, return a Handle. `Mesh` documents the collectives.

        dim: torch's name for `axis`. The fast path supports no options: a call with options goes through all stages.
        """
        if dim is not None:
            axis = axis_or_dim(axis, dim, partial(self.where, row.name))
        elif axis is None:
            axis = 0
        if options is None:
            try:
                ready = self._ready.get((row, op, root, async_op, x.dtype))  # type: ignore[union-attr]
            except (AttributeError, TypeError):  # not a tensor, or op is not a string: reported later
                ready = None
            if (
                ready is not None
                # True, 1.0 and NumPy's 1 hash like 1, so check types. Which axis a negative number selects depends on ndim.
                and type(root) is type(axis) is type(concat) is int
                and not (axis or concat)
                and (result := self._fast_path(row, ready, x, out, async_op)) is not NotImplemented
            ):
                return result
            options = NO_OPTIONS
        return self._by_stages(Request(row, x, async_op, op, root, axis, concat, out, options))

    def barrier(self, async_op: bool = False) -> Handle[None] | None:
        """Return when every rank of the group has arrived."""
        handle: Handle[None] | None = self.collective(BARRIER, None, async_op)
        return handle

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
        named = Communicator(self.name, self.transport, self.who, parts)
        if group:
            frame = users_frame()
            with recorder.call(self, counter, 0, None, frame, root=root):
                recorder.announce_call(self.name, call, facts or {}, frame)
                yield named, recorder.set_bytes
            return
        try:
            yield named, moved.append
        finally:
            counter.calls += 1
            counter.nbytes += moved[-1]
            counter.seconds += clock() - began

    # -- the stages -----------------------------------------------------------------------------

    def _by_stages(self, request: Request) -> Any:
        """Check a call, compare it with the other ranks' calls, load, start and finish it, or return its Handle."""
        row, algorithm = request.row, request.options.algorithm
        name = row.name if algorithm is None else f"{row.name} by {algorithm.name}"
        recorder, checked = self.recorder, check(self, request)
        # Only the source of a scatter knows its bytes.
        x = None if row is SCATTER else checked.source
        nbytes = 0 if x is None else row.moved(x.nbytes, self.size)
        options = request.options
        # An empty list is compared as any other.
        waits = (options.waits or not request.async_op) and row.waits_for_all(
            nbytes or len(options.packed or ())
        )
        facts = {} if recorder.check is None else facts_of_call(checked, self.coord)
        counter, frame = counter_of(recorder.counters, self.name, name), users_frame(3)
        with recorder.call(self, counter, nbytes, x, frame, request.op, request.root):
            try:
                if not options.told or self.transport.compares_calls:
                    recorder.announce_call(self.name, name, facts, frame, waits)
            except MeshcommError:
                if row is SCATTER and checked.problem is not None:
                    raise checked.problem from None
                raise
            loaded = load(self, checked)
            if loaded.nbytes is not None:
                recorder.set_bytes(loaded.nbytes)
            if loaded.repeatable and recorder.check is None and recorder.spans is None:
                self._keep(checked)
            if request.async_op:
                works = self.start(loaded.call)
                return Handle(works, self, row.name, partial(finish, loaded), pending=recorder.later())
            if algorithm is None:
                self.run(loaded.call)
            else:
                call: Any = loaded.call
                algorithm.run(self, call.x.detach(), call.op)
            if row is BARRIER:
                self.confirm("barrier")
            return finish(loaded)

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
            arguments: tuple[Any, ...] = ([sent],)
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
            arguments = row.arguments(x, came, self.size, ())
        recorder = self.recorder
        nbytes = x.nbytes * self.size if row.whole else x.nbytes
        # Begins beyond this method and `collective`, because each frame that is looked at takes time.
        recorder.begin(self, counter, nbytes, x, users_frame(3))
        try:
            work = start(*arguments, options)
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

    def _keep(self, checked: Checked) -> None:
        """Prepare calls of this kind, which are no longer compared or traced, for the fast path."""
        row, x, async_op, op, root, *_ = checked.request
        dtype, wire = x.dtype, REDUCTIONS[op].wire if row.reduces else None
        name = None if wire is None else wire.name
        prepared = self.transport.prepare(row, name, root, not async_op) if dtype in CARRIED else None
        if prepared is not None:
            counter = counter_of(self.recorder.counters, self.name, row.name)
            divides = wire is not None and wire.divided
            ready = Ready(*prepared, counter, x.device, checked.gets, divides)
            self._ready[row, op, root, async_op, dtype] = ready


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
        communicator = self._explain(dims)
        self[dims] = communicator
        return communicator
