"""Which call should the backend have given up by now? Some never do, and Python cannot interrupt them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

from meshcomm.comm.recorder import Recorder

# A backend that gives up by itself does so a moment after the timeout, and leaves the program a chance.
GRACE_S: Final = 5.0

# Of a group's first call this cannot be expected: Gloo, connecting when ranks first talk, waits for a
# peer that does not come for five times the timeout (torch 2.13, tried).
FIRST_GRACE_S: Final = 1.0


@final
class Overdue:
    """Finds a blocking call that lasts longer than its group's timeout and a grace.

    `find` is called again and again, from another thread than the one that is blocked; a call counts
    from when it was first seen.
    """

    def __init__(self) -> None:
        self._seen: dict[Recorder, tuple[Any, float]] = {}
        self._given_up: dict[Recorder, Any] = {}

    def gave_up(self, recorder: Recorder) -> None:
        """The backend has given up the call under way, whose error is being made: it is not overdue."""
        self._given_up[recorder] = _under_way(recorder)

    def find(self, recorders: Iterable[tuple[Recorder, float]], now: float) -> Recorder | None:
        """The first overdue one of `recorders`, given with their timeouts in seconds; now in seconds."""
        for recorder, timeout_s in recorders:
            under_way = _under_way(recorder)
            if under_way is None or _same(self._given_up.get(recorder), under_way):
                self._seen.pop(recorder, None)
                continue
            call, since = self._seen.get(recorder, (None, now))
            if not _same(call, under_way):
                since = now
                self._seen[recorder] = (under_way, now)
            first = recorder.started <= 1
            if now - since > timeout_s + (FIRST_GRACE_S if first else GRACE_S):
                return recorder
        return None


def _under_way(recorder: Recorder) -> Any:
    """The call or message that blocks the rank now; None where none does."""
    return recorder.started if recorder.inside else recorder.messages.waiting


def _same(one: Any, other: Any) -> bool:
    """The same number, or the same message object, is the same call."""
    return bool(one == other) if isinstance(other, int) else one is other
