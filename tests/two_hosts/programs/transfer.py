"""Run under `meshcomm run CONFIG transfer.py BYTES ROUNDS`: time all_reduce over both dims, with two algorithms."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

import torch

import meshcomm
from tests.two_hosts.hosts import sent_bytes
from tests.two_hosts.job import own_the_processor, say

WAYS: tuple[Literal["flat", "hierarchical"], ...] = ("flat", "hierarchical")


def main(size_bytes: int, rounds: int) -> None:
    own_the_processor()
    with meshcomm.init() as mesh:
        dims = ("dp", "tp")
        # Integers, so that both algorithms give exactly the same sum.
        mine = torch.arange(size_bytes // 4, dtype=torch.float32) % 97 + mesh.rank
        expected = mesh.world_size * (mine - mesh.rank) + sum(range(mesh.world_size))
        for way in WAYS:
            mesh.all_reduce(dims, mine[:4096].clone(), algorithm=way)
        measured: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                x = mine.clone()
                mesh.barrier("all")
                sent, began = sent_bytes(Path("/proc/self")), time.perf_counter()
                mesh.all_reduce(dims, x, algorithm=way)
                # The barrier is not timed: no all_reduce ends before all ranks have contributed.
                taken = time.perf_counter() - began
                mesh.barrier("all")
                measured[way].append((taken, sent_bytes(Path("/proc/self")) - sent))
                assert torch.equal(x, expected), f"{way} is wrong on {mesh.label}"
        say("end", mesh.rank, measured)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
