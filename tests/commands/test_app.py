"""The command line itself: help, versions, options after a script, and completion by a shell."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from meshcomm import __version__
from meshcomm.commands.app import GROUPS, app, function_of
from meshcomm.config import load_config
from meshcomm.layout.sizes import coords_text
from meshcomm.train.parity import Difference
from meshcomm.train.parity_job import Blame, Parity
from tests.commands.shown import COMMANDS, recorded
from tests.show.shown import python

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import meshcomm

with meshcomm.init(dims={"dp": -1}, device="cpu") as mesh:
    if mesh.rank == 0:
        print(mesh.world_size, *sys.argv[1:])
"""


def meshcomm(*words: str) -> Result:
    return CliRunner().invoke(app, words, prog_name="meshcomm", env={"COLUMNS": "80"})


# -- options ----------------------------------------------------------------------------------------


def unread(source: str) -> Iterator[str]:
    """The parameters that a function does not read. Methods are left out, because a base class determines their parameters."""
    tree = ast.parse(source)
    methods = {each for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function not in methods:
            body = [node for statement in function.body for node in ast.walk(statement)]
            read = {node.id for node in body if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            given = function.args
            for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if parameter.arg not in read:
                    yield f"{function.name}: {parameter.arg}"


def test_every_option_of_a_command_is_read() -> None:
    """An option has no effect if neither its command nor the function of the file that gets it reads it."""
    planted = (
        "def plan(world, grid):\n    drawn = facts(world, grid)\ndef facts(world, grid):\n    grid = world"
    )
    assert [*unread(planted)] == ["facts: grid"]
    files = {Path(inspect.getfile(function_of(name))) for name in COMMANDS}
    assert len(files) == len(COMMANDS) > 12
    for file in files:
        assert [*unread(file.read_text())] == [], file


def test_every_file_that_declares_a_command_is_in_a_group() -> None:
    """A command that is in no group cannot be called."""
    folder = Path(inspect.getfile(function_of("plan"))).parent
    declared = [path.stem for path in folder.glob("*.py") if "\n@command(" in path.read_text()]
    assert sorted(declared) == sorted(COMMANDS)


def other_codes(source: str) -> bool:
    """Return whether a command can end with an exit code other than 0 and 2."""
    codes = [
        ast.unparse(node.args[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("typer.Exit", "SystemExit", "sys.exit", "exit")
        and node.args
    ]
    return bool({*codes} - {"0", "2"})


def test_the_help_of_a_command_has_its_exit_codes() -> None:
    assert other_codes("raise typer.Exit(1)") and not other_codes("raise typer.Exit(2)\nraise typer.Exit")
    files = {name: Path(inspect.getfile(function_of(name))).read_text() for name in COMMANDS}
    found = {name for name, source in files.items() if other_codes(source)}
    assert {"plan", "lint", "run", "doctor"} < found
    assert found == {name for name in COMMANDS if "exit code is" in str(function_of(name).__doc__)}


# -- what is shown ----------------------------------------------------------------------------------

QUICK, MESH, GPT = (str(ROOT / "configs" / f"{name}.toml") for name in ("quickstart", "mesh", "gpt_1024"))
NODES = ("--set", "topology.ranks_per_node=4")
# For each command with --json, arguments that show every part of its table.
SHOWN: dict[str, list[tuple[str, ...]]] = {
    "plan": [(QUICK, "--rank", "5", "--grid", "--schedule", *NODES), (GPT, "--world-size", "64"), (MESH, "--diff", QUICK)],
    "lint": [(GPT, "--world-size", "1024", "--set", "mesh.dims={ tp = 16, dp = 16, pp = 4 }"), (QUICK,)],
    "doctor": [(QUICK, "--all"), ()],
    "parity": [(QUICK, "--world-size", "8")],
    "costs": [(GPT, "--world-size", "64", "--bytes", "1MiB")],
    "tune": [(QUICK, "--world-size", "8", "--top", "2", *NODES)],
    "transfer": [(QUICK, MESH, *NODES), (QUICK, QUICK, "--same-ranks")],
    "dryrun": [(QUICK, "--world-size", "8", "--sample", "0", "--set", "topology.memory_gbytes=1", *NODES)],
}  # fmt: skip
# Ranks show the results of bench. The others need a job, or files of one. Their own tests check them.
ELSEWHERE = ("bench", "export", "report", "run", "train")


def test_every_command_with_json_is_looked_at() -> None:
    commands: Any = get_command(app)
    with_json = [
        name for name, one in commands.commands.items() if "json" in [each.name for each in one.params]
    ]
    assert sorted(with_json) == sorted([*SHOWN, *ELSEWHERE])


@pytest.mark.parametrize(
    ("command", "words"), [(name, words) for name, every in SHOWN.items() for words in every]
)
def test_a_table_shows_nothing_that_json_lacks(
    command: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recorded` draws each table from the command's JSON as well. The command prints nothing else."""
    monkeypatch.setattr("meshcomm.train.parity_job.prove", lambda *_: DIFFERENT)
    with recorded() as shown:
        printed = [CliRunner().invoke(app, [command, *words, *json]).stdout for json in ((), ("--json",))]
    table, as_json = shown
    assert printed == [f"{table.table}\n", f"{as_json.json}\n"] and table.table
    assert table.keys == as_json.keys


DIFFERENT = Parity(
    load_config(QUICK),
    20,
    1e-9,
    ("a note",),
    (Difference("loss", "step 1", 0.0, 0.0), Difference("gradient norm", "step 1", 2e-3, 1e-3)),
    Difference("gradient norm", "step 1", 2e-3, 1e-3),
    Blame(("dp",), 8, None),
    "in float32",
)


# -- start ------------------------------------------------------------------------------------------


def test_help_and_the_file_of_a_command_load_nothing_that_takes_time() -> None:
    program = """
import sys
from meshcomm.commands.app import GROUPS, app, function_of
from typer.testing import CliRunner
assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2
print([name for name in sys.modules if name.startswith("meshcomm.commands.")])
for names in GROUPS.values():
    for name in names:
        function_of(name)
print([name for name in ("torch", "numpy", "meshcomm.config.read", "meshcomm.layout") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["['meshcomm.commands.app']", "[]"], done.stderr


WITHOUT_TORCH = """
import sys
from typer.testing import CliRunner
from meshcomm.commands.app import app

class Refused(Exception): ...
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            raise Refused
sys.meta_path.insert(0, Finder())
for words in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, words.split())
    assert isinstance(done.exception, Refused) and not done.stdout, (words, done.output, done.exception)
    print(done.stderr, end="")
"""


def test_a_command_that_starts_ranks_says_so_before_torch_is_loaded(tmp_path: Path) -> None:
    """Loading torch takes seconds, and so does starting ranks. A rank itself says nothing."""
    (tmp_path / "x.py").touch()
    (tmp_path / "gpus.toml").write_text("[mesh]\ndims = { dp = -1, tp = 2 }\n")
    sizes = load_config(GPT).mesh.sizes(1024)
    said = {
        f"train {QUICK}": f"starting 8 ranks of {QUICK}: pp=2 dp=2 tp=2",
        f"run {GPT} --world-size 1024 x.py": f"starting 1,024 ranks of x.py: {coords_text(sizes)}",
        f"run {MESH} x.py": "starting 8 ranks of x.py: pp=2 dp=2 tp=2",
        "run --world-size 3 x.py": "starting 3 ranks of x.py",
        "run gpus.toml x.py": "starting one rank per GPU of x.py: dp=-1 tp=2",
        f"parity {QUICK}": f"comparing 8 ranks of {QUICK}: pp=2 dp=2 tp=2 with one process, which trains first",
        "bench": "starting 4 ranks of a mesh on this host: dp=4",
        f"bench {QUICK}": f"starting 8 ranks of {QUICK}: pp=2 dp=2 tp=2",
        f"simulate {MESH} --seed 3 x.py": "simulating 8 ranks of x.py: pp=2 dp=2 tp=2",
        "dryrun --world-size 64 x.py": "dry run of 64 ranks of x.py",
        f"dryrun {QUICK}": f"dry run of 8 ranks of {QUICK}: pp=2 dp=2 tp=2",
    }
    command, given = [sys.executable, "-c", WITHOUT_TORCH], "\n".join(said)
    done = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [f"meshcomm: {line}" for line in said.values()], done.stderr
    as_rank = {**os.environ, "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, input=given, capture_output=True, text=True, timeout=100, env=as_rank
    )
    assert not any(line in done.stdout for line in said.values()), done.stderr


def test_an_error_is_json_on_stdout_and_text_on_stderr() -> None:
    for words in (["plan", "nope.toml"], ["train", "nope.toml"], ["export", "nope", "x"], ["report", "nope"]):
        text, as_json = meshcomm(*words), meshcomm(*words, "--json")
        assert (text.exit_code, text.stdout, as_json.stderr) == (
            2,
            "",
            text.stderr,
        ) and as_json.exit_code == 2
        error = json.loads(as_json.stdout)["error"]
        assert [*error] == ["type", "what", "given", "expected", "try"]
        assert all(
            " ".join(part.split()) in " ".join(text.stderr.split()) for part in [*error.values()][1:] if part
        )
    # The option of a script is not that of the command.
    assert meshcomm("run", "nope.py", "--json").stdout == ""


# -- help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 160])
def test_help_has_every_command_once_under_its_group_and_cuts_nothing(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    group: Any = get_command(app)
    # The usage line contains dots.
    text = group.get_help(group.context_class(group, **group.context_settings)).partition("\n")[2]
    assert "..." not in text and min(columns, 120) - 15 < max(map(len, text.splitlines())) <= columns
    found = re.findall(r"^(\S[^:]*):$|^  (\w+)  +[A-Z]", text, re.MULTILINE)
    listed = [name for _, name in found if name]
    assert listed == [name for names in GROUPS.values() for name in names]
    assert [title for title, _ in found if title in GROUPS] == list(GROUPS)
    words = " ".join(text.split())
    for name in COMMANDS:
        text = function_of(name).__doc__
        assert text is not None and " ".join(text.split("\n\n")[0].split()) in words


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("run", "[OPTIONS] [CONFIG] SCRIPT [ARGUMENTS]..."),
        ("parity", "[OPTIONS] CONFIG [SCRIPT] [ARGUMENTS]..."),
        ("plan", "[OPTIONS] CONFIG"),
        ("export", "[OPTIONS] RUN|CHECKPOINT FILE"),
        ("new", "[OPTIONS] [FOLDER]"),
        ("schema", "[OPTIONS]"),
    ],
)
def test_a_usage_line_has_what_is_needed_and_in_brackets_what_is_not(command: str, usage: str) -> None:
    assert meshcomm(command, "--help").stdout.splitlines()[0] == f"Usage: meshcomm {command} {usage}"
    assert f"Usage: meshcomm {command} {usage}\n" in meshcomm(command, "--nonsense").stderr


def test_an_error_is_folded_to_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = f"{'some_folder/' * 4}nope.toml"
    folded = meshcomm("plan", missing).stderr
    assert max(map(len, folded.splitlines())) <= 80 and "\n            some_folder" not in folded
    monkeypatch.delenv("COLUMNS", raising=False)
    plain = CliRunner().invoke(app, ["plan", missing]).stderr
    assert max(map(len, plain.splitlines())) > 80 and " ".join(plain.split()) == " ".join(folded.split())


def test_the_versions_are_printed() -> None:
    shown = meshcomm("--version")
    assert shown.exit_code == 0 and shown.stdout.startswith(f"meshcomm {__version__}, torch ")


@pytest.mark.parametrize(
    "variable",
    [
        "LOCAL_RANK",
        "SLURM_LOCALID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "JSM_NAMESPACE_LOCAL_RANK",
        "FLUX_TASK_LOCAL_ID",
        "PALS_LOCAL_RANKID",
    ],
)
def test_the_first_rank_of_a_host_reports_a_wrong_config_for_all(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[mesh]\ndimz = { dp = 2 }\n")
    for words in (["train", str(path)], ["run", str(path), __file__], ["plan", str(path)]):
        for local_rank in range(3):
            monkeypatch.setenv(variable, str(local_rank))
            done = meshcomm(*words)
            assert done.exit_code == 2 and ("mesh.dims" in done.stderr) == (local_rank == 0), done.stderr
    # An error that may occur on one rank alone is reported by that rank.
    assert "there is no script" in meshcomm("run", "nothing.py").stderr


# -- a script's own options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world-size", "2", "x.py", "--lr", "3", "name"], "2 --lr 3 name"),
        (
            ["--world-size", "2", "x.py", "--world-size", "3", "--help", "--", "-x"],
            "2 --world-size 3 --help -- -x",
        ),
        (["--world-size", "2", "x.py", "other.py"], "2 other.py"),
        (["--world", "2", "x.py", "--world", "3"], "2 --world 3"),
        (["mesh.toml", "--world-size", "2", "--set", "mesh.timeout_s=9", "x.py", "a", "--set"], "2 a --set"),
    ],
)
def test_what_follows_a_script_is_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    own = SCRIPT if words[0] != "mesh.toml" else SCRIPT.replace('dims={"dp": -1}, device="cpu"', "")
    (tmp_path / "x.py").write_text(own)
    (tmp_path / "mesh.toml").write_text('[mesh]\ndims = { dp = -1 }\ndevice = "cpu"\n')
    shown = meshcomm("simulate", *words)
    assert shown.stdout.splitlines()[0] == said, shown.output


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ("dryrun x.py --world-size 64", "meshcomm dryrun --world-size 64 x.py"),
        ("run x.py --world=2 --lr 3", "meshcomm run --world=2 x.py --lr 3"),
        ("simulate --seed 1 x.py a --world-size 4 b", "meshcomm simulate --seed 1 --world-size 4 x.py a b"),
    ],
)
def test_an_option_that_the_command_needs_and_that_stands_behind_the_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    done = meshcomm(*words.split())
    assert done.exit_code == 2 and f"  try:      {way}\n" in done.stderr, done.output
    assert re.match(r"--world(-size)? stands behind x.py, and so belongs to the script\n", done.stderr)


def test_an_option_behind_the_script_is_noted_if_the_script_may_have_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(SCRIPT)
    done = meshcomm("simulate", "--world-size", "2", "x.py", "--seed", "3", "--set", "a=1")
    assert done.stdout.startswith("2 --seed 3 --set a=1\n"), done.output
    assert done.stderr.startswith(
        "meshcomm: --seed, --set stand behind x.py, and so belong to the script; if meshcomm is meant: "
        "meshcomm simulate --world-size 2 --seed 3 --set a=1 x.py\n"
    )
    assert meshcomm("parity", QUICK, "nope.py", "--steps", "3").stderr.startswith(
        "meshcomm: --steps stands behind"
    )
    # A value before the script, or a word that is no option of the command.
    for more in (["--seed", "1"], []):
        late = ["--seed", "3"] if more else ["--lr", "3"]
        done = meshcomm("simulate", "--world-size", "2", *more, "x.py", *late)
        assert done.stderr == "meshcomm: simulating 2 ranks of x.py\n", done.output


def test_world_is_a_second_name_of_world_size_in_every_command_that_takes_it() -> None:
    group: Any = get_command(app)
    taken = [
        each.opts for command in group.commands.values() for each in command.params if each.name == "world"
    ]
    assert len(taken) > 10 and all(opts == ["--world-size", "--world"] for opts in taken)
    # A command that refuses the value has read it.
    assert "Invalid value for '--world-size' / '--world'" in meshcomm("bench", "--world", "1").stderr
    config, nodes = ROOT / "configs/quickstart.toml", "topology.ranks_per_node=4"
    words = ("tune", str(config), "--json", "--set", nodes)
    both = [meshcomm(*words, name, "4").stdout for name in ("--world-size", "--world")]
    assert both[0] == both[1] and json.loads(both[0])["world_size"] == 4


def test_a_shell_completes_commands_and_options() -> None:
    for words, offered in {
        "meshcomm t": ["train", "tune", "transfer"],
        "meshcomm plan configs/mesh.toml --expo": ["--export"],
    }.items():
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        shown = python("-m", "meshcomm", _MESHCOMM_COMPLETE="complete_bash", **asked)
        assert (shown.code, shown.out.split(), shown.err) == (0, offered, ""), words
