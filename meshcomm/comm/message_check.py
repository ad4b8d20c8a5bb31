"""Do both ends of a message mean the same tensor? Compared through the store before the data moves."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, final

from meshcomm.errors import CallMismatchError

Direction = Literal["send", "recv"]

# Each of a pair's first messages costs its two ends three operations of the job's one store.
_MOST: Final = 4


@final
class MessageCheck:
    """Compares the first messages of each pair of ranks on one group, in each direction, by tag.

    A receive with more room than was sent would return with part of its buffer as it was, and one
    with less room would end the process (Gloo, tried on torch 2.13). So each end says what it is
    about to do, then looks whether the other has: whoever comes second compares, before the data can
    move. The first is then told by its own timeout that the other end has not come.

    Args:
        store: a torch store of this mesh, used for nothing else.
        label: the group, as in `tp[pp=0 dp=1]`.
        ranks: its global ranks, in coord order.
        rank: this one.
        limit: how many messages are compared; None: all. At most 4 where a number is given.
    """

    __slots__ = ("_label", "_limit", "_rank", "_ranks", "_store")

    def __init__(self, store: Any, label: str, ranks: list[int], rank: int, limit: int | None) -> None:
        self._store = store
        self._label = label
        self._ranks = ranks
        self._rank = rank
        self._limit = None if limit is None else min(limit, _MOST)

    def compares(self, number: int) -> bool:
        """Whether the message with this number is compared; the same on both ends."""
        return self._limit is None or number <= self._limit

    def meet(
        self, direction: Direction, peer: int, tag: int, number: int, facts: tuple[str, int, str], site: str
    ) -> None:
        """Say what this end is about to do; compare where the other end, coord `peer`, has said so.

        facts: dtype, number of elements, shape. Raises CallMismatchError before the data moves.
        """
        other = self._ranks[peer]
        src, dst = (self._rank, other) if direction == "send" else (other, self._rank)
        key = self._key(src, dst, tag, number)
        mine = json.dumps([direction, *facts, site])
        # One step: who comes first writes, who comes second gets what the first has written.
        found = self._store.compare_set(key, "", mine)
        if found.decode() == mine:
            return
        way, dtype, count, shape, where = json.loads(found)
        if (dtype, count) == facts[:2]:
            self._store.delete_key(key)
            return
        ends = {direction: (self._rank, facts[0], facts[2], site), way: (other, dtype, shape, where)}
        sender, receiver = ends["send"], ends["recv"]
        told = (
            f"rank {sender[0]} sends {sender[1]} {sender[2]} at {sender[3]}\n"
            f"rank {receiver[0]} has room for {receiver[1]} {receiver[2]} at {receiver[3]}"
        )
        # For the first, which is blocked in its call and asks when that has failed.
        self._store.set(f"{key}/differs", told)
        error = CallMismatchError(
            f"message {number} with tag {tag} from rank {src} to rank {dst} on {self._label} "
            "means two things; nothing was sent",
            given=told,
            expected="the same dtype and number of elements at both ends",
            hint="handshake=True on the send and no out on the receive, where the receiver cannot know the shape",
        )
        error.odd_ranks = (src, dst)
        raise error

    def difference(self, direction: Direction, peer: int, tag: int, number: int) -> str | None:
        """What the other end, coord `peer`, found different in a message that this end came to first."""
        if not self.compares(number):
            return None
        other = self._ranks[peer]
        src, dst = (self._rank, other) if direction == "send" else (other, self._rank)
        key = f"{self._key(src, dst, tag, number)}/differs"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, src: int, dst: int, tag: int, number: int) -> str:
        return f"{self._label}/{src}>{dst}/{tag}/{number}"
