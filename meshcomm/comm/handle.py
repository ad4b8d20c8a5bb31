"""The handle of an asynchronous call: wait for it and get the result."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, final

from meshcomm.comm.checks import seconds_of
from meshcomm.errors import CollectiveTimeout, CommunicationError, MeshcommError, UnsupportedOp
from meshcomm.transport.torch_private import outside_graphs
from meshcomm.watching.callsite import line_of, users_frame
from meshcomm.watching.counters import PendingCall

if TYPE_CHECKING:
    from meshcomm.comm.caller import Caller

T = TypeVar("T")


class UnwaitedHandle(UserWarning):
    """The handle of an asynchronous call was dropped without a wait, so the result may not have been ready."""


@outside_graphs
@final
class Handle(Generic[T]):
    """An asynchronous call in flight. `wait()` returns the result of the blocking call.

    Do not use the tensors of the call before `wait()` returns. A handle that is dropped without a wait issues
    one UnwaitedHandle warning, which names the line that made the call.

    Handles are created by the library, not by users.

    Args:
        works: the backend's Work objects, or other handles.
        by: the object that issued the call.
        finish: computes the result after the Work objects complete.
        result: the result, if there is no `finish`.
        pending: the call's record, which is notified of each wait.
        held: an object to keep alive until the wait.
        source: for a receive, the sender's coord, or a function that returns the coord after the wait.
        confirm: see MessageLog.confirm.
    """

    _finish: Callable[[], T] | None = None
    _source: int | Callable[[], int] | None = None
    _confirm: Callable[[float | None], float | None] | None = None
    _error: Exception | None = None
    # Whether a limited wait has ended before the call.
    _cut = False
    # When the program first asked if the call has completed, or when `is_completed` last looked for lost ranks.
    _polled = 0.0

    def __init__(
        self,
        works: Sequence[Any],
        by: Caller,
        call: str,
        finish: Callable[[], T] | None = None,
        *,
        result: T | None = None,
        pending: PendingCall | None = None,
        source: int | Callable[[], int] | None = None,
        confirm: Callable[[float | None], float | None] | None = None,
        held: object = None,
    ) -> None:
        self._works: Sequence[Any] | None = works
        self._by = by
        self._call = call
        self._result = result
        self._pending = pending
        self._held = held
        self._lock = Lock()
        # Of most calls, these are the defaults of the class.
        if finish is not None:
            self._finish = finish
        if source is not None:
            self._source = source
        if confirm is not None:
            self._confirm = confirm
        # Store the instruction, not the line: finding the line takes longer, and it is rarely needed.
        place = None if pending is None else pending.place
        if place is None:
            frame = users_frame()
            place = frame.f_code, frame.f_lasti
        self._place = place

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOp(
            "the handle of a call cannot be pickled",
            given="pickle.dumps, copying or sending to another process",
            expected="a wait() in the process that made the call",
            hint="pickle handle.wait(), the call's result",
        )

    def wait(self, timeout_s: float | timedelta | None = None) -> T:
        """Block until the call completes, and return its result. Later calls return the result immediately.

        timeout_s: seconds, or a timedelta as in torch's Work. If None, the group's timeout applies.
        Raises:    CommunicationError, with the backend's error as its cause, on every wait; CallMismatchError
                   instead if the ranks' steps had already diverged. CollectiveTimeout after `timeout_s`, except
                   PeerLost, leaves the call under way: a later wait goes on.
        """
        if timeout_s is not None:
            seconds = timeout_s.total_seconds() if isinstance(timeout_s, timedelta) else timeout_s
            timeout_s = seconds_of(seconds, lambda: f"{self._by.where(self._call)}: wait")
        if self._works is not None:
            # Two threads may wait for one handle; the second must not continue before the first.
            with self._lock:
                self._end(timeout_s)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _end(self, timeout_s: float | None) -> None:
        """Wait for the Work objects and compute the result, once. An error is stored, and every wait raises it."""
        works = self._works
        if works is None:
            return
        pending = self._pending
        since = clock() if pending is None else pending.waits()
        try:
            try:
                if timeout_s is None and self._confirm is None and not (self._cut or self._polled):
                    for work in works:
                        work.wait()
                else:
                    self._wait_within(timeout_s)
            except (RuntimeError, TimeoutError) as error:
                failed = self._by.failed(self._call, error)
                if isinstance(error, TimeoutError) and type(failed) is CollectiveTimeout:
                    self._cut = True
                    failed.hint = f"wait() again, which goes on with this call; {failed.hint}"
                raise failed from error
            # `confirm` looks too; the call of it takes longer than this look.
            if self._by.recorder.ordered:
                self._by.confirm(self._call)
        except MeshcommError as error:
            if type(error) is CollectiveTimeout and self._cut:
                raise
            self._error = error
        finally:
            if pending is not None:
                pending.waited(since)
        if self._error is None:
            try:
                if callable(self._source):
                    self._source = self._source()
                if self._finish is not None:
                    self._result = self._finish()
            except Exception as error:
                self._error = error
        if self._error is not None:
            # The program never sees the handles that a list consists of.
            for work in works:
                if isinstance(work, Handle):
                    work._abandon()
        self._held = None
        # Set last, so that other threads continue only after the wait, and an interrupted wait can be repeated.
        self._works = self._finish = self._confirm = None

    def _wait_within(self, timeout_s: float | None) -> None:
        """Wait for the Work objects, for at most `timeout_s` seconds in all; None for the rest of the group's timeout."""
        until = math.inf if timeout_s is None else clock() + timeout_s
        left_s = None if self._confirm is None else self._confirm(timeout_s)
        if timeout_s is None:
            if self._cut or self._polled:
                left_s = left_s or self._by.transport.timeout_s or None
            if left_s is not None:
                until = clock() + left_s
        while self._works:
            work, left_s = self._works[0], max(until - clock(), 0.001)
            if left_s == math.inf:
                work.wait()
            elif isinstance(work, Handle):
                try:
                    work.wait(None if timeout_s is None else left_s)
                except MeshcommError:
                    self._cut = work._cut
                    raise
            else:
                self._by.wait_within(work, left_s, timeout_s is None)
            # A message can be waited for only once.
            self._works = self._works[1:]

    def _abandon(self) -> None:
        """Let the call go without a wait, because its group has failed. Its tensors stay alive as long as the backend has it."""
        if self._works is not None:
            self._works, self._finish, self._confirm = None, None, None
            self._error = CommunicationError(f"{self._by.where(self._call)}: the call was abandoned")

    @property
    def _line(self) -> str:
        return line_of(*self._place)

    def _at_once(self) -> None:
        """Record that the library waits immediately, so that the call counts as blocking."""
        if self._pending is not None:
            self._pending.at_once()

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise without blocking.

        torch's own Work for a message of Gloo does not complete before it is waited for, so another thread waits for it.
        """
        works = self._works
        if works is None:
            return True
        if all(
            work.is_completed() if isinstance(work, Handle) else self._by.has_completed(work)
            for work in works
        ):
            return True
        now, timeout_s = clock(), self._by.transport.timeout_s
        self._polled = self._polled or now
        if not timeout_s or now - self._polled < timeout_s:
            return False
        # A backend does not end a receive from any source if no rank is left that could send.
        self._polled = now
        try:
            self.wait(0.001)
        except CollectiveTimeout as error:
            return error is self._error
        except Exception:
            return True
        return True

    def is_success(self) -> bool:
        """Return whether the call has completed without an error."""
        if self._works is None:
            return self._error is None
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the call; None while the call is in flight and after success."""
        if self._error is not None or self._works is None:
            return self._error
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> T:
        """Return the result of `wait`. Raises CommunicationError before `wait` has been called."""
        if self._works is not None:
            raise CommunicationError(
                f"{self._by.where(self._call)}: the result was asked for before wait()",
                given=f"a handle made at {self._line}",
                expected="handle.wait(), which returns the result",
                hint="handle.wait()",
            )
        return self.wait()

    @property
    def source(self) -> int:
        """The sender's coord for a completed receive."""
        if self._source is None or self._works is not None:
            raise CommunicationError(
                f"{self._by.where(self._call)}: the call has no source",
                given="a call that receives nothing" if self._source is None else "a receive before wait()",
                expected="a receive that has been waited for",
                hint="handle.wait(), then handle.source",
            )
        assert not callable(self._source)
        return self._source

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        # Missing if __init__ did not finish. At the end of Python, other modules are gone.
        works = getattr(self, "_works", None)
        if not works or is_over():
            return
        begun = [work for work in works if not isinstance(work, Handle)]
        self._by.transport.dropped(begun, (self._held, self._result))
        if not (self._cut or self._by.transport.tells_unwaited):
            warnings.warn(
                f"{self._by.where(self._call)}: the handle made at {self._line} was dropped without a wait()",
                UnwaitedHandle,
                stacklevel=2,
                source=self,
            )
