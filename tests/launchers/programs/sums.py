"""Started by the launchers: sums along both dims of a mesh of four ranks. One rank may kill itself in the middle.

python sums.py [--tag N] [--calls N] [--pause S] [--dies RANK] [--show 1]
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time

import torch

import meshcomm


def main() -> None:
    """Make the sums. `tag` is the job's number, and ranks of other jobs must not change the sums."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tag", type=float, default=1.0)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.01)
    parser.add_argument("--dies", type=int, default=-1)
    parser.add_argument("--show", type=int, default=0)
    given = parser.parse_args()
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30) as mesh:
        say(f"rank {mesh.rank} of {mesh.world_size} on {socket.gethostname()}")
        if given.show and mesh.rank == 0:
            say(str(mesh))
        for call in range(given.calls):
            if call == given.calls // 2 and mesh.rank == given.dies:
                say(f"rank {mesh.rank} is killed")
                os.kill(os.getpid(), signal.SIGKILL)
            part = mesh.all_reduce("tp", torch.tensor([given.tag]))
            total = mesh.all_reduce("dp", part).item()
            assert total == 4 * given.tag, f"a sum of {total} in the job of {given.tag}"
            time.sleep(given.pause)
        say(f"rank {mesh.rank} summed {given.calls} times: {total:g}")


def say(line: str) -> None:
    """Print a line in one write, because all ranks may share a pipe."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
