"""A call that its backend will not give up is broken off, so that its rank raises and need not be ended."""

from __future__ import annotations

import contextlib
from typing import Any, Final, final
from weakref import ref

from meshcomm.comm.message_log import Message
from meshcomm.comm.recorder import Recorder
from meshcomm.mesh.overdue import Late, Overdue
from meshcomm.mesh.store_connect import within
from meshcomm.transport import Transport

# How long it may take, as it asks the store where the group listens.
_BREAKS_S: Final = 2.0


@final
class Breaking:
    """Breaks off what `overdue` finds, and tells from then on what the backend's errors are about."""

    def __init__(self, overdue: Overdue) -> None:
        self._overdue = overdue
        # Weak, as a group has to go with the mesh's last reference to it.
        self._transports: dict[Recorder, ref[Transport]] = {}

    def add(self, recorder: Recorder, transport: Transport) -> None:
        """One more group, with what carries it."""
        self._transports[recorder] = ref(transport)

    def break_off(self, recorder: Recorder, late: Late) -> None:
        """Make the blocked call fail, where its transport can; its rank then asks who has not come."""
        call = self._overdue.tried(recorder, late)
        transport = self._transports[recorder]()
        if transport is None:
            return
        peers = _peers(call)

        def over() -> bool:
            return not self._overdue.is_under_way(recorder, call)

        # A store that does not answer must not keep the process from its end.
        with contextlib.suppress(TimeoutError, RuntimeError):
            within(_BREAKS_S, lambda: transport.break_off(peers, late is Late.BREAK, over))

    def explained(self, recorder: Recorder, error: BaseException) -> BaseException:
        """The backend's `error`, in other words where it is about connections that this rank has ended itself."""
        broken_off = self._overdue.broken_off(recorder)
        if broken_off is False:
            return error
        said = (
            "the backend waited on past the timeout, until meshcomm ended its connections on this rank"
            if broken_off
            else "meshcomm has ended the group's connections on this rank, as an earlier call did not end in time"
        )
        error.add_note(said)
        return TimeoutError(said)


def _peers(call: Any) -> list[int] | None:
    """The coords that a call waits for; None: any, as in a collective."""
    if not isinstance(call, Message):
        return None
    peers = [part.peer for part in call.parts if part.peer is not None]
    return list(dict.fromkeys(peers)) if len(peers) == len(call.parts) else None
