"""Records the calls that other code makes on a group (dist.*, DTensor, FSDP, DDP), through torch's hooks for groups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final
from weakref import ref

from meshcomm.collectives import BARRIER, HOOKED, Collective
from meshcomm.transport.base import Direction
from meshcomm.transport.torch_private import HOOK_NAMES, GroupHooks, arguments_of, tag_of
from meshcomm.watching.callsite import users_frame
from meshcomm.watching.counters import counter_of
from meshcomm.watching.facts import bytes_of, facts_of_hook, is_refused
from meshcomm.watching.messages import PendingMessage
from meshcomm.watching.recorder import LATEST, FlightRecorder

# A collective that has been recorded, between its two hooks.
_COLLECTIVE: Final = object()


def observe(recorder: FlightRecorder, group: Any, name: str, who: str) -> None:
    """Let `recorder` observe every call that other code makes on `group`, along the dim `name`."""
    # A weak reference, because Python does not detect a reference cycle through torch's group.
    recorder.hooks = hooked(group, ref(recorder), name, who)


def hooked(group: Any, recorder_of: Callable[[], FlightRecorder | None], name: str, who: str) -> GroupHooks:
    """Let the current recorder, if any, observe each call that other code makes on `group`, along the dim `name`."""
    # What lies between its two hooks. A call that the backend refused never reaches its second hook.
    issued: Any = None

    # The mesh's own calls are recorded already, and every statement here slows them down.
    def before(record: Any) -> None:
        nonlocal issued
        recorder = recorder_of()
        if recorder is not None and recorder.under_way is None and recorder.messages.waiting is None:
            issued = None
            kind = HOOK_NAMES[int(record.name)]
            row = HOOKED.get(kind)
            if row is None:
                issued = _record_message(recorder, name, kind, record)
            else:
                issued = _record(recorder, name, who, row, kind, record)

    def after(record: Any) -> None:
        nonlocal issued
        recorder = recorder_of()
        if recorder is None or recorder.under_way is not None or recorder.messages.waiting is not None:
            return
        if issued is _COLLECTIVE:
            recorder.end()
            recorder.queued(record.work)
            recorder.issued([record.work])
        elif issued is not None:
            recorder.messages.posted(issued, record.work, recorder.ordered)
            if recorder.ordered:
                recorder.queued(record.work, issued)
        issued = None

    return GroupHooks(group, before, after)


def _record(recorder: FlightRecorder, name: str, who: str, row: Collective, kind: str, record: Any) -> object:
    """Record that a collective outside the mesh is about to be issued on the group. Return None if the call will not be issued.

    Raises CallMismatchError if the ranks make different calls.
    """
    size = len(recorder.ranks)
    if recorder.check is not None:
        # Not of every call: a call that is no longer compared is only recorded.
        arguments = arguments_of(sys._getframe(2))
        if is_refused(kind, record, size, not recorder.ordered, arguments):
            return None
    # A barrier may pass a tensor that is never read.
    tensors = [] if row is BARRIER else record.input_tensors
    single = tensors[0] if len(tensors) == 1 else None
    nbytes = sum(map(bytes_of, tensors)) if single is None else bytes_of(single)
    counter = counter_of(recorder.counters, name, row.name, True)
    LATEST[0] = id(recorder)
    frame = users_frame(3)
    recorder.begin(None, counter, row.moved(nbytes, size), single, frame)
    if recorder.span is not None:
        recorder.span.op = getattr(record, "op", None)
        recorder.span.root = -1 if row.root is None else record.root
        if single is None:
            recorder.span.of(tensors)
    try:
        if recorder.check is not None:
            facts = facts_of_hook(row, record, recorder.check.coord, size, arguments)
            waits = not record.async_op and row.waits_for_all(nbytes)
            recorder.announce_call(name, row.name, facts, frame, waits)
    except RuntimeError as error:
        where = f'{row.name} {recorder.past_the_mesh}along "{name}" on {who}'
        raise recorder.inquire(recorder, where, error) from error
    finally:
        recorder.under_way = None
    recorder.tells_end = recorder.ordered or row.name != "reduce_scatter"
    return _COLLECTIVE


def _record_message(recorder: FlightRecorder, name: str, kind: str, record: Any) -> PendingMessage | None:
    # torch converts the root at each read.
    root = record.root
    # torch refuses roots that the group does not have.
    if kind not in ("SEND", "RECV") or root >= len(recorder.ranks):
        return None
    # A message from any source has no root.
    peer = root if root >= 0 else None
    direction: Direction = "send" if kind == "SEND" else "recv"
    # NCCL has no tags, and cannot receive what another size was sent for.
    tag = 0 if recorder.ordered else tag_of(sys._getframe(2))
    tensors = record.input_tensors or record.output_tensors
    return recorder.messages.past(name, direction, peer, tag, tensors, users_frame(3))
