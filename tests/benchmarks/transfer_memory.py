"""Peak memory of a transfer of weights, beyond the models: `python -m tests.benchmarks.transfer_memory [--bucket-mb 8]`.

4 processes on Gloo; the source is split with fsdp=2, the target with tp=2. Each rank holds 128 MB. Linux only: the peak of the
resident memory is reset before the weights are agreed on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

import meshcomm
from meshcomm.testing import Pool
from meshcomm.transfer.agree import Staging
from tests.benchmarks.table import markdown

TENSORS: Final = 32
ROWS: Final = 2048
MB: Final = 1 << 20
LOCAL_MB: Final = TENSORS * ROWS * ROWS * 2 // 2 // MB
# staging=, and whether the source pushes a snapshot.
WAYS: Final[tuple[tuple[Staging, bool], ...]] = (
    ("whole", False),
    ("whole", True),
    ("buckets", False),
    ("buckets", True),
)


class Peaks(NamedTuple):
    """Megabytes beyond the models: of the source and of the target, each the larger of two ranks; and what each may have."""

    way: str
    source: float
    source_most: float
    target: float
    target_most: float


def _memory(what: str) -> float:
    """Return a figure of this process in megabytes: VmRSS, or VmHWM, the peak."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measured(staging: Staging, snapshot: bool, bucket_bytes: int) -> float:
    """Return this rank's peak during two transfers, in megabytes beyond what it held before."""
    torch.set_num_threads(1)
    source = meshcomm.init(dims={"fsdp": 2}, ranks=[0, 1], device="cpu")
    target = meshcomm.init(dims={"tp": 2}, ranks=[2, 3], device="cpu")
    dim, mesh = ("fsdp", source) if source.is_member else ("tp", target)
    shape = (ROWS // 2, ROWS) if source.is_member else (ROWS, ROWS // 2)
    model = {
        f"w{number}": DTensor.from_local(
            torch.full(shape, 1.0, dtype=torch.bfloat16), mesh[dim], [Shard(0 if source.is_member else 1)]
        )
        for number in range(TENSORS)
    }
    with source, target, meshcomm.link(source, target, bucket_bytes=bucket_bytes) as link:
        small = {"w0": model["w0"]}
        warm = link.weights(small)
        (warm.push(0).wait if source.is_member else warm.pull)()
        del warm
        # Both peaks are of the same process, so what torch has loaded by now does not count.
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        weights = link.weights(model, staging=staging)
        for version in (1, 2):
            if source.is_member:
                weights.push(version, snapshot=snapshot).wait()
            else:
                weights.pull()
        return _memory("VmHWM") - before


def peaks(staging: Staging, snapshot: bool, bucket_mb: int) -> Peaks:
    """Return the peaks of one way, in new processes."""
    from tests.benchmarks import transfer_memory

    pool = Pool()
    try:
        run = partial(transfer_memory.measured, staging, snapshot, bucket_mb * MB)
        extra = pool.run(run, ranks=4, timeout_s=300)
    finally:
        pool.close()
    two = 2 * bucket_mb
    way = f'"{staging}"' + (", snapshot" if snapshot else "")
    most = two + LOCAL_MB * snapshot, two + LOCAL_MB * (staging == "whole")
    return Peaks(way, max(extra[:2]), most[0], max(extra[2:]), most[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket-mb", type=int, default=8)
    given = parser.parse_args()
    rows = [peaks(staging, snapshot, given.bucket_mb) for staging, snapshot in WAYS]
    columns: dict[str, Callable[[Peaks], str]] = {
        "staging": lambda row: row.way,
        "source": lambda row: f"{row.source:.0f} MB",
        "source, copies and buckets": lambda row: f"{row.source_most:.0f} MB",
        "target": lambda row: f"{row.target:.0f} MB",
        "target, copies and buckets": lambda row: f"{row.target_most:.0f} MB",
    }
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
