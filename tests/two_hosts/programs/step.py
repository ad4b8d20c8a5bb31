"""Run under `meshcomm run CONFIG step.py ROUNDS`: time the communication of a step for every order of the dims.

`step.json` defines the steps and the orders.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshcomm
from meshcomm.mesh import Mesh
from tests.two_hosts.job import own_the_processor, say


def step(mesh: Mesh, calls: list[dict[str, Any]], buffers: list[torch.Tensor]) -> None:
    """Make this rank's calls of one step, kind by kind."""
    for call, x in zip(calls, buffers, strict=True):
        for number in range(call["calls"]):
            if call["operation"] == "all_reduce":
                mesh.all_reduce(call["dim"], x, op="avg")
            elif call["operation"] == "sendrecv":
                # Activations are sent forward, their gradients backward.
                mesh.shift(call["dim"], x, +1 if number % 2 == 0 else -1, wrap=False)
            else:
                raise AssertionError(call["operation"])


def opened(order: list[str], sizes: dict[str, int]) -> Mesh:
    dims = {dim: sizes[dim] for dim in order}
    return meshcomm.init(dims=dims, merge={"all": order}, device="cpu", timeout_s=120.0)


def main(rounds: int) -> None:
    own_the_processor()
    asked = json.loads(Path("step.json").read_text())
    said: dict[str, list[float]] = {}
    # The default group belongs to this program, so no mesh destroys it on closing.
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        meshes = {
            " ".join(order): stack.enter_context(opened(order, asked["sizes"])) for order in asked["orders"]
        }
        # Each round goes through all orders, so that other work on the machine affects them equally.
        for number in range(rounds + 1):
            for order, mesh in meshes.items():
                for name, calls in asked["steps"].items():
                    # In the first round, all pairs connect and all first calls are compared.
                    buffers = [torch.ones(call["bytes"] // 4 if number else 1) for call in calls]
                    mesh.barrier("all")
                    began = time.perf_counter()
                    step(mesh, calls, buffers)
                    # No rank's time ends before all ranks are done.
                    mesh.barrier("all")
                    if number:
                        said.setdefault(f"{name} {order}", []).append(time.perf_counter() - began)
    dist.destroy_process_group()
    say("end", int(os.environ["RANK"]), said)


if __name__ == "__main__":
    main(int(sys.argv[1]))
