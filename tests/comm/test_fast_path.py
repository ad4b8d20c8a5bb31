"""Calls on the fast path: the same values, refusals and records as when they are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.errors import AutogradError, MeshcommError, ShapeError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool

N = 4
ROOT = 2


def warm(mesh: Mesh) -> None:
    x = torch.arange(8.0)
    for _ in range(2):
        mesh.all_reduce("dp", x.clone())
        mesh.all_reduce("dp", x.clone(), async_op=True).wait()
        mesh.reduce("dp", x, dst=1)
        mesh.broadcast("dp", x.clone(), src=ROOT % mesh.size("dp"))
        mesh.all_gather("dp", x)
        mesh.reduce_scatter("dp", x)
        mesh.all_to_all("dp", x)
    # Prepared for another root too, that a bool would be taken for.
    for _ in range(2):
        mesh.broadcast("dp", x.clone(), src=1)


def kept(mesh: Mesh) -> list[object]:
    return sorted(map(str, mesh._at["dp"]._ready))


def values() -> tuple[list[object], dict[str, Any]]:
    with meshcomm.init(dims={"dp": N}, device="cpu", validate_calls=0, timeout_s=60) as mesh:
        warm(mesh)
        x = (torch.arange(24.0).view(8, 3) + 100 * mesh.coord("dp")).contiguous()
        out = torch.empty(32, 3)
        small = torch.empty(2, 3)
        came = torch.empty(8, 3)
        found: dict[str, Any] = {
            "all_reduce": mesh.all_reduce("dp", x.clone()),
            "later": mesh.all_reduce("dp", x.clone(), async_op=True).wait(),
            "broadcast": mesh.broadcast("dp", x.clone(), src=2),
            "reduce": mesh.reduce("dp", x, dst=1),
            "all_gather": mesh.all_gather("dp", x),
            "all_gather out": mesh.all_gather("dp", x, out=out),
            "reduce_scatter": mesh.reduce_scatter("dp", x),
            "reduce_scatter out": mesh.reduce_scatter("dp", x, out=small),
            "all_to_all": mesh.all_to_all("dp", x),
            "all_to_all out": mesh.all_to_all("dp", x, out=came),
        }
        assert found["all_gather out"] is out and found["reduce_scatter out"] is small
        assert found["all_to_all out"] is came
        x_before = (torch.arange(24.0).view(8, 3) + 100 * mesh.coord("dp")).numpy()
        assert np.array_equal(x.numpy(), x_before)
        return kept(mesh), {name: None if y is None else y.numpy().copy() for name, y in found.items()}


def test_the_values_are_those_of_numpy(pool: Pool) -> None:
    results = pool.run(values, ranks=N)
    inputs = [np.arange(24.0, dtype=np.float32).reshape(8, 3) + 100 * c for c in range(N)]
    total, whole = sum(inputs), np.concatenate(inputs)
    for coord, (prepared, found) in enumerate(results):
        assert len(prepared) == 8, prepared
        assert np.array_equal(found["all_reduce"], total) and np.array_equal(found["later"], total)
        assert np.array_equal(found["broadcast"], inputs[2])
        assert (found["reduce"] is None) == (coord != 1)
        if coord == 1:
            assert np.array_equal(found["reduce"], total)
        for name in ("all_gather", "all_gather out"):
            assert np.array_equal(found[name], whole)
        mine = slice(2 * coord, 2 * coord + 2)
        for name in ("reduce_scatter", "reduce_scatter out"):
            assert np.array_equal(found[name], total[mine])
        for name in ("all_to_all", "all_to_all out"):
            assert np.array_equal(found[name], np.concatenate([x[mine] for x in inputs]))


def conjugate(value: int) -> torch.Tensor:
    """One element, -value, of which the memory holds the value."""
    return torch.tensor([complex(0, value)]).conj().imag


def awkward() -> list[Any]:
    """What only looks like a prepared call, after the calls have been prepared."""
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=0, timeout_s=60) as mesh:
        warm(mesh)
        for _ in range(2):
            mesh.all_reduce("dp", torch.ones(1), "max")
        # One element of a conjugate: dense, and its memory holds the value with the other sign.
        negative = conjugate(2)
        assert negative.is_neg() and negative.is_contiguous()
        columns = torch.arange(6.0).view(2, 3).t()
        halves = mesh.all_gather("dp", negative)
        return [
            mesh.all_reduce("dp", negative.clone()).item(),
            mesh.all_reduce("dp", conjugate(mesh.coord("dp")), "max").item(),
            mesh.reduce_scatter("dp", torch.stack([conjugate(mesh.coord("dp"))] * 2), op="max").item(),
            mesh.broadcast("dp", conjugate(3) if mesh.coord("dp") else torch.tensor([-5.0]), src=0).item(),
            halves.tolist(),
            mesh.all_gather("dp", columns).tolist(),
            mesh.all_gather("dp", torch.tensor(3.0)).tolist(),
            mesh.all_to_all("dp", torch.arange(4.0).view(2, 2), 1, 1).tolist(),
        ]


def test_a_tensor_whose_memory_is_not_its_values_is_not_sent_as_it_is(pool: Pool) -> None:
    columns = torch.arange(6.0).view(2, 3).t()
    for coord, found in enumerate(pool.run(awkward, ranks=2)):
        own = torch.arange(4.0).view(2, 2)[:, coord : coord + 1].expand(2, 2)
        assert found == [
            -4.0, 0.0, 0.0, -5.0, [-2.0, -2.0], torch.cat([columns, columns]).tolist(), [3.0, 3.0], own.tolist(),
        ]  # fmt: skip


REFUSED: dict[str, tuple[Callable[[Mesh], object], type[MeshcommError], str]] = {
    "gradients": (
        lambda mesh: mesh.all_gather("dp", torch.ones(4, requires_grad=True)),
        AutogradError,
        "would change a tensor that needs gradients",
    ),
    "sparse": (lambda mesh: mesh.broadcast("dp", torch.eye(3).to_sparse(), 2), ShapeError, "cannot carry"),
    "no tensor": (lambda mesh: mesh.all_to_all("dp", [1.0]), ShapeError, "was given a list"),  # type: ignore[arg-type]
    "does not divide": (
        lambda mesh: mesh.reduce_scatter("dp", torch.ones(7)),
        ShapeError,
        "cannot split axis 0",
    ),
    "another out": (
        lambda mesh: mesh.all_gather("dp", torch.ones(4), out=torch.empty(4)),
        ShapeError,
        "out does not fit the result",
    ),
    "a list as src": (lambda mesh: mesh.broadcast("dp", torch.ones(2), [1]), MeshcommError, "is not a coord"),  # type: ignore[arg-type]
    "True as src": (lambda mesh: mesh.broadcast("dp", torch.ones(2), True), MeshcommError, "is not a coord"),
    "True as dst": (lambda mesh: mesh.reduce("dp", torch.ones(2), True), MeshcommError, "is not a coord"),
    "another call as op": (
        lambda mesh: mesh.all_reduce("dp", torch.ones(4), "all_gather"),
        MeshcommError,
        "no reduce op",
    ),
    "a key as op": (
        lambda mesh: mesh.all_reduce("dp", torch.ones(4), ("broadcast", 2)),  # type: ignore[arg-type]
        MeshcommError,
        "no reduce op",
    ),
    "a list as op": (
        lambda mesh: mesh.all_reduce("dp", torch.ones(4), ["sum"]),  # type: ignore[arg-type]
        MeshcommError,
        "no reduce op",
    ),
    "an unknown op": (
        lambda mesh: mesh.all_reduce("dp", torch.ones(2), "most"),
        MeshcommError,
        "no reduce op",
    ),
}


def refused() -> dict[str, str]:
    with meshcomm.init(dims={"dp": N}, device="cpu", validate_calls=0, timeout_s=60) as mesh:
        warm(mesh)
        texts = {}
        for name, (call, kind, _) in REFUSED.items():
            with pytest.raises(kind) as caught:
                call(mesh)
            texts[name] = str(caught.value)
        return texts


def test_what_was_refused_before_is_refused_still(pool: Pool) -> None:
    for texts in pool.run(refused, ranks=N):
        for name, (_, _, message) in REFUSED.items():
            assert message in texts[name]


def other_axes() -> list[Any]:
    """-1 is axis 0 of the tensors that the calls are prepared with, and axis 1 of the next ones."""
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=0, timeout_s=60) as mesh:
        for _ in range(2):
            mesh.all_gather("dp", torch.ones(4), axis=-1)
            mesh.all_to_all("dp", torch.ones(4), -1, -1)
        x = torch.arange(4.0).view(2, 2) + 10 * mesh.coord("dp")
        return [mesh.all_gather("dp", x, axis=-1).tolist(), mesh.all_to_all("dp", x, -1, -1).tolist()]


def test_a_negative_axis_is_counted_in_each_tensor_anew(pool: Pool) -> None:
    for coord, found in enumerate(pool.run(other_axes, ranks=2)):
        xs = [torch.arange(4.0).view(2, 2) + 10 * each for each in range(2)]
        moved = torch.cat([x[:, coord : coord + 1] for x in xs], 1)
        assert found == [torch.cat(xs, 1).tolist(), moved.tolist()]


def counted() -> tuple[list[tuple[str, int, int]], str]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=0, timeout_s=60) as mesh:
        for _ in range(3):
            mesh.all_gather("dp", torch.ones(4))
        recorder = mesh._at["dp"].recorder
        last = recorder.last()
        assert last is not None
        rows = [(t.call, t.calls, t.nbytes) for t in recorder.counters.values()]
        return rows, last["callsite"]


def test_fast_calls_are_counted_and_remembered_with_the_users_line(pool: Pool) -> None:
    for rows, site in pool.run(counted, ranks=2):
        assert rows == [("all_gather", 3, 3 * 2 * 16)]
        assert site.startswith(__file__)


def traced_or_not() -> int:
    """How many calls are prepared, while the first calls are still compared."""
    with meshcomm.init(dims={"dp": 2}, device="cpu", validate_calls=100, timeout_s=60) as mesh:
        warm_two = torch.arange(4.0)
        for _ in range(3):
            mesh.all_gather("dp", warm_two)
        return len(kept(mesh))


def test_nothing_is_prepared_while_calls_are_compared(pool: Pool) -> None:
    assert pool.run(traced_or_not, ranks=2) == [0, 0]
