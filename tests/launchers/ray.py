"""Ray, in a virtual environment of its own, as one node of this host: python -m tests.launchers.ray

meshcomm.launch.ray, plain actors that call meshcomm.init, and TorchTrainer.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Final

from tests.foreign.environments import make
from tests.launchers.checks import PROGRAMS, Checks, named, program, summed, version_in

_ACTORS: Final = str(PROGRAMS / "on_ray.py")
_PARTS: Final = "--world-size", "4", "--cpus-per-rank", "0.25"


def main() -> int:
    """All checks; 0 where they passed."""
    python = make("ray") / "bin" / "python"
    checks = Checks(f"Ray {version_in(python, 'ray')}", {"RAY_DEDUP_LOGS": "0"})
    words = program()[1:]
    start = [str(python), "-m", "meshcomm.launch.ray", *_PARTS, "run", *words]
    with checks.case("meshcomm.launch.ray run script.py") as case:
        case.said = summed(case.start(start).end())
    with checks.case("meshcomm.launch.ray, rank 2 killed") as case:
        case.said = named(
            case.start([*start, "--dies", "2"]).end(), "meshcomm: rank 2 was ended by SIGKILL", "the driver"
        )
    with checks.case("meshcomm.launch.ray, an actor killed") as case:
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
    return checks.code()


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
