"""Pages that are made from tables are what the tables make."""

from __future__ import annotations

from pathlib import Path

from meshcomm.transport.support_page import page

DOCS = Path(__file__).parent.parent / "docs"


def test_the_support_page_is_the_support_table() -> None:
    assert (DOCS / "reference" / "support.md").read_text() == page()
