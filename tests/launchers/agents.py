"""torchrun with an agent on each of two hosts in network namespaces; accelerate and Lightning: python -m tests.launchers.agents"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

from tests.foreign.environments import make
from tests.launchers.checks import PROGRAMS, Case, Checks, Job, install, named, program, summed, version_in
from tests.two_hosts.hosts import Host, Link, two_hosts

_TORCHRUN: Final = (
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400"),
)
_LOST: Final = r"rank 2 does not answer"


def main() -> int:
    """Run all checks. Return 0 if they passed."""
    install("iproute2")
    quiet = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    checks = Checks(f"torchrun of torch {torch.__version__}, 2 agents", quiet)
    with tempfile.TemporaryDirectory() as name, two_hosts(Path(name), Link()) as hosts:

        def start(case: Case, host: Host, **options: float) -> Job:
            # Without the interpreter's name: torchrun puts it in front.
            return case.start(host.command([*_TORCHRUN, *program(**options)[1:]], Path(name)))

        with checks.case("script.py") as case:
            jobs = [start(case, host) for host in hosts]
            for job in jobs:
                job.end()
                jobs[0].lines += job.lines if job is not jobs[0] else []
            case.said = summed(jobs[0])
        with checks.case("rank 2 killed") as case:
            here, there = (start(case, host, dies=2) for host in hosts)
            # The agents number their hosts in the order in which they arrive.
            jobs = sorted((here.end(), there.end()), key=lambda job: "rank 2 is killed" in job.text)
            killed = next(line for line in jobs[1].lines if line[1] == "rank 2 is killed")
            jobs[0].lines.insert(0, killed)
            case.said = named(jobs[0], _LOST, "a rank of the other host")
    failed = checks.code()
    python = make("accelerate") / "bin" / "python"
    launch = [str(python), "-m", "accelerate.commands.launch", "--num_processes", "4"]
    checks = Checks(f"accelerate {version_in(python, 'accelerate')}", quiet)
    with checks.case("launch --multi_gpu --num_processes 4 script.py, on CPUs") as case:
        case.said = summed(case.start([*launch, "--multi_gpu", *program()[1:]]).end())
    with checks.case("launch --multi_gpu --num_processes 4, rank 2 killed") as case:
        job = case.start([*launch, "--multi_gpu", *program(dies=2)[1:]]).end()
        case.said = named(job, r"local_rank: 2", "torchrun's agent")
    with checks.case("launch --cpu --num_processes 4 script.py") as case:
        # accelerate starts one process and reports nothing.
        job = case.start([*launch, "--cpu", *program()[1:]]).end()
        job.await_line("the mesh needs 4 processes, and no launcher has started this one")
        case.said = "one process, refused: the mesh needs 4 processes"
    failed = checks.code() or failed
    python = make("lightning") / "bin" / "python"
    checks = Checks(f"Lightning {version_in(python, 'lightning')}", quiet)
    command = [str(python), str(PROGRAMS / "on_lightning.py")]
    with checks.case("Trainer of 4 processes, mesh in on_fit_start") as case:
        case.said = summed(case.start(command).end())
    with checks.case("Trainer of 4 processes, rank 2 killed") as case:
        # If Lightning sees it first, it ends the other ranks.
        text = rf"{_LOST}|\[rank: 2\] Child process"
        case.said = named(case.start([*command, "--dies", "2"]).end(), text, "Lightning or another rank")
    return checks.code() or failed


if __name__ == "__main__":
    raise SystemExit(main())
