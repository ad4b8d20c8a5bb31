"""What is left of the backend's bandwidth? Large tensors and long lists on real processes."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.bench.timing import Row, compare, in_turn
from meshcomm.mesh import Mesh
from meshcomm.transport.torch_private import coalescing, single_names


def large(mesh: Mesh, dim: str, megabytes: int, rounds: int) -> list[Row]:
    """all_reduce, all_gather, reduce_scatter and shift of `megabytes`, beside torch's own calls.

    Called by: every rank of the mesh; times are this rank's.
    """
    group, size, coord = mesh.group(dim), mesh.size(dim), mesh.coord(dim)
    names = single_names()
    count = megabytes * 1024 * 1024 // 4
    count -= count % size
    x = torch.ones(count)
    whole, part = torch.empty(count), torch.empty(count // size)
    piece = torch.ones(count // size)
    buffer = torch.empty(count)

    def gather() -> None:
        getattr(group, names.all_gather)(whole, piece).wait()

    def scatter() -> None:
        getattr(group, names.reduce_scatter)(part, x, dist.ReduceScatterOptions()).wait()

    def ring() -> Tensor:
        received = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.irecv, received, group=group, group_peer=(coord - 1) % size),
            dist.P2POp(dist.isend, x, group=group, group_peer=(coord + 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (lambda: mesh.all_reduce(dim, buffer), lambda: dist.all_reduce(buffer, group=group)),
        "all_gather": (lambda: mesh.all_gather(dim, piece, out=whole), gather),
        "reduce_scatter": (lambda: mesh.reduce_scatter(dim, x, out=part), scatter),
        "shift": (lambda: mesh.shift(dim, x), ring),
    }
    rows = []
    for name, (ours, theirs) in pairs.items():
        found = in_turn({"ours": ours, "theirs": theirs}, rounds, 1, align=lambda: mesh.barrier(dim))
        rows.append(
            compare(f"{name} of {megabytes} MB", found["ours"], found["theirs"], count * 4, "at most 1.03")
        )
    return rows


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
