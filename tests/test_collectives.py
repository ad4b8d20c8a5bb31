"""The table of collectives."""

from __future__ import annotations

from meshcomm.collectives import ROWS


def test_a_collective_in_place_passes_its_tensor_alone() -> None:
    """Prepared calls of the mesh rely on it."""
    rows = [row for row in ROWS.values() if row.in_place]
    assert [row.arguments("x", "out", 4, ()) for row in rows] == [(["x"],)] * len(rows) != []
