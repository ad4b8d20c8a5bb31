"""The log of the calls in one group: a ring of rows, each with the call, its bytes, its line, and when it began and returned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter as clock
from traceback import clear_frames
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, Protocol, final

from torch import Tensor
from torch.autograd.profiler import record_function

from meshcomm.errors import MeshcommError
from meshcomm.transport.torch_changes import end_wait_by
from meshcomm.transport.torch_private import GroupHooks, capturing, profiling, work_error
from meshcomm.watching.callsite import C10D, is_inside, line_of, origin
from meshcomm.watching.compare import CallCheck, MessageCheck
from meshcomm.watching.counters import CallCounter, Counters, Entry, PendingCall
from meshcomm.watching.messages import MessageLog, PendingMessage
from meshcomm.watching.spans import Span, Spans
from meshcomm.watching.steps import StepHistory
from meshcomm.watching.words import failure

KEPT: Final = 256
# How many recent collectives a rank reports to the others.
_RECENT: Final = 16
# The upper limit on recent collectives for backends that run calls long after they were made.
_MOST_RECENT: Final = 128
# The id of the recorder that saw this process's last collective outside the mesh.
LATEST: Final = [0]

Inquire = Callable[["FlightRecorder", str, BaseException], MeshcommError]


class Issuer(Protocol):
    """What issues the mesh's own calls; see comm.caller."""

    def failed(self, call: str, error: BaseException) -> MeshcommError: ...

    def confirm(self, call: str, error: BaseException | None = None) -> None: ...


@final
class FlightRecorder:
    """Records one group's calls under all its names: a ring buffer of the last 256 collectives, counters and messages.

    The mesh's own calls run between `begin` and `end`, or inside `with recorder.call(...)`. Calls that other code makes
    on the same group (dist.*, DTensor, FSDP, DDP) are recorded through the group's hooks; see hooks.py.

    started:   the sequence number of the last collective; equal numbers on the ranks of a group mean the same call.
    under_way: the argument of the call in progress; None if no call is in progress.
    ordered:   whether the backend queues calls, and runs them in order after they have returned.
    work:      the Work of the last collective made outside the mesh or, if calls are ordered, of the last call of any
               kind. message: that call, if it is a message. captured: whether a CUDA graph has captured a call.
               over: the number of a collective known to have completed, as have all earlier ones. tells_end: whether the Work
               reports its end. Gloo's Work of a reduce_scatter never does (torch 2.15).
    left:      when each call in the ring returned to the program, on this host's monotonic clock.
    counters:  the counters of all calls. messages: the group's messages, counted by peer.
    refused:   sequence numbers of calls that sent nothing because the ranks were about to make different calls.
    hooks:     the group's hooks. check: compares the first collectives between the ranks; None afterward.
    of_job:    as in MeshcommError.
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
        self,
        label: str,
        ranks: list[int],
        inquire: Inquire = lambda _, where, error: failure(where, error),
        check: MessageCheck | None = None,
    ) -> None:
        self.label = label
        self.of_job = True
        self.plan = self.group_name = ""
        self.timeout_s: Callable[[], float] = partial(float, "inf")
        self.lost: Callable[[str, bool, bool], MeshcommError | None] = lambda what, waits, confirms: None
        self.ranks = ranks
        self.inquire = inquire
        self.started = self.over = 0
        self.under_way: object = None
        self.ordered = self.captured = False
        self.tells_end = True
        self.work: Any = None
        self.message: PendingMessage | None = None
        self.ring: list[Entry | None] = [None] * KEPT
        self.left = [0.0] * KEPT
        self.counters: Counters = {}
        self.messages = MessageLog(self.counters, label, check)
        self.quick: list[dict[Any, Any]] = []
        self.spans: Spans | None = None
        self.span: Span | None = None
        self.refused: deque[int] = deque(maxlen=KEPT)
        self.steps = StepHistory()
        self.hooks: GroupHooks | None = None
        self.check: CallCheck | None = None
        self.difference: Callable[[], MeshcommError | None] = lambda: None
        # The number of the last call that belongs to a completed step.
        self._noted = 0
        self._caller: Issuer | None = None
        self._counted = True
        self._outer: object = None
        self._profiled: Any = None
        self._succeeded: object = None

    # -- recording -----------------------------------------------------------------------------------

    def call(
        self,
        caller: Issuer | None,
        counter: CallCounter,
        nbytes: int,
        x: Tensor | None,
        frame: FrameType,
        op: str | None = None,
        root: int = -1,
    ) -> FlightRecorder:
        """Record the start of a collective at the user's `frame`. It ends with the `with` block.

        A RuntimeError in the block comes from the backend and becomes an error of `caller`, which is None outside the mesh.
        """
        self.begin(caller, counter, nbytes, x, frame)
        if self.span is not None:
            self.span.op, self.span.root = op, root
        return self

    def begin(
        self,
        caller: Issuer | None,
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
            line = line_of(frame.f_code, frame.f_lasti)
            span = Span(self.label, counter.name, counter.call, line, self.began(number), number, nbytes)
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
            if error is not None:
                if isinstance(error, MeshcommError):
                    error.of_job = self.of_job
                self._failed(error, trace)
        finally:
            self.end()

    def _failed(self, error: BaseException, trace: TracebackType | None) -> None:
        entry = self.ring[self.started % KEPT]
        if entry is None:
            return
        call = entry[0].call
        # A stored error must not keep the backend's Work alive, and with it the group's sockets: neither in the frames of
        # `trace` nor in this one, which therefore names neither the caller nor the comparison.
        if isinstance(error, RuntimeError) and self._caller is not None:
            clear_frames(trace)
            raise self._caller.failed(call, error) from error
        check = self.check
        if check is not None and check.raised:
            clear_frames(trace)
        # An Exception between the comparison and the start is raised on every rank; an interrupt is not.
        if check is not None and check.announced is not None and not isinstance(error, Exception):
            check.leave(entry[0].name, check.announced, type(error).__name__)
        # This may be any error from reading the result of an abandoned call.
        if self.ordered and isinstance(error, Exception) and self._caller is not None:
            self._caller.confirm(call, error)

    def set_bytes(self, nbytes: int) -> None:
        """Set the bytes of the call under way, as the counters count them."""
        place = self.started % KEPT
        entry = self.ring[place]
        if entry is not None:
            self.ring[place] = (entry[0], nbytes, *entry[2:])
        if self.span is not None:
            self.span.nbytes = nbytes

    def announce_call(
        self, name: str, call: str, facts: dict[str, Any], frame: FrameType, waits: bool = True
    ) -> None:
        """Compare the call in progress with the other ranks' calls, while calls are compared.

        frame: the user's. waits: whether the call itself waits for all ranks of the group. See CallCheck.
        Raises CallMismatchError if the ranks make different calls.
        """
        check = self.check
        # The host reads the result of the comparison, which would abort a graph capture.
        if check is None or capturing():
            return
        try:
            check.announce_call(name, call, facts, waits and not self.ordered, frame)
        except MeshcommError:
            self.refuse()
            raise
        if check.is_over:
            self.check = None

    def refuse(self) -> None:
        """Record that the last call sent nothing. Every rank in the group records this, whatever call it was about to make."""
        self.refused.append(self.started)

    def queued(self, work: Any, message: PendingMessage | None = None) -> None:
        """Record that the backend has queued the call under way, and will run it after earlier calls."""
        # The Work of a captured call never completes: only its graph does.
        captured = capturing()
        self.captured |= captured
        self.work, self.message = None if captured else work, message

    def issued(self, works: Sequence[Any]) -> None:
        """Record that the backend has been given the call under way, as these Works."""
        check = self.check
        if check is not None:
            check.announced = None
            for work in works if check.guarded and not self.ordered else ():
                end_wait_by(work, check.ended)

    def later(self) -> PendingCall | None:
        """Record that the program will wait for the call later. Return the object to notify of each wait for the call."""
        self._counted = False
        now, entry = clock(), self.ring[self.started % KEPT]
        if self.span is not None:
            self.span.left = now
        if entry is None:
            return None
        counter, nbytes, code, instruction, began = entry
        return PendingCall(counter, nbytes, began, now, self.span, (code, instruction))

    def note(self, step: int, number: int, excluded: bool, ended_at: tuple[CodeType, int]) -> None:
        """Record that a step of the program is over; see StepHistory.note. The calls that are still in the ring are compared.

        No call of an excluded step is compared. Refused calls are never compared.
        """
        first, self._noted = self._noted + 1, self.started
        numbers = range(self.started + 1 if excluded else first, self.started + 1)
        made = [self.ring[n % KEPT] for n in numbers[-KEPT:] if n not in self.refused]
        self.steps.note(step, number, len(numbers), [entry for entry in made if entry is not None], ended_at)

    def compares(self, check: CallCheck) -> None:
        """Compare the first collectives with `check`."""
        self.check, self.difference = check, check.difference

    def trace(self, spans: Spans | None) -> None:
        """Record every later call in `spans`; stop recording if `spans` is None."""
        self.spans = self.messages.spans = spans
        self.span = None
        for prepared in self.quick:
            prepared.clear()

    def close(self) -> None:
        """Release the message comparison and its connection, and the prepared calls, which keep the group alive."""
        self.trace(None)
        self.quick.clear()
        self.messages.close()
        if self.hooks is not None:
            self.hooks.remove()
        self.work = self.check = self._succeeded = None
        self.difference = lambda: None

    # -- what is known -------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """Whether the group's last collective is under way."""
        if self.under_way is not None:
            return True
        return self.pending and (self.tells_end or is_inside(C10D))

    @property
    def past_the_mesh(self) -> str:
        """The words that mark a call made outside the mesh in errors about a mesh group; "" for a group outside the mesh."""
        return "made outside the mesh " if self.plan else ""

    @property
    def pending(self) -> bool:
        """Whether a call made outside the mesh has not completed, as far as its backend knows."""
        if self.work is None or capturing() or self.work.is_completed():
            return False
        return self.tells_end or LATEST[0] == id(self)

    @property
    def failure(self) -> RuntimeError | None:
        """The error with which the backend ended the last call; None if it did not."""
        work = self.work
        if work is None or work is self._succeeded or capturing() or not work.is_completed():
            return None
        error = work_error(work)
        self._succeeded = work if error is None else None
        return error

    def began(self, number: int) -> float:
        """Return the start time of call `number`, in seconds on the monotonic clock. The call must be in the ring."""
        entry = self.ring[number % KEPT]
        return 0.0 if entry is None else entry[4]

    def remembered(self) -> range:
        """Return the sequence numbers of the calls in the ring buffer."""
        return range(max(1, self.started - KEPT + 1), self.started + 1)

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
            **origin(code, instruction),
            "began": began,
            "over": None if number == self.started and self.inside else self.left[number % KEPT],
        }

    def last(self) -> dict[str, Any] | None:
        """Return the latest call as plain data, or None if there was none. shape: only while it is under way."""
        row = self.call_data(self.started)
        if row is not None:
            shape = getattr(self.under_way, "shape", None)
            row["shape"] = None if shape is None else list(shape)
            row["inside"] = row["over"] is None
        return row

    def history(self) -> list[dict[str, Any]]:
        """Return the calls in the ring and the most recent messages as plain data, in the order in which they began."""
        calls = [row for number in self.remembered() if (row := self.call_data(number)) is not None]
        return sorted([*calls, *self.messages.history()], key=lambda row: row["began"])

    def status(self) -> dict[str, Any]:
        """Return the state of the group's calls, as plain data.

        recent: recent collectives except refused ones. If calls are ordered, the list begins with the first call that may not
        have completed. compared: the compared calls that may differ on another rank, by their number among compared calls.
        """
        first = self.started - _RECENT
        if self.ordered:
            first = min(first, max(self.over, self.started - _MOST_RECENT))
        numbers = range(max(first, 0) + 1, self.started + 1)
        compared = [] if self.check is None else list(self.check.made)
        return {
            "label": self.label,
            "ranks": self.ranks,
            "started": self.started,
            "last": self.last(),
            # All ranks ask each other for this, so it lacks what the verdict does not read.
            "recent": [
                {key: row[key] for key in row if key not in ("dim", "began", "over")}
                for n in numbers
                if n not in self.refused and (row := self.call_data(n)) is not None
            ],
            "compared": {number: told._asdict() for number, told in compared},
            "messages": self.messages.status(self.ranks),
            "steps": self.steps.data(),
        }
