"""One operation of one size along one dim: a call of meshcomm, and what torch.distributed writes for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from meshcomm.mesh import Mesh
from meshcomm.predict.times import DTYPE_BYTES, Operation

Call: TypeAlias = Callable[[], object]

# What the functions of one flat tensor are called since torch 2.13, else before it.
_ALL_GATHER: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pair(NamedTuple):
    """Two calls with the same result."""

    ours: Call
    torch: Call


def device_of(mesh: Mesh, dim: str) -> torch.device:
    """Where tensors for calls along `dim` lie: Gloo carries host memory, whatever the mesh's device is."""
    on_host = mesh.plan.family(dim).options.backend == "gloo"
    return torch.device("cpu") if on_host else mesh.device


def pair(mesh: Mesh, dim: str, operation: Operation, size_bytes: int) -> Pair:
    """`operation` along `dim` by the mesh, and by torch.distributed on the same group; size_bytes: of `counted_bytes`.

    float32 zeros, so that sums stay what they are. Where a call of the mesh returns new memory torch's gets a new tensor
    each time, and where it leaves `x` alone torch's works on a copy; buffers that both can be given are made once. The
    root is coord 0; a message goes to the next coord.
    """
    n, coord, group, device = mesh.size(dim), mesh.coord(dim), mesh.group(dim), device_of(mesh, dim)
    count = size_bytes // DTYPE_BYTES

    def zeros(elements: int) -> Tensor:
        # Written, not only promised by the system: pages that nobody has touched cost nothing to read.
        return torch.empty(elements, dtype=torch.float32, device=device).zero_()

    x = zeros(count)
    match operation:
        case "all_reduce":
            return Pair(lambda: mesh.all_reduce(dim, x), lambda: dist.all_reduce(x, group=group))
        case "all_gather":
            piece = zeros(count // n)
            return Pair(
                lambda: mesh.all_gather(dim, piece, out=x), lambda: _ALL_GATHER(x, piece, group=group)
            )
        case "reduce_scatter":
            part = zeros(count // n)
            return Pair(
                lambda: mesh.reduce_scatter(dim, x, out=part), lambda: _REDUCE_SCATTER(part, x, group=group)
            )
        case "all_to_all":
            return Pair(
                lambda: mesh.all_to_all(dim, x),
                lambda: dist.all_to_all_single(torch.empty_like(x), x, group=group),
            )
        case "broadcast":
            return Pair(
                lambda: mesh.broadcast(dim, x, src=0), lambda: dist.broadcast(x, group=group, group_src=0)
            )
        case "reduce":
            return Pair(
                lambda: mesh.reduce(dim, x, dst=0),
                lambda: dist.reduce(x.clone(), group=group, group_dst=0),
            )
        case "sendrecv":
            return Pair(lambda: mesh.shift(dim, x), partial(_ring, x, group, coord, n))
    assert_never(operation)


def _ring(x: Tensor, group: dist.ProcessGroup, coord: int, n: int) -> Tensor:
    """`x` to the next rank of the group."""
    received = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.irecv, received, group=group, group_peer=(coord - 1) % n),
        dist.P2POp(dist.isend, x, group=group, group_peer=(coord + 1) % n),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received
