"""Experts on any mesh against plain loops over tokens on one process: outputs and every gradient.

Ranks are threads of this process (`simulate`); one test is on real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshcomm
from meshcomm.errors import CallMismatchError, LayoutError, ShapeError, TrainingError, UnknownDim
from meshcomm.mesh import Mesh
from meshcomm.parallel import TensorSplit
from meshcomm.parallel.expert import Experts
from meshcomm.parallel.expert.routing import balance, counts
from meshcomm.parallel.tensor import local
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl, host_syncs, no_host_sync
from tests.parallel.same import close, part, randn

SAMPLES, TOKENS, WIDTH, FF = 8, 8, 6, 4
WEIGHT = 0.7  # weight of the balance loss


@dataclasses.dataclass(frozen=True)
class Case:
    experts: int = 8
    slots: int = 2
    factor: float | None = None
    sequence_parallel: bool = False
    router: str = "random"  # or "tied": all scores equal; "one": expert 3 always first; "never": 3 never


class Numbers(NamedTuple):
    """A whole batch and whole weights, the same on every rank."""

    x: Tensor
    upstream: Tensor
    router: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor


class Result(NamedTuple):
    y: Tensor
    dx: Tensor
    router: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    balance: float
    chosen: list[int]
    dropped: int


def numbers(case: Case) -> Numbers:
    n = case.experts
    x = randn(SAMPLES, TOKENS, WIDTH, seed=0)
    # The first element is 1 everywhere, so the router's first column acts as a bias.
    x[..., 0] = 1.0
    router = randn(n, WIDTH, seed=1)
    if case.router == "tied":
        router.zero_()
    elif case.router != "random":
        router[3, 0] = 50.0 if case.router == "one" else -50.0
    return Numbers(
        x,
        randn(SAMPLES, TOKENS, WIDTH, seed=2),
        router,
        randn(n, FF, WIDTH, seed=3),
        randn(n, FF, WIDTH, seed=4),
        randn(n, WIDTH, FF, seed=5),
    )


@functools.cache
def by_loops(case: Case) -> Result:
    """The reference: a loop over tokens, written after the docstrings."""
    given = numbers(case)
    x, router, w1, w3, w2 = (
        v.clone().requires_grad_() for v in (given.x, given.router, given.w1, given.w3, given.w2)
    )
    n = case.experts
    chosen_of, dropped = [0] * n, 0
    rows, balances = [], []
    for sample in x:
        probabilities = [torch.softmax(router @ token, 0) for token in sample]
        values = [p.tolist() for p in probabilities]
        chosen = [sorted(range(n), key=lambda e: (-v[e], e))[: case.slots] for v in values]
        most = TOKENS * case.slots
        left = [most if case.factor is None else math.ceil(case.factor * most / n)] * n
        keeps = set()
        for slot in range(case.slots):
            for t in range(TOKENS):
                expert = chosen[t][slot]
                chosen_of[expert] += 1
                if left[expert]:
                    left[expert] -= 1
                    keeps.add((t, slot))
                else:
                    dropped += 1
        for t, token in enumerate(sample):
            p = probabilities[t]
            total = sum(p[e] for e in chosen[t]) if case.slots > 1 else 1.0
            y = torch.zeros(WIDTH, dtype=torch.float64)
            for slot, e in enumerate(chosen[t]):
                if (t, slot) in keeps:
                    y = y + p[e] / total * (w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token)))
            rows.append(y)
        fractions = [sum(choice.count(e) for choice in chosen) / most for e in range(n)]
        balances.append(n * sum(fractions[e] * sum(p[e] for p in probabilities) / TOKENS for e in range(n)))
    y = torch.stack(rows).view_as(x)
    balance = torch.stack([torch.as_tensor(b) for b in balances]).mean()
    ((y * given.upstream).sum() + WEIGHT * balance).backward()
    grads = [v.grad for v in (x, router, w1, w3, w2)]
    return Result(y.detach(), *grads, balance.item(), chosen_of, dropped)  # type: ignore[arg-type]


def size_of(mesh: Mesh, dim: str) -> int:
    return mesh.size(dim) if dim in mesh.layout.names else 1


def tp_of(mesh: Mesh) -> str | None:
    return "tp" if "tp" in mesh.layout.names else None


def positions_of(mesh: Mesh) -> Tensor:
    """Zig-zag along cp: of 2n chunks, number c and number 2n - 1 - c."""
    n = size_of(mesh, "cp")
    if n == 1:
        return torch.arange(TOKENS)
    chunks = torch.arange(TOKENS).chunk(2 * n)
    c = mesh.coord("cp")
    return torch.cat([chunks[c], chunks[2 * n - 1 - c]])


def tokens_of(mesh: Mesh, case: Case, x: Tensor) -> Tensor:
    """This rank's (samples, tokens) part of the whole batch, in the layout between layers."""
    mine = part(mesh, "dp", x, 0)[:, positions_of(mesh)]
    return part(mesh, "tp", mine, 1) if case.sequence_parallel else mine


def fill(layer: Experts, mesh: Mesh, given: Numbers) -> Experts:
    with torch.no_grad():
        local(layer.router.weight).copy_(given.router)
        for name, weights in experts_of(mesh, given).items():
            local(getattr(layer.experts, name)).copy_(weights)
    return layer


def experts_of(mesh: Mesh, of: Numbers | Result) -> dict[str, Tensor]:
    """This rank's slices of the experts' weights in `of`, or of their gradients if `of` is a Result."""
    axes = {"w1": 1, "w3": 1, "w2": 2}
    return {
        name: part(mesh, "tp", part(mesh, "ep", getattr(of, name), 0), axis) for name, axis in axes.items()
    }


def layer_of(mesh: Mesh, case: Case, given: Numbers) -> Experts:
    names = mesh.layout.names
    layer = Experts(
        mesh,
        "ep" if "ep" in names else None,
        TensorSplit(mesh, tp_of(mesh), torch.float64, case.sequence_parallel),
        hidden_size=WIDTH,
        intermediate_size=FF,
        experts=case.experts,
        experts_per_token=case.slots,
        capacity_factor=case.factor,
        context="cp" if "cp" in names else None,
        balance_weight=WEIGHT / size_of(mesh, "dp"),
    )
    return fill(layer, mesh, given)


def program(mesh: Mesh, case: Case, given: Numbers, expected: Result) -> None:
    """Run one rank's share of the batch, sum gradients over the right dims, and compare with slices of the whole result."""
    layer = layer_of(mesh, case, given)
    x = tokens_of(mesh, case, given.x).requires_grad_()
    y = layer(x, positions_of(mesh))
    (y * tokens_of(mesh, case, given.upstream)).sum().backward()
    expert_dims: tuple[str, ...] = ("dp", "cp")
    if layer.dim:
        expert_dims = ("edp",)
    experts = [local(cast(Tensor, parameter.grad)) for parameter in layer.experts.parameters()]
    router = local(cast(Tensor, layer.router.weight.grad))
    for dims, values in ((("dp", "cp"), [router]), (expert_dims, experts)):
        for dim in dims:
            for value in values if dim in mesh.layout.names else ():
                mesh.all_reduce(dim, value)
    close(y, tokens_of(mesh, case, expected.y), "y")
    close(x.grad, tokens_of(mesh, case, expected.dx), "dx")
    close(router, expected.router, "router")
    for name, gradient in experts_of(mesh, expected).items():
        close(local(getattr(layer.experts, name).grad), gradient, name)
    choice = layer.router(part(mesh, "dp", given.x, 0)[:, positions_of(mesh)])
    uneven = balance(mesh, layer.context, choice).detach()
    assert mesh.all_reduce("dp", uneven).item() / mesh.size("dp") == pytest.approx(
        expected.balance, rel=1e-12
    )
    chosen = counts(choice.chosen, case.experts).sum(0)
    for dim in ("dp", "cp"):
        if dim in mesh.layout.names:
            mesh.all_reduce(dim, chosen)
    assert chosen.tolist() == expected.chosen


def simulate(mesh: str, program: Any, *args: Any) -> None:
    dims, views = MESHES[mesh]
    meshcomm.simulate(program, dims=dims, views=views, args=args)


MESHES: dict[str, tuple[dict[str, int], dict[str, dict[str, int]] | None]] = {
    "one process": ({"dp": 1}, None),
    "ep1": ({"dp": 2}, {"expert": {"edp": 2, "ep": 1}}),
    "ep2": ({"dp": 2}, {"expert": {"edp": 1, "ep": 2}}),
    "ep4": ({"dp": 4}, {"expert": {"edp": 1, "ep": 4}}),
    "edp2 ep2": ({"dp": 4}, {"expert": {"edp": 2, "ep": 2}}),
    "tp2": ({"dp": 1, "tp": 2}, None),
    "ep2 tp2": ({"dp": 2, "tp": 2}, {"expert": {"edp": 1, "ep": 2, "tp": 2}}),
    "pp2 edp2 ep2": ({"pp": 2, "dp": 4}, {"expert": {"pp": 2, "edp": 2, "ep": 2}}),
    "cp2 over ep2": ({"dp": 1, "cp": 2}, {"expert": {"edp": 1, "ep": 2}}),
    "dp2 cp2 edp2 ep2": ({"dp": 2, "cp": 2}, {"expert": {"edp": 2, "ep": 2}}),
    "dp2 cp2 tp2 ep4": ({"dp": 2, "cp": 2, "tp": 2}, {"expert": {"edp": 1, "ep": 4, "tp": 2}}),
}
CASES = {
    "top 2": Case(),
    "top 1": Case(slots=1),
    "top 3 of 4": Case(experts=4, slots=3),
    "capacity": Case(factor=1.0),
    "capacity, top 1": Case(slots=1, factor=1.3),
    "sequence parallel": Case(factor=1.0, sequence_parallel=True),
    "one expert gets no tokens": Case(router="never"),
    "one expert gets all tokens": Case(slots=1, router="one"),
    "all tie": Case(router="tied"),
    "all tie, capacity": Case(router="tied", factor=0.6),
}


# Every case on the two meshes that split tokens, weights and sequences at once; two cases on each other mesh.
EVERY_CASE = ("ep2 tp2", "dp2 cp2 tp2 ep4")
CHOSEN = [(mesh, case) for mesh in EVERY_CASE for case in CASES] + [
    (mesh, case)
    for number, mesh in enumerate(name for name in MESHES if name not in EVERY_CASE)
    for case in (list(CASES)[number % 10], list(CASES)[(number + 3) % 10])
]


@pytest.mark.parametrize(("mesh", "case"), CHOSEN)
def test_equals_loops_over_tokens(mesh: str, case: str) -> None:
    simulate(mesh, program, CASES[case], numbers(CASES[case]), by_loops(CASES[case]))


def test_the_cases_are_what_they_say() -> None:
    found = {name: by_loops(case) for name, case in CASES.items()}
    assert found["one expert gets no tokens"].chosen[3] == 0
    assert found["one expert gets all tokens"].chosen == [0, 0, 0, SAMPLES * TOKENS, 0, 0, 0, 0]
    assert found["all tie"].chosen == [SAMPLES * TOKENS] * 2 + [0] * 6
    assert found["all tie"].balance == pytest.approx(1.0)  # P is uniform, so the gradient prefers no expert
    assert found["capacity"].dropped > 0
    assert found["top 2"].dropped == 0
    # Expert 3 is chosen every time, so f is 1 there and P is close to 1: the worst balance.
    assert found["one expert gets all tokens"].balance == pytest.approx(8.0)


# -- one property each ----------------------------------------------------------------------------


def uneven_batches(mesh: Mesh, given: Numbers) -> None:
    """Coord 0 has one sample and coord 1 three. The results equal one rank's on all four."""
    mine = slice(0, 1) if mesh.coord("dp") == 0 else slice(1, 4)
    layer = layer_of(mesh, Case(), given)
    layer.balance_weight = 0.0
    y = layer(given.x[mine])
    one = Experts(
        mesh, None, TensorSplit(mesh, None, torch.float64), hidden_size=WIDTH, intermediate_size=FF, experts=8
    )
    with torch.no_grad():
        one.router.weight.copy_(given.router)
        for name in ("w1", "w3", "w2"):
            getattr(one.experts, name).copy_(getattr(given, name))
    close(y, one(given.x[:4])[mine])
    flat = one(given.x[0])
    assert flat.shape == (TOKENS, WIDTH)
    close(flat, one(given.x[:1])[0])


def without_samples(mesh: Mesh, given: Numbers) -> None:
    """Coord 0 has no samples. Weights and balance have the gradients of one rank on the samples of coord 1."""
    mine = slice(0, 0) if mesh.coord("dp") == 0 else slice(None)
    layer, one = layer_of(mesh, Case(), given), by_loops(Case())
    layer.balance_weight = WEIGHT
    x = given.x[mine].clone().requires_grad_()
    y = layer(x)
    (y * given.upstream[mine]).sum().backward()
    close(y.detach(), one.y[mine])
    close(x.grad, one.dx[mine])
    close(mesh.all_reduce("dp", layer.router.weight.grad.clone()), one.router)  # type: ignore[union-attr]
    for name in ("w1", "w3", "w2"):
        close(local(getattr(layer.experts, name).grad), part(mesh, "ep", getattr(one, name), 0))


def recomputed(mesh: Mesh, given: Numbers) -> None:
    x = part(mesh, "dp", given.x, 0)
    kept, again = layer_of(mesh, Case(factor=1.0), given), layer_of(mesh, Case(factor=1.0), given)
    for layer in (kept, again):
        for half in x.chunk(2):  # two microbatches
            y = (
                layer(half)
                if layer is kept
                else checkpoint(layer, half.requires_grad_(), use_reentrant=False)
            )
            y.square().sum().backward()
    for mine, theirs in zip(kept.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def autocast(mesh: Mesh, given: Numbers) -> None:
    """Under autocast the router stays in float32 and chooses the same experts; the experts' matmuls and exchanges are in bfloat16."""
    x = part(mesh, "dp", given.x, 0).float()
    chosen, outputs = [], []
    for on in (False, True):
        layer = layer_of(mesh, Case(), given).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            y = layer(x)
        y.sum().backward()
        assert y.dtype == layer.router.weight.grad.dtype == layer.experts.w1.grad.dtype == torch.float32  # type: ignore[union-attr]
        chosen.append(layer.router(x).chosen)
        outputs.append(y.detach())
    assert torch.equal(*chosen)
    assert not torch.equal(*outputs)
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.5)


def grouped(mesh: Mesh, kind: torch.dtype, factor: float | None, loops: bool) -> tuple[Tensor, list[Tensor]]:
    """One layer with grouped matmuls, or with loops over experts: y and the gradients."""
    layer = Experts(
        mesh,
        None,
        TensorSplit(mesh, None, kind),
        hidden_size=16,
        intermediate_size=24,
        experts=4,
        capacity_factor=factor,
    )
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=number))
        layer.router.weight[2] = 0.0
        layer.router.weight[2, 0] = -50.0  # no token chooses expert 2
    x = randn(3, 9, 16, seed=9).to(kind)
    x[..., 0] = 1.0
    x.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if loops:
            patch.setattr("meshcomm.parallel.expert.experts._has_grouped_product", lambda *given: False)
        y = layer(x)
    y.square().sum().backward()
    grads = [value.grad for value in (x, *layer.parameters())]
    assert not (layer.router(x).chosen == 2).any()
    return y.detach(), grads  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_product_is_the_loop_s(kind: torch.dtype) -> None:
    """One expert has no rows and a gradient of zeros. In bfloat16, gradients reach 5e3 with 8 bits of precision."""
    one, other = (
        meshcomm.simulate(grouped, dims={"dp": 1}, args=(kind, None, loops))[0] for loops in (False, True)
    )
    rtol, atol = (1e-5, 1e-3) if kind == torch.float32 else (2e-2, 60.0)
    assert one[1][2][2].count_nonzero() == 0
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "check", [uneven_batches, without_samples, recomputed, autocast], ids=lambda check: check.__name__
)
def test_properties_on_two_ranks(check: Callable[..., None]) -> None:
    simulate("ep2", check, numbers(Case()))


# -- errors ---------------------------------------------------------------------------------------


def wrong_layers(mesh: Mesh) -> None:
    wrong: list[tuple[str | None, dict[str, Any], type[Exception], list[str]]] = [
        ("ep", {"experts": 6}, ShapeError, ["6, and 4 ranks along ep", "6 % 4 = 2", "8, or a smaller ep"]),
        (None, {"experts": 2, "experts_per_token": 3}, ShapeError, ["3 of 2 experts", "experts_per_token=2"]),
        (None, {"experts_per_token": 0}, ShapeError, ["a token cannot choose 0 of 8 experts"]),
        ("ep", {"capacity_factor": 0.0}, ShapeError, ["would drop every token", "capacity_factor=0.0"]),
        ("tp", {"tensor": "tp"}, LayoutError, ['the dim "tp" cannot both distribute the experts and split']),
        (
            "ep",
            {"tensor": "tp", "intermediate_size": 5},
            ShapeError,
            ["the inner axis of the experts", "5 % 2 = 1"],
        ),
        ("ep2", {"tensor": "tp"}, UnknownDim, ["do not belong to one factorization"]),
        ("pe", {}, UnknownDim, ["pe"]),
    ]
    for dim, changes, kind, texts in wrong:
        settings: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": FF, "experts": 8, **changes}
        split = TensorSplit(mesh, settings.pop("tensor", None), torch.float64)
        with pytest.raises(kind) as caught:
            Experts(mesh, dim, split, **settings)
        assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)


def test_a_layer_that_does_not_fit_is_refused() -> None:
    views = {"expert": {"edp": 1, "ep": 4, "tp": 2}, "other": {"ep2": 8}}
    meshcomm.simulate(wrong_layers, dims={"dp": 4, "tp": 2}, views=views)


def wrong_calls(mesh: Mesh, given: Numbers) -> None:
    layer = layer_of(mesh, Case(factor=1.0), given)
    x = given.x[:, : TOKENS // 2]
    with pytest.raises(ShapeError, match=r'samples split along "cp", positions=None'):
        layer(x)
    with pytest.raises(ShapeError, match=r"positions of shape \(8,\), 4 tokens"):
        layer(x, torch.arange(8))
    for bad in (x[..., :3], x[0, 0], x.long()):
        with pytest.raises(ShapeError, match=r"expected: \(samples, tokens, 6\) or \(tokens, 6\), floating"):
            layer(bad)


def test_a_call_that_does_not_fit_is_refused() -> None:
    simulate("cp2 over ep2", wrong_calls, numbers(Case()))


def without_samples_for_a_capacity(mesh: Mesh, given: Numbers) -> None:
    layer_of(mesh, Case(factor=1.0), given)(given.x[: mesh.coord("dp")])


def test_a_rank_without_samples_is_refused_on_every_rank_with_a_capacity() -> None:
    with pytest.raises(CallMismatchError, match="ranks 0 1 do not agree; nothing was sent"):
        simulate("ep2", without_samples_for_a_capacity, numbers(Case()))


def routed_differently(mesh: Mesh, given: Numbers) -> None:
    layer = layer_of(mesh, Case(), given)
    with torch.no_grad():
        layer.router.weight.mul_(1 - 2 * mesh.coord("tp"))
    with pytest.raises(TrainingError, match='ranks along "tp" send their tokens to different experts') as got:
        layer(given.x)
    assert "is chosen" in str(got.value) and mesh.label in str(got.value)


def test_ranks_that_route_equal_tokens_differently_are_told() -> None:
    simulate("tp2", routed_differently, numbers(Case()))


# -- real processes -------------------------------------------------------------------------------


def syncs_of(mesh: Mesh, dim: str | None, factor: float | None, forbidden: bool) -> int:
    """How often the host waits for device values in a forward and backward of a layer that has run before."""
    tensor = TensorSplit(mesh, "tp", torch.float32)
    layer = Experts(
        mesh, dim, tensor, hidden_size=16, intermediate_size=16, experts=8, capacity_factor=factor
    )
    for parameter in layer.parameters():
        nn.init.normal_(local(parameter))
    mesh.broadcast("tp", local(layer.router.weight).detach(), src=0)
    x = torch.randn(2, 8, 16, requires_grad=True)
    with torch.no_grad():
        mesh.broadcast("tp", x, src=0)
    for _ in range(3):
        layer(x).sum().backward()
    before = host_syncs()
    with no_host_sync() if forbidden else contextlib.nullcontext():
        layer(x).square().mean().backward()
    return host_syncs() - before


def host_waits() -> list[int]:
    views = {"expert": {"edp": 1, "ep": 2, "tp": 2}}
    settings: dict[str, Any] = {"backend": NAME, "device": "cpu", "timeout_s": 30.0, "validate_calls": 4}
    with emulated_nccl(), meshcomm.init(dims={"dp": 2, "tp": 2}, views=views, **settings) as mesh:
        found = [
            syncs_of(mesh, dim, factor, True) for dim, factor in ((None, None), (None, 1.0), ("ep", 1.0))
        ]
        return [*found, syncs_of(mesh, "ep", None, False)]


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason=f"torch {torch.__version__}: experts are a loop over counts on the host",
)
def test_how_often_the_host_waits_for_the_device(pool: Pool) -> None:
    """The host waits once, for the sizes of a dropless exchange, which the backward reuses. Otherwise it never waits."""
    assert pool.run(host_waits, ranks=4) == [[0, 0, 0, 1]] * 4
