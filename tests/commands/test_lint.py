"""`meshcomm lint`: what it prints, and its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from meshcomm.commands import app
from tests.predict.test_links import command

ROOT = Path(__file__).parents[2]


def test_lint_prints_and_strict_is_an_exit_code(tmp_path: Path) -> None:
    # The path is longer than the narrowest terminal here.
    (folder := tmp_path / ("n" * 60)).mkdir()
    config = str(shutil.copy(ROOT / "configs/gpt_1024.toml", folder))
    words = ["lint", config, "--world-size", "1024", "--set", "topology.ranks_per_node=4"]
    shown = command(*words)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith("1 finding on 1,024 ranks:")
    assert "\nlinks: node 2 us 300 GB/s; network 10 us 50 GB/s\n" in shown.stdout
    assert "  try:      mesh.dims = { pp = 16, dp = 16, tp = 4 }\n" in shown.stdout
    assert "\na rank has up to 4 NCCL communicators (about 2.1 GB)\n" in shown.stdout
    for columns in (80, 40):
        folded = CliRunner().invoke(app, words, env={"COLUMNS": str(columns)}).stdout
        # A path is one word and is not folded.
        assert all(len(line) <= columns for line in folded.splitlines() if config not in line)
        assert " ".join(folded.split()) == " ".join(shown.stdout.split())
    one = command("lint", str(ROOT / "configs/ep4_edp2.toml"), "--set", "topology.ranks_per_node=8")
    assert "\na rank has up to 4 Gloo groups (" in one.stdout and "NCCL" not in one.stdout
    strict = command(*words, "--strict", "--json")
    assert strict.exit_code == 1
    facts = json.loads(strict.stdout)
    assert [each["rule"] for each in facts["findings"]] == ["tensor-across-nodes"]
    assert facts["rank"]["nccl"] == 4
    assert command("lint", config, "--world-size", "1024", "--strict").exit_code == 0
