"""Every command refuses unsuitable files with an error that has the file's name, never with a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from meshcomm.commands.app import GROUPS, app

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "configs/quickstart.toml")
NOISE = bytes(range(255, -1, -1))

# The arguments of each command. "FILE" is replaced by the wrong file.
WORDS: dict[str, list[list[str]]] = {
    "new": [],  # it creates a missing folder; tests/commands/test_app.py
    "run": [["FILE", "good.py"], ["--world-size", "2", "FILE"], [QUICK, "FILE"]],
    "train": [["FILE"]],
    "simulate": [["FILE", "good.py"], ["--world-size", "2", "FILE"], [QUICK, "FILE"]],
    "plan": [["FILE"], [QUICK, "--diff", "FILE"]],
    "lint": [["FILE"]],
    "view": [["FILE", "--export", "out.html"]],
    "schema": [],  # it takes no file
    "report": [["FILE"]],
    "doctor": [["FILE"]],
    "parity": [["FILE"], [QUICK, "FILE"]],
    "bench": [["FILE"]],
    "costs": [["FILE"]],
    "tune": [["FILE", "--world-size", "8"], [QUICK, "--world-size", "8", "--write", "FILE"]],
    "dryrun": [["FILE"], ["--world-size", "2", "FILE"], [QUICK, "FILE"]],
    "transfer": [["FILE", QUICK], [QUICK, "FILE"], [QUICK, QUICK, "--model", "FILE"]],
    "export": [["FILE", "out.safetensors"], ["FILE", "out", "--pretrained"]],
}


COMMANDS: Any = get_command(app)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Otherwise typer would read the signatures of all commands for each of several hundred command lines.
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMANDS)
    (tmp_path / "good.py").write_text("raise SystemExit('it was started')\n")
    monkeypatch.setattr("meshcomm.job.spawn.Popen", lambda *_, **__: pytest.fail("processes were started"))
    return tmp_path


def made(folder: Path, kind: str, ending: str) -> str:
    path = folder / f"{kind}{ending}"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_bytes({"empty": b"", "noise": NOISE, "list": b"[1, 2]"}[kind])
    return path.name


def test_every_command_is_tried() -> None:
    assert sorted(WORDS) == sorted(name for names in GROUPS.values() for name in names)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "empty", "noise", "list"])
@pytest.mark.parametrize("command", [name for name, words in WORDS.items() if words])
def test_a_wrong_file_is_an_error_that_names_it(folder: Path, command: str, kind: str) -> None:
    for ending in (".toml", ".json", ".py", ".safetensors", ""):
        for words in WORDS[command]:
            # The user asked to overwrite this file, and any text may be a script.
            writes = "--write" in words
            script = "good.py" not in words and (
                ending == ".py" or (words[0] == QUICK and not words[1].startswith("--"))
            )
            if kind not in ("missing", "folder") and (writes or (script and command in ("run", "parity"))):
                continue
            if kind == "missing" and writes:
                continue
            name = made(folder, kind, ending)
            done = CliRunner().invoke(app, [command, *(name if word == "FILE" else word for word in words)])
            assert isinstance(done.exception, SystemExit | None), (words, name, done.exception)
            assert done.exit_code == 2 or (script and kind not in ("missing", "folder")), (
                words,
                name,
                done.output,
            )
            assert "Traceback" not in done.output and "it was started" not in done.output, (words, name)
            if kind == "folder":
                (folder / name).rmdir()
            else:
                (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize("world", ["0", "-1", "7", "99999999999", "many"])
def test_a_world_that_does_not_fit_is_an_error(folder: Path, world: str) -> None:
    with_world = [name for name in WORDS if name not in ("new", "schema", "report", "export", "view")]
    for command in (*with_world, "view"):
        script = ["good.py"] * (command in ("run", "simulate"))
        export = ["--export", "out.html"] * (command == "view")
        done = CliRunner().invoke(app, [command, QUICK, *export, "--world-size", world, *script])
        assert isinstance(done.exception, SystemExit | None), (command, done.exception)
        # doctor reports it as a finding.
        wrong = 1 if command == "doctor" and world == "7" else 2
        assert done.exit_code == wrong and "Traceback" not in done.output, (command, done.output)
        assert "it was started" not in done.output, command


# These would start ranks, as some of the values are valid.
STARTS = ("run", "train", "simulate", "parity", "bench", "dryrun")


@pytest.mark.parametrize("value", ["", "-1", "99999999999", "nonsense", "dp=7"])
def test_a_wrong_value_of_any_option_is_no_traceback(folder: Path, value: str) -> None:
    for command in (name for name, words in WORDS.items() if words and name not in STARTS):
        for option in COMMANDS.commands[command].params:
            if option.param_type_name == "option" and not option.is_flag:
                words = [QUICK if word == "FILE" else word for word in WORDS[command][0]]
                done = CliRunner().invoke(app, [command, *words, option.opts[0], value])
                assert isinstance(done.exception, SystemExit | None), (command, option.opts, done.exception)
                assert "Traceback" not in done.output, (command, option.opts)


@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_world_of_no_processes_is_refused_by_every_command(value: str) -> None:
    takers = [
        name
        for name in COMMANDS.commands
        if any("--world-size" in option.opts for option in COMMANDS.commands[name].params)
    ]
    assert len(takers) > 8
    for command in takers:
        done = CliRunner().invoke(app, [command, "--world-size", value, __file__])
        told = re.search(
            rf"{value} is not a number of processes|Invalid value for '--world-size'", done.output
        )
        assert done.exit_code == 2 and told, (command, done.output)


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    for words in (["schema"], ["plan", QUICK, "--json"], ["plan", QUICK]):
        command = [sys.executable, "-u", "-m", "meshcomm", *words]
        env = {**os.environ, "COLUMNS": "40", "NO_COLOR": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            process.wait(200)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", [["schema"], ["--help"]])
def test_an_output_without_space_is_an_error(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshcomm", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
        )
    assert done.returncode == 2 and done.stderr.startswith("the output could not be written\n"), done.stderr
    assert "No space left on device" in done.stderr
