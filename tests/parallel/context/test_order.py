"""The positions of each rank's part of a sequence."""

from __future__ import annotations

import pytest
import torch

from meshcomm.errors import LayoutError, ShapeError, UnsupportedOp
from meshcomm.parallel.context import sequence_positions


def test_positions() -> None:
    assert [sequence_positions(8, 2, c, "zigzag").tolist() for c in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert sequence_positions(5, 1, 0, "zigzag").tolist() == [0, 1, 2, 3, 4]
    assert sequence_positions(6, 3, 2, "contiguous").tolist() == [4, 5]
    # Created on the device, not copied to it: the host would wait for a copy.
    assert sequence_positions(8, 2, 0, "zigzag", torch.device("meta")).device.type == "meta"
    with pytest.raises(ShapeError) as raised:
        sequence_positions(12, 4, 0, "zigzag")
    assert str(raised.value) == (
        "a sequence of 12 cannot be split in zigzag order over 4 ranks\n"
        "  given:    12 tokens, 8 chunks\n"
        "  expected: a multiple of 8; 12 % 8 = 4\n"
        '  try:      16 tokens, or order="contiguous", as in ContextSplit(mesh, dim, "ulysses")'
    )
    with pytest.raises(ShapeError, match=r"expected: a multiple of 3; 10 % 3 = 1\n  try:      12 tokens$"):
        sequence_positions(10, 3, 0, "contiguous")
    with pytest.raises(LayoutError, match="coord 4 holds no part of the sequence"):
        sequence_positions(16, 4, 4, "zigzag")
    with pytest.raises(UnsupportedOp, match="cannot be split in the order 'striped'"):
        sequence_positions(8, 2, 0, "striped")  # type: ignore[arg-type]
