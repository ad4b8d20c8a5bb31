"""Calls that a compiler cannot support are refused by name; the others are checked and recorded."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import meshcomm
from meshcomm.errors import (
    AutogradError,
    CallMismatchError,
    CollectiveTimeout,
    MeshClosed,
    MeshcommError,
    PeerLost,
)
from meshcomm.mesh import Mesh
from tests.ranks import on_ranks


def slope(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.func.grad(lambda x: f(x).sum())(x)


def backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return f(x.clone().requires_grad_()).sum().backward()


def tangent(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))


@pytest.mark.mesh(tp=2, via="gloo")
def test_a_maximum_has_no_derivative_in_any_mode(mesh: Mesh) -> None:
    f, x = mesh.functional, torch.arange(4.0) + mesh.rank
    for mode in (backward, slope, tangent):
        for call in (
            lambda x: f.all_reduce("tp", x, "max", grad="sum"),
            lambda x: f.reduce_scatter("tp", x, 0, "max"),
        ):
            with pytest.raises(AutogradError, match="has no gradient for op='max'"):
                mode(call, x)
    batch = torch.vmap(lambda x: f.all_reduce("tp", x, "max", grad="sum"))(torch.stack([x, -x]))
    assert torch.equal(batch, torch.stack([torch.arange(4.0) + 1, -torch.arange(4.0)]))


@pytest.mark.mesh(
    tp=2,
    via="gloo",
    timeout_s=110,
    not_via={"emulated_nccl": "the emulation stands between autograd and the call"},
)
@pytest.mark.deep
def test_a_graph_without_tangents_is_not_used_with_them(mesh: Mesh) -> None:
    """Inductor's code would use the value and drop the tangent, as it does for torch.sin."""
    f = torch.compile(lambda x: mesh.functional.all_reduce("tp", x * 2, grad="sum") + 1)
    x = torch.ones(4)
    f(x)
    with forward_ad.dual_level():
        try:
            found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones(4)))).tangent
            text = "no tangent" if found is None else str(found)
        except (AutogradError, RuntimeError) as error:  # torch 2.15 refuses compiled code on dual tensors
            text = str(error)
    assert "forward-mode AD" in text
    assert "tangents" in text or "tangent" in text


@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
@pytest.mark.deep
def test_rearrange_and_shift_compile_without_a_break(mesh: Mesh) -> None:
    patterns: list[tuple[str, dict[str, Any], bool]] = [
        ("a b -> a (tp b)", {"grad": "slice"}, True),
        ("a b -> (tp a) b", {"grad": "reduce_scatter"}, True),
        ("a (tp b) -> (tp a) b", {}, True),
        ("(tp a) b -> a b", {"partial": "sum"}, True),
        ("(tp a) b -> b a", {}, True),
        ("a b -> b (tp a)", {}, False),
        ("(tp a) b -> a b", {"partial": "max"}, False),
    ]

    def program(xs: list[Tensor]) -> list[Tensor]:
        ys = [mesh.rearrange(x * 2, text, **more) for x, (text, more, _) in zip(xs, patterns, strict=True)]
        return [*ys, mesh.functional.shift("tp", xs[0])]

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for rows in (4, 6):  # the second shape makes torch.compile try dynamic shapes
        found = []
        for function in (program, compiled):
            xs = [
                (torch.arange(rows * 4.0).view(rows, 4) + mesh.rank).requires_grad_(needs_grad)
                for _, _, needs_grad in patterns
            ]
            ys = function(xs)
            torch.stack([y.sin().sum() for y in ys if y.requires_grad]).sum().backward()
            found.append([*ys, *(x.grad for x in xs if x.grad is not None)])
        assert len(found[0]) == len(patterns) + 1 + 5
        torch.testing.assert_close(found[0], found[1])


@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
def test_a_wrong_pattern_is_named_in_a_compiled_function(mesh: Mesh) -> None:
    for text in ("a b -> a (pt b)", "a b -> a (tp b)"):
        with pytest.raises(MeshcommError, match=r"no dim of that name|not determined"):
            torch.compile(lambda x: mesh.rearrange(x, text), backend="eager")(
                torch.ones(2, 2).requires_grad_()
            )


# A pattern and two values for each keyword of `rearrange`, and what the pattern also needs.
PATTERNS: dict[str, tuple[str, tuple[Any, Any], dict[str, Any]]] = {
    "partial": ("(tp a) b -> a b", ("sum", "max"), {}),
    "grad": ("a b -> a (tp b)", ("slice", "reduce_scatter"), {}),
}


@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
def test_every_keyword_of_rearrange_has_an_effect(mesh: Mesh) -> None:
    """Also with gradients, and in a graph."""

    def named(call: Callable[..., Any]) -> set[str]:
        return {name for name, each in signature(call).parameters.items() if each.kind is each.KEYWORD_ONLY}

    def ending(key: str, value: Any, tracked: bool, compiles: bool) -> Any:
        pattern, _, needed = PATTERNS[key]

        def program(x: torch.Tensor) -> torch.Tensor:
            return mesh.rearrange(x, pattern, **{**needed, key: value})

        x = (torch.arange(1.0, 9.0).view(4, 2) * 10**mesh.rank).requires_grad_(tracked)
        try:
            y = torch.compile(program, backend="eager")(x) if compiles else program(x)
            if tracked:
                (y * torch.arange(1.0, 1 + y.numel()).view(y.shape) * 10**mesh.rank).sum().backward()
        except (MeshcommError, RuntimeError) as error:
            # A compiler wraps the error of a gradient that is refused.
            if not tracked:
                raise
            return str(error)
        return y.tolist(), None if x.grad is None else x.grad.tolist()

    assert named(meshcomm.explain_pattern) == named(Mesh.rearrange) - {"grad"}
    for key in sorted(named(Mesh.rearrange)):
        for tracked in (True,) if key == "grad" else (False, True):
            for compiles in (False, True):
                one, other = (ending(key, value, tracked, compiles) for value in PATTERNS[key][1])
                assert one != other, f"{key}= has no effect, gradients: {tracked}, in a graph: {compiles}"


@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
def test_plain_calls_break_the_graph_and_run_as_they_are(mesh: Mesh) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: Tensor) -> Tensor:
        y = mesh.all_reduce("tp", x * 2) + 1
        handle = mesh.all_reduce("tp", y.clone(), async_op=True)
        z = mesh.all_gather("tp", x.sin()).sum() + mesh.shift("tp", x)
        mesh.barrier("tp")
        return handle.wait() + z * mesh.objects.all_gather("tp", mesh.rank)[1]

    x = torch.arange(4.0) + mesh.rank
    compiled = torch.compile(program, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), program(x))
    assert 2 <= len(graphs) <= 6
    # No code inside this package was compiled into a separate graph.
    package = f"{Path(meshcomm.__file__).parent}{os.sep}"
    assert not any(package in (node.stack_trace or "") for graph in graphs for node in graph.graph.nodes)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"it communicates; mesh\.functional compiles"):
        torch.compile(program, backend=backend, fullgraph=True)(x)


@pytest.mark.mesh(tp=2, via="gloo", timeout_s=110)
def test_a_compiled_call_is_checked_counted_and_works_as_an_eager_one(mesh: Mesh) -> None:
    f = torch.compile(lambda x: mesh.functional.all_reduce("tp", x, grad="sum"), backend="aot_eager")
    x = torch.full((3,), mesh.rank + 1, dtype=torch.int16)
    before = mesh.stats()
    assert torch.equal(f(x), torch.full((3,), 3, dtype=torch.int16))
    made = mesh.stats().since(before)
    assert [(row.dim, row.call, row.calls) for row in made.rows] == [("tp", "all_reduce", 1)]
    wrong = torch.ones(3 + mesh.rank)
    with pytest.raises(CallMismatchError, match="ranks 0 1 do not agree") as caught:
        f(wrong)
    assert Path(__file__).name in str(caught.value)


@on_ranks(2)
@pytest.mark.faults
def test_a_compiled_call_on_a_broken_group_says_who_and_where() -> None:
    with meshcomm.init(dims={"tp": 2}, device="cpu", timeout_s=3) as mesh:
        f = torch.compile(lambda x: mesh.functional.all_reduce("tp", x, grad="sum"), backend="aot_eager")
        f(torch.ones(2))
        if mesh.rank:
            mesh.store.get("done", timeout_s=60)
            return
        for _ in range(2):
            with pytest.raises((CollectiveTimeout, PeerLost)) as caught:
                f(torch.ones(2))
            assert 'all_reduce along "tp" on rank 0 (tp=0)' in str(caught.value)
        mesh.store.set("done", "1")


@on_ranks(2)
def test_a_backward_after_the_mesh_names_it() -> None:
    for keep in (True, False):
        mesh: Any = meshcomm.init(dims={"tp": 2}, device="cpu", timeout_s=30)
        x = torch.ones(2, requires_grad=True)
        y = mesh.functional.all_reduce("tp", x, grad="sum").sum()
        said = (
            rf"is closed on {re.escape(mesh.label)}"
            if keep
            else 'call along "tp" belongs to a mesh that no longer exists'
        )
        mesh.close()
        if not keep:
            del mesh
            gc.collect()
        with pytest.raises(MeshClosed, match=said):
            y.backward()
