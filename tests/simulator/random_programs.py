"""Random correct programs: each seed gives the same steps on every rank. Results are digests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import meshcomm
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh

DIMS = {"a": 3, "b": 2}
MERGE = {"ab": ("a", "b")}
ORDER = [4, 1, 5, 0, 3, 2]
NAMES: tuple[Dims, ...] = ("a", "b", "ab")
_SIDE = 6  # divisible by the size of every dim


def digest(x: Any) -> str:
    """The same digest for tensors that are equal to the bit, and for equal plain objects."""
    if isinstance(x, Tensor):
        data = x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode() + data).hexdigest()[:12]
    return hashlib.sha256(repr(x).encode()).hexdigest()[:12]


def run(mesh: Mesh, seed: int, steps: int = 6) -> list[str]:
    """Run one program, and return the digest of every step's result on this rank."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed * 1000 + mesh.rank)
    x = torch.randn(_SIDE, _SIDE, generator=generator).to(chance.choice(_DTYPES))
    found = []
    for number in range(steps):
        step = chance.choice(_STEPS)
        # All ranks draw the same step, and the step draws the same arguments on all ranks.
        result = step(mesh, x, chance.choice(NAMES), chance)
        found.append(f"{step.__name__} {digest(result)}")
        if isinstance(result, Tensor) and result.shape == x.shape:
            # Small values, so that no step overflows.
            x = (result.to(torch.float32) / (1 + result.abs().max().to(torch.float32))).to(x.dtype)
            if number % 3 == 1:  # memory that is not contiguous
                x = x.T.contiguous().T
    return found


def run_all(mesh: Mesh, seeds: Sequence[int]) -> list[list[str]]:
    """Run every program, one after the other."""
    return [run(mesh, seed) for seed in seeds]


def on_gloo(seeds: Sequence[int]) -> list[list[str]]:
    """Run every program on real processes."""
    with meshcomm.init(dims=DIMS, merge=MERGE, rank_order=ORDER, device="cpu", timeout_s=60) as mesh:
        return run_all(mesh, seeds)


def _all_reduce(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.all_reduce(dims, x.clone(), chance.choice(("sum", "avg", "max", "min")))


def _later(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    first = mesh.all_reduce(dims, x.clone(), async_op=True)
    second = mesh.all_gather(chance.choice(NAMES), x, async_op=True)
    handles = [first, second]
    chance.shuffle(handles)
    for handle in handles:
        handle.wait()
    return first.result() * second.result().sum()


def _broadcast(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.broadcast(dims, x.clone(), src=chance.randrange(mesh.size(dims)))


def _reduce(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.reduce(dims, x, chance.randrange(mesh.size(dims)))


def _gather_and_scatter(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    root, axis = chance.randrange(mesh.size(dims)), chance.randrange(2)
    whole = mesh.gather(dims, x, root, axis)
    return mesh.scatter(dims, whole, root, axis)


def _all_gather(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.all_gather(dims, x, chance.randrange(2))


def _uneven(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.all_gather(dims, x[: mesh.coord(dims) + 1], uneven=True)


def _reduce_scatter(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.reduce_scatter(dims, x, chance.randrange(2), chance.choice(("sum", "avg")))


def _all_to_all(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.all_to_all(dims, x, chance.randrange(2), chance.randrange(2))


def _shift(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    return mesh.shift(dims, x, chance.randrange(-3, 4), wrap=chance.random() < 0.5)


def _exchange(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    peers = [peer for peer in range(mesh.size(dims)) if peer != mesh.coord(dims)]
    outs = [(torch.zeros_like(x, memory_format=torch.contiguous_format), peer) for peer in reversed(peers)]
    return torch.stack(mesh.exchange(dims, [(x, peer) for peer in peers], outs)).sum(0)


def _list(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    one, two = mesh.all_reduce(dims, [x.clone(), x.to(torch.float64)])
    return one.double() + two


def _in_turn(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    coord, out, tag = mesh.coord(dims), torch.zeros_like(x), chance.randrange(3)
    if coord > 0:
        mesh.recv(dims, out, src=coord - 1, tag=tag)
    if coord < mesh.size(dims) - 1:
        mesh.send(dims, x + out, dst=coord + 1, tag=tag)
    return out


def _begun_first(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    out, n, coord = torch.zeros_like(x), mesh.size(dims), mesh.coord(dims)
    handles = [mesh.irecv(dims, out, src=(coord - 1) % n), mesh.isend(dims, x, dst=(coord + 1) % n)]
    for handle in reversed(handles):
        handle.wait()
    return out


def _objects(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    told = {"rank": mesh.rank, "first": x.reshape(-1)[0].item()}
    if chance.random() < 0.5:
        return mesh.objects.all_gather(dims, told)
    return mesh.objects.broadcast(dims, told, src=chance.randrange(mesh.size(dims)))


def _gradient(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    leaf = x.to(torch.float32).requires_grad_()
    y = mesh.functional.all_gather(dims, leaf, 0, grad="reduce_scatter")
    y = mesh.functional.reduce_scatter(dims, y * y)
    mesh.functional.all_reduce(dims, y, grad="sum").sin().sum().backward()
    return leaf.grad


def _pattern(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    name = dims if isinstance(dims, str) else "a"
    if chance.random() < 0.5:
        return mesh.rearrange(x, f"r c -> r (c {name})")
    return mesh.rearrange(x, f"({name} r) c -> r c", partial="sum")


def _meet(mesh: Mesh, x: Tensor, dims: Dims, chance: random.Random) -> Any:
    if chance.random() < 0.5:
        mesh.debug.monitored_barrier(dims, timeout_s=30)
    else:
        mesh.barrier(dims)
    return x


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_STEPS: tuple[Callable[..., Any], ...] = (
    _all_reduce, _later, _broadcast, _reduce, _gather_and_scatter, _all_gather, _uneven, _reduce_scatter,
    _all_to_all, _shift, _exchange, _list, _in_turn, _begun_first, _objects, _gradient, _pattern, _meet,
)  # fmt: skip
