"""`meshcomm simulate` runs a script as all ranks."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from meshcomm.commands import app

ROOT = Path(__file__).parents[2]


def test_the_command(tmp_path: Path) -> None:
    config = str(ROOT / "configs/mesh.toml")
    done = CliRunner().invoke(app, ["simulate", config, str(ROOT / "examples/hello_mesh.py")])
    assert done.exit_code == 0, done.stderr
    assert "rank 7 (pp=1 dp=1 tp=1)" in done.stdout
    assert done.stdout.splitlines()[-1] == "8 ranks simulated, no deadlock"
    bad = tmp_path / "bad.py"
    bad.write_text("import meshcomm\nmesh = meshcomm.init()\nif mesh.rank:\n    mesh.barrier('tp')\n")
    done = CliRunner().invoke(app, ["simulate", config, str(bad)])
    assert done.exit_code == 2
    assert done.stderr.partition("\n")[2].startswith(
        "rank 0 returned while rank 1 waits\n"
        "  given:    rank 1 (pp=0 dp=0 tp=1) waits in barrier, call 1 on tp[pp=0 dp=0] at "
        f"{bad}:4; rank 0 has returned\n"
    ), done.stderr
