"""The cost of a call before any byte moves, and of a long list of small tensors when bytes move.

python -m tests.benchmarks.overhead                              calls, in one process on torch's fake backend
torchrun --nproc-per-node 4 -m tests.benchmarks.overhead         lists of tensors, between processes
"""

from __future__ import annotations

import os
import random
import sys
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.commands.measure import Call, Pair, in_turn, pair
from meshcomm.mesh import Mesh
from meshcomm.predict.times import OPERATIONS
from tests.benchmarks.table import Row, compare, comparisons

# Small enough that copying them is negligible in a call.
_BYTES: Final = 256


def overhead(rounds: int = 9, calls: int = 5000) -> list[Row]:
    """Compare calls of one element, or of 256 bytes, with torch's own, along a dim of 4 of 8 pretended ranks.

    Runs on torch's fake backend in one process. The results are meaningless by design; only the calls are timed.
    The process must not have initialised torch.distributed.
    """
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        with meshcomm.init(dims={"pp": 2, "dp": 4}, device="cpu", backend="fake") as mesh:
            # In reverse order: after a job, its other ranks may still be shutting down at first.
            found = [
                _timed(name, both, rounds, max(1, calls // share))
                for name, both, share in reversed(_calls(mesh))
            ]
            return found[::-1]
    finally:
        dist.destroy_process_group()


def _calls(mesh: Mesh) -> list[tuple[str, Pair, int]]:
    """For each comparison: its name, both ways, and the divisor of the number of calls."""
    x, group = torch.ones(1), mesh.group("dp")
    device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    backend: Any = group._get_backend(torch.device("cpu"))

    def ours() -> Tensor:
        return mesh.all_reduce("dp", x)

    def waited(work: Any) -> None:
        work.wait()

    by_lookup = Pair(ours, lambda: dist.all_reduce(x, group=device_mesh["dp"].get_group()))
    by_pattern = Pair(lambda: mesh.rearrange(x, "h -> (dp h)"), lambda: mesh.all_gather("dp", x))
    by_hand = {name: pair(mesh, "dp", name, _BYTES) for name in OPERATIONS if name != "all_reduce"}
    others = {
        **{"shift" if name == "sendrecv" else name: both for name, both in by_hand.items()},
        "send": Pair(lambda: mesh.send("dp", x, 1), lambda: dist.send(x, group=group, group_dst=1)),
        "recv": Pair(lambda: mesh.recv("dp", x, src=1), lambda: dist.recv(x, group=group, group_src=1)),
        "isend": Pair(
            lambda: mesh.isend("dp", x, 1).wait(), lambda: waited(dist.isend(x, group=group, group_dst=1))
        ),
        "all_reduce(async_op=True)": Pair(
            lambda: mesh.all_reduce("dp", x, async_op=True).wait(),
            lambda: waited(dist.all_reduce(x, group=group, async_op=True)),
        ),
    }
    return [
        (
            "all_reduce / `dist.all_reduce(x, group=g)`",
            Pair(ours, lambda: dist.all_reduce(x, group=group)),
            1,
        ),
        ("all_reduce / the backend's own call", Pair(ours, lambda: backend.allreduce([x]).wait()), 1),
        ('all_reduce / `dist.all_reduce(x, group=device_mesh["dp"].get_group())`', by_lookup, 20),
        ("rearrange to a plain all_gather / `mesh.all_gather`", by_pattern, 5),
        *((f"{name} / torch.distributed's", both, 5) for name, both in others.items()),
    ]


def _timed(name: str, both: Pair, rounds: int, calls: int) -> Row:
    times = in_turn(both._asdict(), rounds, calls)
    return compare(name, times["ours"], times["torch"])


def many(mesh: Mesh, dim: str, rounds: int) -> list[Row]:
    """A list of 1,000 tensors of 1 to 4,096 floats, against manual flattening and torch's coalescing."""
    group = mesh.group(dim)
    sizes = random.Random(0)
    shapes = [sizes.randint(1, 4096) for _ in range(1000)]
    rows = []
    for name, dtypes in (
        ("float32", (torch.float32,)),
        ("float32 and bfloat16", (torch.float32, torch.bfloat16)),
    ):
        # Written zeros: adding them a hundred times over changes nothing.
        tensors = [torch.ones(n, dtype=dtypes[i % len(dtypes)]).zero_() for i, n in enumerate(shapes)]
        by_dtype = [[x for x in tensors if x.dtype == dtype] for dtype in dtypes]

        def by_hand(by_dtype: list[list[Tensor]] = by_dtype) -> None:
            for chosen in by_dtype:
                flat = torch.cat(chosen)
                dist.all_reduce(flat, group=group)
                for x, value in zip(chosen, flat.split([x.numel() for x in chosen]), strict=True):
                    x.copy_(value)

        def coalesced(by_dtype: list[list[Tensor]] = by_dtype) -> None:
            for chosen in by_dtype:  # Gloo's coalescing takes one dtype at a time
                with dist._coalescing_manager(group=group):
                    for x in chosen:
                        dist.all_reduce(x, group=group)

        def ours(tensors: list[Tensor] = tensors) -> None:
            mesh.all_reduce(dim, tensors)

        ways: dict[str, Call] = {"ours": ours, "hand": by_hand, "coalescing": coalesced}
        found = in_turn(ways, rounds, 4, align=lambda: mesh.barrier(dim))
        # One of the ways, not the faster one of each round: the minimum of two noisy times is lower than either.
        best = min(found["hand"], found["coalescing"], key=median)
        label = f"list of 1,000, {name} / the faster of two"
        rows.append(compare(label, found["ours"], best))
    return rows


def _main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    if "RANK" not in os.environ:
        print(comparisons(overhead(rounds)))
        return
    with meshcomm.init(dims={"dp": -1}, device="cpu", validate_calls=0) as mesh:
        rows = many(mesh, "dp", rounds)
        if mesh.rank == 0:
            print(comparisons(rows))


if __name__ == "__main__":
    _main()
