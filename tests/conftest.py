"""Shared by all tests: the plugin's pool of warm ranks, and measured figures for the end of the log."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable

import pytest

# A worker collects no garbage before it has collected the tests: nearly all that it makes until then stays.
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()

# Threads that wait for each other at the end of a parallel loop would spin. On a busy machine, the one that they wait for then has
# no core, and a step takes ten times as long. OpenMP reads the setting when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from meshcomm.testing import Pool
from meshcomm.train.parity import Difference
from tests.train.parity_page import write_page

# These need packages that no other test needs.
collect_ignore = ["benchmarks/torchtitan.py", "launchers"]

# torch's store looks up the name of every address that connects. With a name server that does not answer, each lookup would
# cost five seconds. The setting is read at the first lookup, so it is set before.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Many container images set this variable. Several hundred processes would then each compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Variables by which a terminal, a scheduler or a surrounding job influences programs. Tests see only the variables that
# they set themselves.
_OF_TERMINALS = (
    "COLUMNS", "LINES", "TERMINAL_WIDTH", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS",
)  # fmt: skip
_OF_JOBS = re.compile(
    # These two contain paths for tests/foreign.
    r"(?!MESHCOMM_(FOREIGN|PICOTRON)$)"
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|(MESHCOMM|SLURM|OMPI|PMI|PMIX|MPI|MV2|I_MPI|FLUX|JSM|PALS|RAY|TORCHELASTIC|TORCH_ELASTIC|TORCH_DISTRIBUTED|GLOO|NCCL)_\w+)"
)

_FIGURE = "measured"
_ROWS: pytest.StashKey[list[tuple[str, Difference]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that writes a page with the measurements."""
    parser.addoption(
        "--write-parity-table",
        action="store_true",
        help="with -m parity: write the table of docs/guide/parity.md from what the meshes gave",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to write the page from several processes, which each have only a part."""
    if config.getoption("--write-parity-table") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--write-parity-table needs the rows of one process: add -n 0")


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of later garbage collections, each of which would take a third of a second."""
    gc.freeze()
    gc.enable()
    # At its end, Python collects what extension modules count as leaked otherwise.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, because a long file at the end would leave the other process without work. Mark deep tests.

    `deep_cases(pattern)` marks a test's cases as deep if the pattern matches their names. Tests that take minutes are deep, too.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    # Tests whose pattern has matched no case yet. A run of cases selected by name may lack them, so it is not checked.
    unfound: set[tuple[str, str]] = set()
    for item in items:
        cases = item.get_closest_marker("deep_cases")
        if cases is not None and not any("::" in given for given in item.config.args):
            unfound.add((item.nodeid.partition("[")[0], cases.args[0]))
    for item in items:
        cases = item.get_closest_marker("deep_cases")
        found = cases is not None and re.search(cases.args[0], item.name)
        if cases is not None and found:
            unfound.discard((item.nodeid.partition("[")[0], cases.args[0]))
        if found or any(item.get_closest_marker(name) for name in ("faults", "parity", "netns")):
            item.add_marker("deep")
    if unfound:
        raise pytest.UsageError(
            f"deep_cases finds no case of {', '.join(f'{at}: {what}' for at, what in sorted(unfound))}"
        )


def pytest_sessionstart() -> None:
    """Remove the surrounding variables from the environment, after pytest has read the ones that it needs."""
    for name in list(os.environ):
        if name in _OF_TERMINALS or _OF_JOBS.fullmatch(name):
            del os.environ[name]
    # A background job, or one under nohup, starts with these signals ignored, and every rank would inherit that.
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    for number, handler in usual.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def pool(mesh_pool: Pool) -> Pool:
    """Warm ranks for tests that open their meshes themselves. This is the plugin's pool, shared with its tests."""
    return mesh_pool


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a launcher's variables, whatever an earlier test has set."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "NCCL_SOCKET_IFNAME") or name.startswith(("GLOO_", "SLURM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A function that prints a line of measured figures at the end of the test log."""
    return lambda line: request.node.user_properties.append((_FIGURE, line))


@pytest.fixture
def parity_rows(pytestconfig: pytest.Config) -> list[tuple[str, Difference]]:
    """A list of (case, its largest difference from one process), for the table of combinations."""
    return pytestconfig.stash.setdefault(_ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures, and write the page if asked for."""
    # The reports have the figures, because tests may run in other processes.
    reports = [report for each in terminalreporter.stats.values() for report in each]
    properties = [each for report in reports for each in getattr(report, "user_properties", ())]
    lines = dict.fromkeys(line for name, line in properties if name == _FIGURE)
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
    if config.getoption("--write-parity-table"):
        terminalreporter.write_line(write_page(dict(config.stash.get(_ROWS, []))))
