"""The text of a pattern, read by the rules of einops."""

from __future__ import annotations

import pytest

from meshcomm.errors import PatternError
from meshcomm.pattern.parse import parse


def test_parse_reads_what_is_written() -> None:
    assert parse("b (h w)1-> 1 (b 1) ( h w )", 3).left == (("b",), ("h", "w"), ())
    assert parse("b (h w)1-> 1 (b 1) ( h w )", None).right == ((), ("b",), ("h", "w"))
    assert parse(" -> ", 0).left == ()
    assert parse("... a -> (a ...)", 3).right == (("a", "...0", "...1"),)
    assert parse("... a -> a (...)", 1).right == (("a",), ())


def test_a_pattern_alone_knows_no_mesh() -> None:
    with pytest.raises(PatternError, match=r"^rearrange: imbalanced parentheses, on the left\n") as caught:
        parse("b (h -> b h", None)
    assert "mesh" not in str(caught.value)
