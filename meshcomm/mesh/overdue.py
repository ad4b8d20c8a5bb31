"""Which call should the backend have given up by now? Some never do, and Python cannot interrupt them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, final

from meshcomm.comm.message_log import Message
from meshcomm.comm.recorder import Recorder

# Of a first contact: Gloo, connecting when ranks first talk, waits for a peer that does not come for five
# times the timeout (torch 2.13, tried). Where it waits for nothing else it gives up at the timeout.
FIRST_GRACE_S: Final = 0.5

# A backend that gives up by itself does so a moment after the timeout. One that goes on may still move data,
# or connect late.
BREAK_GRACE_S: Final = 3.0

# What was broken off is back long before. What is not then cannot be brought back.
GRACE_S: Final = 5.0


class Late(IntEnum):
    """What is to be done about an overdue call, the mildest first."""

    CONNECT = 1
    """End its waits for peers that have not connected: the group has not been used before."""
    BREAK = 2
    """End its connections."""
    END = 3
    """End the process."""


@final
class Overdue:
    """Finds a blocking call, or a wait for one, that lasts longer than its group's timeout and a grace.

    `find` is called again and again, from another thread than the one that is blocked; a call counts
    from when it was first seen.
    """

    def __init__(self) -> None:
        # By group: the call, since when it is under way, and what was done about it.
        self._seen: dict[Recorder, tuple[Any, float, int]] = {}
        self._given_up: dict[Recorder, Any] = {}
        self._broken_off: dict[Recorder, Any] = {}

    def gave_up(self, recorder: Recorder) -> None:
        """The backend has given up the call under way, whose error is being made: it is not overdue."""
        self._given_up[recorder] = under_way(recorder)

    def find(self, recorders: Iterable[tuple[Recorder, float]], now: float) -> tuple[Recorder, Late] | None:
        """The first overdue one of `recorders`, given with their timeouts in seconds, and what is to be done.

        now: in seconds. Nothing is found twice for the same call, once `tried` was told; but Late.END is.
        """
        for recorder, timeout_s in recorders:
            call = under_way(recorder)
            if call is None or _same(self._given_up.get(recorder), call):
                self._seen.pop(recorder, None)
                continue
            seen, since, tried = self._seen.get(recorder, (None, now, 0))
            if not _same(seen, call):
                since, tried = now, 0
                self._seen[recorder] = (call, since, tried)
            late = _late(recorder, call, now - since - timeout_s)
            if late is not None and late > tried:
                return recorder, late
        return None

    def tried(self, recorder: Recorder, late: Late) -> Any:
        """`late` is now being done about the call under way, which is returned; see `is_under_way`."""
        call, since, _ = self._seen[recorder]
        if late < Late.END:
            self._seen[recorder] = (call, since, late)
            self._broken_off[recorder] = call
        return call

    def is_under_way(self, recorder: Recorder, call: Any) -> bool:
        """Whether the rank is still blocked in `call`."""
        now = under_way(recorder)
        return now is not None and _same(call, now) and not _same(self._given_up.get(recorder), now)

    def broken_off(self, recorder: Recorder) -> bool | None:
        """Whether the call under way was broken off; None where an earlier one on its group was."""
        if recorder not in self._broken_off:
            return False
        return _same(self._broken_off[recorder], under_way(recorder)) or None


def under_way(recorder: Recorder) -> Any:
    """The call or message that blocks the rank now; None where none does."""
    if recorder.inside:
        return recorder.started
    if recorder.messages.waiting is not None:
        return recorder.messages.waiting
    # A copy, as the program may make the first call of a kind meanwhile.
    waits = (total.waiting for total in list(recorder.totals.values()))
    return next((later for later in waits if later is not None), None)


def _late(recorder: Recorder, call: Any, over_s: float) -> Late | None:
    if over_s > GRACE_S:
        return Late.END
    if over_s > BREAK_GRACE_S:
        return Late.BREAK
    return Late.CONNECT if over_s > FIRST_GRACE_S and _is_first(recorder, call) else None


def _is_first(recorder: Recorder, call: Any) -> bool:
    """Whether the ranks of a call may not have talked before."""
    if isinstance(call, Message):
        return any(part.number <= 1 for part in call.parts)
    ended = any(total.calls or total.later_calls for total in list(recorder.totals.values()))
    return recorder.started <= 1 or not ended


def _same(one: Any, other: Any) -> bool:
    """The same number, or the same message object, is the same call."""
    return bool(one == other) if isinstance(other, int) else one is other
