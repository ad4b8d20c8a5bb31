"""Checks that all ranks start the collectives of several NCCL groups, and the messages of one, in one order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias, final

from meshcomm.comm.diagnosis import shortest_way
from meshcomm.errors import DeadlockError

# A collective is identified by its group and its number there, a message also by the coords of its ends.
Call: TypeAlias = tuple[int, ...]

_GROUPS: Final = (
    "collectives of NCCL groups",
    "one order on all ranks, asynchronous calls too: a collective may block the device until its peers arrive, "
    "and these may be blocked by another collective",
    "start them in the same order on every rank",
)
_MESSAGES: Final = (
    "calls of one NCCL group",
    "one order on all ranks, asynchronous messages too: NCCL runs the calls of a group one after the other, and a "
    "message completes when its other end has arrived",
    "messages that belong together as one call: mesh.exchange, or mesh.shift",
)


class Start(NamedTuple):
    """One rank's start of a collective. where: the rank with its coords. what: call, group and line."""

    rank: int
    where: str
    what: str


@final
class StartOrder:
    """The order of starts over all NCCL groups of a simulation.

    Calls on one communicator are matched by their order. NCCL defines no order between communicators, and a kernel that
    waits for its peers may keep those of other communicators from running: torch's documentation calls concurrent groups
    unsafe for that reason. If one rank starts A before B and another B before A, the program may hang or not, depending on
    timing. Such a pair is a cycle in the graph of starts. A call that all its ranks have started, with none left before it, is
    in no cycle and is dropped, so that only calls under way are kept.

    messages: if True, follows the messages and collectives of one group, which are queued one after the other. Then such
    a program always hangs.
    """

    def __init__(self, messages: bool = False) -> None:
        self._words = _MESSAGES if messages else _GROUPS
        self._last: dict[int, tuple[Sequence[Call], Start]] = {}
        self._left: dict[Call, int] = {}
        self._before: dict[Call, set[Call]] = {}
        self._after: dict[Call, dict[Call, tuple[Start, Start]]] = {}

    def start(self, calls: Sequence[Call], size: int, own: Start) -> DeadlockError | None:
        """Record that a rank starts these calls as one, each made by `size` ranks. Return the error if that closes a cycle."""
        for call in calls:
            if call not in self._left:
                self._left[call], self._before[call], self._after[call] = size, set(), {}
            self._left[call] -= 1
        earlier, start = self._last.get(own.rank, ((), own))
        self._last[own.rank] = (calls, own)
        for before in earlier:
            for call in calls:
                if before not in self._left or before == call:
                    continue
                self._after[before].setdefault(call, (start, own))
                self._before[call].add(before)
                if way := shortest_way(self._after, call, before):
                    circle = [(start, own), *(self._after[one][other] for one, other in pairwise(way))]
                    return _error(circle, *self._words)
        for call in calls:
            self._forget(call)
        return None

    def _forget(self, call: Call) -> None:
        waiting = [call]
        while waiting:
            at = waiting.pop()
            if at in self._left and not self._left[at] and not self._before[at]:
                for later in self._after.pop(at):
                    self._before[later].discard(at)
                    waiting.append(later)
                del self._left[at], self._before[at]


def _error(circle: Sequence[tuple[Start, Start]], what: str, expected: str, hint: str) -> DeadlockError:
    lines = [f"{first.where} starts {first.what}, then {second.what}" for first, second in circle]
    ranks = tuple(dict.fromkeys(first.rank for first, _ in circle))
    return DeadlockError(
        f"ranks start {what} in different orders: " + ", ".join(map(str, ranks)),
        given="\n".join(lines),
        expected=expected,
        hint=hint,
        circle=ranks,
    )
