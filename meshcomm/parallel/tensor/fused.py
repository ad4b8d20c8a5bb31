"""One weight that holds several, such as q, k and v: in which order its rows are kept when it is split.

Each rank needs its share of every part, which is no contiguous slice of the rows as they stand. So
they are kept as (units, rows of all parts in a unit, ...), where a unit has equally many rows of each
part's share; a rank has a contiguous run of units. `units` follows from the parts alone, so what a
checkpoint holds does not depend on the mesh, and the extra axis says aloud that it is another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def units(sizes: Sequence[int]) -> int:
    """Into how many equal shares all parts can be cut: any number of ranks that divides it will do."""
    return math.gcd(*sizes)


def kept(whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """Rows in the parts' order (sum of sizes, ...) -> as they are kept (units, rows in a unit, ...).

    >>> kept(torch.tensor([0, 1, 2, 3, 10, 11]), [4, 2]).tolist()
    [[0, 1, 10], [2, 3, 11]]
    """
    n = units(sizes)
    return torch.cat([part.unflatten(0, (n, -1)) for part in whole.split(list(sizes))], 1)


def joined(units_held: Tensor, sizes: Sequence[int]) -> Tensor:
    """Some of the units, or all -> their rows in the parts' order: the inverse of `kept`."""
    n = units(sizes)
    return torch.cat([part.flatten(0, 1) for part in units_held.split([size // n for size in sizes], 1)])
