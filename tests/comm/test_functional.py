"""Functional collectives along every dim and under torch's transforms, against one process with the values of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from meshcomm.mesh import Mesh

pytestmark = pytest.mark.long

# From the xs of all ranks to their ys.
Whole = Callable[[Tensor], Tensor]


class Row(NamedTuple):
    """mine: this rank's y from its x. whole: (ranks, ...) -> (ranks, ...), the same on one process.

    alike: every rank uses the same y in one common loss. equal: all ranks have the same x.
    """

    mine: Callable[[Any, str, Tensor], Tensor]
    whole: Whole
    alike: bool = False
    equal: bool = False


def each(xs: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y] * len(xs))


def parts(y: Tensor, ranks: int, axis: int) -> Tensor:
    return torch.stack(y.chunk(ranks, axis))


def joined(xs: Tensor, axis: int) -> Tensor:
    return torch.cat(xs.unbind(0), axis)


def exchanged(xs: Tensor, split: int, concat: int) -> Tensor:
    cut = [x.chunk(len(xs), split) for x in xs.unbind(0)]
    return torch.stack([torch.cat([row[c] for row in cut], concat) for c in range(len(xs))])


ROWS: dict[str, Row] = {
    "all_reduce identity": Row(
        lambda f, d, x: f.all_reduce(d, x, grad="identity"), lambda xs: each(xs, xs.sum(0)), alike=True
    ),
    "all_reduce sum": Row(lambda f, d, x: f.all_reduce(d, x, grad="sum"), lambda xs: each(xs, xs.sum(0))),
    "all_reduce avg identity": Row(
        lambda f, d, x: f.all_reduce(d, x, "avg", grad="identity"),
        lambda xs: each(xs, xs.mean(0)),
        alike=True,
    ),
    "all_reduce avg sum": Row(
        lambda f, d, x: f.all_reduce(d, x, "avg", grad="sum"), lambda xs: each(xs, xs.mean(0))
    ),
    "identity": Row(lambda f, d, x: f.identity(d, x), lambda xs: xs, equal=True),
    "all_gather slice": Row(
        lambda f, d, x: f.all_gather(d, x, 1, grad="slice"), lambda xs: each(xs, joined(xs, 1)), alike=True
    ),
    "all_gather reduce_scatter": Row(
        lambda f, d, x: f.all_gather(d, x, 0, grad="reduce_scatter"), lambda xs: each(xs, joined(xs, 0))
    ),
    "reduce_scatter": Row(
        lambda f, d, x: f.reduce_scatter(d, x, -1), lambda xs: parts(xs.sum(0), len(xs), 1)
    ),
    "reduce_scatter avg": Row(
        lambda f, d, x: f.reduce_scatter(d, x, 0, "avg"), lambda xs: parts(xs.mean(0), len(xs), 0)
    ),
    "slice": Row(lambda f, d, x: f.slice(d, x, 1), lambda xs: parts(xs[0], len(xs), 1), equal=True),
    "all_to_all": Row(lambda f, d, x: f.all_to_all(d, x, 0, 1), lambda xs: exchanged(xs, 0, 1)),
    "all_to_all one axis": Row(lambda f, d, x: f.all_to_all(d, x, 1, 1), lambda xs: exchanged(xs, 1, 1)),
    "shift": Row(lambda f, d, x: f.shift(d, x), lambda xs: xs.roll(1, 0)),
}


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(y: Tensor, scale: Tensor | float) -> Tensor:
    """A loss that is nonlinear in y and weights each of its elements differently."""
    weight = torch.arange(1, y.numel() + 1, dtype=torch.float64).view(y.shape) / 5
    return (y.sin() * weight).sum() * scale


# -- transforms of a function -----------------------------------------------------------------------
#
# Each mode takes y(x), loss(x) and three tensors: x, another of its shape, and a batch of them along the last
# axis. It is applied to this rank's functions and to the functions of all ranks, so that it is written only once.

Function = Callable[[Tensor], Tensor]
Mode = Callable[[Function, Function, Tensor, Tensor, Tensor], Tensor]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def backward(y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    x = leaf(x)
    return torch.autograd.grad(loss(x), x)[0]


def twice_backward(y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    x = leaf(x)
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad((first.sin() * t).sum(), x)[0]


def dual_numbers(y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(y(forward_ad.make_dual(x, t))).tangent
        assert tangent is not None, "no tangent"
        return tangent


def recomputed(reentrant: bool, y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    x = leaf(x)
    checkpoint(loss, x, use_reentrant=reentrant).backward()
    assert x.grad is not None
    return x.grad


def traced(y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    graph = make_fx(torch.func.grad(loss))(torch.zeros_like(x))
    return graph(x)


def in_inference_mode(y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    with torch.inference_mode():
        return y(x * 1).clone()


def without_grad(y: Function, loss: Function, x: Tensor, t: Tensor, xs: Tensor) -> Tensor:
    with torch.no_grad():
        return y(leaf(x))


FUNC: dict[str, Mode] = {
    "func.jvp": lambda y, loss, x, t, xs: torch.func.jvp(y, (x,), (t,))[1],
    "func.grad": lambda y, loss, x, t, xs: torch.func.grad(loss)(x),
    "func.grad of func.grad": lambda y, loss, x, t, xs: torch.func.grad(
        lambda x: (torch.func.grad(loss)(x).sin() * t).sum()
    )(x),
    "func.jvp of func.grad": lambda y, loss, x, t, xs: torch.func.jvp(torch.func.grad(loss), (x,), (t,))[1],
    "vmap": lambda y, loss, x, t, xs: torch.vmap(y, -1, -1)(xs),
    "vmap of func.grad": lambda y, loss, x, t, xs: torch.vmap(torch.func.grad(loss), -1, -1)(xs),
    "vmap of func.jvp": lambda y, loss, x, t, xs: torch.vmap(
        lambda x: torch.func.jvp(y, (x,), (t,))[1], -1, -1
    )(xs),
}
EAGER: dict[str, Mode] = {
    **FUNC,
    "vmap of vmap": lambda y, loss, x, t, xs: torch.vmap(torch.vmap(y, -1, -1), -1, -1)(
        torch.stack([xs, xs.cos()], -1)
    ),
    "backward": backward,
    "twice backward": twice_backward,
    "dual numbers": dual_numbers,
    "checkpoint": partial(recomputed, False),
    "checkpoint, reentrant": partial(recomputed, True),
    "make_fx": traced,
    "no_grad": without_grad,
    "inference_mode": in_inference_mode,
}
# Modes whose result has the shape of x, not of y.
LIKE_X = {
    *(name for name in EAGER if "grad" in name and name != "no_grad"),
    "backward",
    "twice backward",
    "checkpoint",
    "checkpoint, reentrant",
    "make_fx",
}


def here(mesh: Mesh, dims: str, row: Row) -> tuple[Function, Function]:
    scale = 1.0 if row.alike else mesh.coord(dims) + 1.0

    def y(x: Tensor) -> Tensor:
        return row.mine(mesh.functional, dims, x * 2)

    return y, lambda x: loss_of(y(x), scale)


def inputs(row: Row, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = 0 if row.equal else rank
    return numbers(4, 4, seed=seed), numbers(4, 4, seed=seed + 10), numbers(4, 4, 3, seed=seed + 20)


def wanted(mesh: Mesh, dims: str, row: Row, name: str) -> Tensor:
    """The result on one process that has the xs of all ranks and the sum of their losses."""
    size = mesh.size(dims)

    def ys(x: Tensor) -> Tensor:
        return row.whole((torch.stack([x] * size) if row.equal else x) * 2)

    def loss(x: Tensor) -> Tensor:
        found = ys(x)
        if row.alike:
            return loss_of(found[0], 1)
        return torch.stack([loss_of(found[c], c + 1.0) for c in range(size)]).sum()

    given = list(zip(*(inputs(row, rank) for rank in mesh.ranks(dims)), strict=True))
    x, t, xs = (tensors[0] if row.equal else torch.stack(tensors) for tensors in given)
    found = EAGER[name](ys, loss, x, t, xs)
    return found if row.equal and name in LIKE_X else found[mesh.coord(dims)]


def compare(mesh: Mesh, row: str, name: str, got: Tensor | None, dims: str = "tp") -> None:
    assert got is not None
    # In float64, only the order of sums differs.
    want = wanted(mesh, dims, ROWS[row], name).detach()
    torch.testing.assert_close(got.detach(), want, rtol=1e-10, atol=1e-10, msg=f"{row}, {name} along {dims}")


def eagerly(mesh: Mesh, name: str, dims: str = "tp") -> None:
    for row in ROWS:
        given = inputs(ROWS[row], mesh.rank)
        compare(mesh, row, name, EAGER[name](*here(mesh, dims, ROWS[row]), *given), dims)


@pytest.mark.mesh(
    dp=2,
    one=1,
    tp=2,
    merge={"both": ("tp", "dp")},
    rank_order=[2, 1, 0, 3],
    via=("simulator", "gloo", "emulated_nccl"),
)
# The emulated NCCL sends the same calls through Gloo.
@pytest.mark.deep_cases(r"\[gloo\]")
def test_values_and_gradients_along_every_dim(mesh: Mesh) -> None:
    for dims in ("dp", "tp", "both", "one"):
        for name in ("no_grad", "backward"):
            eagerly(mesh, name, dims)


@pytest.mark.mesh(tp=2, via="gloo")
@pytest.mark.parametrize("name", [name for name in EAGER if name not in ("no_grad", "backward")])
@pytest.mark.deep_cases(r"\[make_fx")
def test_eager(mesh: Mesh, name: str) -> None:
    eagerly(mesh, name)


@pytest.mark.parity
@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
def test_backward_of_one_compiled_graph(mesh: Mesh) -> None:
    """The graph is the same for every group, so one dim is enough."""
    torch._dynamo.reset()

    def program(xs: list[Tensor]) -> list[Tensor]:
        return [here(mesh, "tp", row)[0](x) for row, x in zip(ROWS.values(), xs, strict=True)]

    xs = [leaf(inputs(row, mesh.rank)[0]) for row in ROWS.values()]
    ys = torch.compile(program, backend="aot_eager", fullgraph=True)(xs)
    # Each x is in one of the losses only.
    scales = [1.0 if row.alike else mesh.coord("tp") + 1.0 for row in ROWS.values()]
    torch.stack([loss_of(y, scale) for y, scale in zip(ys, scales, strict=True)]).sum().backward()
    for row, x, y in zip(ROWS, xs, ys, strict=True):
        compare(mesh, row, "no_grad", y)
        compare(mesh, row, "backward", x.grad)


# Every operator, directly or as the adjoint of another. Each further row costs a second of compilation.
COMPILED = ("all_reduce identity", "all_gather reduce_scatter", "slice", "all_to_all", "shift")


# torch cannot compile the other modes: they surround compiled code. Nested transforms cover their parts.
@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
@pytest.mark.parametrize(
    ("name", "backend", "rows"),
    [
        ("vmap of func.grad", "aot_eager", COMPILED),
        *(
            pytest.param(*each, marks=pytest.mark.parity)
            for each in (
                ("func.grad of func.grad", "aot_eager", COMPILED),
                ("vmap of func.jvp", "aot_eager", COMPILED),
                ("func.jvp of func.grad", "eager", COMPILED),
                ("vmap of func.grad", "inductor", COMPILED[:1]),
            )
        ),
    ],
)
@pytest.mark.deep_cases(r"\[vmap")
def test_compiled_with_the_transform_in_one_graph(
    mesh: Mesh, name: str, backend: str, rows: Sequence[str]
) -> None:
    torch._dynamo.reset()
    chosen = [ROWS[row] for row in rows]

    def program(given: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        return [EAGER[name](*here(mesh, "tp", row), *one) for row, one in zip(chosen, given, strict=True)]

    given = [inputs(row, mesh.rank) for row in chosen]
    got = torch.compile(program, backend=backend, fullgraph=True)(given)
    for row, found in zip(rows, got, strict=True):
        compare(mesh, row, name, found)
