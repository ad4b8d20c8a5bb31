"""Shared by the scripts of all launchers: jobs whose printed lines have times, and one line of output for each check."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, final

ROOT: Final = Path(__file__).parents[2]
PROGRAMS: Final = Path(__file__).with_name("programs")
# Ray takes a minute to start on a busy machine.
LIMIT_S: Final = 240.0
# Every process of a check inherits this variable, so the check can find it.
_MARK: Final = "LAUNCHER_CHECK"
# A process that is found right after a job has ended may still be ending.
_SETTLES_S: Final = 20.0
_KILLED: Final = re.compile(r"rank (\d+) is killed")


@final
@dataclass
class Job:
    """A running job. lines: its printed lines, each with its time."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        """Read the job's output until the job ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def end(self, limit_s: float = LIMIT_S) -> Job:
        """Wait until the job ends. Raises AssertionError if it does not."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s:g} s\n{self.text}") from None
        time.sleep(0.1)  # for its last lines
        return self

    def await_line(self, text: str, count: int = 1, limit_s: float = LIMIT_S) -> float:
        """Wait until `count` lines contain `text`. Return the time of the last of these lines."""
        deadline = time.monotonic() + limit_s
        while len(found := [at for at, line in self.lines if text in line]) < count:
            over = self.process.poll() is not None or time.monotonic() > deadline
            assert not over, f"{text!r} stands in {len(found)} lines, not in {count}\n{self.text}"
            time.sleep(0.02)
        return found[count - 1]

    @property
    def text(self) -> str:
        """The whole output so far."""
        return "\n".join(line for _, line in list(self.lines))


@final
@dataclass
class Case:
    """One check. said: the result in its line of output."""

    mark: str
    env: Mapping[str, str]
    said: str = ""
    jobs: list[Job] = field(default_factory=list)

    def start(
        self, command: Sequence[str], env: Mapping[str, str] = MappingProxyType({}), folder: Path = ROOT
    ) -> Job:
        """Start a command in its own process group, and read its stdout and stderr."""
        process = subprocess.Popen(
            command,
            env={**self.env, **env, _MARK: self.mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        job = Job(process)
        self.jobs.append(job)
        threading.Thread(target=job.read, daemon=True).start()
        return job


@final
class Checks:
    """The checks of one launcher. tool: its name and version, which start each line of output."""

    def __init__(self, tool: str, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self.tool, self.failed = tool, 0
        # A script finds the package next to these tests, wherever its launcher starts it.
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}

    @contextmanager
    def case(self, what: str, beside: Callable[[], Sequence[str]] = tuple) -> Iterator[Case]:
        """A check. It fails on an AssertionError, or if it leaves a process; then its processes are killed.

        beside: returns further lines about leftovers, such as jobs in a queue.
        """
        case, began, wrong = Case(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", self.env), time.monotonic(), ""
        try:
            yield case
        except AssertionError as error:
            wrong = str(error) or "an assertion without words"
        seconds = time.monotonic() - began
        left = [] if wrong else _settled(lambda: [*map(_words, _marked(case.mark)), *beside()])
        for process in _marked(case.mark):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for job in case.jobs:
            job.process.wait(10)
        self.failed += bool(wrong or left)
        found = wrong or case.said
        ok = "FAILED" if wrong or left else "ok"
        print(f"{self.tool} | {what} | {seconds:.1f} s | {ok}: {found} | left running: {'; '.join(left) or ('not looked at' if wrong else 'nothing')}", flush=True)  # fmt: skip

    def code(self) -> int:
        """The exit code of the script."""
        print(f"{self.tool}: {self.failed or 'no'} checks failed", flush=True)
        return int(self.failed > 0)


def program(**options: float) -> list[str]:
    """The command of `sums.py`, as in `program(dies=2)`."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(PROGRAMS / "sums.py"), *words]


def summed(job: Job, *tags: int) -> str:
    """Check that every rank of the job made all sums, without numbers of other jobs. tags: one for each job in its lines."""
    assert job.process.returncode == 0, f"exit code {job.process.returncode}\n{job.text}"
    for tag in tags or (1,):
        for rank in range(4):
            text = rf"\brank {rank} summed \d+ times: {4 * tag}$"
            assert re.search(text, job.text, re.MULTILINE), f"no line has {text!r}\n{job.text}"
    return "sums right on 4 ranks" + (f" of each of {len(tags)} jobs" if len(tags) > 1 else "")


def named(job: Job, text: str, by: str, of_many: int = 1) -> str:
    """Check that the killed rank is named after its end. text: a pattern of the line. by: the process that prints it."""
    assert job.process.returncode != 0, f"exit code 0\n{job.text}"
    killed = next((at for at, line in job.lines if _KILLED.search(line)), None)
    assert killed is not None, f"no rank was killed\n{job.text}"
    lines = [(at, line) for at, line in job.lines if at >= killed and re.search(text, line)]
    assert len(lines) >= of_many, f"no line has {text!r}\n{job.text}"
    at, line = lines[of_many - 1]
    return f"named by {by} after {at - killed:.1f} s: {line.strip()}"


def version(*command: str) -> str:
    """The first dotted number that the command prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"{' '.join(command)} says no version: {done.stdout}{done.stderr}")
    return found[0]


def install(*packages: str) -> None:
    """Install Debian packages, if one of them is missing."""
    known = subprocess.run(["dpkg", "-s", *packages], capture_output=True)
    if known.returncode:
        for words in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *words], check=True, stdout=subprocess.DEVNULL)


def version_in(python: Path, package: str) -> str:
    """The version of a package in a virtual environment."""
    return version(str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))")


def _marked(mark: str) -> list[int]:
    """The processes that have inherited a check's variable."""
    found, words = [], f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if words in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def _words(process: int) -> str:
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return ""
    return f"{process} {line.replace(bytes(1), b' ').decode(errors='replace').strip()[:100]}"


def _settled(left: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + _SETTLES_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
