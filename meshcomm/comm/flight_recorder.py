"""Records the calls in one group: operation, arguments, line, and whether a call is in progress."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter as clock
from traceback import clear_frames
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, final
from weakref import ref

from torch import Tensor
from torch.autograd.profiler import record_function

from meshcomm.collectives import BARRIER, HOOKED, ROWS, Call
from meshcomm.comm.callsite import C10D, is_inside, line_of, users_frame
from meshcomm.comm.counters import CallCounter, Counters, Entry, PendingCall, counter_of
from meshcomm.comm.facts import bytes_of, facts_of_hook, is_refused, shortened
from meshcomm.comm.mismatch import CallCheck, StepHistory
from meshcomm.comm.p2p_log import MessageCheck, MessageLog, PendingMessage
from meshcomm.comm.spans import Span, Spans
from meshcomm.comm.torch_private import arguments_of, tag_of
from meshcomm.errors import MeshcommError
from meshcomm.transport.base import Direction, Transport, Work
from meshcomm.transport.torch_changes import end_wait_by
from meshcomm.transport.torch_private import HOOK_NAMES, GroupHooks, capturing, profiling, work_error

KEPT: Final = 256
# How many recent collectives a rank reports to the others.
_RECENT: Final = 16
# Collectives to which all ranks contribute tensors of the same size.
_EQUALLY_LARGE: Final = frozenset(name for name, row in ROWS.items() if row.in_place)
# The upper limit on recent collectives for backends that run calls long after they were made.
_MOST_RECENT: Final = 128

Inquire = Callable[["FlightRecorder", str, BaseException], MeshcommError]


# The id of the recorder that saw this process's last collective outside the mesh.
_LATEST: Final = [0]


@final
class FlightRecorder:
    """Records one group's calls under all its names: a ring buffer of the last 256 collectives, counters and messages.

    The mesh's own calls run between `begin` and `end`, or inside `with recorder.call(...)`. Calls that other code makes
    on the same group (dist.*, DTensor, FSDP, DDP) are observed through the group's hooks; see `watch`.

    started:   the sequence number of the last collective; equal numbers on the ranks of a group mean the same call.
    under_way: the argument of the call in progress; None if no call is in progress.
    ordered:   whether the backend queues calls, and runs them in order after they have returned.
    work:      the Work of the last collective made outside the mesh or, if calls are ordered, of the last call of any
               kind. message: that call, if it is a message. captured: whether a CUDA graph has captured a call.
               over: the number of a collective known to have completed, as have all earlier ones.
    left:      when each call in the ring returned to the program, on this host's monotonic clock.
    counters:  the counters of all calls. messages: the group's messages, counted by peer.
    refused:   sequence numbers of calls that sent nothing because the ranks were about to make different calls.
    hooks:     the hooks of `watch`. check: compares the first collectives between the ranks; None afterward.
    difference: returns the error if such a comparison has found a difference; see CallCheck.difference.
    steps:     the calls of each step, if the program calls `mesh.step`.
    group_name, timeout_s: the name and timeout of the backend's group, if a watchdog created the recorder.
    lost:      takes a call and whether a peer is gone; returns the error if ranks were lost and replaced.
    plan:      the suffix of the labels in profilers. spans: receives every call while a trace is recorded; span: the last
               call's. quick: dictionaries of prepared calls, emptied for a trace because prepared calls bypass it.

    Args:
        label: the group and its common coords, as in `tp[pp=0 dp=1]`.
        ranks: the group's global ranks, in coord order.
        inquire: creates the error for a failed call. The error names the ranks that have not arrived and what they are doing.
        check: compares the first messages; see MessageCheck.
    """

    def __init__(
        self, label: str, ranks: list[int], inquire: Inquire, check: MessageCheck | None = None
    ) -> None:
        self.label = label
        self.plan = ""
        self.group_name = ""
        self.timeout_s: Callable[[], float] = partial(float, "inf")
        self.lost: Callable[[str, bool, bool], MeshcommError | None] = lambda what, waits, confirms: None
        self.ranks = ranks
        self.inquire = inquire
        self.started = 0
        self.under_way: object = None
        self.ordered = False
        self.work: Any = None
        self.message: PendingMessage | None = None
        self.captured = False
        self.over = 0
        self.ring: list[Entry | None] = [None] * KEPT
        self.left = [0.0] * KEPT
        self.counters: Counters = {}
        self.messages = MessageLog(self.counters, label, check)
        self.quick: list[dict[Any, Any]] = []
        self.spans: Spans | None = None
        self.span: Span | None = None
        self.refused: deque[int] = deque(maxlen=KEPT)
        self.steps = StepHistory()
        # The number of the last call that belongs to a completed step.
        self._noted = 0
        self._caller: Caller | None = None
        self._counted = True
        self._outer: object = None
        self._past: PendingMessage | None = None
        self._profiled: Any = None
        # Whether a collective outside the mesh is between its two hooks.
        self._issued = False
        # Whether that collective's Work reports its end. Gloo's Work of a reduce_scatter never does (torch 2.15).
        self._tells_end = True
        self._succeeded: object = None
        self.hooks: GroupHooks | None = None
        self.check: CallCheck | None = None
        self.difference: Callable[[], MeshcommError | None] = lambda: None

    @property
    def inside(self) -> bool:
        """Whether the group's last collective is under way."""
        if self.under_way is not None:
            return True
        return self.pending and (self._tells_end or is_inside(C10D))

    @property
    def past_the_mesh(self) -> str:
        """The words that mark a call made outside the mesh in errors about a mesh group; "" for a group outside the mesh."""
        return "made outside the mesh " if self.plan else ""

    @property
    def pending(self) -> bool:
        """Whether a call made outside the mesh has not completed, as far as its backend knows."""
        if self.work is None or capturing() or self.work.is_completed():
            return False
        return self._tells_end or _LATEST[0] == id(self)

    @property
    def failure(self) -> RuntimeError | None:
        """The error with which the backend ended the last call; None if it did not."""
        work = self.work
        if work is None or work is self._succeeded or capturing() or not work.is_completed():
            return None
        error = work_error(work)
        self._succeeded = work if error is None else None
        return error

    # -- calls of the mesh ---------------------------------------------------------------------------

    def compares(self, check: CallCheck) -> None:
        """Compare the first collectives with `check`."""
        self.check, self.difference = check, check.difference

    def call(
        self,
        caller: Caller | None,
        counter: CallCounter,
        nbytes: int,
        x: Tensor | None,
        op: str | None = None,
        root: int = -1,
    ) -> FlightRecorder:
        """Record the start of a collective, which ends with the `with` block.

        A RuntimeError in the block comes from the backend and becomes an error of `caller`, which is None outside the mesh.
        """
        self.begin(caller, counter, nbytes, x, users_frame(2))
        if self.span is not None:
            self.span.op, self.span.root = op, root
        return self

    def begin(
        self,
        caller: Caller | None,
        counter: CallCounter,
        nbytes: int,
        x: Tensor | None,
        frame: FrameType,
    ) -> None:
        """Record the start of a collective at the user's `frame`; `end` marks its end. For the other arguments, see `call`."""
        self.started = number = self.started + 1
        self._outer, self.under_way = self.under_way, True if x is None else x
        self._caller = caller
        self._counted = True
        # Store the instruction, not the line: finding the line takes longer than everything else here.
        self.ring[number % KEPT] = counter, nbytes, frame.f_code, frame.f_lasti, clock()
        if self.spans is not None:
            began, line = self.began(number), line_of(frame.f_code, frame.f_lasti)
            span = Span(self.label, counter.name, counter.call, line, began, number, nbytes)
            span.of(() if x is None else (x,))
            self.span = self.spans.keep(span)
        if caller is not None and profiling():
            self._profiled = record_function(f"meshcomm::{counter.call} {counter.name}{self.plan}")
            self._profiled.__enter__()

    def end(self) -> None:
        """Record that the collective under way has ended, has been started, or has failed."""
        place = self.started % KEPT
        entry = self.ring[place]
        self.left[place] = now = clock()
        if entry is not None and self._counted:
            total = entry[0]
            total.calls += 1
            total.nbytes += entry[1]
            total.seconds += now - entry[4]
            if self.span is not None:
                self.span.left = now
        if self._profiled is not None:
            self._profiled.__exit__(None, None, None)
            self._profiled = None
        self.under_way, self._caller = self._outer, None

    def __enter__(self) -> FlightRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            entry = self.ring[self.started % KEPT]
            if isinstance(error, RuntimeError) and self._caller is not None and entry is not None:
                # The error must not keep the backend's Work alive, and with it the group's sockets.
                clear_frames(trace)
                raise self._caller.failed(entry[0].call, error) from error
            check = self.check
            if check is not None and check.raised:
                # Nor must an error about calls that are under way.
                clear_frames(trace)
            # An Exception between the comparison and the start is raised on every rank; an interrupt is not.
            interrupted = error is not None and not isinstance(error, Exception)
            if interrupted and check is not None and check.announced and entry is not None:
                check.leave(entry[0].name, entry[0].call, type(error).__name__)
            # This may be any error from reading the result of an abandoned call.
            if isinstance(error, Exception) and self._caller is not None and entry is not None:
                self._caller.confirm(entry[0].call, error)
        finally:
            self.end()

    def set_bytes(self, nbytes: int) -> None:
        """Set the bytes of the call under way, as the counters count them."""
        place = self.started % KEPT
        entry = self.ring[place]
        if entry is not None:
            self.ring[place] = (entry[0], nbytes, *entry[2:])
        if self.span is not None:
            self.span.nbytes = nbytes

    def queued(self, work: Any, message: PendingMessage | None = None) -> None:
        """Record that the backend has queued the call under way, and will run it after earlier calls."""
        # The Work of a captured call never completes: only its graph does.
        captured = capturing()
        self.captured |= captured
        self.work, self.message = None if captured else work, message

    def refuse(self) -> None:
        """Record that the last call sent nothing. Every rank in the group records this, whatever call it was about to make."""
        self.refused.append(self.started)

    def announce_call(self, name: str, call: str, facts: dict[str, Any], waits: bool = True) -> bool:
        """Compare the call in progress with the other ranks' calls, while calls are compared. Return whether it was compared.

        waits: whether the call itself waits for all ranks of the group. See CallCheck.
        Raises CallMismatchError if the ranks make different calls.
        """
        # The host reads the result of the comparison, which would abort a graph capture.
        if self.check is None or capturing():
            return False
        check = self.check
        try:
            if check.active:
                waits = waits and not self.ordered
                return check.announce_call(name, call, facts, waits, self.started)
            check.refuse()
            if check.settled():
                self.check = None
            return False
        except MeshcommError:
            self.refuse()
            raise

    def issued(self, works: Sequence[Any]) -> None:
        """Record that the backend has been given the call under way, as these Works."""
        check = self.check
        if check is not None:
            check.announced = False
            for work in works if check.guarded and not self.ordered else ():
                end_wait_by(work, check.ended)

    def later(self) -> PendingCall | None:
        """Record that the program will wait for the call later. Return the object to notify of each wait for the call."""
        place = self.started % KEPT
        entry = self.ring[place]
        self._counted = False
        now = clock()
        if self.span is not None:
            self.span.left = now
        return (
            None if entry is None else PendingCall(entry[0], entry[1], entry[4], now, self.span, entry[2:4])
        )

    # -- calls outside the mesh -----------------------------------------------------------------------

    def watch(self, group: Any, name: str, who: str) -> None:
        """Observe every call that other code makes on `group`, along the dim `name`, if torch has hooks for groups."""
        # A weak reference, because Python does not detect a reference cycle through torch's group.
        self.hooks = hooked(group, ref(self), name, who)

    def before(self, name: str, who: str, given: Any) -> None:
        """Record that a call outside the mesh is about to be issued on the group."""
        # A call that the backend refused never reached its second hook.
        self._issued, self._past = False, None
        kind = HOOK_NAMES[int(given.name)]
        row = HOOKED.get(kind)
        tensors = given.input_tensors
        if row is None:
            # A message from any source has no root. torch refuses other roots that the group does not have.
            if kind in ("SEND", "RECV") and (root := given.root) < len(self.ranks):
                peer = root if root >= 0 else None
                tensors = tensors or given.output_tensors
                direction: Direction = "send" if kind == "SEND" else "recv"
                # NCCL has no tags, and cannot receive what another size was sent for.
                tag = 0 if self.ordered else tag_of(sys._getframe(2))
                self._past = self.messages.past(name, direction, peer, tag, tensors, users_frame(3))
            return
        if self.check is not None:
            # Not of every call: a call that is no longer compared is only recorded.
            arguments = arguments_of(sys._getframe(2))
            if is_refused(kind, given, len(self.ranks), not self.ordered, arguments):
                return
        # A barrier may pass a tensor that is never read.
        tensors = [] if row is BARRIER else tensors
        one = tensors[0] if len(tensors) == 1 else None
        nbytes = sum(map(bytes_of, tensors)) if one is None else bytes_of(one)
        counter = counter_of(self.counters, name, row.name, True)
        _LATEST[0] = id(self)
        self.begin(None, counter, row.moved(nbytes, len(self.ranks)), one, users_frame(3))
        if self.span is not None:
            self.span.op, self.span.root = (
                getattr(given, "op", None),
                given.root if row.root is not None else -1,
            )
            if one is None:
                self.span.of(tensors)
        try:
            if self.check is not None:
                facts = facts_of_hook(row, given, self.check.coord, len(self.ranks), arguments)
                waits = not given.async_op and row.waits_for_all(nbytes)
                self.announce_call(name, row.name, facts, waits)
        except RuntimeError as error:
            where = f'{row.name} {self.past_the_mesh}along "{name}" on {who}'
            raise self.inquire(self, where, error) from error
        finally:
            self.under_way = None
        self._issued, self._tells_end = True, self.ordered or row.name != "reduce_scatter"

    def after(self, given: Any) -> None:
        """Record that the call outside the mesh has been issued."""
        if self._issued:
            self._issued = False
            self.end()
            self.queued(given.work)
            if self.check is not None:
                self.issued([given.work])
        elif self._past is not None:
            self.messages.posted(self._past, given.work)
            if self.ordered:
                self.queued(given.work, self._past)
            self._past = None

    # -- what is known -------------------------------------------------------------------------------

    def note(self, step: int, number: int, excluded: bool, ended_at: tuple[CodeType, int]) -> None:
        """Record that a step of the program is over; see StepHistory.note. The calls that are still in the ring are compared.

        No call of an excluded step is compared. Refused calls are never compared.
        """
        first, self._noted = self._noted + 1, self.started
        numbers = range(self.started + 1 if excluded else first, self.started + 1)
        made = [self.ring[n % KEPT] for n in numbers[-KEPT:] if n not in self.refused]
        self.steps.note(step, number, len(numbers), [entry for entry in made if entry is not None], ended_at)

    def trace(self, spans: Spans | None) -> None:
        """Record every later call in `spans`; stop recording if `spans` is None."""
        self.spans = self.messages.spans = spans
        self.span = None
        for prepared in self.quick:
            prepared.clear()

    def began(self, number: int) -> float:
        """Return the start time of call `number`, in seconds on the monotonic clock. The call must be in the ring."""
        entry = self.ring[number % KEPT]
        return 0.0 if entry is None else entry[4]

    def remembered(self) -> range:
        """Return the sequence numbers of the calls in the ring buffer."""
        return range(max(1, self.started - KEPT + 1), self.started + 1)

    def close(self) -> None:
        """Release the message comparison and its connection, and the prepared calls, which keep the group alive."""
        self.trace(None)
        self.quick.clear()
        self.messages.close()
        if self.hooks is not None:
            self.hooks.remove()
        self.work = self.check = self._succeeded = None
        self.difference = lambda: None

    def call_data(self, number: int) -> dict[str, Any] | None:
        """Return the call `number` as plain data; None if it is not in the ring. over: None while it is under way."""
        entry = self.ring[number % KEPT]
        if entry is None:
            return None
        counter, nbytes, code, instruction, began = entry
        return {
            "number": number,
            "dim": counter.name,
            "call": counter.call,
            "bytes": nbytes,
            "callsite": line_of(code, instruction),
            "began": began,
            "over": None if number == self.started and self.inside else self.left[number % KEPT],
        }

    def last(self) -> dict[str, Any] | None:
        """Return the latest call as plain data, or None if there was none. shape: only while it is under way."""
        found = self.call_data(self.started)
        if found is not None:
            shape = getattr(self.under_way, "shape", None)
            found["shape"] = None if shape is None else list(shape)
            found["inside"] = found["over"] is None
        return found

    def history(self) -> list[dict[str, Any]]:
        """Return the calls in the ring and the most recent messages as plain data, in the order in which they began."""
        calls = [call for number in self.remembered() if (call := self.call_data(number)) is not None]
        return sorted([*calls, *self.messages.history()], key=lambda call: call["began"])

    def status(self) -> dict[str, Any]:
        """Return the state of the group's calls, as plain data.

        recent: recent collectives except refused ones, each with its sequence number, operation, callsite and, if equal
        on all ranks, its bytes. If calls are ordered, the list begins with the first call that may not have completed.
        """
        first = self.started - _RECENT
        if self.ordered:
            first = min(first, max(self.over, self.started - _MOST_RECENT))
        numbers = range(max(first, 0) + 1, self.started + 1)
        recent = [self.call_data(n) for n in numbers if n not in self.refused]
        return {
            "label": self.label,
            "ranks": self.ranks,
            "started": self.started,
            "last": self.last(),
            "recent": [
                (
                    call["number"],
                    call["call"],
                    call["callsite"],
                    call["bytes"] if call["call"] in _EQUALLY_LARGE else None,
                )
                for call in recent
                if call
            ],
            "compared": self._compared(),
            "messages": self.messages.status(self.ranks),
            "steps": self.steps.data(),
        }

    def _compared(self) -> dict[int, Sequence[Any]]:
        """Return the compared calls that may differ on another rank as plain data, by their number among compared calls."""
        made = [] if self.check is None else list(self.check.made)
        calls = ((each, self.call_data(each[1])) for each in made)
        return {
            number: [call, shortened(facts), "?" if recorded is None else recorded["callsite"]]
            for (number, _, call, facts), recorded in calls
        }


class Caller:
    """Issues calls along the dim `name`, provides the beginning of their error messages, and explains failed calls.

    who: this rank and its coords, for errors, as in `rank 5 (pp=1 dp=0 tp=1)`.
    """

    def __init__(self, name: str, transport: Transport, who: str, recorder: FlightRecorder) -> None:
        self.name, self.who = name, who
        self.transport, self.recorder = transport, recorder
        self.size, self.coord = transport.size, transport.coord
        # The device types of tensors that calls take.
        self.kinds = transport.kinds

    def where(self, call: str) -> str:
        """Return the beginning of an error about a call."""
        return f'{call} along "{self.name}" on {self.who}'

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        """Return the error for a call that the backend gave up on."""
        return self.recorder.inquire(self.recorder, self.where(call), error)

    def confirm(self, call: str, error: BaseException | None = None) -> None:
        """Raise RankLost from `error` if ranks have been lost. Called when the host has waited, or has read a value.

        If calls are queued, a call that is abandoned because of a lost rank ends without an error, with an undefined result.
        """
        recorder = self.recorder
        if recorder.ordered and (lost := recorder.lost(self.where(call), False, error is None)) is not None:
            raise lost from error

    def start(self, call: Call) -> Sequence[Work]:
        """Make the backend start a collective. Return its Work objects, or none if it has already completed."""
        work = self.transport.start(call)
        if self.recorder.ordered:
            self.recorder.queued(work)
        works = () if work is None else (work,)
        self.recorder.issued(works)
        return works

    def run(self, call: Call) -> None:
        """Start a collective and wait for it."""
        for work in self.start(call):
            work.wait()

    def wait_within(self, work: Work, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for one of the group's Work objects."""
        self.transport.wait_within(work, timeout_s)


def hooked(group: Any, recorder_of: Callable[[], FlightRecorder | None], name: str, who: str) -> GroupHooks:
    """Let the current recorder, if any, observe each call that other code makes on `group`, along the dim `name`."""

    # The mesh's own calls are recorded already, and every statement here slows them down.
    def before(given: Any) -> None:
        recorder = recorder_of()
        if recorder is not None and recorder.under_way is None and recorder.messages.waiting is None:
            recorder.before(name, who, given)

    def after(given: Any) -> None:
        recorder = recorder_of()
        if recorder is not None and recorder.under_way is None and recorder.messages.waiting is None:
            recorder.after(given)

    return GroupHooks(group, before, after)
