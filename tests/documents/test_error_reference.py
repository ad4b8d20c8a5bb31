"""Every public error is in the error reference, and each of the reference's programs does what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshcomm.errors
from meshcomm.testing import Pool
from tests.documents.blocks import ROOT
from tests.documents.error_page import PAGE, Entry, class_of, entries, public_errors, shown, steady

ENTRIES = entries()


def test_every_public_error_has_an_entry_and_stands_in_the_table() -> None:
    assert set(ENTRIES) == public_errors()
    table = (ROOT / PAGE).read_text(encoding="utf-8").partition("## MeshcommError")[0]
    assert [name for name in public_errors() - {"MeshcommError"} if f"`{name}`" not in table] == []


def test_entries_say_what_the_error_is_and_are_told_apart_from_other_sections() -> None:
    assert all(len(entry.words) > 60 for entry in ENTRIES.values())
    good = "# Page\n## A section\nwords\n## BadError\nwords\n<!-- raises: BadError -->\n```python\nx\n```\n"
    good += "<!-- output -->\n```text\nBadError: x\n```\n```python\ny\n```\n"
    assert list(entries(good)) == ["BadError"]
    with pytest.raises(ValueError, match="BadError: not a failing program"):
        entries(good.replace("<!-- output -->\n", ""))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_a_failing_program_and_the_same_put_right(
    entry: Entry, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = shown(entry, entry.wrong, pool)
    assert printed is not None, "the program that should fail did not"
    assert steady(printed) == entry.printed.text
    raised = class_of(printed)
    if entry.name == "MeshcommError":
        assert issubclass(getattr(meshcomm.errors, raised), meshcomm.errors.MeshcommError)
    else:
        assert raised == entry.name == entry.wrong.notes["raises"]
    assert entry.right.text != entry.wrong.text
    assert shown(entry, entry.right, pool) is None


def test_only_what_differs_between_runs_is_left_out() -> None:
    said = "given: process 77 of host3, started at 99 at 127.0.0.1:4711, rank 3 of 4"
    assert steady(said) == "given: process 4711 of node, started at 815 at 127.0.0.1:29500, rank 3 of 4"
    trace = 'Traceback:\n  File "/x/y.py", line 3, in f\n    g()\n    ^^\nZeroDivisionError: no\n'
    assert steady(trace) == "Traceback:\n  ...\nZeroDivisionError: no"
