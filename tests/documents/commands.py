"""A page's command lines. The real command line parses every one, and the quick ones are run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from typing import Any

from torch.distributed.run import get_args_parser

from tests.documents import tool

all_commands = tool("cli_page").all_commands

# Commands that take longer than the tests of a page may, and the tests that run them.
NOT_RUN = {
    "train": "starts its ranks and trains for minutes; tests/train/test_steps.py",
    "parity": "trains twice; tests/commands/test_parity.py",
    "bench": "measures for minutes, and never gives the same figures; tests/commands/test_bench.py",
    "dryrun": "runs some forty ranks; tests/commands/test_dryrun.py",
    "doctor": "says what this machine has; tests/commands/test_doctor.py",
    "export": "wants a run's checkpoint; tests/train/test_export.py",
    "report": "wants the reports of a job that failed; tests/commands/test_report.py",
    "view": "serves until it is stopped; tests/commands/test_view.py",
}
# Programs that are not ours. Their arguments are not read.
_OTHERS = {
    "pytest",
    "pip",
    "cd",
    "export",
    "ip",
    "srun",
    "mpirun",
    "mpiexec",
    "git",
    "properdocs",
    "ssh",
    "cat",
    "ls",
}


@dataclass(frozen=True)
class Command:
    """One command line. name: the meshcomm command, or "script" for a Python file run directly.

    ranks: processes that a launcher before it starts, or None without a launcher. hosts: the launcher's machines.
    """

    line: str
    name: str
    arguments: tuple[str, ...]
    ranks: int | None = None
    hosts: int = 1


def command_lines(text: str, prompt: bool) -> list[tuple[str, str]]:
    """(command line, output shown below it). With `prompt`, commands begin with `$ `; otherwise every line is a command."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if found and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0][:-1].rstrip() + " " + line.strip(), [])
        elif not prompt and line.strip() and not line.strip().startswith("#"):
            found.append((line.strip(), []))
        elif prompt and line.startswith("$ "):
            found.append((line[2:].strip(), []))
        elif prompt and found:
            found[-1][1].append(line)
        elif prompt and line.strip():
            raise ValueError(f"output before a command: {line}")
    return [(line, "\n".join(shown)) for line, shown in found]


def read(line: str) -> Command | None:
    """Parse a command line with the real parsers. Returns None for a program that is not ours.

    Raises ValueError for an unknown command, option or module.
    """
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    # Placeholders that the reader fills in.
    words = [word for word in words if word != "..."]
    # The shell handles redirections.
    ends = [at for at, word in enumerate(words) if word in (">", ">>", "2>", "|", "&", "<")]
    words = words[: ends[0]] if ends else words
    if "&&" in words:
        cut = len(words) - words[::-1].index("&&")
        words = words[cut:]
    program, rest = words[0].rsplit("/", 1)[-1], words[1:]
    if program == "torchrun":
        # The script gets all words after it, here as in the real command line.
        known = get_args_parser().parse_args(rest)
        ranks = int(known.nproc_per_node) if known.nproc_per_node.isdigit() else 1
        hosts = int(known.nnodes.split(":")[-1])
        target = known.training_script
        if known.module and target == "meshcomm":
            return _ours(line, known.training_script_args, ranks, hosts)
        if known.module:
            _module(target)
        return Command(line, "script", (target, *known.training_script_args), ranks, hosts)
    if program in ("python", "python3"):
        if rest[:2] == ["-m", "meshcomm"]:
            return _ours(line, rest[2:], None, 1)
        if rest[:1] == ["-m"]:
            if rest[1] not in ("venv", "pip"):
                _module(rest[1])
            return None
        return Command(line, "script", tuple(rest), 1)
    if program == "meshcomm":
        return _ours(line, rest, None, 1)
    if program not in _OTHERS:
        raise ValueError(f"{program}: a program that the tests do not know: {line}")
    return None


def wrong_in_text(text: str) -> list[str]:
    """The errors in commands within running text, such as `meshcomm plan CONFIG --rank 3`.

    Options must exist. Arguments may be missing, and so may the module after `python -m`.
    """
    wrong = []
    commands = all_commands()
    spans = re.findall(r"(?<!`)`(meshcomm [a-z][^`\n]*)`", text)
    for span in spans:
        words = span.split()
        name = next((name for name in (" ".join(words[1:3]), words[1]) if name in commands), None)
        if name is None:
            wrong.append(f"`{span}`: there is no command {words[1]}")
            continue
        flags = {flag for each in commands[name].params for flag in [*each.opts, *each.secondary_opts]}
        wrong += [
            f"`{span}`: meshcomm {name} has no option {word}"
            for word in words[1 + len(name.split()) :]
            if word.startswith("--") and word.split("=")[0] not in flags | {"--help"}
        ]
    for module in re.findall(r"python3? -m ([\w.]+)", text):
        if module not in ("venv", "pip"):
            try:
                _module(module)
            except ValueError as error:
                wrong.append(str(error))
    return wrong


def _ours(line: str, words: list[str], ranks: int | None, hosts: int) -> Command:
    if not words or words[0].startswith("-"):
        if words and words[0] not in ("--help", "--version", "--install-completion", "--show-completion"):
            raise ValueError(f"meshcomm has no option {words[0]}: {line}")
        return Command(line, "", tuple(words), ranks, hosts)
    commands = all_commands()
    name = words[0] if words[0] in commands else " ".join(words[:2])
    if name not in commands:
        raise ValueError(f"meshcomm has no command {words[0]}: {line}")
    arguments = words[len(name.split()) :]
    _read_as(commands[name], name, arguments, line)
    return Command(line, name, tuple(arguments), ranks, hosts)


def _read_as(command: Any, name: str, arguments: list[str], line: str) -> None:
    try:
        # Parses and checks, but calls nothing.
        command.make_context(name, list(arguments))
    except Exception as error:
        raise ValueError(f"{line}: {getattr(error, 'message', '') or error}") from error


def _module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ValueError(f"python -m {name}: there is no such module")
