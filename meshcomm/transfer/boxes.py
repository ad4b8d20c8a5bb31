"""Who sends which piece to whom if the boxes of each rank are listed, because no placement describes who holds what.

Some ranks may be lost, others may have copies of their boxes, and boxes of several layouts may overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import TypeAlias, final

import numpy as np
import torch

from meshcomm.transfer.placement import Ints
from meshcomm.transfer.plan import BUCKET_BYTES, Loaded, Pieces, Slice, assigned, packed

# The name, dtype and full shape of a tensor.
Key: TypeAlias = tuple[str, torch.dtype, tuple[int, ...]]
# Where a box begins and ends in the full tensor.
Span: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
# The boxes of one rank.
Spans: TypeAlias = Mapping[Key, Sequence[Span]]


@lru_cache(maxsize=4096)
def box_pieces(source: tuple[tuple[int, Span], ...], target: tuple[tuple[int, Span], ...]) -> Pieces | None:
    """Return the pieces of a tensor: each element of each rank's boxes of the target arrives there once.

    source, target: the boxes of ranks. Returns None if no rank of the source has some element.
    """
    axes = range(len(target[0][1][0]))
    # The corners of all boxes cut the tensor into cells. A box has all of a cell or nothing of it.
    corners = [sorted({corner[axis] for _, span in source + target for corner in span}) for axis in axes]
    cells = [*product(*map(pairwise, corners))]
    begin, end = np.array(cells, dtype=np.int64).reshape(len(cells), len(axes), 2).transpose(2, 0, 1)

    def ranks_of_cells(boxes: Sequence[tuple[int, Span]]) -> Ints:
        spans = np.array([span for _, span in boxes], dtype=np.int64).reshape(len(boxes), 2, len(axes))
        inside = ((spans[:, 0] <= begin[:, None]) & (end[:, None] <= spans[:, 1])).all(axis=2)
        order = np.argsort(~inside, axis=1, kind="stable")[:, : inside.sum(axis=1).max(initial=0)]
        numbers = np.array([rank for rank, _ in boxes], dtype=np.int64)
        ranks: Ints = np.where(np.take_along_axis(inside, order, axis=1), numbers[order], -1)
        return ranks

    holders, readers = ranks_of_cells(source), ranks_of_cells(target)
    wanted, held = ((ranks >= 0).any(axis=1) for ranks in (readers, holders))
    if (wanted & ~held).any():
        return None
    holders, readers = holders[wanted], readers[wanted]
    local = (holders[:, None] == readers[:, :, None]).any(axis=2) & (readers >= 0)
    return assigned(holders, readers, local, begin[wanted], end[wanted], None)


@final
class BoxPlan:
    """A transfer of tensors between listed boxes, which Run carries out like a Plan. Equal on all ranks.

    sources, targets: the boxes of each rank.
    keys:    the tensors of the target, in the order in which they are sent.
    lacking: those of which no rank has some element. If there are any, the plan cannot be carried out.
    """

    def __init__(self, sources: Sequence[Spans], targets: Sequence[Spans]) -> None:
        self._size = len(sources)
        self.keys = [*dict.fromkeys(key for spans in targets for key in spans)]
        self.itemsizes = [dtype.itemsize for _, dtype, _ in self.keys]
        pieces = {key: box_pieces(_of_key(sources, key), _of_key(targets, key)) for key in self.keys}
        self.lacking = [key for key, every in pieces.items() if every is None]
        self._pieces = [every for every in pieces.values() if every is not None]

    def rounds(self) -> list[list[Slice]]:
        """Return what is sent at once, in order."""
        size = self._size
        return packed(map(partial(_chunked, size), self._pieces, self.itemsizes), size, BUCKET_BYTES)

    def own(self, part: Slice, position: int, sends: bool) -> Pieces:
        """Return the pieces of a slice's tensor that a rank sends, or receives."""
        every = self._pieces[part.entry]
        return every.of((every.source if sends else every.target) == position)


def _chunked(size: int, every: Pieces, itemsize: int) -> tuple[int, Loaded]:
    """Return in how many chunks the pieces of a tensor are sent between `size` ranks, and what each rank sends and receives."""
    lengths = (every.end - every.begin).max(axis=1, initial=1)
    rows = every.elements // lengths

    def loads(chunks: int) -> Ints:
        sizes = rows * -(-lengths // chunks) * itemsize
        sent, received = (np.bincount(ranks, sizes, size) for ranks in every[:2])
        return np.append(sent, received).astype(np.int64)

    chunks = max(1, -(-int(loads(1).max(initial=0)) // BUCKET_BYTES))
    # Chunks of a piece differ by one row. A row is not divided.
    while loads(chunks).max(initial=0) > BUCKET_BYTES and chunks < lengths.max():
        chunks += -(-chunks // 8)
    places = np.flatnonzero(most := loads(chunks))
    return chunks, (places, most[places])


def _of_key(ranks: Sequence[Spans], key: Key) -> tuple[tuple[int, Span], ...]:
    return tuple((rank, span) for rank, spans in enumerate(ranks) for span in spans.get(key, ()))
