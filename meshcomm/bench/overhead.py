"""What does a call cost before a byte moves? On torch's fake backend, in one process."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.bench.calls import Pair, pair
from meshcomm.bench.timing import Row, compare, in_turn
from meshcomm.predict.times import OPERATIONS

# Small enough that copying them costs nothing beside a call.
_BYTES: Final = 256
_NAMES: Final = {"sendrecv": "shift"}


def overhead(rounds: int = 9, calls: int = 5000) -> list[Row]:
    """Times of calls of one element, or of 256 bytes, along a dim of 4 of 8 pretended ranks, beside torch's own.

    Results on this backend are meaningless by design; only the calls are timed. The process must
    not have initialised torch.distributed.
    """
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        with meshcomm.init(dims={"pp": 2, "dp": 4}, device="cpu", backend="fake") as mesh:
            x = torch.ones(1)
            group = mesh.group("dp")
            device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
            backend: Any = group._get_backend(torch.device("cpu"))
            others: dict[str, Pair] = {
                name: pair(mesh, "dp", name, _BYTES) for name in OPERATIONS if name != "all_reduce"
            }
            others["send"] = Pair(
                lambda: mesh.send("dp", x, 1), lambda: dist.send(x, group=group, group_dst=1)
            )
            others["recv"] = Pair(
                lambda: mesh.recv("dp", x, src=1), lambda: dist.recv(x, group=group, group_src=1)
            )
            others["isend"] = Pair(
                lambda: mesh.isend("dp", x, 1).wait(),
                lambda: _waited(dist.isend(x, group=group, group_dst=1)),
            )
            others["all_reduce(async_op=True)"] = Pair(
                lambda: mesh.all_reduce("dp", x, async_op=True).wait(),
                lambda: _waited(dist.all_reduce(x, group=group, async_op=True)),
            )
            by_hand = {
                name: in_turn({"ours": both.ours, "torch": both.torch}, rounds, max(1, calls // 5))
                for name, both in others.items()
            }
            pattern = in_turn(
                {
                    "rearrange": lambda: mesh.rearrange(x, "h -> (dp h)"),
                    "all_gather": lambda: mesh.all_gather("dp", x),
                },
                rounds,
                max(1, calls // 5),
            )
            lookup = in_turn(
                {
                    "mesh": lambda: mesh.all_reduce("dp", x),
                    "device_mesh": lambda: dist.all_reduce(x, group=device_mesh["dp"].get_group()),
                },
                rounds,
                max(1, calls // 20),
            )
            # Last: where this follows a job, its other ranks may still be ending.
            found = in_turn(
                {
                    "mesh": lambda: mesh.all_reduce("dp", x),
                    "group": lambda: dist.all_reduce(x, group=group),
                    "backend": lambda: backend.allreduce([x]).wait(),
                },
                rounds,
                calls,
            )
            return [
                compare(
                    "all_reduce / dist.all_reduce(group)", found["mesh"], found["group"], target="at most 0.8"
                ),
                compare("all_reduce / the backend's own call", found["mesh"], found["backend"]),
                compare(
                    "all_reduce / dist.all_reduce(device_mesh[..])",
                    lookup["mesh"],
                    lookup["device_mesh"],
                    target="at most 0.05",
                ),
                compare(
                    "rearrange / mesh.all_gather",
                    pattern["rearrange"],
                    pattern["all_gather"],
                    target="at most 5 us more",
                ),
                *(
                    compare(f"{_NAMES.get(name, name)} / torch.distributed", times["ours"], times["torch"])
                    for name, times in by_hand.items()
                ),
            ]
    finally:
        dist.destroy_process_group()


def _waited(work: Any) -> None:
    work.wait()
