"""Which ranks of a large world are run? One of each kind, and a sample of the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Final

from meshcomm.layout import Layout

# Worlds of up to so many ranks are run whole.
WHOLE: Final = 16
# Corners are taken of so many dims, the outermost; 2 ** 5 of them.
_CORNERS: Final = 5
# Middles are taken of dims of so many ranks and more.
_MIDDLE: Final = 4


def chosen(
    layout: Layout, pipeline: str | None = None, *, also: Sequence[int] = (), sample: int = 8, seed: int = 0
) -> list[int]:
    """Ranks that stand for all, ascending.

    The first, middle and last coord along each dim of the base and of each view, the others being 0; every stage
    of `pipeline`; every corner, which is first or last along each dim; those in `also`; and `sample` more, drawn
    from `seed`. All of them in worlds of up to 16.

    >>> chosen(Layout({"pp": 4, "dp": 64, "tp": 8}), "pp", sample=0)[:6]
    [0, 4, 7, 256, 504, 511]
    """
    world = layout.world_size
    everyone = [int(rank) for rank in layout.ranks]
    if world <= WHOLE:
        return sorted(everyone)
    first = layout.rank_of(0)
    found = {first, *also}
    for sizes in (layout.dims, *layout.views.values()):
        for dim, size in sizes.items():
            line = layout.group_of(first, dim)
            middle = [size // 2] if size >= _MIDDLE else []
            coords = range(size) if dim == pipeline else {0, *middle, size - 1}
            found.update(int(line[coord]) for coord in coords)
    wide = [dim for dim, size in layout.dims.items() if size > 1][:_CORNERS]
    for ends in product((0, 1), repeat=len(wide)):
        at = dict.fromkeys(layout.dims, 0)
        at |= {dim: end * (layout.size(dim) - 1) for dim, end in zip(wide, ends, strict=True)}
        found.add(layout.rank_at(**at))
    draw = random.Random(seed)
    while sample and len(found) < world:
        found.add(layout.rank_of(draw.randrange(world)))
        sample -= 1
    return sorted(found)
