"""Gradients of every functional collective, checked across ranks, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.mesh import Mesh

Op = Callable[[Mesh, str, Tensor], Tensor]

# name -> (forward on this rank's x, and the same on all ranks' xs at once: coord -> y).
# "alike" ones are followed by the same loss on every rank, which counts once.
OPS: dict[str, tuple[Op, Callable[[list[Tensor], int], Tensor], bool]] = {
    "all_reduce identity": (
        lambda m, d, x: m.functional.all_reduce(d, x, grad="identity"),
        lambda xs, c: torch.stack(xs).sum(0),
        True,
    ),
    "all_reduce sum": (
        lambda m, d, x: m.functional.all_reduce(d, x, grad="sum"),
        lambda xs, c: torch.stack(xs).sum(0),
        False,
    ),
    "all_reduce avg identity": (
        lambda m, d, x: m.functional.all_reduce(d, x, "avg", grad="identity"),
        lambda xs, c: torch.stack(xs).mean(0),
        True,
    ),
    "all_reduce avg sum": (
        lambda m, d, x: m.functional.all_reduce(d, x, "avg", grad="sum"),
        lambda xs, c: torch.stack(xs).mean(0),
        False,
    ),
    "all_gather slice": (
        lambda m, d, x: m.functional.all_gather(d, x, 1, grad="slice"),
        lambda xs, c: torch.cat(xs, 1),
        True,
    ),
    "all_gather reduce_scatter": (
        lambda m, d, x: m.functional.all_gather(d, x, -1, grad="reduce_scatter"),
        lambda xs, c: torch.cat(xs, -1),
        False,
    ),
    "reduce_scatter": (
        lambda m, d, x: m.functional.reduce_scatter(d, x, 1),
        lambda xs, c: torch.chunk(torch.stack(xs).sum(0), len(xs), 1)[c],
        False,
    ),
    "reduce_scatter avg": (
        lambda m, d, x: m.functional.reduce_scatter(d, x, 0, "avg"),
        lambda xs, c: torch.chunk(torch.stack(xs).mean(0), len(xs), 0)[c],
        False,
    ),
    "all_to_all": (
        lambda m, d, x: m.functional.all_to_all(d, x, 0, 1),
        lambda xs, c: torch.cat([torch.chunk(x, len(xs), 0)[c] for x in xs], 1),
        False,
    ),
    "all_to_all same axis": (
        lambda m, d, x: m.functional.all_to_all(d, x, 1, 1),
        lambda xs, c: torch.cat([torch.chunk(x, len(xs), 1)[c] for x in xs], 1),
        False,
    ),
    "shift": (
        lambda m, d, x: m.functional.shift(d, x, 1),
        lambda xs, c: xs[(c - 1) % len(xs)],
        False,
    ),
}


def leaf(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 8, dtype=torch.float64, generator=generator).requires_grad_()


def loss_of(y: Tensor, coord: int) -> Tensor:
    """Another loss for every coord, not linear in y."""
    weight = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).view(y.shape) / 7
    return (y.sin() * weight * (coord + 1)).sum()


def gradients_here(mesh: Mesh, dims: str, compiled: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """Each operation's y and the gradient of its x; compiled, all are one graph, which is made once."""

    def program(xs: list[Tensor]) -> list[Tensor]:
        return [forward(mesh, dims, x * 2) for (forward, _, _), x in zip(OPS.values(), xs, strict=True)]

    if compiled:
        torch._dynamo.reset()
        program = torch.compile(program, backend="aot_eager", fullgraph=True)
    xs = [leaf(mesh.rank) for _ in OPS]
    ys = program(xs)
    # Each x is in one of the losses only.
    alike = [row[2] for row in OPS.values()]
    losses = [loss_of(y, 0 if one else mesh.coord(dims)) for y, one in zip(ys, alike, strict=True)]
    torch.stack(losses).sum().backward()
    found = {}
    for name, x, y in zip(OPS, xs, ys, strict=True):
        assert x.grad is not None
        found[name] = y.detach(), x.grad
    return found


WIDE: dict[str, Any] = {
    "dp": 2,
    "one": 1,
    "tp": 2,
    "merge": {"both": ("tp", "dp")},
    "rank_order": [2, 1, 0, 3],
    "timeout_s": 110,
}


def check(mesh: Mesh, compiled: bool) -> None:
    # Compiling takes the time; which group it is makes no difference to the graph.
    for dims in ("tp",) if compiled else ("dp", "tp", "both", "one"):
        for name, (got_y, got) in gradients_here(mesh, dims, compiled).items():
            _, together, alike = OPS[name]
            ranks = mesh.ranks(dims)
            xs = [leaf(rank) for rank in ranks]
            ys = [together([x * 2 for x in xs], c) for c in range(len(xs))]
            losses = [loss_of(y, 0 if alike else c) for c, y in enumerate(ys)]
            total = losses[0] if alike else torch.stack(losses).sum()
            total.backward()
            mine = mesh.coord(dims)
            torch.testing.assert_close(got_y, ys[mine].detach(), rtol=1e-12, atol=1e-12)
            want = xs[mine].grad
            assert want is not None
            # float64; only the order of sums differs.
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, msg=f"{name} along {dims}")


@pytest.mark.mesh(**WIDE, via=("simulator", "gloo"))
def test_gradients_equal_those_of_one_process(mesh: Mesh) -> None:
    check(mesh, False)


# More ranks would compile the same.
@pytest.mark.mesh(tp=2, rank_order=[1, 0], timeout_s=110, via="gloo")
def test_gradients_equal_those_of_one_process_compiled_in_one_graph(mesh: Mesh) -> None:
    check(mesh, True)


@pytest.mark.mesh(tp=2, via="gloo")
def test_identity_and_slice(mesh: Mesh) -> None:
    """What Megatron-LM's f, and its scatter to tensor ranks, are for."""
    for compiled in (False, True):
        x = leaf(0)  # equal on all ranks
        w = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

        def program(x: Tensor) -> Tensor:
            c = mesh.coord("tp")
            return mesh.functional.identity("tp", x) @ w[:, 4 * c : 4 * c + 4]

        def sliced(x: Tensor) -> Tensor:
            return mesh.functional.slice("tp", x, 1)

        if compiled:
            torch._dynamo.reset()
            program = torch.compile(program, backend="aot_eager", fullgraph=True)
            sliced = torch.compile(sliced, backend="aot_eager", fullgraph=True)
        y = mesh.functional.all_gather("tp", program(x), 1, grad="slice")
        loss_of(y, 0).backward()
        alone = leaf(0)
        loss_of(alone @ w, 0).backward()
        torch.testing.assert_close(x.grad, alone.grad, rtol=1e-12, atol=1e-12)

        x, alone = leaf(0), leaf(0)
        y = mesh.functional.all_gather("tp", sliced(x).sin(), 1, grad="slice")
        loss_of(y, 0).backward()
        loss_of(alone.sin(), 0).backward()
        torch.testing.assert_close(x.grad, alone.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.mesh(tp=2, via=("simulator", "gloo"))
def test_gradients_are_the_slopes(mesh: Mesh) -> None:
    """gradcheck perturbs each rank's x in turn; all ranks run every evaluation together."""
    f = mesh.functional
    for program in (
        lambda x: f.reduce_scatter("tp", x, 1),
        lambda x: f.all_to_all("tp", x, 0, 1),
        lambda x: f.shift("tp", x),
    ):
        # The function is the sum over all ranks, the same number on each of them.
        x = (torch.arange(8.0, dtype=torch.float64).view(2, 4) + mesh.rank).requires_grad_()

        def total(x: Tensor) -> Tensor:
            return mesh.functional.all_reduce("tp", (program(x) ** 2).sum(), grad="identity")

        total(x).backward()
        for rank in range(mesh.size("tp")):
            for place in range(x.numel()):
                moved = [x.detach().clone(), x.detach().clone()]
                if mesh.coord("tp") == rank:
                    moved[0].view(-1)[place] += 1e-6
                    moved[1].view(-1)[place] -= 1e-6
                slope = (total(moved[0]) - total(moved[1])) / 2e-6
                if mesh.coord("tp") == rank:
                    assert x.grad is not None
                    assert abs(slope.item() - x.grad.view(-1)[place].item()) < 1e-5


@pytest.mark.mesh(tp=2, via=("simulator", "gloo"))
def test_each_wrong_gradient_is_refused(mesh: Mesh) -> None:
    texts = []
    f, x = mesh.functional, leaf(0)
    calls: list[Callable[[], Any]] = [
        lambda: f.all_reduce("tp", x, grad="both"),  # type: ignore[arg-type]
        lambda: f.all_reduce("tp", x, "max", grad="sum"),
        lambda: f.all_gather("tp", x, grad="mine"),  # type: ignore[arg-type]
        lambda: f.all_gather("tp", x, 2, grad="slice"),
        lambda: f.reduce_scatter("tp", x[:3]),
        lambda: f.reduce_scatter("tp", x, 0, "max"),
    ]
    for call in calls:
        try:
            call()
            texts.append("nothing")
        except meshcomm.MeshcommError as error:
            texts.append(error.what)
    assert texts == [
        "functional.all_reduce has no gradient rule 'both'",
        "functional.all_reduce along \"tp\" has no gradient for op='max'",
        "functional.all_gather has no gradient rule 'mine'",
        f'functional.all_gather along "tp" on {mesh.label} has no axis 2',
        f'functional.reduce_scatter along "tp" on {mesh.label} cannot split axis 0',
        "functional.reduce_scatter along \"tp\" has no gradient for op='max'",
    ]
