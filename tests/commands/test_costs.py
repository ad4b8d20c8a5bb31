"""`meshcomm costs`: sizes as they were asked for, and the times of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcomm.commands import app
from tests.show.shown import GPT, run


def test_costs_have_sizes_as_they_were_asked_for_and_say_that_a_backend_chooses() -> None:
    words = (
        "costs",
        GPT,
        "--world-size",
        "1024",
        "--op",
        "all_reduce",
        "--bytes",
        "64KiB",
        "--bytes",
        "64MB",
    )
    shown = run(*words).out
    assert shown.count("  64 KiB  ") == shown.count("  64 MB  ") == 3
    assert "NCCL and other backends may" in shown


ROOT = Path(__file__).parents[2]


def test_the_command_says_what_the_model_says() -> None:
    def command(*words: str) -> Any:
        return CliRunner().invoke(app, list(words))

    words = [
        "costs",
        str(ROOT / "configs/gpt_1024.toml"),
        "--world-size",
        "1024",
        "--op",
        "all_reduce",
        "--bytes",
    ]
    facts: dict[str, Any] = json.loads(command(*words, "64MB", "--json").stdout)
    tp = next(each for each in facts["dims"] if each["dim"] == "tp")
    (row,) = tp["rows"]
    assert (row["algorithm"], row["bytes"]) == ("halving_doubling", 64_000_000)
    seconds = 6 * 2e-6 + 1.75 * 64e6 / 300e9
    assert row["seconds"] == pytest.approx(seconds, rel=1e-12)
    assert row["algbw_gbytes_s"] == pytest.approx(64e6 / seconds / 1e9)
    assert row["busbw_gbytes_s"] == pytest.approx(1.75 * row["algbw_gbytes_s"])
    shown = command(*words, "64MB")
    assert shown.exit_code == 0
    assert "halving_doubling" in shown.stdout
    wrong = command("costs", str(ROOT / "configs/mesh.toml"))
    assert wrong.exit_code == 2
    assert "try:      --set topology.ranks_per_node=8" in wrong.stderr
