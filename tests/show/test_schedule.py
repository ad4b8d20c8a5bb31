"""The picture of a pipeline's schedule, and the facts that it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from meshcomm.commands import app
from meshcomm.config import load_config
from meshcomm.errors import ConfigError
from meshcomm.show.schedule import ScheduleView, schedule_facts

ROOT = Path(__file__).parents[2]


def facts(*overrides: str) -> dict[str, Any]:
    return schedule_facts(load_config(ROOT / "configs/quickstart.toml", overrides))


def drawn(what: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(ScheduleView(what))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_picture_of_1f1b() -> None:
    assert drawn(facts(), 80) == [
        "1f1b along pp: 2 ranks, 2 stages, 4 microbatches; 15 slots, bubble 20.0%",
        "slot  0              5              10",
        "pp=0  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -",
        "pp=1  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .",
        "F forward 1 slot, B backward 2; - continues, . waits; messages take no time",
        "kept at once, in microbatches of one stage, by rank: 2 1",
        "stage 0 on pp=0: embedding, layers 0 to 1; 48.3% of the work",
        "stage 1 on pp=1: layers 2 to 3, head; 51.7% of the work",
    ]


MANY = ("mesh.dims={ pp = 4, dp = 1, tp = 2 }", "model.num_layers=8", "parallel.options.stages_per_rank=2")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_picture_fits_its_width_and_holds_every_pass(width: int) -> None:
    what = facts(*MANY, "parallel.options.schedule='zero_bubble'", "train.global_batch_size=64")
    assert (what["ranks"], what["microbatches"]) == (4, 16)
    lines = drawn(what, width)
    assert max(map(len, lines)) <= width
    cell = 5
    rows: dict[str, str] = {f"pp={rank}": "" for rank in range(4)}
    missing: list[range] = []
    for line in lines:
        name, cells = line[:6].strip(), line[6:]
        if name in rows and set(line[:4]) != {" "}:
            columns = (width - 6) // cell
            rows[name] += cells.ljust(columns * cell)
        if line.startswith("slots "):
            words = line.split()
            missing.append(range(int(words[1]), int(words[3]) + 1))
            for row in rows:
                rows[row] += "?" * (cell * len(missing[-1]))
    assert bool(missing) == (width < 120)
    hidden = {slot for part in missing for slot in part}
    for rank, passes in enumerate(what["passes"]):
        row = rows[f"pp={rank}"]
        labels = [row[start : start + cell].strip() for start in range(0, len(row), cell)]
        expected = ["."] * what["slots"]
        for kind, stage, microbatch, start, end in passes:
            expected[start:end] = [f"{kind}{microbatch}{'ab'[stage // 4]}"] + ["-"] * (end - start - 1)
        for slot, label in enumerate(expected):
            assert labels[slot] == ("?????" if slot in hidden else label)


def test_the_command_draws_and_gives_the_facts() -> None:
    config = str(ROOT / "configs/quickstart.toml")
    shown = CliRunner().invoke(app, ["plan", config, "--schedule"])
    assert shown.exit_code == 0
    assert "mesh of 8 ranks" in shown.output
    assert "bubble 20.0%" in shown.output
    told = json.loads(CliRunner().invoke(app, ["plan", config, "--schedule", "--json"]).output)
    assert told["schedule"] == json.loads(json.dumps(facts()))
    assert "schedule" not in json.loads(CliRunner().invoke(app, ["plan", config, "--json"]).output)


def test_without_a_pipeline_there_is_nothing_to_draw() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_facts(load_config({"mesh": {"dims": {"dp": 2}}}))
    assert str(caught.value).startswith(
        "there is no pipeline whose schedule could be drawn\n  given:    config has no training\n"
    )
    with pytest.raises(ConfigError) as caught:
        facts("mesh.dims={ pp = 1, dp = 2, tp = 2 }")
    assert 'given:    pipeline = "pp", mesh.dims = { pp = 1, dp = 2, tp = 2 }\n' in str(caught.value)
