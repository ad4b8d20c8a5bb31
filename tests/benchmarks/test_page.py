"""docs/benchmarks.md: its tables come from the commands above them, and a new measurement replaces one table."""

from __future__ import annotations

import importlib.util
import re
import shlex

import pytest

from tests.benchmarks import __main__ as page
from tests.benchmarks.table import compare, comparisons

_PAGE = "# A\n\n<!-- measured by: python -m a -->\nold\n<!-- end of measured -->\n\n<!-- measured by: python -m b 3 -->\n<!-- end of measured -->\n"


def test_only_the_table_of_the_command_is_replaced() -> None:
    assert page.commands(_PAGE) == ["python -m a", "python -m b 3"]
    new = page.written(_PAGE, "python -m a", r"| 1 \d |")
    assert new == _PAGE.replace("old\n", "\n| 1 \\d |\n\n")
    assert page.written(new, "python -m b 3", "x").count("<!-- end of measured -->") == 2


def test_every_command_of_the_page_exists_and_was_measured() -> None:
    text = page.PAGE.read_text()
    assert len(page.commands(text)) == len(set(page.commands(text))) == text.count("<!-- end of measured -->")
    for command in page.commands(text):
        words = shlex.split(command)
        assert importlib.util.find_spec(words[words.index("-m") + 1]), command
        assert re.search(
            rf"^`{re.escape(command)}` \(\d+ \w+ \d{{4}}, torch [\d.]+, [\d.]+ min\)$", text, re.MULTILINE
        ), command


def test_words_that_no_command_contains_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["no such benchmark"]) == 1
    assert "no command of" in capsys.readouterr().err


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    row = compare("a / b", [1.0, 2.0, 9.0], [2.0, 2.0, 3.0])
    assert (row.ours_s, row.theirs_s, row.ratio, row.low, row.high) == (2.0, 2.0, 1.0, 0.75, 2.0)
    assert comparisons([row]).splitlines()[-1] == "| a / b | 2 s | 2 s | 1 | 0.75 to 2 |"
