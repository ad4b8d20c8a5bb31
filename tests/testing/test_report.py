"""The report of a test's body on every rank."""

from __future__ import annotations

# pytester forgets the imports of a suite, and torch cannot be imported twice.
from meshcomm.testing.marker import read
from meshcomm.testing.pool import Ended
from meshcomm.testing.report import Ends, Outcome, failure_of


def test_equal_stacks_are_told_once() -> None:
    request = read((), {"dp": 2, "tp": 4}, "gloo")
    late = "did not return within 1 s"
    ends = [Ended("late", None, late, "here" if rank < 5 else "there") for rank in range(8)]
    report = failure_of(Ends(ends), request)
    first = "ranks 0 1 2 3 4 of 8: did not return within 1 s"
    other = "ranks 5 6 7 (all with dp=1) of 8: did not return within 1 s"
    assert report == f"{first}\n\n--- {first} ---\nhere\n\n--- {other} ---\nthere"


def test_the_reason_is_in_the_first_line() -> None:
    failed = Outcome("failed", "KeyError: 'lost'", text="    x = y['lost']\nKeyError: 'lost'")
    ends = [Ended("returned", Outcome("passed")), Ended("returned", failed)]
    report = failure_of(Ends(ends), read((), {"tp": 2}, "gloo"))
    assert report == (
        "[r1 tp1] KeyError: 'lost'\n\n--- rank 1 (tp=1) of 2 ---\n    x = y['lost']\nKeyError: 'lost'\n\n"
        "--- rank 0 (tp=0) of 2: no failure ---"
    )
