"""What does a long list of small tensors cost? On real processes."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.bench.timing import Row, compare, in_turn
from meshcomm.mesh import Mesh
from meshcomm.transport.torch_private import coalescing


def many(mesh: Mesh, dim: str, rounds: int) -> list[Row]:
    """A list of 1,000 tensors of 1 to 4,096 floats, beside flattening by hand and torch's coalescing."""
    group = mesh.group(dim)
    sizes = random.Random(0)
    shapes = [sizes.randint(1, 4096) for _ in range(1000)]
    rows = []
    for name, dtypes in (
        ("float32", (torch.float32,)),
        ("float32 and bfloat16", (torch.float32, torch.bfloat16)),
    ):
        tensors = [torch.ones(n, dtype=dtypes[i % len(dtypes)]) for i, n in enumerate(shapes)]
        # Zeros: adding them a hundred times over changes nothing.
        for x in tensors:
            x.zero_()

        def by_hand(tensors: list[Tensor] = tensors, dtypes: tuple[torch.dtype, ...] = dtypes) -> None:
            for dtype in dtypes:
                chosen = [x for x in tensors if x.dtype == dtype]
                flat = torch.cat(chosen)
                dist.all_reduce(flat, group=group)
                for x, value in zip(chosen, flat.split([x.numel() for x in chosen]), strict=True):
                    x.copy_(value)

        def coalesced(tensors: list[Tensor] = tensors, dtypes: tuple[torch.dtype, ...] = dtypes) -> None:
            for dtype in dtypes:  # Gloo's coalescing takes one dtype at a time
                with coalescing(group):
                    for x in tensors:
                        if x.dtype == dtype:
                            dist.all_reduce(x, group=group)

        def ours(tensors: list[Tensor] = tensors) -> None:
            mesh.all_reduce(dim, tensors)

        found = in_turn(
            {"ours": ours, "hand": by_hand, "coalescing": coalesced},
            rounds,
            1,
            align=lambda: mesh.barrier(dim),
        )
        best = [min(a, b) for a, b in zip(found["hand"], found["coalescing"], strict=True)]
        rows.append(
            compare(
                f"list of 1,000, {name} / the faster of two",
                found["ours"],
                best,
                sum(shapes) * 4,
                "at most 1",
            )
        )
    return rows
