"""A job on both hosts, started as on a cluster: with the same command on each, and the ranks meet by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import torch

from tests.two_hosts.hosts import NAMES, Host, Link, two_hosts

PROGRAMS: Final = Path(__file__).parent / "programs"
# Variables that a launcher or a test left in the environment would be taken for the job's.
_FOREIGN: Final = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GLOO_", "TORCH", "MESHCOMM_", "SLURM_")


@final
@dataclass
class Job:
    """A running job on two hosts.

    folder: its working folder, on both hosts; rank 3 writes its final report to `said/end-3.json`.
    """

    hosts: tuple[Host, Host]
    folder: Path
    processes: list[subprocess.Popen[bytes]]

    def finish(self, limit_s: float) -> list[int]:
        """The exit code of each host's torchrun. Raises AssertionError if one keeps running."""
        deadline = time.monotonic() + limit_s
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s:g} s:\n{self.log()}") from None

    def log(self) -> str:
        """The output of both hosts so far."""
        return "\n".join(f"--- {name}\n{(self.folder / name).read_text(errors='replace')}" for name in NAMES)

    def said(self, event: str = "") -> dict[int, Any]:
        """The reports of the ranks so far, by rank. event: as in `say`."""
        found = {}
        for path in (self.folder / "said").glob(f"{event or 'end'}-*.json"):
            found[int(path.stem.split("-")[1])] = json.loads(path.read_text())
        return dict(sorted(found.items()))

    def await_said(self, event: str, ranks: int, limit_s: float) -> dict[int, Any]:
        """The reports of an event, as soon as all `ranks` have written one."""
        deadline = time.monotonic() + limit_s
        while len(found := self.said(event)) < ranks:
            over = [process.poll() for process in self.processes]
            assert None in over and time.monotonic() < deadline, (
                f"no {event!r} of all ranks, only of {list(found)}:\n{self.log()}"
            )
            time.sleep(0.02)
        return found

    def left(self) -> list[str]:
        """The command lines of processes that still run on the two hosts."""
        return [f"{host.name}: {words}" for host in self.hosts for words in host.processes()]


@contextmanager
def job(
    folder: Path,
    link: Link,
    ranks_per_node: int,
    config: str | None,
    program: str,
    *arguments: str,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Job]:
    """Start `meshcomm run CONFIG PROGRAM ARGUMENTS` under torchrun on two new hosts.

    config: the text of a TOML file, or None for a program that opens its meshes without one. program: a file in
    `programs`. files: name -> text of other files. At the end of the block both hosts and their processes are gone.
    """
    (folder / "said").mkdir()
    named = {} if config is None else {"mesh.toml": config}
    for name, text in {**files, **named}.items():
        (folder / name).write_text(text)
    with two_hosts(folder, link) as hosts:
        line = line_of(ranks_per_node, [*named, str(PROGRAMS / f"{program}.py"), *arguments])
        processes = [host.start(line, folder, folder / host.name, environment(folder)) for host in hosts]
        started = Job(hosts, folder, processes)
        try:
            yield started
        finally:
            for process in processes:
                # The processes inside a host end with it, but nsenter itself runs outside.
                process.kill()
                process.wait()


def line_of(ranks_per_node: int, words: Sequence[str]) -> list[str]:
    """The command, equal on both hosts. words: CONFIG if there is one, SCRIPT, and its arguments."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:29400"]
    size = ["--nnodes", str(len(NAMES)), "--nproc-per-node", str(ranks_per_node)]
    command = ["-m", "meshcomm", "run", *words]
    return [sys.executable, "-m", "torch.distributed.run", *size, *meet, *command]


def environment(folder: Path) -> dict[str, str]:
    """The environment of this process, without variables of another job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {
        **kept,
        "PYTHONPATH": str(PROGRAMS.parents[2]),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        # No host can reach a name server, and no process shall wait for one.
        "RES_OPTIONS": "timeout:1 attempts:1",
        # Otherwise torch's store logs each broken connection, with stack frames of its code.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def say(event: str, rank: int, facts: object) -> None:
    """Called by a program: write `facts` where the test finds them, under the name of an event."""
    half = Path("said") / f".{event}-{rank}"
    half.write_text(json.dumps(facts))
    half.replace(Path("said") / f"{event}-{rank}.json")


def own_the_processor() -> None:
    """Called by a program that measures: gives the calling thread, and threads that it starts, priority over other work.

    The hosts of a cluster have their processors to themselves.
    """
    torch.set_num_threads(1)
    # Some machines do not allow this even for root. Then the other work affects the measurement.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


@contextmanager
def telling() -> Iterator[None]:
    """Used by a program: an error that leaves the block is first reported as "error".

    The report has the time on the clock that all processes of a machine share.
    """
    try:
        yield
    except Exception as error:
        facts = {
            "kind": type(error).__name__,
            "text": str(error),
            "missing": list(getattr(error, "missing", ())),
            "at": time.monotonic(),
        }
        say("error", int(os.environ["RANK"]), facts)
        raise
