"""Simulations of many ranks, and tests through the pytest plugin: `python -m tests.benchmarks.simulated [--rounds 5]`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

import torch

import meshcomm
from meshcomm.show.units import seconds_text
from tests.benchmarks.table import markdown

_TESTS: Final = """
import pytest
import torch


@pytest.mark.mesh(dp=2, tp=4)
@pytest.mark.parametrize("number", range(100))
def test_nothing_much(mesh, number):
    assert mesh.all_reduce("tp", torch.ones(1)).item() == 4
"""
_MANY: Final = {"a": 8, "b": 8, "c": 4}


def along_three_dims(mesh: meshcomm.Mesh) -> None:
    """20 all_reduces along each dim."""
    x = torch.ones(16)
    for _ in range(20):
        for dim in mesh.dims:
            mesh.all_reduce(dim, x)


def ring(mesh: meshcomm.Mesh) -> None:
    """All ranks send and no rank receives: a deadlock."""
    mesh.send("ring", torch.ones(1), dst=(mesh.coord("ring") + 1) % mesh.size("ring"))


def simulation(fn: Callable[[meshcomm.Mesh], object], dims: dict[str, int]) -> float:
    """Return the seconds of one simulation, which may end with an error."""
    began = time.perf_counter()
    with suppress(meshcomm.MeshcommError):
        meshcomm.simulate(fn, dims=dims)
    return time.perf_counter() - began


def hundred_tests(via: str) -> float:
    """Return the seconds of `pytest` on 100 tests of 8 ranks each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test_hundred.py")
        path.write_text(_TESTS)
        began = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--mesh-via",
            via,
            str(path),
        ]
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ways: dict[str, Callable[[], float]] = {
        "256 ranks (8, 8, 4): 20 all_reduces along each dim": lambda: simulation(along_three_dims, _MANY),
        "the same 256 ranks, no calls": lambda: simulation(lambda mesh: None, _MANY),
        "64 ranks: a ring of sends, until the error": lambda: simulation(ring, {"ring": 64}),
        "100 tests of 8 ranks, `pytest --mesh-via simulator`": lambda: hundred_tests("simulator"),
        "100 tests of 8 ranks, `pytest --mesh-via gloo`": lambda: hundred_tests("gloo"),
    }
    found: list[tuple[str, Sequence[float]]] = [
        (name, sorted(way() for _ in range(rounds))) for name, way in ways.items()
    ]
    columns: dict[str, Callable[[tuple[str, Sequence[float]]], str]] = {
        "": lambda row: row[0],
        "median": lambda row: seconds_text(median(row[1])),
        "from, to": lambda row: f"{seconds_text(row[1][0])}, {seconds_text(row[1][-1])}",
    }
    print(markdown(columns, found))


if __name__ == "__main__":
    main()
