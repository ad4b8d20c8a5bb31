"""Messages that have passed every check once and need no preparation: sent and received again without asking again.

Prepared like other calls (comm/straight.py), by direction, peer and tag: the transport's call, and the lane
on which the message is counted. What MessageLog.begin and .left, and Messages, do is written out here without
what only the first messages, a trace or a profiler need.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import _getframe as frame_at
from time import perf_counter as clock
from typing import Any, Final, TypeAlias, TypeVar

from torch import Tensor

from meshcomm.comm.handle import Caller, Handle
from meshcomm.comm.ledger import Later, total_of
from meshcomm.comm.message_log import Awaited, Lane, Message, Part
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.site import is_ours
from meshcomm.comm.straight import Ready
from meshcomm.transport import Work

T = TypeVar("T")
# A message, and what it is prepared by.
Prepared: TypeAlias = tuple[Ready, Tensor]

# Message(...) and Part(...) take twice as long.
_made: Final = tuple.__new__


def at_once(by: Caller, ready: Ready, x: Tensor) -> None:
    """Send or receive `x`."""
    start, lane, total, recorder, _ = ready
    frame: Any = frame_at(3)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    log = recorder.messages
    lane.begun = number = lane.begun + 1
    nbytes = x.nbytes
    began = clock()
    log.waiting = message = _made(
        Message,
        (
            total.name,
            total.call,
            (_made(Part, (lane, number)),),
            frame.f_code,
            frame.f_lasti,
            nbytes,
            1,
            began,
            None,
        ),
    )
    try:
        work = start([x], lane.peer, lane.tag)
        try:
            work.wait()
        finally:
            over = clock()
            log.recent.append((message, over))
            # Messages of a collective that is done step by step are a part of it.
            if recorder.under_way is None:
                total.calls += 1
                total.nbytes += nbytes
                total.seconds += over - began
    except RuntimeError as error:
        raise by.failed(lane.text, error) from error
    log.waiting = None


def later(by: Caller, ready: Ready, x: Tensor, result: T, source: int | None = None) -> Handle[T]:
    """Start to send or receive `x`; the handle's `wait` returns `result`, and until then it holds `x`."""
    start, lane, total, recorder, _ = ready
    frame: Any = frame_at(3)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    log = recorder.messages
    lane.begun = number = lane.begun + 1
    nbytes = x.nbytes
    place = code, instruction = frame.f_code, frame.f_lasti
    began = clock()
    log.waiting = message = _made(
        Message,
        (total.name, total.call, (_made(Part, (lane, number)),), code, instruction, nbytes, 1, began, None),
    )
    try:
        work = start([x], lane.peer, lane.tag)
    except RuntimeError as error:
        raise by.failed(lane.text, error) from error
    log.waiting = None
    counted = Later(None if recorder.under_way is not None else total, nbytes, began, clock())
    log.recent.append((message, counted))
    return Handle(
        (Awaited(work, log, message, counted),), by, lane.text, None, result, None, source, place, x
    )


def all_at_once(
    by: Caller,
    recorder: Recorder,
    name: str,
    call: str,
    going: Sequence[Prepared],
    coming: Sequence[Prepared],
) -> None:
    """Send and receive a set of messages, as the call `call` on the dim `name`."""
    log = recorder.messages
    log.waiting = message = _begun(name, call, going, coming)
    try:
        works = _started(going, coming)
        try:
            for work in works:
                work.wait()
        finally:
            over = clock()
            log.recent.append((message, over))
            if recorder.under_way is None:
                total = total_of(recorder.totals, name, call)
                total.calls += 1
                total.nbytes += message.nbytes
                total.seconds += over - message.began
    except RuntimeError as error:
        raise by.failed(call, error) from error
    log.waiting = None


def all_later(
    by: Caller,
    recorder: Recorder,
    name: str,
    call: str,
    going: Sequence[Prepared],
    coming: Sequence[Prepared],
) -> list[Awaited]:
    """`all_at_once`, started only: what is to be waited for."""
    log = recorder.messages
    log.waiting = message = _begun(name, call, going, coming)
    try:
        works = _started(going, coming)
    except RuntimeError as error:
        raise by.failed(call, error) from error
    log.waiting = None
    counted = log.left(message, None if recorder.inside else call)
    return [Awaited(work, log, message, counted) for work in works]


def _begun(name: str, call: str, going: Sequence[Prepared], coming: Sequence[Prepared]) -> Message:
    """Count the messages, and remember the line of the call, which is 4 frames up."""
    frame: Any = frame_at(4)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    parts = []
    sent = came = 0
    for ready, x in going:
        lane: Lane = ready[1]
        lane.begun = number = lane.begun + 1
        parts.append(Part(lane, number))
        sent += x.nbytes
    for ready, x in coming:
        lane = ready[1]
        lane.begun = number = lane.begun + 1
        parts.append(Part(lane, number))
        came += x.nbytes
    code, instruction, nbytes = frame.f_code, frame.f_lasti, sent if sent > came else came
    return _made(Message, (name, call, tuple(parts), code, instruction, nbytes, 1, clock(), None))


def _started(going: Sequence[Prepared], coming: Sequence[Prepared]) -> list[Work]:
    """Receives first, as Transport.exchange does."""
    works = []
    for ready, x in (*coming, *going):
        lane: Lane = ready[1]
        works.append(ready[0]([x], lane.peer, lane.tag))
    return works
