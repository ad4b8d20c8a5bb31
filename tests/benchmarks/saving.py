"""How long a checkpoint blocks a step, and how long reading it takes: `python -m tests.benchmarks.saving [--rounds 5]`.

4 ranks, { dp = 2, tp = 2 }, 228 tensors sharded along tp, on the disk of the folder for temporary files.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import torch

import meshcomm
from meshcomm.commands.measure import slowest
from meshcomm.config import TrainConfig
from meshcomm.parallel.tensor.parameters import parameter_of
from meshcomm.show.units import seconds_text
from meshcomm.testing import Pool
from meshcomm.train import Checkpoints
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.checkpoint.reader import Saved
from tests.benchmarks.table import markdown

TENSORS: Final = 228
SIZES: Final = {"10 MB": 10_000_000, "50 MB": 50_000_000, "200 MB": 200_000_000}
COLUMNS: Final = ("blocking save", "asynchronous save blocks for", "until it is complete", "read")


def measured(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return, by size, the median seconds of each column; a round's time is the slowest rank's."""
    torch.set_num_threads(1)
    found = {}
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu") as mesh:
        for label, size in SIZES.items():
            each = size // 4 // TENSORS // 64 // 2
            state = {
                f"w{number}": parameter_of(mesh, torch.randn(each, 64), {"tp": 0}).detach()
                for number in range(TENSORS)
            }
            times: list[list[float]] = [[], [], [], []]
            for number in range(rounds + 1):
                row = _round(mesh, dict(state), Path(folder, f"{size} {number}"))
                # The first round creates objects that later rounds reuse, so it is not counted.
                for column, seconds in zip(times, row, strict=True):
                    column += [seconds] * (number > 0)
            found[label] = [median(column) for column in slowest(mesh, times)]
    return found


def _round(mesh: meshcomm.Mesh, state: dict[str, torch.Tensor], folder: Path) -> list[float]:
    row = []
    for asynchronous in (False, True):
        out = folder / str(asynchronous)
        train = TrainConfig(
            steps=1, global_batch_size=1, micro_batch_size=1, checkpoint_every=1,
            checkpoint_async=asynchronous, out=str(out),
        )  # fmt: skip
        lock = Lock(step=1, seconds=0.0, fingerprint="", plan={}, config={}, versions={})
        mesh.barrier()
        began = time.perf_counter()
        with Checkpoints(mesh, train) as checkpoints:
            saved = checkpoints.save(lock, state)
            row.append(time.perf_counter() - began)
            checkpoints.finish()
        if asynchronous:
            row.append(time.perf_counter() - began)
    mesh.barrier()
    began = time.perf_counter()
    Saved(saved).fill(state)
    return [*row, time.perf_counter() - began]


def main() -> None:
    """Print the table."""
    from tests.benchmarks import saving

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = pool.run(saving.measured, folder, given.rounds, ranks=4, timeout_s=600)[0]
    finally:
        pool.close()
    columns: dict[str, Callable[[str], str]] = {"state": lambda label: label}
    for place, name in enumerate(COLUMNS):
        columns[name] = lambda label, place=place: seconds_text(found[label][place])  # type: ignore[misc]
    print(markdown(columns, found))


if __name__ == "__main__":
    main()
