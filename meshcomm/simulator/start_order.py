"""Checks that all ranks start the collectives of several NCCL groups, or the messages of one group, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias, final

from meshcomm.errors import DeadlockError
from meshcomm.watching.waits import shortest_way

# A collective is identified by its group and its sequence number, and a message by the coords of its ends and its number.
Call: TypeAlias = tuple[int, ...]

_GROUPS: Final = (
    "collectives of NCCL groups",
    "the same order on all ranks, for asynchronous calls too: a collective may block the device until its peers "
    "arrive, and another collective may block the peers",
    "start them in the same order on every rank",
)
_MESSAGES: Final = (
    "calls of one NCCL group",
    "the same order on all ranks, for asynchronous messages too: NCCL runs a group's calls one after another, and a "
    "message completes only when its peer has started it",
    "one call for messages that belong together: mesh.exchange or mesh.shift",
)


class Start(NamedTuple):
    """One rank's start of a collective. where: the rank with its coords. what: the call, its group and its line."""

    rank: int
    where: str
    what: str


@final
class StartOrder:
    """The order in which ranks start calls on all NCCL groups of a simulation.

    Calls on one communicator are matched by their order. NCCL defines no order between communicators, and a kernel that
    waits for its peers may keep other communicators' kernels from running, which is why torch's documentation calls the
    concurrent use of several groups unsafe. If one rank starts A before B and another starts B before A, the program may
    hang, depending on timing. Such a pair is a cycle in the graph of starts. A call that all ranks have started cannot be part
    of a cycle once no earlier call is pending. It is then dropped, so that only pending calls are kept.

    messages: if True, tracks the messages and collectives of one group. NCCL runs a group's calls one after another, so a
    program with a cycle always hangs.
    """

    def __init__(self, messages: bool = False) -> None:
        self._words = _MESSAGES if messages else _GROUPS
        self._last: dict[int, tuple[Sequence[Call], Start]] = {}
        self._left: dict[Call, int] = {}
        self._before: dict[Call, set[Call]] = {}
        self._after: dict[Call, dict[Call, tuple[Start, Start]]] = {}

    def start(self, calls: Sequence[Call], size: int, own: Start) -> DeadlockError | None:
        """Record that a rank starts `calls` together. Return the error if this closes a cycle. size: ranks per call."""
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
            call = waiting.pop()
            if call in self._left and not self._left[call] and not self._before[call]:
                for later in self._after.pop(call):
                    self._before[later].discard(call)
                    waiting.append(later)
                del self._left[call], self._before[call]


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
