"""Random programs run eager, compiled and on one process: values, gradients, and each rank's calls in order."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshcomm.comm.communicator import Communicator
from meshcomm.comm.p2p import Messages
from meshcomm.mesh import Mesh
from tests.comm.programs import LOCAL, Step, Values, constant, drawn, loss_of, square, start, wanted

# Two groups of the same ranks. If a call trades places with a call of the other group, it waits for its peer.
GROUPS = {"dp": [[0, 1]], "again": [[0, 1]]}
MESH: dict[str, Any] = {
    "dp": 2,
    "one": 1,
    "merge": {"again": ("dp", "one")},
    "options": {"again": {"comm_id": "again"}},
    "validate_calls": "always",
    "via": "gloo",
}
CALLS: dict[str, Callable[[Mesh, str, Tensor], Tensor]] = {
    "all_reduce": lambda m, d, x: m.functional.all_reduce(d, x, grad="sum"),
    "all_reduce avg": lambda m, d, x: m.functional.all_reduce(d, x, "avg", grad="sum"),
    "all_reduce identity": lambda m, d, x: m.functional.all_reduce(d, x, grad="identity"),
    "all_gather": lambda m, d, x: m.functional.all_gather(d, x, 0, grad="reduce_scatter"),
    "all_gather slice": lambda m, d, x: m.functional.all_gather(d, x, 0, grad="slice"),
    "reduce_scatter": lambda m, d, x: m.functional.reduce_scatter(d, x, 0),
    "all_to_all": lambda m, d, x: m.functional.all_to_all(d, x, 0, 1),
    "shift": lambda m, d, x: m.functional.shift(d, x),
    "shift back": lambda m, d, x: m.functional.shift(d, x, -1),
    "rearrange": lambda m, d, x: m.rearrange(x, f"i ({d} j) -> j i", partial="sum"),
    "rearrange gather": lambda m, d, x: m.rearrange(x, f"i j -> j ({d} i)", grad="reduce_scatter"),
    "identity": lambda m, d, x: m.functional.identity(d, m.functional.all_reduce(d, x, grad="sum")),
    "slice": lambda m, d, x: m.functional.slice(d, m.functional.all_reduce(d, x, grad="sum"), 0),
}


def run(mesh: Mesh, steps: Sequence[Step], values: Values, regions: bool) -> Values:
    """Run a program on this rank. regions: whether checkpoints recompute; otherwise their steps run directly."""
    for step in steps:
        if step.kind == "break":
            torch._dynamo.graph_break()
        elif step.kind == "local":
            values.append(LOCAL[step.call](values[step.at]))
        elif step.kind == "checkpoint" and regions:

            def body(x: Tensor, inner: Sequence[Step] = step.body) -> Tensor:
                return run(mesh, inner, [x], True)[-1]

            values.append(checkpoint(body, values[step.at], use_reentrant=False))
        elif step.kind == "checkpoint":
            values.append(run(mesh, step.body, [values[step.at]], False)[-1])
        elif step.used == "all":
            values.append(square(CALLS[step.call](mesh, step.group, values[step.at])))
        else:
            x = values[step.at].detach().clone() if step.of is None else constant(step.of, mesh.rank)
            y = CALLS[step.call](mesh, step.group, x)
            if step.changed:
                x.mul_(3)
                y = y + CALLS[step.call](mesh, step.group, x)
            if step.used == str(mesh.rank):
                values[step.at] = values[step.at] + square(y)
    return values


@contextmanager
def noted() -> Iterator[list[tuple[str, str]]]:
    """Record the calls that this rank makes on all groups, in order."""
    calls: list[tuple[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        collective, shift = Communicator.collective, Messages.shift

        def counted(self: Communicator, row: Any, *args: Any, **named: Any) -> Any:
            calls.append((self.name, row.name))
            return collective(self, row, *args, **named)

        def counted_shift(self: Messages, x: Tensor, offset: int, *args: Any, **named: Any) -> Any:
            calls.append((f"messages {offset}", "shift"))
            return shift(self, x, offset, *args, **named)

        patch.setattr(Communicator, "collective", counted)
        patch.setattr(Messages, "shift", counted_shift)
        yield calls


def compare(mesh: Mesh, seed: int, backend: str, breaks: bool) -> None:
    torch._dynamo.reset()
    steps = drawn(random.Random(seed), list(GROUPS), 1, breaks)
    loss, gradient = wanted(seed, steps, 2, GROUPS)[mesh.rank]

    def program(x: Tensor, regions: bool) -> Tensor:
        return loss_of(run(mesh, steps, [x], regions))

    compiled = torch.compile(program, backend=backend, fullgraph=not breaks)
    found = []
    # A compiled checkpoint keeps the results of its calls. The second compiled run does not trace again.
    for function, regions in ((program, True), (program, False), (compiled, True), (compiled, True)):
        x = start(seed, mesh.rank).requires_grad_()
        with noted() as calls:
            y = function(x, regions)
            y.backward()
        what = f"seed {seed}, {backend}, breaks {breaks}, {'compiled' if function is compiled else 'eager'}"
        # In float64, only the order of sums differs.
        torch.testing.assert_close(y.detach(), loss, rtol=1e-9, atol=1e-9, msg=f"{what}: loss {steps}")
        torch.testing.assert_close(x.grad, gradient, rtol=1e-9, atol=1e-9, msg=f"{what}: gradient {steps}")
        found.append(calls)
    assert found[2] == found[3] == found[1], f"seed {seed}, {backend}, breaks {breaks}: {steps}"


@pytest.mark.mesh(**MESH, timeout_s=250)
@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        ("aot_eager", range(3)),
        *(
            pytest.param(backend, range(first, first + count), marks=pytest.mark.deep)
            for backend, first, count in (
                *(("aot_eager", first, 12) for first in range(3, 51, 12)),
                ("aot_eager_decomp_partition", 60, 12),
                *(("inductor", first, 3) for first in range(80, 89, 3)),
            )
        ),
    ],
    ids=str,
)
def test_a_compiled_program_makes_its_calls(mesh: Mesh, backend: str, seeds: Sequence[int]) -> None:
    # torch would otherwise find graphs on disk that were compiled under other rules.
    with torch._functorch.config.patch(enable_autograd_cache=False), warnings.catch_warnings():
        # While tracing, torch itself reads the gradient of a tensor that is not a leaf.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for seed in seeds:
            compare(mesh, seed, backend, seed % 3 == 2)


def compiled(mesh: Mesh, program: Callable[[Tensor], Any], backend: str) -> tuple[Any, list[tuple[str, str]]]:
    """The result of a compiled program and the calls that it makes; the first run compiles it."""
    torch._dynamo.reset()
    x = torch.arange(4.0) + 1 + mesh.rank
    with torch._functorch.config.patch(enable_autograd_cache=False), noted() as calls:
        return torch.compile(program, backend=backend, fullgraph=True)(x), calls


@pytest.mark.mesh(**MESH, timeout_s=110)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.deep)])
def test_calls_whose_results_some_ranks_do_not_use(mesh: Mesh, backend: str) -> None:
    f = mesh.functional

    def program(x: Tensor) -> Any:
        f.all_reduce(
            "again", torch.tensor([2]), grad="sum"
        )  # a call of a constant, which is not computed while tracing
        loss = f.all_reduce("dp", x, grad="sum")
        shifted = (f.shift("dp", x), f.shift("dp", x * 10))[mesh.rank]
        twice = f.all_reduce("dp", x, "avg", grad="sum")
        return shifted, (loss if mesh.rank == 0 else None), twice

    (shifted, loss, twice), calls = compiled(mesh, program, backend)
    assert shifted.tolist() == ([2, 3, 4, 5] if mesh.rank == 0 else [10, 20, 30, 40])
    assert (loss is None) if mesh.rank else (loss.tolist() == [3, 5, 7, 9])
    assert twice.tolist() == [1.5, 2.5, 3.5, 4.5]
    shift = ("messages 1", "shift")
    assert calls == [("again", "all_reduce"), ("dp", "all_reduce"), shift, shift, ("dp", "all_reduce")]


@pytest.mark.mesh(**MESH, timeout_s=110)
def test_control_flow_in_a_graph_is_refused_and_runs_without_one(mesh: Mesh) -> None:
    def program(x: Tensor) -> Tensor:
        def summed(x: Tensor) -> Tensor:
            return mesh.functional.all_reduce("dp", x, grad="sum")

        return torch.cond(x.sum() > 0, summed, torch.sin, (x,))  # type: ignore[no-any-return]

    assert program(torch.ones(2)).tolist() == [2, 2]
    assert compiled(mesh, program, "eager")[0].tolist() == [3, 5, 7, 9]
    with pytest.raises(
        RuntimeError, match='a call along "dp" cannot be compiled in the body of torch\'s cond'
    ):
        compiled(mesh, program, "aot_eager")
