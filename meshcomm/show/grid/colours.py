"""Colours that tell eight groups apart, also for people who do not see all colours."""

from __future__ import annotations

from typing import Final

# Okabe and Ito's palette (Color Universal Design, 2008), a grey in place of its black: fill, and the
# colour of text on it that has the higher contrast.
PALETTE: Final = (
    ("#56b4e9", "#000000"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#f0e442", "#000000"),
    ("#0072b2", "#ffffff"),
    ("#d55e00", "#000000"),
    ("#b3b3b3", "#000000"),
)


def fill(group: int) -> tuple[str, str]:
    """Background and text colour of a group, by its index."""
    return PALETTE[group % len(PALETTE)]


def turn(group: int) -> int:
    """How often the colours have repeated before this group."""
    return group // len(PALETTE)
