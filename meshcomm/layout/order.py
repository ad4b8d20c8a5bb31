"""Which rank sits at which position of the row-major rank grid?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np

from meshcomm.errors import LayoutError
from meshcomm.layout.digits import Ranks
from meshcomm.layout.sizes import fold, times


@final
class RankOrder:
    """Rank <-> position, of a mesh of these dims.

    rank_order: the rank at each position; None: rank and position are the same.
    given: `rank_order` as an array that cannot be written to, None where it changes nothing.

    Raises LayoutError where a rank is listed twice or one is missing.
    """

    __slots__ = ("_dims", "_positions", "_world_size", "given")

    given: Final[Ranks | None]

    def __init__(self, rank_order: Sequence[int] | None, dims: Mapping[str, int]) -> None:
        self._dims = dims
        self._world_size = math.prod(dims.values())
        self.given = None if rank_order is None else _permutation(rank_order, dims, self._world_size)
        self._positions: dict[int, int] | None = None
        if self.given is not None:
            self._positions = {rank: position for position, rank in enumerate(self.given.tolist())}

    def __contains__(self, rank: object) -> bool:
        if self._positions is None:
            return isinstance(rank, int) and 0 <= rank < self._world_size
        return rank in self._positions

    def position(self, rank: int) -> int:
        """Index of `rank` in the grid. Raises LayoutError where it has none."""
        if rank not in self:
            raise LayoutError(
                f"rank {rank} is not in the mesh",
                given=f"rank {rank}",
                expected=f"0 to {self._world_size - 1}"
                if self._positions is None
                else f"one of {fold(sorted(self._positions))}",
                hint=f"the mesh has {times(self._dims)} ranks",
            )
        return rank if self._positions is None else self._positions[rank]

    def rank(self, position: int) -> int:
        """The rank at a position."""
        return position if self.given is None else int(self.given[position])

    def at(self, positions: Ranks) -> Ranks:
        """`rank` of every position, same shape."""
        return positions if self.given is None else self.given[positions]

    def ranks(self) -> Ranks:
        """Every rank, in grid order; new memory."""
        if self.given is None:
            return np.arange(self._world_size, dtype=np.int64)
        return self.given.copy()


def _permutation(rank_order: Sequence[int], dims: Mapping[str, int], world: int) -> Ranks | None:
    """`rank_order`, checked; None where it is 0, 1, 2, ..."""
    order = np.asarray(rank_order, dtype=np.int64)
    if order.shape != (world,):
        raise LayoutError(
            f"rank_order lists {order.size} ranks for a mesh of {world}",
            given=f"{order.size} ranks, {times(dims)}",
            expected=f"{world} different ranks",
            hint="one rank for each position of the row-major grid, or no rank_order",
        )
    values, counts = np.unique(order, return_counts=True)
    if (values.size and values[0] < 0) or (counts > 1).any():
        odd = values[(counts > 1) | (values < 0)]
        raise LayoutError(
            "rank_order is not a permutation",
            given=f"rank {int(odd[0])} {'twice' if odd[0] >= 0 else ''}".rstrip(),
            expected=f"{world} different ranks, none negative",
            hint="list each rank once",
        )
    if (order == np.arange(world)).all():
        return None
    order.setflags(write=False)
    return order
