"""What a simulated rank has started, and the line of the program that it is at."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NamedTuple, final

from meshcomm.comm.callsite import is_ours
from meshcomm.simulator.scheduler import Actor, Scheduler


class Callsite(NamedTuple):
    """A line of the user's program (file:line), and the function of meshcomm or torch that it called."""

    call: str
    line: str


_UNKNOWN = Callsite("?", "an unknown line")


def here() -> Callsite:
    """Where the caller's thread is."""
    return _walk(sys._getframe(1))


def callsite_of(actor: Actor) -> Callsite:
    """Where a rank is that does not run."""
    frame = sys._current_frames().get(actor.ident)
    return _UNKNOWN if frame is None else _walk(frame)


def raised_at(error: BaseException) -> str:
    """The innermost line of the program that an exception passed through."""
    found, trace = _UNKNOWN.line, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not is_ours(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _walk(frame: Any) -> Callsite:
    call = "?"
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        call = frame.f_code.co_name
        frame = frame.f_back
    return Callsite(call, f"{frame.f_code.co_filename}:{frame.f_lineno}")


@final
class SimulatedWork:
    """One operation that a rank has started; done when its peers have made theirs.

    call:   the operation, as in `all_reduce`. label: the group, as in `tp[dp=0]`.
    absent: returns the global ranks that the operation needs and that have not come.
    site:   where it was started; None for a blocking call, whose rank is still at that line.
    number: sequence number of a collective on its group. peer: the other global rank of a message, None
            for a receive from any source. source: the coord that a receive got its message from.
    """

    __slots__ = (
        "_scheduler", "absent", "actor", "call", "done", "kind", "label", "number", "peer", "site", "source", "tag",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduler,
        actor: Actor,
        kind: Literal["collective", "send", "recv"],
        call: str,
        label: str,
        absent: Callable[[], list[int]],
        site: Callsite | None,
        number: int = 0,
        peer: int | None = None,
        tag: int = 0,
    ) -> None:
        self._scheduler = scheduler
        self.absent = absent
        self.actor = actor
        self.kind = kind
        self.call = call
        self.label = label
        self.number = number
        self.peer = peer
        self.tag = tag
        self.site = site
        self.done = False
        self.source = -1
        if site is not None:
            actor.unwaited[id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the other ranks run until it is done. No time passes meanwhile, so no timeout ends it."""
        if self.site is not None:
            self.actor.unwaited.pop(id(self), None)
        if not self.done:
            self._scheduler.wait(self.actor, self)
        return True

    def is_completed(self) -> bool:
        """Whether it is done; where it is not, other ranks run first, so that asking again may help."""
        if not self.done:
            self._scheduler.poll(self.actor, self)
        return self.done

    def complete(self) -> None:
        """It is done; wake the rank if it waits for it."""
        self.done = True
        # `absent` leads to the tensors of all ranks: let go of them.
        self.absent = list
        if self.actor.wait is self:
            self._scheduler.wake(self.actor)

    def described(self, call: str) -> str:
        """`all_reduce, call 3 on tp[dp=0]`; `send to rank 1, tag 0, on tp[dp=0]`. call: the user's own."""
        if self.kind == "collective":
            name = self.call if call in (self.call, "?") else f"{call} ({self.call})"
            return f"{name}, call {self.number} on {self.label}"
        end = "send to" if self.kind == "send" else "receive from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        tag = "" if self.tag == 0 else f", tag {self.tag}"
        text = f"{end} {peer}{tag}, on {self.label}"
        return text if call in (self.kind, "?") else f"{call} ({text})"
