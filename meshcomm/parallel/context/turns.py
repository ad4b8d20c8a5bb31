"""Which block of attention does a rank compute when it holds which rank's keys? Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from meshcomm.parallel.context.order import Order

Part: TypeAlias = Literal["all", "first", "second"]


class Block(NamedTuple):
    """Which of a rank's queries meet which of the keys at hand; causal: only keys at or before them."""

    queries: Part
    keys: Part
    causal: bool


def source_at(turn: int, n: int, coord: int) -> int:
    """Whose keys and values a rank holds at a turn, 0 to n - 1, of a ring that passes them upwards."""
    return (coord - turn) % n


def block_at(turn: int, n: int, coord: int, order: Order, causal: bool) -> Block | None:
    """What coord `coord` of `n` computes at `turn`; None: no query of its own comes after those keys.

    At turn 0 it is always a block with all of its queries. In zig-zag order it is, at each turn and on
    each rank, as much as a half of a rank's queries by all of a rank's keys:

    >>> [block_at(turn, 3, 1, "zigzag", True) for turn in (0, 1, 2)]  # doctest: +NORMALIZE_WHITESPACE
    [Block(queries='all', keys='all', causal=True),
     Block(queries='all', keys='first', causal=False),
     Block(queries='second', keys='all', causal=False)]
    """
    source = source_at(turn, n, coord)
    if not causal or source == coord:
        return Block("all", "all", causal)
    if order == "contiguous":
        return Block("all", "all", False) if source < coord else None
    # The source has chunks source and 2n - 1 - source, this rank coord and 2n - 1 - coord.
    return Block("all", "first", False) if source < coord else Block("second", "all", False)


def rows(part: Part, length: int) -> slice:
    """The places of a part in a rank's `length` tokens."""
    half = length // 2
    return {"all": slice(0, length), "first": slice(0, half), "second": slice(half, length)}[part]
