"""Tensors in awkward memory, other modes of torch, handles that two threads wait for: right all the same."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.errors import MeshcommError, ShapeError, UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from tests.comm.test_collectives import array

# -- seeded calls of random kind, beside what all ranks' values say must come out --------------------------

GRID: dict[str, Any] = {"dims": {"a": 3, "b": 2, "one": 1}, "merge": {"ab": ("a", "b"), "ba": ("b", "a")}}
ORDER = [4, 0, 3, 1, 5, 2]
_NAMES: tuple[Dims, ...] = ("a", "b", "ab", "ba", "one", ("b", "a"), ("a", "one"))
_DTYPES = (
    torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int64,
    torch.uint8, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.bool,
)  # fmt: skip
_SHAPES = ((), (1,), (6,), (0,), (6, 6), (1, 6), (2, 6, 3), (6, 0), (2, 6, 1, 6))
# Every size of _NAMES divides these along both axes, so that axis 0 and -1 can be cut.
_CUT = ((6,), (6, 6), (6, 0), (6, 2, 6))


def values(seed: int, number: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, which any rank can draw for any other."""
    chance = random.Random(f"{seed} {number} {rank}")
    drawn = torch.tensor([chance.randint(0, 3) for _ in range(math.prod(shape))], device="cpu")
    found = drawn.view(shape).to(torch.float32).to(dtype)
    return found * complex(1, 2) if dtype.is_complex else found


def in_memory(x: Tensor, style: str) -> Tensor:
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


# What is called along which dims, and what must come out of all ranks' arrays. chance: the same on every rank.
Call = Callable[[Mesh, Dims, Any, list[np.ndarray], random.Random], tuple[Any, Any]]


def reduce_scatter(m: Mesh, d: Dims, x: Any, of: list[np.ndarray], chance: random.Random) -> tuple[Any, Any]:
    axis = chance.choice((0, -1))
    return m.reduce_scatter(d, x, axis), np.split(sum(of), m.size(d), axis)[m.coord(d)]


def scatter(m: Mesh, d: Dims, x: Any, of: list[np.ndarray], chance: random.Random) -> tuple[Any, Any]:
    src, axis = chance.randrange(m.size(d)), chance.choice((0, -1))
    return m.scatter(d, x, src, axis), np.split(of[src], m.size(d), axis)[m.coord(d)]


def gather(m: Mesh, d: Dims, x: Any, of: list[np.ndarray], chance: random.Random) -> tuple[Any, Any]:
    axis = chance.choice((0, 0, -1))
    return m.all_gather(d, x, axis), np.concatenate([np.atleast_1d(each) for each in of], axis)


def broadcast(m: Mesh, d: Dims, x: Any, of: list[np.ndarray], chance: random.Random) -> tuple[Any, Any]:
    src = chance.randrange(m.size(d))
    return m.broadcast(d, [x] if chance.random() < 0.3 else x, src), of[src]


def later(m: Mesh, d: Dims, x: Any, of: list[np.ndarray], chance: random.Random) -> tuple[Any, Any]:
    with torch.no_grad():
        handle = m.all_reduce(d, [x, torch.ones(2, device="cpu")], async_op=True)
    return handle.wait(), sum(of)


def shift(m: Mesh, d: Dims, x: Any, of: list[np.ndarray], chance: random.Random) -> tuple[Any, Any]:
    offset = chance.randint(-3, 3)
    got = m.shift(d, x, offset, handshake=chance.random() < 0.5)
    return got, of[(m.coord(d) - offset) % m.size(d)]


ADDED: tuple[Call, ...] = (
    lambda m, d, x, of, chance: (
        m.all_reduce(d, x, algorithm=chance.choice(("flat", "ring", "tree", "halving_doubling"))),
        sum(of),
    ),
    later,
    reduce_scatter,
)
CUTTING: tuple[Call, ...] = (
    reduce_scatter,
    scatter,
    lambda m, d, x, of, chance: (
        m.all_to_all(d, x),
        np.concatenate([np.split(each, m.size(d))[m.coord(d)] for each in of]),
    ),
)
ALL: tuple[Call, ...] = (
    *ADDED, broadcast, gather, *CUTTING[1:], shift,
    lambda m, d, x, of, chance: (m.objects.all_gather(d, x.detach().as_subclass(Tensor))[0], of[0]),
)  # fmt: skip


def equal(got: Tensor, want: np.ndarray, dtype: torch.dtype) -> bool:
    found = array(got.detach().as_subclass(Tensor).resolve_conj().resolve_neg())
    return got.dtype == dtype and np.array_equal(found, np.asarray(want).astype(found.dtype))


def program(mesh: Mesh, seed: int, count: int) -> list[str]:
    """Make `count` calls, each three times; return what was not as it must be."""
    wrong = []
    chance = random.Random(seed)
    for number in range(count):
        call, dims, style = chance.choice(ALL), chance.choice(_NAMES), chance.choice(_STYLES)
        dtype = chance.choice(_DTYPES[:5] if call in ADDED else _DTYPES)
        shape = chance.choice(_CUT if call in CUTTING else _SHAPES)
        told = f"call {number} ({ALL.index(call)}) of seed {seed} along {dims}: {dtype} {shape} {style}"
        for again in range(3):
            place = 10 * number + again
            of = [values(seed, place, rank, shape, dtype) for rank in mesh.ranks(dims)]
            x = in_memory(of[mesh.coord(dims)].clone(), style)
            with torch.device("meta") if again == 2 else torch.no_grad():
                try:
                    arrays, drawn = [array(each) for each in of], random.Random(f"{seed} {number} {again}")
                    got, expected = call(mesh, dims, x, arrays, drawn)
                except MeshcommError as error:
                    wrong.append(f"{told}: {error}")
                    continue
            got = got[0] if isinstance(got, list) else got
            if not equal(got, expected, dtype):
                wrong.append(f"{told}: {got}, not {expected}")
    return wrong


def on_gloo(seed: int, count: int) -> list[str]:
    """The same on processes, with calls prepared after the first."""
    with meshcomm.init(**GRID, rank_order=ORDER, device="cpu", timeout_s=60, validate_calls=0) as mesh:
        return program(mesh, seed, count)


def test_values_in_awkward_memory_arrive() -> None:
    for seed in (1, 2):
        found = meshcomm.simulate(program, **GRID, rank_order=ORDER, args=(seed, 40))
        assert found == [[]] * 6


def test_values_in_awkward_memory_arrive_on_gloo(pool: Pool) -> None:
    assert pool.run(on_gloo, 3, 25, ranks=6) == [[]] * 6


# -- modes of torch, and handles ---------------------------------------------------------------------------


def in_other_modes(mesh: Mesh) -> list[Any]:
    """Calls that are made in one mode of torch and waited for in another."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    with torch.no_grad():
        begun = mesh.all_reduce("dp", [weight, weight.new_ones(2)], async_op=True)
        turned = mesh.all_reduce("dp", weight.detach().t(), async_op=True)
    begun.wait()
    turned.wait()
    with torch.inference_mode():
        columns = torch.arange(6.0).view(2, 3).t()
    mesh.all_reduce("dp", columns)
    with torch.inference_mode():
        row = torch.arange(2.0)
    mesh.all_reduce("dp", row, algorithm="ring")
    negative = torch.tensor([0 + 2j, 0 + 3j]).conj().imag
    mesh.all_reduce("dp", [negative])
    with torch.device("meta"):  # as around a model that is made without memory
        summed = mesh.all_reduce("dp", torch.arange(1.0, 4.0, device="cpu").to(torch.bfloat16))
        received = mesh.shift("dp", summed, handshake=True)
        told = mesh.objects.all_gather("dp", mesh.coord("dp"))
    assert received is not None
    # One element of a slice: contiguous, whatever its stride.
    lone = torch.tensor([0, 1 + mesh.coord("dp"), 0], dtype=torch.int16)[1::2]
    assert lone.is_contiguous() and lone.stride() == (2,)
    mesh.broadcast("dp", lone, src=2)
    return [
        row.tolist(),
        lone.tolist(),
        columns.tolist(),
        negative.tolist(),
        summed.tolist(),
        received.tolist(),
        told,
    ]


def in_other_modes_on_gloo() -> list[Any]:
    with meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=60) as mesh:
        return in_other_modes(mesh)


@pytest.mark.parametrize("via", ["simulator", "gloo"])
def test_a_mode_of_torch_changes_nothing(via: str, pool: Pool) -> None:
    ranks = (
        meshcomm.simulate(in_other_modes, dims={"dp": 3})
        if via == "simulator"
        else pool.run(in_other_modes_on_gloo, ranks=3)
    )
    for found in ranks:
        columns = [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
        assert found == [[0.0, 3.0], [3], columns, [-6.0, -9.0], [3.0, 6.0, 9.0], [3.0, 6.0, 9.0], [0, 1, 2]]


class Slow:
    """Work that is over when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.asked = threading.Event()

    def wait(self, timeout: object = None) -> bool:
        self.asked.set()
        return self.over.wait()

    def is_completed(self) -> bool:
        return self.over.is_set()


class By:
    """Whose calls the handles of these tests are."""

    def where(self, call: str) -> str:
        return call

    def failed(self, call: str, error: BaseException) -> MeshcommError:
        return ShapeError(call)


def test_two_threads_wait_for_one_handle() -> None:
    work, made = Slow(), []

    def finish() -> str:
        made.append(1)
        return "result"

    handle = meshcomm.Handle([work], By(), "a call", finish)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(handle.wait())) for _ in range(2)]
    threads[0].start()
    assert work.asked.wait(60)
    threads[1].start()
    assert not handle.is_success() and not found
    work.over.set()
    for thread in threads:
        thread.join(60)
    assert found == ["result", "result"] and made == [1]


def test_what_ended_a_wait_ends_every_wait() -> None:
    work = Slow()
    work.over.set()

    def finish() -> None:
        raise ShapeError("no room", given="a", expected="b", hint="c")

    handle = meshcomm.Handle([work], By(), "a call", finish)
    for wait in (handle.wait, handle.wait, handle.result):
        with pytest.raises(ShapeError, match="no room"):
            wait()
    assert isinstance(handle.exception(), ShapeError) and not handle.is_success()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), "5", True])
def test_a_handle_waits_for_a_time(timeout_s: Any) -> None:
    work = Slow()
    work.over.set()
    handle = meshcomm.Handle([work], By(), "a call", lambda: 3)
    with pytest.raises(UnsupportedOp, match="not a time to wait"):
        handle.wait(timeout_s)
    assert handle.wait(float("inf")) == 3


def in_its_own_memory() -> list[bool]:
    """all_to_all with x itself as out, before and after the call has been prepared."""
    found = []
    with meshcomm.init(dims={"dp": 3}, device="cpu", timeout_s=60, validate_calls=0) as mesh:
        coord, length = mesh.coord("dp"), 600_000
        everyones = [torch.arange(length) + length * c for c in range(3)]
        expected = torch.cat([x.chunk(3)[coord] for x in everyones])
        for _ in range(6):
            mesh.all_to_all("dp", everyones[coord])
            x = everyones[coord].clone()
            found.append(mesh.all_to_all("dp", x, out=x) is x and torch.equal(x, expected))
    return found


def test_a_prepared_all_to_all_does_not_overwrite_what_is_still_to_leave(pool: Pool) -> None:
    assert pool.run(in_its_own_memory, ranks=3) == [[True] * 6] * 3
