"""Program for test_timer: four ranks, of which rank 3 fails after some calls while the others wait in `.item()`."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext

import torch

import meshcomm
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl

# A call that never ends is told after this time. The mesh is connected within it too, so a fault that is told at once
# leaves more of it: ranks that start on a busy machine have taken 3 s.
TIMEOUT_S = {"raises": 20.0, "killed": 20.0}
OF_OTHERS_S = 8.0


def main(
    fault: str, calls: int, backend: str = NAME, device: str = "cpu", timeout_s: float | None = None
) -> None:
    """Make `calls` correct calls, then one in which rank 3 fails as `fault` says."""
    dims = {"dp": 2, "tp": 2}
    timeout_s = timeout_s or TIMEOUT_S.get(fault, OF_OTHERS_S)
    with (
        emulated_nccl() if backend == NAME else nullcontext(),
        meshcomm.init(dims=dims, backend=backend, device=device, timeout_s=timeout_s) as mesh,
    ):
        x = torch.zeros(4, device=mesh.device)
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
                x = torch.zeros(6, device=mesh.device)
        if fault == "deaf" and mesh.coord("dp") == 0:
            mesh.send("dp", x, dst=1)
        if not (at_fault and fault == "skips") and fault != "deaf":
            mesh.all_reduce("dp", x)
        y = torch.ones(2, device=mesh.device)
        mesh.all_reduce("tp", y)
        x.sum().item() + y.sum().item()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
