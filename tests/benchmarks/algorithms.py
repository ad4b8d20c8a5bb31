"""Does an algorithm over messages beat the backend's own all_reduce? On real processes.

`torchrun --nproc-per-node 8 -m tests.benchmarks.algorithms [ROUNDS]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

import meshcomm
from meshcomm.comm.scheduled import SCHEDULED
from meshcomm.commands.measure import in_turn, slowest
from meshcomm.mesh import Mesh
from meshcomm.show.units import seconds_text
from tests.benchmarks.table import Row, compare, markdown

SIZES: Final[Mapping[str, int]] = {
    "64 B": 64,
    "4 KiB": 4 << 10,
    "64 KiB": 64 << 10,
    "1 MiB": 1 << 20,
    "4 MiB": 4 << 20,
}


def algorithms(
    mesh: Mesh, dim: str, sizes: Mapping[str, int] = SIZES, rounds: int = 9
) -> dict[str, dict[str, Row]]:
    """Compare each algorithm with `algorithm="flat"`, by algorithm and size; a round's time is the slowest rank's.

    two_level is left out: it needs two dims. Called by every rank along `dim`; equal on all of them.
    """
    rows: dict[str, dict[str, Row]] = {}
    for label, size in sizes.items():
        x = torch.zeros(size // 4)
        ways: dict[str, Callable[[], object]] = {
            name: partial(mesh.all_reduce, dim, x, algorithm=name)
            for name in ("flat", *SCHEDULED)
            if name != "two_level"
        }
        calls = 20 if size < 1 << 16 else 4
        found = in_turn(ways, rounds, calls, align=lambda: mesh.barrier(dim))
        worst = dict(zip(found, slowest(mesh, [*found.values()]), strict=True))
        for name, times in worst.items():
            rows.setdefault(name, {})[label] = compare(name, times, worst["flat"])
    return rows


def _main() -> None:
    with meshcomm.init(dims={"dp": -1}, device="cpu") as mesh:
        rows = algorithms(mesh, "dp", rounds=int(sys.argv[1]) if len(sys.argv) > 1 else 9)
        if mesh.rank == 0:
            columns: dict[str, Callable[[str], str]] = {f"{mesh.size('dp')} ranks": lambda name: name}
            columns |= {label: partial(_cell, rows, label) for label in SIZES}
            print(markdown(columns, rows))


def _cell(rows: Mapping[str, Mapping[str, Row]], label: str, name: str) -> str:
    row = rows[name][label]
    return seconds_text(row.ours_s) + ("" if name == "flat" else f" ({row.ratio:.2g})")


if __name__ == "__main__":
    _main()
