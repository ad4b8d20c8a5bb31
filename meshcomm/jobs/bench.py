"""`meshcomm bench`."""

from __future__ import annotations

import os

import torch

from meshcomm.config import Config, load
from meshcomm.jobs.starting import start_job
from meshcomm.mesh.launcher import find_launch
from meshcomm.mesh.opening import init


def bench(megabytes: int, rounds: int, world: int) -> int:
    """Measure meshcomm beside raw torch.distributed; returns the exit code."""
    # Steady state: the comparison of the first calls is over.
    mesh = {"dims": {"dp": world}, "device": "cpu", "timeout_s": 300.0, "validate_calls": 0}
    settings = load({"mesh": mesh})
    words = ["bench", "--megabytes", str(megabytes), "--rounds", str(rounds), "--world", str(world)]
    if find_launch(os.environ).kind == "single":
        from meshcomm.bench.overhead import overhead
        from meshcomm.bench.table import console, rows_table

        console().print(rows_table("calls, fake backend, one process", overhead(rounds)))
    return start_job(settings, None, words, (), lambda: _bench(settings, megabytes, rounds))


def _bench(settings: Config, megabytes: int, rounds: int) -> None:
    from meshcomm.bench.table import console, rows_table
    from meshcomm.bench.transfer import large, many

    torch.set_num_threads(1)
    with init(settings) as mesh:
        rows = [*many(mesh, "dp", rounds), *large(mesh, "dp", megabytes, rounds)]
        if mesh.rank == 0:
            console().print(rows_table(f"data, {mesh.size('dp')} processes, {mesh.device.type}", rows))
