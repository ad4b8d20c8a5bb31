"""Who sends which piece to whom if boxes are listed rank by rank, because no placement describes who holds what.

Some ranks may be lost, others may have copies of their boxes, and boxes of several layouts may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, final

import numpy as np
import torch

from meshcomm.layout import Layout
from meshcomm.transfer.placement import Ints
from meshcomm.transfer.plan import Ends, Pieces, Slice, assigned, packed

# The name, dtype and full shape of a tensor.
Key: TypeAlias = tuple[str, torch.dtype, tuple[int, ...]]
# Where a box begins and ends in the full tensor.
Span: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
# The boxes of one rank.
Boxes: TypeAlias = Mapping[Key, Sequence[Span]]


def ends_of(ranks: int) -> Ends:
    """Return the ends of a transfer in which all ranks are on both sides, numbered in order."""
    layout, numbers = Layout({"rank": ranks}), np.arange(ranks)
    return Ends(layout, layout, numbers, numbers)


@lru_cache(maxsize=4096)
def box_pieces(
    source: tuple[tuple[int, Span], ...], target: tuple[tuple[int, Span], ...], ranks: int
) -> Pieces | None:
    """Return the pieces of a tensor: each element of each rank's boxes of the target arrives there once.

    source, target: ranks below `ranks`, each with a box. Returns None if no rank has some element.
    """
    axes = len(target[0][1][0])
    numbers = np.array([rank for rank, _ in source + target])
    spans = np.array([span for _, span in source + target], dtype=np.int64).reshape(len(numbers), 2, axes)
    # The corners of all boxes cut the tensor into cells. A box has all of a cell or nothing of it.
    cuts = [np.unique(corners) for corners in spans.reshape(2 * len(numbers), axes).T]
    counts = [len(cut) - 1 for cut in cuts]
    cells = np.indices(counts).reshape(axes, math.prod(counts))
    begin, end = (
        np.array([cut[cell + last] for cut, cell in zip(cuts, cells, strict=True)], dtype=np.int64)
        .reshape(cells.shape)
        .T
        for last in (0, 1)
    )
    inside = ((spans[:, 0] <= begin[:, None]) & (end[:, None] <= spans[:, 1])).all(axis=2)
    holders, readers = (
        _first(inside[:, side], numbers[side]) for side in (slice(len(source)), slice(len(source), None))
    )
    wanted = (readers >= 0).any(axis=1)
    if not (holders[wanted] >= 0).any(axis=1).all():
        return None
    return assigned(holders[wanted], readers[wanted], begin[wanted], end[wanted], ends_of(ranks))


def _first(inside: Ints, numbers: Ints) -> Ints:
    """Return the ranks that have each cell, followed by -1. inside: whether a box has a cell, of shape (cells, boxes)."""
    order = np.argsort(~inside, axis=1, kind="stable")[:, : inside.sum(axis=1).max(initial=0)]
    ranks: Ints = np.where(np.take_along_axis(inside, order, axis=1), numbers[order], -1)
    return ranks


@final
class BoxPlan:
    """A transfer of tensors between the boxes of ranks, which Run carries out like a Plan. Equal on all ranks.

    sources, targets: the boxes of each rank.
    keys:    the tensors of the target, in the order in which they are sent.
    lacking: those that no rank has as a whole. The plan cannot be carried out if there are any.
    """

    def __init__(
        self, sources: Sequence[Boxes], targets: Sequence[Boxes], bucket_bytes: int = 32 << 20
    ) -> None:
        self.keys, self._bucket_bytes = (
            [*dict.fromkeys(key for boxes in targets for key in boxes)],
            bucket_bytes,
        )
        pieces = {
            key: box_pieces(_of_key(sources, key), _of_key(targets, key), len(targets)) for key in self.keys
        }
        self.lacking = [key for key, every in pieces.items() if every is None]
        self._pieces = [every for every in pieces.values() if every is not None]

    def rounds(self) -> list[list[Slice]]:
        """Return what is sent at once, in order."""
        most = [
            int(max(np.bincount(ranks, every.elements).max(initial=0) for ranks in every[:2]))
            * key[1].itemsize
            for key, every in zip(self.keys, self._pieces, strict=True)
        ]
        return packed(most, self._bucket_bytes)

    def own(self, part: Slice, position: int, sends: bool) -> Pieces:
        """Return the pieces of a slice's tensor that a rank sends, or receives."""
        every = self._pieces[part.entry]
        return every.of((every.source if sends else every.target) == position)


def _of_key(ranks: Sequence[Boxes], key: Key) -> tuple[tuple[int, Span], ...]:
    return tuple((rank, span) for rank, boxes in enumerate(ranks) for span in boxes.get(key, ()))
