"""Seeded calls of random kind with tensors of awkward memory, beside what all ranks' values say must come out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh

DIMS: dict[str, Any] = {"dims": {"a": 3, "b": 2, "one": 1}, "merge": {"ab": ("a", "b"), "ba": ("b", "a")}}
ORDER = [4, 0, 3, 1, 5, 2]
_NAMES: tuple[Dims, ...] = ("a", "b", "ab", "ba", "one", ("b", "a"), ("a", "one"))
_DTYPES = (
    torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int64,
    torch.uint8, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.bool,
)  # fmt: skip
_SHAPES = ((), (1,), (6,), (0,), (6, 6), (1, 6), (2, 6, 3), (6, 0), (2, 6, 1, 6))
# Every size of _NAMES divides these along both axes, so that axis 0 and -1 can be cut.
_CUT = ((6,), (6, 6), (6, 0), (6, 2, 6))
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def values(seed: int, number: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which any rank can draw for any other."""
    chance = random.Random(f"{seed} {number} {rank}")
    drawn = torch.tensor([chance.randint(0, 3) for _ in range(math.prod(shape))], device="cpu")
    found = drawn.view(shape).to(torch.float32).to(dtype)
    return found * complex(1, 2) if dtype.is_complex else found


def laid_out(x: Tensor, style: str) -> Tensor:
    """The values of `x` in another memory; `x` where the style does not suit it."""
    if style == "turned" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if style == "every second" and x.ndim:
        wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1] + 1))
        wide[..., 1::2].copy_(x)
        return wide[..., 1::2]
    if style == "conjugate" and x.dtype == torch.complex64:
        return x.conj().resolve_conj().conj()
    if style == "negative" and x.dtype == torch.float32:
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    if style == "of inference":
        with torch.inference_mode():
            return x.clone()
    if style == "parameter":
        return torch.nn.Parameter(x, requires_grad=False)
    return x


_STYLES = ("plain", "turned", "every second", "conjugate", "negative", "of inference", "parameter")


def joined(parts: list[Tensor], axis: int) -> Tensor:
    """As torch.cat, which not every dtype has."""
    parts = [x.view(_BITS[x.itemsize]) if not x.is_complex() else x for x in parts]
    return torch.cat([x.unsqueeze(0) if x.ndim == 0 else x for x in parts], axis)


def plain(x: Any) -> Any:
    """What can be compared: dtype, shape and numbers."""
    if isinstance(x, (list, tuple)):
        return [plain(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    dense = x.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return (
        str(x.dtype),
        tuple(x.shape),
        dense.to(torch.complex128 if x.is_complex() else torch.float64).tolist(),
    )


Call = Callable[[Mesh, Dims, Tensor, list[Tensor], random.Random], tuple[Any, Any]]


def reduced(x: list[Tensor], op: str) -> Tensor:
    wide = torch.stack([each.to(torch.complex128 if each.is_complex() else torch.float64) for each in x])
    return (wide.sum(0) if op == "sum" else wide.amax(0)).to(x[0].dtype)


def _all_reduce(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    algorithm = chance.choice(("flat", "ring", "tree", "halving_doubling"))
    return m.all_reduce(d, x, algorithm=algorithm), reduced(of, "sum")  # type: ignore[call-overload]


def _later(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    with torch.no_grad():
        handle = m.all_reduce(d, [x, torch.ones(2, device="cpu")], async_op=True)
    return handle.wait()[0], reduced(of, "sum")


def _reduce_scatter(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    axis = chance.choice((0, -1))
    return m.reduce_scatter(d, x, axis), reduced(of, "sum").chunk(m.size(d), axis)[m.coord(d)]


def _broadcast(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    src = chance.randrange(m.size(d))
    return m.broadcast(d, [x] if chance.random() < 0.3 else x, src), of[src]


def _all_gather(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    axis = chance.choice((0, 0, -1))
    return m.all_gather(d, x, axis), joined(of, axis).view(x.dtype)


def _scatter(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    src, axis = chance.randrange(m.size(d)), chance.choice((0, -1))
    return m.scatter(d, x, src, axis), of[src].chunk(m.size(d), axis)[m.coord(d)]


def _all_to_all(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    parts = [each.chunk(m.size(d), 0)[m.coord(d)].contiguous() for each in of]
    return m.all_to_all(d, x), joined(parts, 0).view(x.dtype)


def _shift(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    offset = chance.randint(-3, 3)
    got = m.shift(d, x, offset, handshake=chance.random() < 0.5)
    return got, of[(m.coord(d) - offset) % m.size(d)]


def _objects(m: Mesh, d: Dims, x: Tensor, of: list[Tensor], chance: random.Random) -> tuple[Any, Any]:
    return m.objects.all_gather(d, x.detach().as_subclass(Tensor)), of


_ADDED = (_all_reduce, _later, _reduce_scatter)
_CUTTING = (_reduce_scatter, _scatter, _all_to_all)
_CALLS: tuple[Call, ...] = (*_ADDED, _broadcast, _all_gather, _scatter, _all_to_all, _shift, _objects)


def program(mesh: Mesh, seed: int, count: int) -> list[str]:
    """Make `count` calls, each three times; return what was not as it must be."""
    wrong = []
    chance = random.Random(seed)
    for number in range(count):
        call, dims, style = chance.choice(_CALLS), chance.choice(_NAMES), chance.choice(_STYLES)
        dtype = chance.choice(_DTYPES[:5] if call in _ADDED else _DTYPES)
        shape = chance.choice(_CUT if call in _CUTTING else _SHAPES)
        told = f"{call.__name__} {number} of seed {seed} along {dims}: {dtype} {shape} {style}"
        for again in range(3):
            place = 10 * number + again
            of = [values(seed, place, rank, shape, dtype) for rank in mesh.ranks(dims)]
            x = laid_out(of[mesh.coord(dims)].clone(), style)
            with torch.device("meta") if again == 2 else torch.no_grad():
                try:
                    got, expected = call(mesh, dims, x, of, random.Random(f"{seed} {number} {again}"))
                except MeshcommError as error:
                    wrong.append(f"{told}: {error}")
                    continue
            if isinstance(got, list) and not isinstance(expected, list):
                got = got[0]
            if plain(got) != plain(expected):
                wrong.append(f"{told}: {plain(got)}, not {plain(expected)}")
    return wrong


def on_gloo(seed: int, count: int) -> list[str]:
    """The same on processes, with calls prepared after the first."""
    with meshcomm.init(**DIMS, rank_order=ORDER, device="cpu", timeout_s=60, validate_calls=0) as mesh:
        return program(mesh, seed, count)
