"""The fault table, row by row, on real processes; every run of the tests includes a short form."""

from __future__ import annotations

import pytest

from tests.faults import runner
from tests.faults.row import BUSY_S
from tests.faults.rows import ROWS
from tests.faults.runner import Result, Said, complaints, names, run
from tests.faults.table import PAGE, page
from tests.group_hooks import needs_group_hooks

pytestmark = pytest.mark.long

QUICK = [name for name, row in ROWS.items() if row.quick]


def marked(name: str) -> object:
    row, marks = ROWS[name], []
    if row.flaw:
        marks.append(pytest.mark.xfail(strict=not row.sometimes, reason=row.flaw))
    if "outside the mesh" in row.moment or row.bare:
        marks.append(needs_group_hooks)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in QUICK])
@pytest.mark.deep_cases(r"\[bare-(fsdp-skip|new-group-exits)")
def test_short_form(name: str) -> None:
    assert complaints(ROWS[name], run(ROWS[name]), BUSY_S) == []


@pytest.mark.faults
@pytest.mark.parametrize("name", [marked(name) for name in ROWS])
def test_row(name: str) -> None:
    assert complaints(ROWS[name], run(ROWS[name]), BUSY_S) == []


def test_the_short_form_has_no_flaw() -> None:
    assert len(ROWS) >= 153 and QUICK
    assert not [name for name in QUICK if ROWS[name].flaw]


def test_the_page_has_every_row_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert shown == list(ROWS)
    # The code makes the head and the rows; the measured figures differ between runs.
    empty = page({name: Result() for name in ROWS}).split("| row |")[0]
    assert text.split("| row |")[0].rpartition("\n\n")[0].rpartition("\n\n")[0] in empty


def test_what_a_row_complains_about() -> None:
    row = ROWS["skipped-tp"]
    good = Said("CollectiveTimeout", 'all_reduce along "tp" did not end', 0.0, (6,))
    said = {rank: Said("", "", 0.0) for rank in range(7)} | {7: good}
    assert complaints(row, Result(said, seconds=2.0)) == []

    def one(**changes: object) -> str:
        found = complaints(row, Result(**{"said": said, "seconds": 2.0, **changes}))  # type: ignore[arg-type]
        assert len(found) == 1
        return found[0]

    assert one(seconds=4.01) == "4.01 s after the fault, promised within 4 s"
    assert complaints(row, Result(said, seconds=4.01), BUSY_S) == []
    late = "10.01 s after the fault, promised within 4 s, and 6 s for other work"
    assert complaints(row, Result(said, seconds=10.01), BUSY_S) == [late]
    assert one(left=2) == "2 processes of the row were left"
    assert one(said={**said, 7: Said("CollectiveTimeout", "", 0.0, (5,))}).startswith(
        "rank 7 does not name [6]"
    )
    wrong = Said("WrongNumber", "3 instead of 2", 0.0)
    assert one(said={**said, 0: wrong}).startswith("rank 0: no error expected, got WrongNumber")
    del said[3]
    assert one(said=said).startswith("rank 3 said nothing")
    assert one(said=said, hung={3: "stack"}) == "rank 3 hangs:\nstack"


def test_a_machine_too_busy_to_open_meshes_has_not_shown_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Said("PeerLost", "rank 1 could not create the group tp[dp=0]: rank 0 has not joined it", 0.0)
    ended = [Result({1: late}), Result(), Result({1: late})]
    monkeypatch.setattr(runner, "_once", lambda row: ended.pop())
    assert run(ROWS["exception-in-creation"]).said == {1: late}  # in this row, the error is the fault itself
    assert run(ROWS["exception-tp"]) == Result()
    ended = [Result({1: late})] * 3
    assert run(ROWS["exception-tp"]).said == {1: late} and ended == []


def test_no_second_of_the_page_is_beyond_what_is_promised() -> None:
    table = [
        line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    head, rows = table[0], [cells for cells in table if cells[0].startswith("| `")]
    # From the end of a line, because a text may contain " | ".
    took_at, promise_at = (head.index(name) - len(head) for name in ("seconds", "at most"))
    measured = {cells[0].split("`")[1]: (cells[took_at], cells[promise_at]) for cells in rows}
    assert {name: promise for name, (_, promise) in measured.items()} == {
        name: f"{row.promise_s:g}" for name, row in ROWS.items()
    }
    assert [
        name for name, (took, promise) in measured.items() if took != "-" and float(took) > float(promise)
    ] == []


def test_which_ranks_a_text_names() -> None:
    assert names(Said("E", "ranks 1 3-5 differ, and rank 7 (dp=0 tp=2)", 0.0)) == {1, 3, 4, 5, 7}
    assert names(Said("E", "the object of coord 2 cannot be sent", 0.0)) == {2}
    assert names(Said("E", "rank 1", 0.0, (4,))) == {4}
