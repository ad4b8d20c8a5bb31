"""Startup time of whole jobs, until every dim is used, compared with torch's init_device_mesh.

python -m tests.benchmarks.startup [--world-size 8] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import prod
from statistics import median
from typing import Any, Final, NamedTuple

from meshcomm.errors import LaunchError
from meshcomm.rendezvous.exposure import serve_on_loopback
from meshcomm.testing import Pool
from tests.benchmarks.table import markdown

# The user's program for each way. `mark` notes the time of an event. Every group is used once.
PROGRAMS: Final = {
    "init_device_mesh": """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
groups = [mesh.get_group(name) for name in dims]
mark("created")
for group in groups:
    dist.all_reduce(torch.ones(1), group=group)
mark("used")
dist.destroy_process_group()
""",
    "meshcomm": """
import torch
import meshcomm
mesh = meshcomm.init(dims=dims, device="cpu")
mark("created")
for name in dims:
    mesh.all_reduce(name, torch.ones(1))
mark("used")
mesh.close()
""",
}
_HEAD: Final = """
import json, sys, time
dims, marks = json.loads(sys.argv[1]), {}
def mark(name): marks[name] = (time.time(), time.process_time())
"""
# For programs that already have the default group: the time starts here.
_DEFAULT_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
mark("began")
"""
_COLD, _FORKED = 8, 64


class Startup(NamedTuple):
    """One start of all ranks. created_s, used_s: until the slowest rank's groups existed, and had been used once.

    cpu_s: processor time of a rank until then, as the mean over ranks.
    """

    created_s: float
    used_s: float
    cpu_s: float


def startup(world: int | None, rounds: int) -> None:
    """Measure starts of three dims each way in turn and print medians, for 8 cold and 64 forked processes or for `world`.

    Forked processes are also measured with an existing default group.
    """
    facts = []
    cases = (
        (False, "", "cold"),
        (True, "", "forked"),
        (True, _DEFAULT_GROUP, "forked, with the default group"),
    )
    for fork, before, kind in cases:
        size = world or (_FORKED if fork else _COLD)
        for name, each in measured(three_dims(size), rounds, fork=fork, before=before).items():
            facts.append({"processes": f"{size} {kind}", "program": name, **each._asdict()})
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "processes": lambda row: row["processes"],
        "program": lambda row: row["program"],
        "created": lambda row: f"{row['created_s']:.3f} s",
        "used": lambda row: f"{row['used_s']:.3f} s",
        "CPU of a rank": lambda row: f"{row['cpu_s']:.3f} s",
    }
    print(markdown(columns, facts))


def from_python(program: str, dims: Mapping[str, int], timeout_s: float = 300.0) -> Startup:
    """Start a Python for each rank, as torchrun would. The time starts before the first of them.

    Raises LaunchError with the output of the rank that failed.
    """
    store = serve_on_loopback("127.0.0.1", 0, timedelta(seconds=timeout_s))
    assert store is not None
    text = f"{_HEAD}{program}\nprint(json.dumps(marks))"
    world = prod(dims.values())
    common = {
        **os.environ,
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    began = time.time()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", text, json.dumps(dims)],
            env=common | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, rank in enumerate(ranks):
        if rank.returncode:
            raise LaunchError(
                f"rank {number} of the start that is measured failed",
                given=said[number][1].strip(),
                expected="a start that works",
                hint="meshcomm doctor",
            )
    return _slowest([json.loads(out.splitlines()[-1]) for out, _ in said], began)


def from_fork(program: str, dims: Mapping[str, int], timeout_s: float = 300.0) -> Startup:
    """Fork ranks that have only loaded torch and meshcomm. The time starts with their program."""
    ranks = Pool()
    try:
        marks = ranks.run(_forked, program, dict(dims), ranks=prod(dims.values()), timeout_s=timeout_s)
    finally:
        ranks.close()
    return _slowest(marks, min(each["began"][0] for each in marks))


def measured(
    dims: Mapping[str, int], rounds: int, *, fork: bool, before: str = "", timeout_s: float = 300.0
) -> dict[str, Startup]:
    """Run `before` and every program in turn, `rounds` times. Returns the median of each figure, by program."""
    start = from_fork if fork else from_python
    found: dict[str, list[Startup]] = {name: [] for name in PROGRAMS}
    for number in range(rounds):
        # The order alternates, because the first program finds files that the other has just read.
        for name in sorted(PROGRAMS, reverse=bool(number % 2)):
            found[name].append(start(before + PROGRAMS[name], dims, timeout_s))
    return {name: Startup(*map(median, zip(*each, strict=True))) for name, each in found.items()}


def _forked(program: str, dims: dict[str, int]) -> dict[str, tuple[float, float]]:
    marks: dict[str, tuple[float, float]] = {}

    def mark(name: str) -> None:
        marks[name] = (time.time(), time.process_time())

    mark("began")
    exec(program, {"dims": dims, "mark": mark})
    return marks


def _slowest(marks: list[Any], began: float) -> Startup:
    cpu = [each["used"][1] - each.get("began", (0, 0))[1] for each in marks]
    created, used = (max(each[name][0] for each in marks) for name in ("created", "used"))
    return Startup(created - began, used - began, sum(cpu) / len(cpu))


def three_dims(world: int) -> dict[str, int]:
    """Split `world` into three sizes, as equal as its factors allow and the largest first.

    >>> three_dims(128), three_dims(12), three_dims(7)
    ({'pp': 8, 'dp': 4, 'tp': 4}, {'pp': 3, 'dp': 2, 'tp': 2}, {'pp': 7, 'dp': 1, 'tp': 1})
    """
    sizes, left = [1, 1, 1], world
    for factor in range(world, 1, -1):
        # Starts with the largest prime factor.
        while left % factor == 0 and all(factor % smaller for smaller in range(2, factor)):
            sizes = sorted([sizes[0] * factor, *sizes[1:]])
            left //= factor
    return dict(zip(("pp", "dp", "tp"), reversed(sizes), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    startup(given.world_size, given.rounds)
