"""Which calls of several ranks belong together: the rule of a group, for ranks that run as threads or were only recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Collective(Generic[T]):
    """A collective. number: its place among those of the group, from 1. came: what each member has brought."""

    def __init__(self, members: Sequence[int], number: int) -> None:
        self.members, self.number = members, number
        self.came: dict[int, T] = {}

    @property
    def complete(self) -> bool:
        """Whether every member has come."""
        return len(self.came) == len(self.members)

    def absent(self, needed: Collection[int] | None = None) -> list[int]:
        """Return the members, or those in `needed`, that have not come."""
        return [rank for rank in self.members if rank not in self.came and (needed is None or rank in needed)]


@final
class Collectives(Generic[T]):
    """The collectives of one group: the n-th call of each member is one collective.

    pending: the collectives that are not complete, by number.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.pending: dict[int, Collective[T]] = {}
        self._made: Counter[int] = Counter()

    def join(self, rank: int, brought: T) -> Collective[T]:
        """Return the next collective of `rank`."""
        self._made[rank] += 1
        number = self._made[rank]
        found = self.pending.get(number)
        if found is None:
            found = self.pending[number] = Collective(self.members, number)
        found.came[rank] = brought
        if found.complete:
            del self.pending[number]
        return found


@final
class Message(Generic[T]):
    """A message, and what each of its ends has brought. source: None while a receive from any source waits for a sender."""

    __slots__ = ("received", "sent", "source", "tag", "target")

    def __init__(self, source: int | None, target: int, tag: int) -> None:
        self.source, self.target, self.tag = source, target, tag
        self.sent: T | None = None
        self.received: T | None = None

    @property
    def complete(self) -> bool:
        """Whether both ends have come."""
        return self.sent is not None and self.received is not None

    def lacks(self) -> int | None:
        """Return the rank whose end has not come; None if any rank may send it."""
        return self.target if self.received is None else self.source


@final
class Messages(Generic[T]):
    """The messages of one group: those of the same two ranks and tag match in order.

    A receive from any source takes the first message of one of the senders. Messages are not buffered.
    """

    def __init__(self) -> None:
        # The messages that lack an end by target and tag, as they were posted, with their place among all of them.
        self._waiting: dict[tuple[int, int], list[tuple[int, Message[T]]]] = defaultdict(list)
        self._posted = 0

    def send(self, source: int, target: int, tag: int, brought: T) -> Message[T]:
        """Return the next message of `source` to `target` with this tag."""
        waiting = self._waiting[target, tag]
        for place, (_, message) in enumerate(waiting):
            if message.sent is None and message.source in (None, source):
                del waiting[place]
                break
        else:
            message = self._post(source, target, tag)
        message.source, message.sent = source, brought
        return message

    def receive(
        self, source: int | None, target: int, tag: int, brought: T, choose: Callable[[int], int]
    ) -> Message[T]:
        """Return the next message to `target` from `source`. If `source` is None, `choose` selects one of several senders."""
        waiting = self._waiting[target, tag]
        fits = []
        for place, (_, message) in enumerate(waiting):
            if message.sent is not None and source in (None, message.source):
                fits.append(place)
                if source is not None:
                    break
        if fits:
            # The first message of each sender.
            first = list({waiting[place][1].source: place for place in reversed(fits)}.values())
            _, message = waiting.pop(first[choose(len(first)) if len(first) > 1 else 0])
        else:
            message = self._post(source, target, tag)
        message.received = brought
        return message

    def unmatched(self) -> list[Message[T]]:
        """Return the messages that lack an end, as they were posted."""
        waiting = sorted(
            (each for group in self._waiting.values() for each in group), key=lambda each: each[0]
        )
        return [message for _, message in waiting]

    def _post(self, source: int | None, target: int, tag: int) -> Message[T]:
        message = Message[T](source, target, tag)
        self._posted += 1
        self._waiting[target, tag].append((self._posted, message))
        return message
