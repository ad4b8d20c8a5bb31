"""Do both ends of a message mean the same tensor? Compared through the store before the data moves."""

from __future__ import annotations

import json
import time
from typing import Any, Final, NamedTuple, final

from meshcomm.errors import CallMismatchError
from meshcomm.transport.base import Direction

# Each of a pair's first messages costs its two ends seven operations of the job's one store.
_MOST: Final = 4

# How long the end that comes first waits to be told that the other means the same, before it moves its data.
_ANSWERED_S: Final = 5.0


class Unanswered(NamedTuple):
    """What an end that came first has said, and has no answer to. peer: a global rank."""

    key: str
    peer: int


@final
class MessageCheck:
    """Compares the first messages of each pair of ranks on one group, in each direction.

    A receive with more room than was sent would return with part of its buffer as it was, and one
    with less room would end the process (Gloo, tried on torch 2.13). So each end says what it is
    about to do, and whoever comes second compares, answers, and raises where the two differ. Who came first
    reads the answer before it waits for the data, so that both ends raise at once.

    Args:
        store: a torch store of this mesh, used for nothing else.
        label: the group, as in `tp[pp=0 dp=1]`.
        ranks: its global ranks, in coord order.
        rank: this one.
        limit: how many messages are compared; None: all. At most 4 where a number is given.
    """

    __slots__ = ("_any", "_label", "_limit", "_rank", "_ranks", "_store")

    def __init__(self, store: Any, label: str, ranks: list[int], rank: int, limit: int | None) -> None:
        self._store = store
        self._label = label
        self._ranks = ranks
        self._rank = rank
        self._limit = None if limit is None else min(limit, _MOST)
        self._any = False

    def compares(self, number: int) -> bool:
        """Whether the message with this number among those of its pair is compared."""
        return self._limit is None or number <= self._limit

    def takes_any(self) -> None:
        """This rank receives without saying from whom, or past the mesh: others do not wait for its answer."""
        if not self._any:
            self._any = True
            self._store.set(f"{self._label}/any/{self._rank}", "1")

    def meet(
        self, direction: Direction, peer: int, tag: int, number: int, facts: tuple[str, int, str], site: str
    ) -> Unanswered | None:
        """Say what this end is about to do; compare where the other end, coord `peer`, has said so.

        number: of the message among those with its tag. facts: dtype, number of elements, shape.
        Returns what `confirm` takes, where the other end has not come yet. Raises CallMismatchError before the
        data moves.
        """
        other = self._ranks[peer]
        src, dst = (self._rank, other) if direction == "send" else (other, self._rank)
        key = self.key(src, dst, tag, number)
        mine = json.dumps([direction, *facts, site])
        # One step: who comes first writes, who comes second gets what the first has written.
        found = self._store.compare_set(key, "", mine)
        if found.decode() == mine:
            return Unanswered(key, other)
        way, dtype, count, shape, where = json.loads(found)
        if (dtype, count) == facts[:2]:
            self._store.set(f"{key}/answer", "")
            return None
        ends = {direction: (self._rank, facts[0], facts[2], site), way: (other, dtype, shape, where)}
        sender, receiver = ends["send"], ends["recv"]
        told = (
            f"rank {sender[0]} sends {sender[1]} {sender[2]} at {sender[3]}\n"
            f"rank {receiver[0]} has room for {receiver[1]} {receiver[2]} at {receiver[3]}"
        )
        self._store.set(f"{key}/answer", told)
        raise self._differs(key, src, dst, told)

    def confirm(self, waiting: list[Unanswered]) -> None:
        """Return when the other ends mean the same, or have been silent for some seconds; then their backend tells.

        Raises CallMismatchError where one means something else.
        """
        until, pause = time.monotonic() + _ANSWERED_S, 0.0005
        for key, peer in waiting:
            while not self._store.check([f"{key}/answer"]):
                if time.monotonic() > until or self._store.check([f"{self._label}/any/{peer}"]):
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            else:
                told = self._store.get(f"{key}/answer").decode()
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/answer")
                if told:
                    src, dst = key.split("/")[-3].split(">")
                    raise self._differs(key, int(src), int(dst), told)

    def key(self, src: int, dst: int, tag: int, number: int) -> str:
        """Where the end that comes first says what it is about to do."""
        return f"{self._label}/{src}>{dst}/{tag}/{number}"

    def _differs(self, key: str, src: int, dst: int, told: str) -> CallMismatchError:
        tag, number = key.split("/")[-2:]
        error = CallMismatchError(
            f"message {number} with tag {tag} from rank {src} to rank {dst} on {self._label} "
            "means two things; nothing was sent",
            given=told,
            expected="the same dtype and number of elements at both ends",
            hint="handshake=True on the send and no out on the receive, where the receiver cannot know the shape",
        )
        error.mismatched_ranks = (src, dst)
        return error
