"""Carries out a plan: packs pieces into buckets, exchanges them along the link, and writes them to their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import sub
from typing import Any, Final, NamedTuple, final
from zlib import crc32

import torch
from torch import Tensor

from meshcomm.comm import Handle
from meshcomm.transfer.boxes import BoxPlan
from meshcomm.transfer.changes import Digest, digest_of, summed
from meshcomm.transfer.plan import PACKED_BYTES, Plan, Slice, sliced
from meshcomm.transfer.sides import Sides
from meshcomm.transfer.tensors import Region

# Where a piece may begin in a bucket: torch reads no element at an odd address.
_ALIGNED_BYTES: Final = 16


class Room(NamedTuple):
    """This rank's memory for an entry. dtype: of the elements on their way, to which the source converts them."""

    regions: Sequence[Region]
    dtype: torch.dtype


class _Piece(NamedTuple):
    peer: int
    entry: int
    leg: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    nbytes: int

    @property
    def sign(self) -> tuple[int, int]:
        """The entry's number, and an odd number of the piece, so that the hashes of two pieces do not count alike."""
        return self.entry, 2 * crc32(repr((self.entry, self.begin, self.end)).encode()) + 1


class _Round(NamedTuple):
    """What this rank sends and receives at once: the pieces of each message, and those that stay on this rank.

    reads_last: whether the round sends what the one before it receives.
    """

    sends: list[list[_Piece]]
    recvs: list[list[_Piece]]
    local: list[_Piece]
    reads_last: bool


@final
class Schedule:
    """The messages of one rank in a transfer. They follow from the plan alone, so transfers of the same plan share them."""

    def __init__(self, plan: Plan | BoxPlan, sides: Sides) -> None:
        self.mesh, self.dim = sides.mesh, sides.dim
        self._plan, self._me = plan, sides.me
        self._sender, self._receiver = sides.position("source"), sides.position("target")
        rounds = plan.rounds()
        self.rounds = [
            self._round(parts, before) for parts, before in zip(rounds, [[], *rounds], strict=False)
        ]

    def _round(self, parts: Sequence[Slice], before: Sequence[Slice]) -> _Round:
        going, coming = [*self._pieces(parts, sends=True)], [*self._pieces(parts, sends=False)]
        # What a copy already has of a later leg stays where it is.
        local = [piece for piece in coming if piece.peer == self._me and piece.leg == 0]
        written = {(part.entry, part.leg + 1) for part in before}
        reads_last = any((part.entry, part.leg) in written for part in parts)
        return _Round(self._messages(going), self._messages(coming), local, reads_last)

    def _pieces(self, parts: Sequence[Slice], sends: bool) -> Iterator[_Piece]:
        """Yield this rank's pieces of a round, in the order of the plan."""
        for part in parts:
            position = self._receiver if part.leg or not sends else self._sender
            if position is None:
                continue
            mine = self._plan.own(part, position, sends)
            begin, end = mine.begin, mine.end
            if part.chunks > 1:
                begin, end = sliced(begin, end, part.chunk, part.chunks)
            nbytes = (end - begin).prod(axis=1) * self._plan.itemsizes[part.entry]
            peers = mine.target if sends else mine.source
            for peer, first, last, size in zip(
                peers.tolist(), begin.tolist(), end.tolist(), nbytes.tolist(), strict=True
            ):
                if size:
                    yield _Piece(peer, part.entry, part.leg, tuple(first), tuple(last), size)

    def _messages(self, listed: Sequence[_Piece]) -> list[list[_Piece]]:
        """Return the pieces of each message. Both ends list the same messages of a pair of ranks, in the same order."""
        packed: dict[int, list[_Piece]] = {}
        alone: dict[int, list[list[_Piece]]] = {}
        for piece in listed:
            if piece.peer == self._me:
                continue
            # It is sent from its place, and received into it, where its memory is contiguous.
            if piece.nbytes > PACKED_BYTES:
                alone.setdefault(piece.peer, []).append([piece])
            else:
                packed.setdefault(piece.peer, []).append(piece)
        messages = [*packed.values(), *(message for of_peer in alone.values() for message in of_peer)]
        # Each rank begins with the rank after itself, so that not all send to the same.
        size = self.mesh.size(self.dim)
        return sorted(messages, key=lambda message: (message[0].peer - self._me) % size)


class _Place(NamedTuple):
    """A piece in this rank's memory. held: its values; None if the region's memory has another order, or is of inference mode."""

    piece: _Piece
    shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    held: Tensor | None

    def read(self) -> Tensor:
        return self.region.read(self.piece.begin, self.piece.end) if self.held is None else self.held

    def write(self, values: Tensor) -> None:
        if self.held is None or self.held.is_inference():
            self.region.write(self.piece.begin, self.piece.end, values)
        else:
            self.held.copy_(values)

    def of_bytes(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).view(self.shape)

    def as_bytes(self, device: torch.device) -> Tensor | None:
        """Return the memory itself as bytes, or None if it cannot be sent, or received into, as it is."""
        held = self.held
        if held is None or held.dtype != self.dtype or held.device != device or type(held) is not Tensor:
            return None
        if not held.is_contiguous() or held.is_conj() or held.is_neg():
            return None
        return held.as_strided((held.numel(),), (1,)).view(torch.uint8)


class _Message(NamedTuple):
    """memory: what is sent, or received into, of a single place; None if the places are packed in the bucket, each at its byte of
    `at`.
    """

    peer: int
    memory: Tensor | None
    places: list[_Place]
    at: list[int]

    def tensor(self, bucket: Tensor) -> Tensor:
        if self.memory is not None:
            return self.memory
        return bucket[self.at[0] : self.at[-1] + self.places[-1].piece.nbytes]

    def arrived(self, bucket: Tensor) -> Iterator[tuple[_Place, Tensor]]:
        """Yield the places and the bytes that have arrived for them."""
        if self.memory is not None:
            yield self.places[0], self.memory
        for place, at in zip(self.places, self.at, strict=False):
            yield place, bucket[at : at + place.piece.nbytes]


class _Ready(NamedTuple):
    """A round with this rank's memory. local: pairs of what is read and where it is written."""

    sends: list[_Message]
    recvs: list[_Message]
    local: list[tuple[_Place, _Place]]
    reads_last: bool


@final
class Run:
    """A schedule with this rank's memory. May be called any number of times.

    sources, targets: this rank's memory, by the number of the entry.
    """

    def __init__(self, schedule: Schedule, sources: Mapping[int, Room], targets: Mapping[int, Room]) -> None:
        self._mesh, self._dim = schedule.mesh, schedule.dim
        self._sources, self._targets = sources, targets
        self._rounds = [
            _Ready(
                self._messages(sends, True),
                self._messages(recvs, False),
                [places for piece in local if not _same_memory(*(places := self._both_places(piece)))],
                reads_last,
            )
            for sends, recvs, local, reads_last in schedule.rounds
        ]

    def sent(self) -> dict[int, int]:
        """Return a hash of what this rank sends of the source's values, by the number of the entry.

        The sum over all ranks equals the sum that `__call__` returns if every piece arrives as it is now.
        """
        known: dict[tuple[Any, ...], Digest] = {}

        def digest(place: _Place) -> Digest:
            key = place.piece[1:]
            if key not in known:
                known[key] = digest_of(place.read(), place.dtype)
            return known[key]

        messages = [message for ready in self._rounds for message in ready.sends]
        places = [place for message in messages for place in message.places if place.piece.leg == 0]
        places += [source for ready in self._rounds for source, _ in ready.local]
        return summed((*place.piece.sign, digest(place)) for place in places)

    def __call__(self, checks: bool = False) -> dict[int, int]:
        """Send and receive every round. Called by: every rank of the link. Raises CommunicationError.

        checks: whether to hash what arrives; see `sent`. Returns the hashes, or {}.
        """
        self._arrived: list[tuple[int, int, Digest]] | None = [] if checks else None
        self._handles: list[Handle[Any]] = []
        try:
            self._run()
        except BaseException:
            # Other messages under way have no more use.
            for handle in self._handles:
                handle._abandon()
            raise
        return summed(self._arrived or ())

    def _arrives(self, piece: _Piece, values: Tensor) -> None:
        if self._arrived is not None and piece.leg == 0:
            self._arrived.append((*piece.sign, digest_of(values)))

    def _run(self) -> None:
        # Two send and two receive buckets, for rounds in turn.
        buckets: dict[tuple[str, int], Tensor] = {}
        finish: Callable[[], None] | None = None
        for number, ready in enumerate(self._rounds):
            if finish is not None and ready.reads_last:
                finish()
                finish = None
            before, finish = finish, self._start(ready, buckets, number % 2)
            if before is not None:
                before()
        if finish is not None:
            finish()

    def _start(self, ready: _Ready, buckets: dict[tuple[str, int], Tensor], turn: int) -> Callable[[], None]:
        """Start a round; return a function that waits for it and writes what has arrived."""
        going, coming = (
            self._bucket(messages, buckets, (direction, turn))
            for direction, messages in (("send", ready.sends), ("recv", ready.recvs))
        )
        for message in ready.sends:
            for place, at in zip(message.places, message.at, strict=False):
                place.of_bytes(going[at : at + place.piece.nbytes]).copy_(place.read())
        handle: Handle[Any] | None = None
        if ready.sends or ready.recvs:
            handle = self._mesh.exchange(
                self._dim,
                sends=[(message.tensor(going), message.peer) for message in ready.sends],
                recvs=[(message.tensor(coming), message.peer) for message in ready.recvs],
                async_op=True,
            )
            self._handles.append(handle)
        for source, target in ready.local:
            values = source.read().to(source.dtype)
            self._arrives(source.piece, values)
            target.write(values)

        def finish() -> None:
            if handle is not None:
                handle.wait()
                self._handles.remove(handle)
            for message in ready.recvs:
                for place, data in message.arrived(coming):
                    values = place.of_bytes(data)
                    self._arrives(place.piece, values)
                    if message.memory is None:
                        place.write(values)

        return finish

    def _bucket(
        self, messages: Sequence[_Message], buckets: dict[tuple[str, int], Tensor], key: tuple[str, int]
    ) -> Tensor:
        used = [message.at[-1] + message.places[-1].piece.nbytes for message in messages if message.at]
        bucket = buckets.get(key)
        if bucket is None or bucket.numel() < max(used, default=0):
            bucket = torch.empty(max(used, default=0), dtype=torch.uint8, device=self._mesh.device)
            buckets[key] = bucket
        return bucket

    def _messages(self, messages: Sequence[Sequence[_Piece]], sends: bool) -> list[_Message]:
        ready = []
        used = 0
        for message in messages:
            places = [self._place(piece, sends) for piece in message]
            memory = places[0].as_bytes(self._mesh.device) if len(places) == 1 else None
            if memory is not None:
                ready.append(_Message(message[0].peer, memory, places, []))
                continue
            at = []
            for piece in message:
                at.append(used)
                used += -(-piece.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            ready.append(_Message(message[0].peer, None, places, at))
        return ready

    def _both_places(self, piece: _Piece) -> tuple[_Place, _Place]:
        return self._place(piece, reads=True), self._place(piece, reads=False)

    def _place(self, piece: _Piece, reads: bool) -> _Place:
        room = (self._sources if reads and piece.leg == 0 else self._targets)[piece.entry]
        # A piece lies in one block of each side.
        region = next(region for region in room.regions if region.box.contains(piece.begin, piece.end))
        is_plain = region.units is None and not region.held.is_inference()
        held = region.read(piece.begin, piece.end) if is_plain else None
        shape = tuple(map(sub, piece.end, piece.begin))
        return _Place(piece, shape, region, room.dtype, held)


def _same_memory(source: _Place, target: _Place) -> bool:
    return source.held is not None and target.held is not None and source.held.is_set_to(target.held)
