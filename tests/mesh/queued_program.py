"""A program of four ranks whose rank 3 has a fault after some calls, while the others sit in `.item()`; see test_queued_calls."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import meshcomm
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl

TIMEOUT_S = 3.0


def main(fault: str, calls: int) -> None:
    """Make `calls` right calls, then one in which rank 3 has its fault."""
    dims = {"dp": 2, "tp": 2}
    with emulated_nccl(), meshcomm.init(dims=dims, backend=NAME, device="cpu", timeout_s=TIMEOUT_S) as mesh:
        x = torch.zeros(4)
        for _ in range(calls):
            mesh.all_reduce("dp", x, "avg")
        assert x.tolist() == [0] * 4
        at_fault = mesh.rank == 3
        if at_fault:
            print(f"fault at {time.time()}", flush=True)
            if fault == "raises":
                raise ValueError("a fault of the program")
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "asleep":
                time.sleep(60)
            if fault == "shape":
                x = torch.zeros(6)
        if fault == "deaf" and mesh.coord("dp") == 0:
            mesh.send("dp", x, dst=1)
        if not (at_fault and fault == "skips") and fault != "deaf":
            mesh.all_reduce("dp", x)
        y = torch.ones(2)
        mesh.all_reduce("tp", y)
        x.sum().item() + y.sum().item()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
