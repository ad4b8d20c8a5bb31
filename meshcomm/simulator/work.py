"""What a simulated rank has started: done when the others have come, waited for or not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal, final

from meshcomm.simulator.scheduler import Actor, Scheduler
from meshcomm.simulator.sites import Site

Kind = Literal["collective", "send", "recv"]


@final
class SimulatedWork:
    """One operation of one rank.

    kind:    how to read the rest. call: what it is to the group, as in `all_reduce`.
    label:   the group, as in `tp[dp=0]`. number: how-manieth collective of this rank on the group.
    absent:  global ranks that it needs and that have not come.
    site:    where it was started; None where the rank waits for it at once, and so is there.
    peer:    the other global rank of a message; None for a receive from whoever comes first.
    """

    __slots__ = (
        "_absent",
        "_scheduler",
        "actor",
        "call",
        "done",
        "kind",
        "label",
        "number",
        "peer",
        "shape",
        "site",
        "source",
        "tag",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        actor: Actor,
        kind: Kind,
        call: str,
        label: str,
        absent: Callable[[], list[int]],
        site: Site | None,
        *,
        number: int = 0,
        peer: int | None = None,
        tag: int = 0,
        shape: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._absent = absent
        self.actor = actor
        self.kind = kind
        self.call = call
        self.label = label
        self.number = number
        self.peer = peer
        self.tag = tag
        self.shape = shape
        self.site = site
        self.done = False
        self.source = -1
        actor.open[id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the other ranks run until it is done. Time does not pass while ranks wait, so no timeout ends it."""
        self.actor.open.pop(id(self), None)
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
        # What it waited for knows its works: let go, so that tensors end with their last user.
        self._absent = _nobody
        if self.actor.wait is self:
            self._scheduler.wake(self.actor)

    def absent(self) -> list[int]:
        """The global ranks that it needs and that have not come."""
        return self._absent()


def _nobody() -> list[int]:
    return []
