"""The functions of torch that meshcomm replaces: what each is replaced for, and the torch versions that this was tried with.

Importing meshcomm replaces nothing. A function is replaced while a mesh is open, or a watch or a dry run needs it, and is put
back when the last of them closes, in whatever order they close. `REPLACED` lists the functions.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from inspect import unwrap
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from meshcomm.transport.torch_private import bindings, default_group, outside_graphs


@final
class Replaced:
    """A function of torch: `torchs`, or None in a version without it. tried: the versions that its replacement was tried with."""

    def __init__(self, owner: Any, name: str, tried: str) -> None:
        self.owner, self.name, self.tried = owner, name, tried
        self.torchs: Any = getattr(owner, name, None)
        self._ours: Any = None

    def put(self, ours: Callable[..., Any]) -> None:
        """Replace torch's function by `ours`."""
        # Other code may have replaced or restored it in the meantime.
        if self.torchs is not None and getattr(self.owner, self.name) is not ours:
            self._ours = ours
            setattr(self.owner, self.name, ours)

    def put_back(self) -> None:
        """Put torch's function back, unless other code has replaced it in the meantime."""
        if self._ours is not None and getattr(self.owner, self.name) is self._ours:
            setattr(self.owner, self.name, self.torchs)
        self._ours = None


# Asked by calls without a timeout: `dist.monitored_barrier` then waits for torch's 30 minutes, which a watchdog shortens.
_TIMEOUT: Final = Replaced(c10d, "_get_default_timeout", "2.11, 2.13, 2.14, 2.15")
# Waits for a call of Gloo, which only time ends where a rank was lost or makes another call.
_WAIT: Final = Replaced(bindings.Work, "wait", "2.15")
# Called with each group that torch creates.
_REGISTER: Final = Replaced(c10d, "_register_pg_in_world", "2.15")
# Called last when torch creates the default group, and again after each later group.
_MADE: Final = Replaced(c10d, "_is_barrier_after_init", "2.15")
# Called whenever a default group ends, whichever function a program calls.
_SET: Final = Replaced(c10d, "_update_default_pg", "2.15")

REPLACED: Final = (_TIMEOUT, _WAIT, _REGISTER, _MADE, _SET)
# One entry for each open mesh and each watch.
_OPEN: list[object] = []
if hasattr(os, "register_at_fork"):
    # A forked process closes none of them.
    os.register_at_fork(after_in_child=_OPEN.clear)


def changed() -> Callable[[], None]:
    """Called when a mesh opens or a watch begins, before waits and the default timeout are replaced.

    Returns the function to call when it closes, once or more often. The last one puts both back.
    """
    token = object()
    _OPEN.append(token)
    _TIMEOUT.put(_default_timeout)
    if _ABANDONED:
        _WAIT.put(_wait)

    def end() -> None:
        if token in _OPEN:
            _OPEN.remove(token)
        if not _OPEN:
            _TIMEOUT.put_back()
            _WAIT.put_back()
            _barriers.clear()
            _ENDED_BY.clear()

    return end


# -- groups that torch creates ----------------------------------------------------------------------

# Whether torch's groups can be watched. Torch 2.14 added the required hooks.
CAN_WATCH: Final = all(each.torchs is not None for each in (_MADE, _SET, _REGISTER)) and hasattr(
    dist.ProcessGroup, "register_pre_hook"
)
# What to call with each group that torch creates.
_NEW_GROUPS: list[Callable[[Any], None]] = []


def _registered(group: Any, *args: Any, **kwargs: Any) -> None:
    _REGISTER.torchs(group, *args, **kwargs)
    for callback in list(_NEW_GROUPS):
        callback(group)


def on_new_groups(callback: Callable[[Any], None]) -> Callable[[], None]:
    """Call `callback` with every process group that torch creates from now on. Return a function that stops these calls.

    The group's ranks become known only afterwards. Older torch than 2.14 reports no groups.
    """
    _NEW_GROUPS.append(callback)
    _REGISTER.put(_registered)

    def end() -> None:
        if callback in _NEW_GROUPS:
            _NEW_GROUPS.remove(callback)
        if not _NEW_GROUPS:
            _REGISTER.put_back()

    return end


def on_default_group(begins: Callable[[], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call `begins` when the default group is complete, and `ends` when it is gone. Return a function that stops these calls.

    `begins` is called again after each later group. A program has one watch, so there is one such pair at a time.
    """

    def made() -> Any:
        begins()
        return _MADE.torchs()

    def update(group: Any) -> None:
        _SET.torchs(group)
        if group is None:
            ends()

    _MADE.put(made)
    _SET.put(update)

    def end() -> None:
        if getattr(c10d, _MADE.name) is made:
            _MADE.put_back()
            _SET.put_back()

    return end


# -- barriers without a timeout ---------------------------------------------------------------------

_MONITORED_BARRIER: Final = unwrap(dist.monitored_barrier).__code__
# The last such call of each thread: the group's name, and the start time on the monotonic clock.
_barriers: dict[int, tuple[str, float]] = {}


def _default_timeout(backend: Any) -> timedelta:
    caller = sys._getframe(1)
    if caller.f_code is _MONITORED_BARRIER:
        _barriers[threading.get_ident()] = _group_of_barrier(caller), time.monotonic()
    timeout: timedelta = _TIMEOUT.torchs(backend)
    return timeout


def _group_of_barrier(frame: Any) -> str:
    return str((frame.f_locals["group"] or default_group()).group_name)


def overdue_barrier(limit_s: Callable[[str], float], now: float) -> str | None:
    """Return a group whose `dist.monitored_barrier`, called without a timeout, has blocked a thread for longer than the
    group's limit.

    limit_s: returns the limit in seconds of a group by its name. Returns None if there is no such group.
    """
    for thread, (name, began) in list(_barriers.items()):
        if now - began > limit_s(name):
            frame = sys._current_frames().get(thread)
            if frame is not None and frame.f_code is _MONITORED_BARRIER:
                return name
            _barriers.pop(thread, None)
    return None


def failed_barrier(error: BaseException) -> str | None:
    """Return the name of the group whose `dist.monitored_barrier` raised `error`, or None if another call did."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _MONITORED_BARRIER:
            return _group_of_barrier(trace.tb_frame)
        trace = trace.tb_next
    return None


# -- waits ------------------------------------------------------------------------------------------

_SLICE: timedelta = timedelta(seconds=0.25)
_FOREVER: Final = timedelta(days=1000)
# Torch's words at the end of a limited wait for a call that goes on.
_OVER: Final = "Operation timed out"
# The numbers in c10d::OpType of calls whose Work can be waited for in slices. A message whose wait times out closes all of
# its group's connections, and a wait for Gloo's reduce_scatter does not support a timeout.
_IN_SLICES: frozenset[int] = frozenset({*range(9), 10, 11, 15})


_RECEIVES: frozenset[int] = frozenset({13, 14})


class _OwnWaits(threading.local):
    """given_up: whether this thread's waits for Works should end with a RuntimeError; see `interruptible_waits`."""

    given_up: Callable[[], bool] = staticmethod(lambda: False)


own_waits = _OwnWaits()


# Whether the host's waits are to end because ranks were lost; see `interruptible_waits`.
_ABANDONED: list[Callable[[], bool]] = []
# The works whose waits end with an error that another rank may cause; see `end_wait_by`.
_ENDED_BY: WeakKeyDictionary[Any, Callable[[bool], Exception | None]] = WeakKeyDictionary()


def interruptible_waits(abandoned: Callable[[], bool]) -> None:
    """End the host's waits for a backend's Work with a RuntimeError once `abandoned` returns True.

    If a connection breaks, Gloo loses a call whose first bytes it is about to write. In torch 2.15, the cause is
    Pair::handleRemotePendingRecv, where the operation is on no list at that moment. Such a call ends only at its
    group's timeout. Waits inside C++, such as those of functional collectives, are unchanged.
    """
    _ABANDONED[:] = [abandoned]
    if _OPEN:
        _WAIT.put(_wait)


def end_wait_by(work: Any, error: Callable[[bool], Exception | None]) -> None:
    """End the host's waits for one Work of Gloo with the error that `error` returns, once it returns one.

    It is asked every quarter of a second of a wait. Waits inside C++ are unchanged, as above.
    """
    _ENDED_BY[work] = error
    _WAIT.put(_wait)


@outside_graphs
def wait_until(work: Any, error: Callable[[bool], Exception | None]) -> None:
    """Wait for a Work of Gloo now, as after `end_wait_by`."""
    _wait_in_slices(work, timedelta(0), error)


@outside_graphs
def wait_at_most(work: Any, timeout: timedelta, last: bool) -> None:
    """Wait for a Work of Gloo. Raises TimeoutError after `timeout`, and a later wait by this function goes on.

    last: whether no wait follows. Gloo then ends a message that does not complete, and closes its group's connections, so that
    no later message comes in its place.
    """
    if last and work not in _WAITED_BESIDE:
        work.wait(timeout)
        return
    error = _ENDED_BY.get(work)
    try:
        _wait_in_slices(work, timeout, error, again=True)
    except RuntimeError as failed:
        if _OVER not in str(failed):
            raise
        if not last:
            raise TimeoutError(
                f"not complete after {timeout.total_seconds():g} s; it stays under way"
            ) from None
        _WAIT.torchs(work, timedelta(milliseconds=1))


def is_receive(work: Any) -> bool:
    """Return whether a Work of Gloo is a receive, also from any source. Simulated Works have no type, and are none."""
    kind = getattr(work, "_get_op_type", None)
    return kind is not None and kind() in _RECEIVES


@outside_graphs
def has_completed(work: Any) -> bool:
    """Return whether a Work of Gloo has completed. A message does not complete before it is waited for: a thread waits for it.

    After this, wait for a message by `wait_at_most`.
    """
    kind = getattr(work, "_get_op_type", None)
    if kind is None or kind() in _IN_SLICES or work.is_completed():
        return bool(work.is_completed())
    return not _queues_of(work, _FOREVER)[1].empty()


@outside_graphs
def _wait(work: Any, timeout: timedelta = timedelta(0)) -> bool:
    error = _ENDED_BY.get(work)
    if error is None:
        if not _ABANDONED and not _ENDED_BY:
            _WAIT.put_back()
        # NCCL's wait blocks a stream, not the host.
        if not _ABANDONED or torch.cuda.is_initialized():
            return bool(_WAIT.torchs(work, timeout))
    try:
        return _wait_in_slices(work, timeout, error)
    finally:
        _ENDED_BY.pop(work, None)


def _wait_in_slices(
    work: Any, timeout: timedelta, error: Callable[[bool], Exception | None] | None, again: bool = False
) -> bool:
    """again: whether a later wait may follow after `timeout`."""

    def ended(over: bool = False) -> Exception | None:
        if not over and (own_waits.given_up() or any(abandoned() for abandoned in _ABANDONED)):
            return _given_up(work)
        return None if error is None else error(over)

    if work._get_op_type() not in _IN_SLICES:
        return _waited_beside(work, timeout, ended, again)
    ends = time.monotonic() + timeout.total_seconds() if timeout else math.inf
    while True:
        left_s = ends - time.monotonic()
        try:
            return bool(
                _WAIT.torchs(work, min(_SLICE, timedelta(seconds=max(left_s, 0.001))) if timeout else _SLICE)
            )
        except RuntimeError as failed:
            over = _OVER not in str(failed) or left_s <= _SLICE.total_seconds()
            # The rank that knows the error may have closed its connections already.
            _raise(ended(over))
            if over:
                raise


# The calls whose waits were given up.
held_calls: list[Any] = []


def _given_up(work: Any) -> RuntimeError:
    held_calls.append(work)
    return RuntimeError("connection closed by a rank that was lost; the backend still holds the call")


def _raise(cause: Exception | None) -> None:
    if cause is not None:
        try:
            raise cause from None
        finally:
            # An error must not refer to itself by its frames, which keep the group.
            del cause


def _waited_beside(work: Any, timeout: timedelta, ended: Callable[[], Exception | None], again: bool) -> bool:
    """Wait for `work` in another thread, which goes on after an error here: only one wait for a message ever returns."""
    queues = _queues_of(work, _FOREVER if again else timeout)
    until = time.monotonic() + timeout.total_seconds() if again else math.inf
    while True:
        left_s = until - time.monotonic()
        try:
            answer = queues[1].get(timeout=max(0.0, min(_SLICE.total_seconds(), left_s)))
            break
        except Empty:
            _raise(ended())
            if left_s <= 0:
                raise RuntimeError(f"{_OVER}!") from None
    del _WAITED_BESIDE[work]
    _BESIDE.append(queues)
    if isinstance(answer, BaseException):
        raise answer
    return bool(answer)


def _queues_of(work: Any, timeout: timedelta) -> _Queues:
    """Return the queues of the thread that waits for `work`, after starting the wait if there is none."""
    queues = _WAITED_BESIDE.get(work)
    if queues is None:
        queues = _WAITED_BESIDE[work] = _BESIDE.pop() if _BESIDE else _beside()
        queues[0].put((work, timeout))
    return queues


_Queues: TypeAlias = tuple["SimpleQueue[Any]", "SimpleQueue[Any]"]
_BESIDE: list[_Queues] = []
# The works that another thread waits for.
_WAITED_BESIDE: WeakKeyDictionary[Any, _Queues] = WeakKeyDictionary()


def _beside() -> _Queues:
    """Start a thread that waits for the Works in one queue and puts each result into the other. Return both queues."""
    asks: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        while True:
            work, timeout = asks.get()
            try:
                answers.put(_WAIT.torchs(work, timeout))
            except RuntimeError as error:
                answers.put(error)
            del work

    threading.Thread(target=run, name="meshcomm-wait", daemon=True).start()
    return asks, answers
