"""Carries out a plan: packs pieces into buckets, exchanges them along the link, and writes them to their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.comm import Handle
from meshcomm.transfer.plan import Leg, Pieces, Plan, Slice, pieces, sliced
from meshcomm.transfer.sides import Sides
from meshcomm.transfer.tensors import Region

# Where a piece may begin in a bucket: torch reads no element at an odd address.
_ALIGNED_BYTES = 16


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


@final
class Run:
    """One transfer on this rank.

    sources, targets: this rank's memory, by the number of the entry.
    """

    def __init__(
        self,
        plan: Plan,
        sides: Sides,
        sources: Mapping[int, Room],
        targets: Mapping[int, Room],
    ) -> None:
        self._plan, self._mesh, self._me = plan, sides.mesh, sides.me
        self._dim = sides.dim
        self._sender, self._receiver = sides.position("source"), sides.position("target")
        self._sources, self._targets = sources, targets
        # Two send and two receive buckets, for rounds in turn.
        self._buckets: dict[tuple[str, int], Tensor] = {}

    def __call__(self) -> None:
        """Send and receive every round. Called by: every rank of the link. Raises CommunicationError."""
        under_way: tuple[list[Slice], Callable[[], None]] | None = None
        for number, parts in enumerate(self._plan.rounds()):
            if under_way is not None and _needs(parts, under_way[0]):
                under_way[1]()
                under_way = None
            finish = self._start(parts, number % 2)
            if under_way is not None:
                under_way[1]()
            under_way = parts, finish
        if under_way is not None:
            under_way[1]()

    def _start(self, parts: Sequence[Slice], turn: int) -> Callable[[], None]:
        """Start a round; return a function that waits for it and writes what has arrived."""
        going = [*self._pieces(parts, sends=True)]
        coming = [*self._pieces(parts, sends=False)]
        sends, packed = self._messages("send", turn, [piece for piece in going if piece.peer != self._me])
        for piece, room in packed:
            room.copy_(self._read(piece))
        recvs, arriving = self._messages("recv", turn, [piece for piece in coming if piece.peer != self._me])
        handle: Handle[Any] | None = None
        if sends or recvs:
            handle = self._mesh.exchange(self._dim, sends=sends, recvs=recvs, async_op=True)
        for piece in coming:
            if piece.peer == self._me:
                self._write(piece, self._read(piece))

        def finish() -> None:
            if handle is not None:
                handle.wait()
            for piece, room in arriving:
                self._write(piece, room)

        return finish

    def _pieces(self, parts: Sequence[Slice], sends: bool) -> Iterator[_Piece]:
        """Yield this rank's pieces of a round, by peer in the order of the plan."""
        for part in parts:
            entry = self._plan.entries[part.entry]
            leg = self._plan.legs(entry)[part.leg]
            mine = self._own(leg, part.leg, sends)
            if mine is None or not len(mine.begin):
                continue
            begin, end = mine.begin, mine.end
            if part.chunks > 1:
                begin, end = sliced(begin, end, part.chunk, part.chunks)
            peers = mine.target if sends else mine.source
            for peer, first, last in zip(peers.tolist(), begin.tolist(), end.tolist(), strict=True):
                if all(a < b for a, b in zip(first, last, strict=True)):
                    yield _Piece(peer, part.entry, part.leg, tuple(first), tuple(last))

    def _own(self, leg: Leg, number: int, sends: bool) -> Pieces | None:
        align = self._plan.align
        position = self._receiver if number or not sends else self._sender
        if position is None:
            return None
        return (
            pieces(leg.source, leg.target, leg.ends, sender=position, align=align)
            if sends
            else pieces(leg.source, leg.target, leg.ends, receiver=position, align=align)
        )

    def _messages(
        self, direction: str, turn: int, listed: Sequence[_Piece]
    ) -> tuple[list[tuple[Tensor, int]], list[tuple[_Piece, Tensor]]]:
        """Return a message for each peer, and the memory of each piece in it."""
        by_peer: dict[int, list[_Piece]] = {}
        for piece in listed:
            by_peer.setdefault(piece.peer, []).append(piece)
        places: list[tuple[_Piece, int]] = []
        spans: list[tuple[int, int, int]] = []
        used = 0
        size = self._plan.ends.size
        # Each rank begins with the rank after itself, so that not all send to the same.
        for peer in sorted(by_peer, key=lambda peer: (peer - self._me) % size):
            begin = used
            for piece in by_peer[peer]:
                places.append((piece, used))
                used += -(-self._nbytes(piece) // _ALIGNED_BYTES) * _ALIGNED_BYTES
            spans.append((peer, begin, used))
        bucket = self._bucket(direction, turn, used)
        messages = [(bucket[begin:end], peer) for peer, begin, end in spans]
        rooms = []
        for piece, at in places:
            values = bucket[at : at + self._nbytes(piece)].view(self._room(piece, direction).dtype)
            rooms.append((piece, values.view([b - a for a, b in zip(piece.begin, piece.end, strict=True)])))
        return messages, rooms

    def _bucket(self, direction: str, turn: int, nbytes: int) -> Tensor:
        bucket = self._buckets.get((direction, turn))
        if bucket is None or bucket.numel() < nbytes:
            bucket = torch.empty(nbytes, dtype=torch.uint8, device=self._mesh.device)
            self._buckets[direction, turn] = bucket
        return bucket

    def _room(self, piece: _Piece, direction: str) -> Room:
        reads_source = direction == "send" and piece.leg == 0
        return (self._sources if reads_source else self._targets)[piece.entry]

    def _nbytes(self, piece: _Piece) -> int:
        size = self._plan.entries[piece.entry].itemsize
        for begin, end in zip(piece.begin, piece.end, strict=True):
            size *= end - begin
        return size

    def _read(self, piece: _Piece) -> Tensor:
        room = self._room(piece, "send")
        return _region(room, piece).read(piece.begin, piece.end).to(room.dtype)

    def _write(self, piece: _Piece, values: Tensor) -> None:
        room = self._room(piece, "recv")
        _region(room, piece).write(piece.begin, piece.end, values)


def _region(room: Room, piece: _Piece) -> Region:
    """Return the region that contains a piece. A piece lies in one block of each side."""
    return next(
        region
        for region in room.regions
        if all(
            a >= begin and b <= end
            for a, b, begin, end in zip(piece.begin, piece.end, region.box.begin, region.box.end, strict=True)
        )
    )


def _needs(parts: Sequence[Slice], before: Sequence[Slice]) -> bool:
    """Return whether a round reads what the one before it writes."""
    written = {part._replace(leg=part.leg + 1) for part in before}
    return any(part in written for part in parts)
