"""`meshcomm report`: the newest run's reports are read; damaged or foreign ones are skipped, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.commands.report import view
from meshcomm.errors import LaunchError
from meshcomm.show.page import as_text
from meshcomm.watching.words import UNKNOWN
from tests.commands.shown import combined

GROUP: dict[str, Any] = {
    "label": "dp",
    "ranks": [0, 1],
    "started": 3,
    "last": {
        **UNKNOWN,
        "number": 3,
        "dim": "dp",
        "call": "all_reduce",
        "bytes": 4,
        "callsite": "train.py:9",
        "shape": [1],
        "inside": True,
    },
    "recent": [{**UNKNOWN, "number": 3, "call": "all_reduce", "callsite": "train.py:9", "bytes": 4}],
    "messages": {"begun": [{"direction": "send", "peer": 1, "tag": 0, "number": 2}], "waiting": None},
    "steps": {},
}
REPORT: dict[str, Any] = {
    "rank": 0,
    "coords": {"dp": 0},
    "main": "train.py:9",
    "torch": [],
    "failed": {**UNKNOWN, "label": "dp", "error": ["timed out"], "call": "all_reduce", "callsite": "train.py:9", "waiting": None},
    "differs": None,
    "groups": [GROUP],
    "clock": {"host": "one", "now_s": 5.0, "ahead_s": 0},
    "history": [{"dim": "dp", "began": 1.0, "over": None}],
}  # fmt: skip
WRONG = ("missing", None, 7, "text", [], {}, [7], -1.5, True)


def damaged(whole: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Copies of `whole` with one value, at any depth, removed or replaced."""

    def places(node: Any) -> Iterator[tuple[Any, ...]]:
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            yield (key,)
            yield from ((key, *rest) for rest in places(node[key]))

    for path in places(whole):
        for value in WRONG:
            made = copy.deepcopy(whole)
            node = made
            for key in path[:-1]:
                node = node[key]
            if value == "missing":
                del node[path[-1]]
            else:
                node[path[-1]] = value
            yield f"{path} {value!r}", made


def refused_or_read(read: Callable[[Path], object], whole: Any, file: Path, given: Path) -> tuple[int, int]:
    file.write_text(json.dumps(whole))
    read(given)
    outcomes = [0, 0]
    for name, made in [*damaged(whole), *((repr(value), value) for value in WRONG)]:
        file.write_text(json.dumps(made))
        try:
            read(given)
            outcomes[0] += 1
        except LaunchError as error:
            outcomes[1] += 1
            text = str(error)
            if str(file) not in text:
                pytest.fail(f"{name}: {text}")
        except Exception as error:
            raise AssertionError(name) from error
    return outcomes[0], outcomes[1]


def test_damaged_reports_are_refused_by_name(tmp_path: Path) -> None:
    readable, refused = refused_or_read(combined, REPORT, tmp_path / "rank0.json", tmp_path)
    assert readable > 50 and refused > 100


def test_copies_and_other_ranks_reports(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps(REPORT))
    for name in ("rank0-old.json", "rank.json", "ranks.json", "rank 1.json"):
        (tmp_path / name).write_text("[]")
    assert combined(tmp_path).startswith("1 report(s)")
    (tmp_path / "rank1.json").write_text(json.dumps(REPORT))
    with pytest.raises(LaunchError, match=r"rank1.json is not a report of rank 1\n.*rank: 0"):
        combined(tmp_path)
    (tmp_path / "rank1.json").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match=r"rank1.json is not a report"):
        combined(tmp_path)


def test_the_reports_of_the_newest_run_are_read(tmp_path: Path) -> None:
    status = {
        "rank": 0,
        "coords": {"dp": 0},
        "failed": None,
        "groups": [],
        "main": "",
        "torch": [],
        "differs": None,
    }
    for name, rank in (("20261121-235959-one", 3), ("20261122-000001-two", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"rank{rank}.json").write_text(json.dumps({**status, "rank": rank}))
    text = combined(tmp_path)
    assert text.startswith(f"1 report(s) in {tmp_path / '20261122-000001-two'}, the newest of 2 runs\n")
    assert "rank 5" in text and "rank 3" not in text
    assert "no rank was found waiting for another: the reports do not show a cause" in text
    assert "rank 3" in combined(tmp_path / "20261121-235959-one")
    shown = CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).stdout
    facts = json.loads(shown)
    assert [*facts] == ["folder", "runs", "cause", "ranks"] and facts["runs"] == 2
    assert [(rank["rank"], rank["coords"], rank["failed"]) for rank in facts["ranks"]] == [
        (5, {"dp": 0}, None)
    ]
    # The text shows nothing that the JSON lacks.
    assert f"{as_text(view(facts), 10_000)}\n" == CliRunner().invoke(app, ["report", str(tmp_path)]).stdout


def test_a_folder_without_reports(tmp_path: Path) -> None:
    with pytest.raises(meshcomm.MeshcommError, match="there are no reports in"):
        combined(tmp_path)
    (tmp_path / "rank0.json").write_text("{")
    with pytest.raises(meshcomm.MeshcommError, match=r"rank0.json is not a report"):
        combined(tmp_path)
