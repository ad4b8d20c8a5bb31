"""`out` overlaps the tensor that is sent: every operation gives the result of separate memory, first or prepared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshcomm.comm import lists
from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh

# name -> the call, given x and out; and x and out as slices of 12 elements, by the coord along dp.
Slices = Callable[[int], tuple[slice, slice]]
_HERE = slice(0, 6)

CALLS: dict[str, tuple[Callable[[Any, Tensor, Tensor], object], Slices]] = {
    "scatter": (lambda m, x, out: m.scatter("dp", x, 1, out=out), lambda c: (_HERE, slice(0, 2))),
    "scatter, another part": (
        lambda m, x, out: m.scatter("dp", x, 0, out=out),
        lambda c: (_HERE, slice(3, 5)),
    ),
    "scatter, its own part": (
        lambda m, x, out: m.scatter("dp", x, 1, out=out),
        lambda c: (_HERE, slice(2 * c, 2 * c + 2)),
    ),
    "all_gather": (lambda m, x, out: m.all_gather("dp", x, out=out), lambda c: (slice(1, 3), _HERE)),
    "all_gather, in place": (
        lambda m, x, out: m.all_gather("dp", x, out=out),
        lambda c: (slice(2 * c, 2 * c + 2), _HERE),
    ),
    "all_gather, behind": (lambda m, x, out: m.all_gather("dp", x, out=out), lambda c: (slice(5, 7), _HERE)),
    "all_gather, uneven": (
        lambda m, x, out: m.all_gather("dp", x, out=out, uneven=True),
        lambda c: (slice(1, 3), _HERE),
    ),
    "all_gather, axis 1": (
        lambda m, x, out: m.all_gather("dp", x.view(2, 1), 1, out=out.view(2, 3)),
        lambda c: (slice(1, 3), _HERE),
    ),
    "gather": (lambda m, x, out: m.gather("dp", x, 1, out=out), lambda c: (slice(1, 3), _HERE)),
    "gather, in place": (lambda m, x, out: m.gather("dp", x, 1, out=out), lambda c: (slice(2, 4), _HERE)),
    "gather, uneven": (
        lambda m, x, out: m.gather("dp", x, 1, out=out, uneven=True),
        lambda c: (slice(1, 3), _HERE),
    ),
    "reduce_scatter": (
        lambda m, x, out: m.reduce_scatter("dp", x, out=out),
        lambda c: (_HERE, slice(1, 3)),
    ),
    "reduce_scatter, in place": (
        lambda m, x, out: m.reduce_scatter("dp", x, out=out),
        lambda c: (_HERE, slice(2 * c, 2 * c + 2)),
    ),
    "reduce_scatter, premul_sum": (
        lambda m, x, out: m.reduce_scatter("dp", x, op="premul_sum", factor=0.5, out=out),
        lambda c: (_HERE, slice(1, 3)),
    ),
    "reduce_scatter, max": (
        lambda m, x, out: m.reduce_scatter("dp", x, op="max", out=out),
        lambda c: (_HERE, slice(1, 3)),
    ),
    "all_to_all": (lambda m, x, out: m.all_to_all("dp", x, out=out), lambda c: (_HERE, _HERE)),
    "all_to_all, shifted": (lambda m, x, out: m.all_to_all("dp", x, out=out), lambda c: (_HERE, slice(1, 7))),
    "all_to_all, splits": (
        lambda m, x, out: m.all_to_all("dp", x, input_split_sizes=[2] * 3, out=out),
        lambda c: (_HERE, slice(1, 7)),
    ),
    "alone, all_gather": (lambda m, x, out: m.all_gather("one", x, out=out), lambda c: (_HERE, slice(1, 7))),
    "alone, scatter": (lambda m, x, out: m.scatter("one", x, 0, out=out), lambda c: (_HERE, slice(1, 7))),
}


def drawn(mesh: Mesh) -> Tensor:
    return torch.arange(12, dtype=torch.float32) + 100 * mesh.rank


def memory_after(mesh: Mesh, name: str, overlapping: bool, async_op: bool) -> tuple[list[float], list[float]]:
    """The contents of `out` after the call, and the rest of the memory that x is part of."""
    call, slices = CALLS[name]
    sent, into = slices(mesh.coord("dp"))
    whole = drawn(mesh)
    out = whole[into] if overlapping else drawn(mesh)[into]

    class Asks:
        def __getattr__(self, operation: str) -> Any:
            def ask(*args: Any, **given: Any) -> Any:
                if not async_op:
                    return getattr(mesh, operation)(*args, **given)
                return getattr(mesh, operation)(*args, async_op=True, **given).wait()

            return ask

    call(Asks(), whole[sent], out)
    beside = torch.ones(12, dtype=torch.bool)
    beside[into] = False
    return out.tolist(), whole[beside].tolist()


@pytest.mark.mesh(dp=3, one=1, validate_calls=2)
@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_that_of_memory_apart(mesh: Mesh, name: str) -> None:
    for async_op in (False, True, False, True):
        apart = memory_after(mesh, name, False, async_op)
        assert memory_after(mesh, name, True, async_op) == apart


@pytest.mark.mesh(dp=2, validate_calls=0)
def test_what_two_messages_would_write_to_is_refused(mesh: Mesh) -> None:
    """There is no right result: it depends on chance which message is written last."""
    peer = 1 - mesh.coord("dp")
    for _ in range(2):
        x = drawn(mesh)
        with pytest.raises(ShapeError, match="receive into memory that another of its messages uses"):
            mesh.exchange("dp", [(x[:2], peer)], [(x[1:3], peer)])
        with pytest.raises(ShapeError, match="receive into memory that another of its messages uses"):
            mesh.exchange("dp", [(x[:2], mesh.coord("dp"))], [(x[1:3], mesh.coord("dp"))])
        with pytest.raises(ShapeError, match=r"all_reduce of a list.*would receive into memory"):
            mesh.all_reduce("dp", [x, x.view(torch.int32)])
        # With one dtype, each element is reduced once, however many views contain it.
        assert mesh.all_reduce("dp", [x, x[2:4]])[1].tolist() == [104.0, 106.0]
        x = drawn(mesh)
        mesh.exchange("dp", [(x[:2], peer)], [(x[2:4], peer)])
        assert x[2:4].tolist() == [100.0 * peer, 100.0 * peer + 1]


@pytest.mark.mesh(dp=3, validate_calls=0, via="gloo")
def test_a_prepared_all_to_all_does_not_overwrite_what_is_still_to_leave(mesh: Mesh) -> None:
    """The call has x itself as out, before and after it has been prepared."""
    coord, length = mesh.coord("dp"), 600_000
    everyones = [torch.arange(length) + length * c for c in range(3)]
    expected = torch.cat([x.chunk(3)[coord] for x in everyones])
    for _ in range(6):
        mesh.all_to_all("dp", everyones[coord])
        x = everyones[coord].clone()
        assert mesh.all_to_all("dp", x, out=x) is x and torch.equal(x, expected)


@pytest.mark.mesh(dp=2)
@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_memory_that_appears_twice_in_a_list_is_reduced_once(mesh: Mesh, call: str) -> None:
    """With one message, with several of one dtype, with several dtypes, with strides, and in calls that are waited for later."""
    coord = mesh.coord("dp")
    for most, kinds, step, async_op in product((1 << 28, 16, 24), (1, 2), (1, 2), (False, True)):
        whole = (torch.arange(16.0) + coord)[::step][:8]
        ints = [torch.full((3,), coord + 1)] * 2
        given = [whole, whole, whole[:4], whole[2:], whole[1:2], *ints[: 2 * (kinds - 1)]]
        before = [torch.arange(16.0)[::step][:8] + c for c in (0, 1)]
        with patch.object(lists, "_MOST_BYTES", most):
            if call == "all_reduce":
                found = mesh.all_reduce("dp", given, async_op=async_op)
            else:
                found = mesh.broadcast("dp", given, 1, async_op=async_op)
            _ = found.wait() if async_op else found
        expected = before[0] + before[1] if call == "all_reduce" else before[1]
        assert torch.equal(whole, expected), (most, kinds, step, async_op)
        assert kinds == 1 or ints[0].tolist() == [3 if call == "all_reduce" else 2] * 3
