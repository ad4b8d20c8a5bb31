"""Ray, in a separate virtual environment, on this host: python -m tests.launchers.ray [elastic|vanished]

There are three sets of checks. On one node: meshcomm.job.ray, plain actors that call meshcomm.init, and TorchTrainer. On several
nodes of this host (elastic): trainings that lose ranks and nodes. On two hosts in network namespaces (vanished): a training whose
second host is cut off. A word selects one of the last two sets.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import psutil

from tests.elastic.deaths import Run, config_of, training
from tests.foreign.environments import make
from tests.launchers.checks import PROGRAMS, ROOT, Case, Checks, Job, named, program, summed, version_in
from tests.two_hosts.hosts import Host, Link, two_hosts

_ACTORS: Final = str(PROGRAMS / "on_ray.py")
_PARTS: Final = "--world-size", "4", "--cpus-per-rank", "0.25"
_PORT: Final = "26379"
# A batch that 2 or 3 ranks along dp can share.
_BATCH: Final = "--set", "train.global_batch_size=12", "--set", "train.micro_batch_size=1"


def main() -> int:
    """Run all checks. Return 0 if they passed."""
    python = make("ray") / "bin" / "python"
    # Ray would treat a token in the home folder as the token of a cluster of several nodes.
    own = {"RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    checks = Checks(f"Ray {version_in(python, 'ray')}", own)
    sets = {"": _one_node, "elastic": _elastic, "vanished": _vanished}
    for name in sys.argv[1:] or sets:
        sets[name](checks, python)
    return checks.code()


def _one_node(checks: Checks, python: Path) -> None:
    """Jobs whose ranks end, or are not replaced."""
    words = program()[1:]
    start = [str(python), "-m", "meshcomm.job.ray", *_PARTS, "run", *words]
    with checks.case("meshcomm.job.ray run script.py") as case:
        case.said = summed(case.start(start).end())
    with checks.case("meshcomm.job.ray, rank 2 killed") as case:
        case.said = named(
            case.start([*start, "--dies", "2"]).end(), "meshcomm: rank 2 was ended by SIGKILL", "the driver"
        )
    with checks.case("meshcomm.job.ray, an actor killed") as case:
        job = case.start([*start, "--calls", "1000000"])
        job.await_line("of 4 on", 4)
        actor = _actor_of(2, case.mark)
        job.lines.append((time.monotonic(), "rank 2 is killed"))
        os.kill(actor, signal.SIGKILL)
        case.said = named(job.end(), "meshcomm: rank 2 lost its actor", "the driver")
    # Ray Train ends the other ranks at once.
    naming = {
        "actors": (r"rank 2 does not answer", "another rank"),
        "trainer": (r"\[Rank 2 Error Snippet\]", "Ray Train"),
    }
    for kind, (text, who) in naming.items():
        with checks.case(f"{kind} of Ray that call meshcomm.init") as case:
            case.said = summed(case.start([str(python), _ACTORS, kind]).end())
        with checks.case(f"{kind}, rank 2 killed") as case:
            case.said = named(case.start([str(python), _ACTORS, kind, "--dies", "2"]).end(), text, who)


def _elastic(checks: Checks, python: Path) -> None:
    """Trainings that lose ranks, compared with undisturbed ones."""
    with tempfile.TemporaryDirectory(prefix="ray") as name:
        folder = Path(name)
        alone = _Training(checks, python, folder / "1", config_of("dp2", 120))
        with checks.case("--replace 1, an actor killed") as case:
            job = alone.start(case, 2, "--replace", "1", "--cpus-per-rank", "0.25")
            seconds = alone.kill(_actor_of(1, case.mark))
            case.said = f"{alone.same(job)}; {seconds:.1f} s to the next step"
        nodes = _Training(checks, python, folder / "2", config_of("dp4", 160))
        with checks.case("--replace 3 on 3 nodes, an actor killed, then a node with 2 ranks") as case:
            cluster = _Cluster(case, python, folder / "a")
            _, second = cluster.add(2), cluster.add(2)
            job = nodes.start(case, 4, "--replace", "3")
            cluster.add(2)
            rank = next(each for each in (0, 3) if _actor_of(each, case.mark) in cluster.all_of(second))
            seconds = nodes.kill(_actor_of(rank, case.mark))
            after = nodes.kill(*cluster.all_of(second))
            case.said = (
                f"{nodes.same(job)}; {seconds:.1f} s to the next step, {after:.1f} s where a node died"
            )
            cluster.end()
        text = config_of("dp2", 400).replace("dp = 2", "dp = 3")
        text += "\n[elastic]\nmin = { dp = 2 }\n"
        fewer = _Training(checks, python, folder / "3", text, config_of("dp2", 400), _BATCH)
        with checks.case("elastic.min on 2 nodes, one dies, and a new one comes") as case:
            cluster = _Cluster(case, python, folder / "b")
            _, second = cluster.add(2), cluster.add(1)
            job = fewer.start(case, 3, "--replace", "1")
            seconds = fewer.kill(*cluster.all_of(second))
            job.await_line("; continues with dp=2")
            began = time.monotonic()
            cluster.add(1)
            job.await_line("; continues with dp=3")
            grown = time.monotonic() - began
            same = fewer.same(job, 1e-12)
            case.said = (
                f"{same}; {seconds:.1f} s to the next step, {grown:.1f} s from a new node until it grew"
            )
            cluster.end()


def _vanished(checks: Checks, python: Path) -> None:
    """A training loses the network of a host with two of four ranks, so no process there is seen to end."""
    with (
        tempfile.TemporaryDirectory(prefix="ray") as name,
        two_hosts(Path(name), Link("1gbit")) as (one, other),
    ):
        folder = Path(name)
        nodes = _Training(checks, python, folder / "1", config_of("dp4", 160))
        with checks.case("--replace 2 on two hosts, one with 2 ranks is cut off") as case:
            cluster = _Cluster(case, python, folder / "a")
            cluster.add(2, one)
            cluster.add(2, other)
            job = nodes.start(case, 4, "--replace", "2", host=one)
            cluster.add(2, one)
            seconds = nodes.lose(other.cut)
            case.said = f"{nodes.same(job)}; {seconds:.1f} s to the next step"
            other.mend()
            cluster.end()


@final
class _Training:
    """A training on Ray, compared with a training by meshcomm's launcher. before: the config of the latter, if different."""

    def __init__(
        self,
        checks: Checks,
        python: Path,
        folder: Path,
        config: str,
        before: str = "",
        words: Sequence[str] = (),
    ) -> None:
        self._python, self._folder, self._words = python, folder, words
        with training(folder / "before", before or config, 0, words=words) as run:
            assert run.process.wait(300) == 0, run.log.read_text()
            self._before = [line["loss"] for line in run.lines]
        (folder / "train.toml").write_text(config)

    def start(self, case: Case, ranks: int, *options: str, host: Host | None = None) -> Job:
        """Start the training, and wait for its first steps. host: the driver's host."""
        command = [str(self._python), "-m", "meshcomm.job.ray", "--world-size", str(ranks), *options]
        sets = [*self._words, "--set", f'train.out="{self._folder / "out"}"']
        command += ["train", *sets, str(self._folder / "train.toml")]
        job = case.start(command if host is None else host.command(command, ROOT), _address(case))
        self._run = Run(job.process, self._folder / "out", self._folder)  # type: ignore[arg-type]
        assert self._run.await_step(5, 240.0), job.text
        self._job = job
        return job

    def kill(self, *processes: int) -> float:
        """Kill processes. Return the seconds until the step after the current one was logged."""

        def act() -> None:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

        return self.lose(act)

    def lose(self, act: Callable[[], object]) -> float:
        """Make ranks disappear by `act`. Return the seconds until the step after the current one was logged."""
        done, began = int(self._run.lines[-1]["step"]), time.monotonic()
        act()
        assert self._run.await_step(done + 2, 240.0), self._job.text
        return time.monotonic() - began

    def same(self, job: Job, within: float = 0.0) -> str:
        """Check that the training ended well with the losses of the undisturbed one.

        within: the relative limit in the first 200 steps. Training magnifies rounding errors: undisturbed, dp=2 and dp=3 differ
        by 3e-14 after 160 steps and by 8e-10 after 400.
        """
        job.end()
        assert job.process.returncode == 0, f"exit code {job.process.returncode}\n{job.text}"
        losses = [line["loss"] for line in self._run.lines]
        assert len(losses) == len(self._before), f"{len(losses)} steps, not {len(self._before)}\n{job.text}"
        every = [abs(a - b) / b for a, b in zip(losses, self._before, strict=True)]
        off = max(every[:200] if within else every)
        assert max(every) < 1e-6, f"losses differ by {max(every):g}\n{job.text}"
        assert off <= within, f"losses differ by {off:g}\n{job.text}"
        return f"{len(losses)} losses " + ("bitwise identical" if not off else f"within {off:.0e}")


def _address(case: Case) -> dict[str, str]:
    """The address of the cluster that a check has started, for its jobs. If there is none, each job starts a cluster."""
    found = re.search(r"--address='(\S+)'", "\n".join(job.text for job in case.jobs))
    return {"RAY_ADDRESS": found[1]} if found else {}


@final
@dataclass
class _Cluster:
    """Nodes on this host; the head node is the first one."""

    case: Case
    python: Path
    folder: Path
    nodes: list[Job] = field(default_factory=list)

    def add(self, cpus: int, host: Host | None = None) -> Job:
        """Add one node, and wait until it has started: nodes that start at the same time would take the same names."""
        head = ["--head", "--port", _PORT, "--include-dashboard", "false", "--temp-dir", str(self.folder)]
        joins = ["--address", _address(self.case)["RAY_ADDRESS"]] if self.nodes else head
        ports = ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", "100000000"]
        words = ["-m", "ray.scripts.scripts", "start", "--num-cpus", str(cpus), *joins, *ports]
        command = [str(self.python), *words, "--disable-usage-stats", "--block"]
        if host is not None:
            command = host.command([*command, "--node-ip-address", host.address], ROOT)
        job = self.case.start(command)
        job.await_line("block forever")
        self.nodes.append(job)
        return job

    def all_of(self, node: Job) -> list[int]:
        """The processes of a node: raylet, workers and ranks, as if its host had failed."""
        parent = psutil.Process(node.process.pid)
        return [each.pid for each in (parent, *parent.children(recursive=True))]

    def end(self) -> None:
        """End the nodes, the head node last."""
        for node in reversed(self.nodes):
            started = psutil.Process(node.process.pid)
            # nsenter starts nodes on another host, and forwards no signals.
            for each in started.children() if started.name() == "nsenter" else [started]:
                each.terminate()
            node.process.wait(30)


def _actor_of(rank: int, mark: str) -> int:
    """The process of the actor that started a rank."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            status = (entry / "status").read_text()
        except OSError:
            continue
        if f"LAUNCHER_CHECK={mark}".encode() in words and f"RANK={rank}".encode() in words:
            parent = int(re.search(r"PPid:\t(\d+)", status)[1])
            if b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes():
                return parent
    raise AssertionError(f"no process of rank {rank} whose parent is an actor")


if __name__ == "__main__":
    raise SystemExit(main())
