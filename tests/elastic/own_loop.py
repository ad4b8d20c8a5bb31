"""A user-written loop that continues when a rank is lost: `meshcomm run --replace 1 --world-size 4 FILE dies`."""

from __future__ import annotations

import os
import signal
import sys

import torch

import meshcomm
from meshcomm.errors import RankLost

STEPS, DIES_AT = 12, 5


def of_the_farthest(mesh: meshcomm.Mesh, step: int, weight: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The step and weight of the rank along dp that has made the most steps; a new rank has made none."""
    every: list[tuple[int, torch.Tensor]] = mesh.objects.all_gather("dp", (step, weight))
    return max(every, key=lambda each: each[0])


def main() -> None:
    """Sum something in every step."""
    mesh = meshcomm.init(dims={"dp": 2, "tp": 2})
    step, weight = 0, torch.zeros(3, dtype=torch.float64)
    if mesh.elastic.generation.number:
        print(f"replaced {dict(mesh.elastic.generation.replaced)}")
        step, weight = of_the_farthest(mesh, step, weight)
    while step < STEPS:
        try:
            gradient = torch.full((3,), float(step + mesh.rank), dtype=torch.float64)
            mesh.all_reduce("tp", gradient)
            if (mesh.rank, step, mesh.elastic.generation.number) == (3, DIES_AT, 0) and "dies" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            mesh.all_reduce("dp", gradient)
            mesh.barrier()
            step, weight = step + 1, weight + gradient
        except RankLost as error:
            print(f"lost {error.missing}")
            mesh.elastic.reopen(error)
            step, weight = of_the_farthest(mesh, step, weight)
    print(f"rank {mesh.rank}: {weight.tolist()}")
    mesh.close()


if __name__ == "__main__":
    main()
