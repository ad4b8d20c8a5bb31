"""Trainings in which processes of ranks are killed or stopped, compared with undisturbed runs.

`python -m tests.elastic.deaths --deaths 40 --stopped 0.3`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import psutil

import meshcomm
from meshcomm.config import load_config
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.benchmarks.table import markdown
from tests.forked_jobs import Job

ROOT: Final = Path(__file__).parents[2]

_COMMON: Final = """
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 4
num_heads = 4
num_kv_heads = 2
[data]
files = ["{root}/README.md"]
seq_len = 32
[train]
steps = {steps}
global_batch_size = 8
micro_batch_size = 2
lr = 0.01
warmup_steps = 2
seed = 1
dtype = "float64"
log_every = 1
"""

MESHES: Final = {
    "pp2 dp2 tp2": '[mesh]\ndims = { pp = 2, dp = 2, tp = 2 }\ndevice = "cpu"\n'
    '[parallel]\npipeline = "pp"\ndata = "dp"\ntensor = "tp"\n',
    "dp4 cp2": '[mesh]\ndims = { dp = 4, cp = 2 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\ncontext = "cp"\n',
    "dp4": '[mesh]\ndims = { dp = 4 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\n',
    "dp2": '[mesh]\ndims = { dp = 2 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\n',
    "fsdp2": '[mesh]\ndims = { fsdp = 2 }\ndevice = "cpu"\n[parallel]\nshard = "fsdp"\n',
    "dp2 fsdp2": '[mesh]\ndims = { dp = 2, fsdp = 2 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\nshard = "fsdp"\n',
}

# In the environment of all processes of a training.
_MARK: Final = "TRAINING_OF_A_TEST"
SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
# A stopped rank is replaced after this time. On a busy host, other ranks must not mistake it for a slow call.
_TIMEOUT_S: Final = 15.0


@dataclass
class Death:
    """A process that was killed or stopped. after: its last logged step. lost_s: seconds until one more step was logged."""

    rank: int
    number: int
    after: int
    lost_s: float = 0.0
    named: bool = False


@dataclass
class Run:
    """A running training, started by `meshcomm train`."""

    process: subprocess.Popen[bytes] | Job
    out: Path
    log: Path
    deaths: list[Death] = field(default_factory=list)
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def lines(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl that are training steps."""
        with suppress(OSError):
            text = (self.out / "metrics.jsonl").read_text().splitlines()
            return [line for line in map(json.loads, text) if "loss" in line]
        return []

    def ranks(self) -> dict[int, psutil.Process]:
        """The current processes of the ranks."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                # A standby process was started without a rank. Its name contains the rank.
                rank = child.environ().get("RANK") or child.name().removeprefix("rank ")
                if rank.isdigit() and child.status() != "zombie":
                    found[int(rank)] = child
        self.seen.update(found.values())
        return found

    def await_step(self, step: int, within_s: float = 100.0) -> bool:
        """Wait for `step` in the metrics; False if the run ends or the time is over before."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            lines = self.lines
            if lines and lines[-1]["step"] >= step:
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.005)
        return False

    def kill(self, rank: int, number: int) -> Death:
        """Send a signal to the process of a rank."""
        lines = self.lines
        self.deaths.append(Death(rank, number, int(lines[-1]["step"]) if lines else 0))
        self.ranks()[rank].send_signal(number)
        return self.deaths[-1]


def config_of(mesh: str, steps: int, more: str = "") -> str:
    """The text of a config."""
    return MESHES[mesh] + _COMMON.format(root=ROOT, steps=steps) + more


@contextmanager
def training(
    folder: Path, config: str, replace: int, script: Path | None = None, words: Sequence[str] = ()
) -> Iterator[Run]:
    """Run a training; no process of it is left when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "train.toml", folder / "log.txt"
    path.write_text(config)
    command = ["train" if script is None else "run", *words]
    command += ["--replace", str(replace), "--set", f'train.out="{folder / "out"}"']
    command += [str(path), *([] if script is None else [str(script)])]
    with log.open("wb") as out:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", _MARK: str(folder)}
        process = subprocess.Popen(
            [sys.executable, "-m", "meshcomm", *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=ROOT,
        )
        try:
            yield Run(process, folder / "out", log)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


@contextmanager
def forked_training(
    pool: Pool, folder: Path, config: str, replace: int, words: Sequence[str] = ()
) -> Iterator[Run]:
    """The same in forks of a process that has loaded torch. No rank of it is left when the launcher has ended."""
    path, ranks = folder / "train.toml", set[psutil.Process]()
    path.write_text(config)
    command = ["-m", "meshcomm", "train", *words, "--replace", str(replace)]
    command += ["--set", f'train.out="{folder / "run"}"', str(path)]
    job = Job(pool, folder, *command)
    try:
        yield Run(job, folder / "run", folder / "err", seen=ranks)
    finally:
        job.kill()
        assert not psutil.wait_procs(ranks, 10)[1]


def left_over(folder: Path) -> list[int]:
    """Processes of the training in this folder that still exist."""
    return [
        each.info["pid"]
        for each in psutil.process_iter(["environ", "pid"])
        if (each.info["environ"] or {}).get(_MARK) == str(folder)
    ]


def undisturbed(folder: Path, mesh: str, steps: int, more: str = "") -> list[float]:
    """The losses of a run in which no rank dies."""
    with training(folder, config_of(mesh, steps, more), 0) as run:
        assert run.process.wait(200) == 0, run.log.read_text()
        return [line["loss"] for line in run.lines]


def simulated(folder: Path, mesh: str, steps: int, words: Sequence[str] = ()) -> list[float]:
    """The same losses, bitwise identical, from the simulator, in a second. mesh: without shards and pipelines."""
    path = folder / "simulated.toml"
    path.write_text(config_of(mesh, steps))
    settings = load_config(path, [*words, f'train.out="{folder / "simulated"}"'])
    return list(meshcomm.simulate(lambda mesh: Trainer(mesh, settings).run().losses, settings)[0])


def _disturbed(
    folder: Path, mesh: str, steps: int, deaths: int, stopped: float, draw: random.Random
) -> tuple[Run, int]:
    words = ["--set", f"mesh.timeout_s={_TIMEOUT_S}"] if stopped else []
    with training(folder, config_of(mesh, steps), deaths, words=words) as run:
        done = 0
        for number in range(deaths):
            last = steps * (number + 1) // deaths - 3
            at = draw.randrange(done + 1, max(done + 2, last))
            if not run.await_step(at):
                break
            time.sleep(draw.random() * 0.2)
            began = time.monotonic()
            number_of = signal.SIGSTOP if draw.random() < stopped else draw.choice(SIGNALS)
            death = run.kill(draw.choice(sorted(run.ranks())), int(number_of))
            if not run.await_step(death.after + 2):
                break
            death.lost_s = time.monotonic() - began
            done = death.after + 2
        code = run.process.wait(200)
    return run, code


@dataclass(frozen=True)
class Ended:
    """How a run ended. equal: whether its losses equal the losses of an uninterrupted run, bit for bit."""

    code: int
    equal: bool
    left: list[int]
    deaths: list[Death]

    @classmethod
    def of(cls, run: Run, code: int, expected: Sequence[float]) -> Ended:
        """Compare a run with an uninterrupted one."""
        losses = [line["loss"] for line in run.lines]
        log = run.log.read_text().splitlines()
        for death in run.deaths:
            death.named = any(f"rank {death.rank} " in line and "replaced" in line for line in log)
        return cls(code, losses == expected, left_over(run.out.parent), run.deaths)

    @property
    def right(self) -> bool:
        """Whether the run ended like an uninterrupted one."""
        return not self.code and self.equal and not self.left


def _deaths(runs: Sequence[Ended]) -> list[Death]:
    return [death for run in runs for death in run.deaths]


def main() -> None:
    """Print a table, and a line for each run on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--each", type=int, default=3, help="deaths in a run")
    parser.add_argument("--stopped", type=float, default=0.0, help="share of ranks that are stopped instead")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mesh", choices=list(MESHES), action="append")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    meshes = given.mesh or ["pp2 dp2 tp2", "dp4", "dp2 fsdp2"]
    found: dict[str, list[Ended]] = {mesh: [] for mesh in meshes}
    with tempfile.TemporaryDirectory() as name:
        expected: dict[str, list[float]] = {}
        for number in range(-(-given.deaths // given.each)):
            mesh = meshes[number % len(meshes)]
            if mesh not in expected:
                expected[mesh] = undisturbed(Path(name) / f"{number}-before", mesh, given.steps)
            run, code = _disturbed(
                Path(name) / str(number), mesh, given.steps, given.each, given.stopped, draw
            )
            found[mesh].append(Ended.of(run, code, expected[mesh]))
            print(f"{mesh}: {found[mesh][-1]}", file=sys.stderr, flush=True)
            if not found[mesh][-1].right:
                print(run.log.read_text(), file=sys.stderr, flush=True)
    columns: dict[str, Callable[[str], str]] = {
        "mesh": lambda mesh: mesh,
        "deaths, in runs": lambda mesh: f"{len(_deaths(found[mesh]))}, {len(found[mesh])}",
        "runs with bitwise identical losses": lambda mesh: str(sum(each.equal for each in found[mesh])),
        "ranks named": lambda mesh: str(sum(death.named for death in _deaths(found[mesh]))),
        "processes left": lambda mesh: str(sum(len(each.left) for each in found[mesh])),
        "seconds, median": lambda mesh: f"{median(death.lost_s for death in _deaths(found[mesh])):.1f}",
        "most": lambda mesh: f"{max(death.lost_s for death in _deaths(found[mesh])):.1f}",
    }
    print(markdown(columns, [mesh for mesh in meshes if found[mesh]]))
    raise SystemExit(not all(each.right for ended in found.values() for each in ended))


if __name__ == "__main__":
    main()
