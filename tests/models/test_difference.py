"""Numbers that differ are shown with enough digits."""

from __future__ import annotations

from meshcomm.models.difference import difference_of
from meshcomm.models.one_step import Outcome


def test_numbers_that_differ_are_shown_with_enough_digits() -> None:
    words = difference_of(
        Outcome(results={"loss of step 1": 0.62849301}), Outcome(results={"loss of step 1": 0.62849302})
    )
    assert words == "the loss of step 1 is 0.62849301, but 0.62849302 in the unsplit model"
