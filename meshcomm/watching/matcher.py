"""Which calls of several ranks belong together: the rule of a group, for ranks that run as threads or were only recorded."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeAlias, TypeVar, final

T = TypeVar("T")


@final
class Collective(Generic[T]):
    """A collective. number: its sequence number in the group, from 1. came: the contribution of each member that has arrived."""

    def __init__(self, members: Sequence[int], number: int) -> None:
        self.members, self.number = members, number
        self.came: dict[int, T] = {}

    @property
    def complete(self) -> bool:
        """Whether every member has come."""
        return len(self.came) == len(self.members)

    def absent(self, needed: Collection[int] | None = None) -> list[int]:
        """Return the missing members; with `needed`, only members in it."""
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
        collective = self.pending.get(number)
        if collective is None:
            collective = self.pending[number] = Collective(self.members, number)
        collective.came[rank] = brought
        if collective.complete:
            del self.pending[number]
        return collective


@final
class Message(Generic[T]):
    """A message with the contributions of its two ends. source: None while a receive from any source waits for a sender."""

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


# The source, the target and the tag of a message. The source of a receive from any rank is None.
_Channel: TypeAlias = "tuple[int | None, int, int]"


@final
class Messages(Generic[T]):
    """The messages of one group: those of the same two ranks and tag match in order.

    A receive from any source takes the first message of one of the senders. Messages are not buffered.
    """

    def __init__(self) -> None:
        # The messages that lack an end, as they were posted, with their place among all of them. Each is found without a
        # search: a channel of a step may have thousands.
        self._sent: dict[_Channel, deque[tuple[int, Message[T]]]] = {}
        self._awaited: dict[_Channel, deque[tuple[int, Message[T]]]] = {}
        # The senders of messages that were not received, by target and tag.
        self._senders: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._posted = 0

    def send(self, source: int, target: int, tag: int, brought: T) -> Message[T]:
        """Return the next message of `source` to `target` with this tag."""
        channels = [
            channel for channel in ((source, target, tag), (None, target, tag)) if channel in self._awaited
        ]
        if channels:
            message = self._taken(
                self._awaited, min(channels, key=lambda channel: self._awaited[channel][0][0])
            )
        else:
            message = self._post(self._sent, source, target, tag)
            self._senders[target, tag].add(source)
        message.source, message.sent = source, brought
        return message

    def receive(
        self, source: int | None, target: int, tag: int, brought: T, choose: Callable[[int], int]
    ) -> Message[T]:
        """Return the next message to `target` from `source`. If `source` is None, `choose` selects one of several senders."""
        senders = self._senders[target, tag]
        if source is None and senders:
            # As their first messages were posted.
            first = sorted(senders, key=lambda sender: self._sent[sender, target, tag][0][0])
            source = first[choose(len(first)) if len(first) > 1 else 0]
        if source in senders:
            message = self._taken(self._sent, (source, target, tag))
            if (source, target, tag) not in self._sent:
                senders.discard(source)
        else:
            message = self._post(self._awaited, source, target, tag)
        message.received = brought
        return message

    def unmatched(self) -> list[Message[T]]:
        """Return the messages that lack an end, as they were posted."""
        waiting = (
            each for queues in (self._sent, self._awaited) for queue in queues.values() for each in queue
        )
        return [message for _, message in sorted(waiting, key=lambda posted: posted[0])]

    def _taken(self, queues: dict[_Channel, deque[tuple[int, Message[T]]]], channel: _Channel) -> Message[T]:
        _, message = queues[channel].popleft()
        if not queues[channel]:
            del queues[channel]
        return message

    def _post(
        self, queues: dict[_Channel, deque[tuple[int, Message[T]]]], source: int | None, target: int, tag: int
    ) -> Message[T]:
        message = Message[T](source, target, tag)
        self._posted += 1
        queues.setdefault((source, target, tag), deque()).append((self._posted, message))
        return message
