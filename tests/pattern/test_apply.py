"""Patterns: on Gloo against NumPy on all ranks' inputs at once, on simulated ranks, and as plans."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import einops
import numpy as np
import pytest
import torch

import meshcomm
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from meshcomm.pattern import explain_pattern

DIMS = {"pp": 2, "dp": 2, "tp": 2}
MERGE = {"model": ("pp", "tp"), "data": ("tp", "dp")}
VIEWS = {"expert": {"pp": 2, "ep": 4}}
ORDERS = (None, [6, 3, 1, 4, 0, 7, 5, 2])
# The base dims of each name above, outermost first, for the oracle.
PARTS = {"pp": ("pp",), "dp": ("dp",), "tp": ("tp",), "model": ("pp", "tp"), "data": ("tp", "dp")}
PARTS["ep"] = ("dp", "tp")


@dataclass(frozen=True)
class Case:
    """A pattern, the local shape, the role of each dim, and the expected steps.

    roles: dim -> g(ather), s(lice), r(educe-scatter), m(ove), k(eep).
    steps: one letter for each step: g s r a(ll_to_all), . (einops.rearrange).
    """

    pattern: str
    shape: tuple[int, ...]
    roles: dict[str, str]
    steps: str
    partial: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)


CASES = [
    # One dim is gathered.
    Case("b s h -> b s (tp h)", (2, 3, 4), {"tp": "g"}, "g"),
    Case("b s h -> (tp b) s h", (2, 3, 4), {"tp": "g"}, "g"),
    Case("b s h -> b s (h tp)", (2, 3, 4), {"tp": "g"}, "g."),
    Case("b h -> tp b h", (2, 3), {"tp": "g"}, "g."),
    Case("b h -> b tp h", (2, 3), {"tp": "g"}, "g."),
    Case("b h -> b h tp", (2, 3), {"tp": "g"}, "g."),
    Case("... -> tp ...", (2, 3), {"tp": "g"}, "g."),
    Case("... h -> ... (pp h)", (2, 3, 2), {"pp": "g"}, "g"),
    Case("-> dp", (), {"dp": "g"}, ".g"),
    Case("b h -> h (dp b)", (2, 3), {"dp": "g"}, "g."),
    Case("b h -> b h 1 (dp 1)", (2, 3), {"dp": "g"}, "g."),
    Case("(b c) h -> b (dp c) h", (6, 2), {"dp": "g"}, "g.", sizes={"b": 2}),
    Case("b (s) h -> b (model s) h", (2, 3, 2), {"model": "g"}, "g"),
    Case("t e -> (ep t) e", (3, 2), {"ep": "g"}, "g"),
    Case("c a b -> c (dp a b)", (2, 3, 2), {"dp": "g"}, "g."),
    # A slice is kept.
    Case("b s (tp h) -> b s h", (2, 3, 4), {"tp": "s"}, "s"),
    Case("(dp b) s -> b s", (4, 3), {"dp": "s"}, "s"),
    Case("b (h tp) -> b h", (2, 6), {"tp": "s"}, ".s."),
    Case("tp b h -> b h", (2, 3, 2), {"tp": "s"}, "s."),
    Case("tp -> ", (2,), {"tp": "s"}, "s."),
    Case("b (dp tp h) -> h b", (2, 8), {"dp": "s", "tp": "s"}, "ss."),
    Case("... (tp h) -> h ...", (2, 3, 4), {"tp": "s"}, "s."),
    Case("(data b) h -> b h", (8, 3), {"data": "s"}, "s"),
    # Dims are reduced and scattered.
    Case("b s (tp h) -> b s h", (2, 3, 4), {"tp": "r"}, "r", "sum"),
    Case("(tp b) s -> b s", (4, 3), {"tp": "r"}, "r", "avg"),
    Case("b (tp h) -> b h", (2, 6), {"tp": "r"}, "r", "max"),
    Case("b (tp h) -> h b", (2, 6), {"tp": "r"}, "r.", "min"),
    Case("tp b -> b", (2, 3), {"tp": "r"}, "r.", "product"),
    Case("b (dp tp h) -> b h", (2, 8), {"dp": "r", "tp": "r"}, ".rr.", "sum"),
    Case("(dp b) (tp h) -> b h", (2, 4), {"dp": "r", "tp": "r"}, "rr", "sum"),
    Case("... (pp h) -> ... h", (2, 3, 4), {"pp": "r"}, "r", "avg"),
    Case("(ep t) e -> t e", (8, 2), {"ep": "r"}, "r", "sum"),
    # Dims move between axes.
    Case("b s (tp h) d -> b (tp s) h d", (2, 3, 4, 2), {"tp": "m"}, "a"),
    Case("b (tp s) h d -> b s (tp h) d", (2, 6, 2, 2), {"tp": "m"}, "a"),
    Case("(ep e) c d -> e (ep c) d", (8, 3, 2), {"ep": "m"}, "a"),
    Case("e (ep c) d -> (ep e) c d", (2, 12, 2), {"ep": "m"}, "a"),
    Case("tp b h -> b tp h", (2, 3, 2), {"tp": "m"}, "a."),
    Case("b (tp h) -> (tp b) h", (3, 4), {"tp": "m"}, "a"),
    Case("b (tp h) -> b (h tp)", (3, 4), {"tp": "m"}, ".a."),
    Case("(tp a) b -> b a tp", (4, 3), {"tp": "m"}, "a."),
    Case("a b (tp h) -> a (h tp b)", (2, 3, 4), {"tp": "m"}, ".a."),
    Case("(dp a) (tp b) -> (tp a) (dp b)", (4, 6), {"dp": "m", "tp": "m"}, "a.a."),
    # Dims stay in place, so no data moves.
    Case("b s (tp h) -> b s (tp h)", (2, 3, 4), {"tp": "k"}, ""),
    Case("b s (tp h) -> (tp h) b s", (2, 3, 4), {"tp": "k"}, "."),
    Case("b (tp h) d -> b tp h d", (2, 6, 2), {"tp": "k"}, "."),
    Case("b tp h d -> d b (tp h)", (2, 2, 3, 2), {"tp": "k"}, "."),
    Case("(a tp h) b -> b a (tp h)", (8, 3), {"tp": "k"}, ".", sizes={"h": 2}),
    Case("(h tp) b -> b h tp", (6, 2), {"tp": "k"}, "."),
    # Without a mesh dim, einops does the work.
    Case("b (h w) c -> c b w h", (2, 6, 3), {}, ".", sizes={"h": 2}),
    Case("... a b -> ... (a b) 1", (2, 3, 2, 2), {}, "."),
    Case("a ... -> (... a)", (2, 3, 2), {}, "."),
    Case("a b -> a b", (2, 3), {}, ""),
    # Several roles at once.
    Case("b s h -> (dp b) s (tp h)", (2, 3, 4), {"dp": "g", "tp": "g"}, "gg"),
    Case("b h -> b (dp tp h)", (2, 3), {"dp": "g", "tp": "g"}, "gg."),
    Case("b h -> b (tp dp h)", (2, 3), {"dp": "g", "tp": "g"}, "gg."),
    Case("b s h -> tp (pp b) dp s h", (2, 3, 2), {"pp": "g", "dp": "g", "tp": "g"}, "ggg."),
    Case("b (dp s) (tp h) -> (pp b) s h", (2, 4, 6), {"pp": "g", "dp": "s", "tp": "s"}, "ssg"),
    Case("b s (tp h) -> (dp b) s h", (2, 3, 4), {"dp": "g", "tp": "r"}, "rg", "sum"),
    Case("(dp b) s (tp h) d -> b (tp s) h d", (4, 3, 4, 2), {"dp": "s", "tp": "m"}, "sa"),
    Case("(dp b) s (tp h) d -> (pp b) (tp s) h d", (4, 3, 4, 2), {"pp": "g", "dp": "r", "tp": "m"}, "rag", "sum"),
    Case("(tp b) (dp h) -> (tp b) h", (4, 6), {"dp": "r", "tp": "k"}, "r", "sum"),
]  # fmt: skip

LETTER = {
    "all_gather": "g",
    "slice": "s",
    "reduce_scatter": "r",
    "all_to_all": "a",
    "rearrange": ".",
}
ROLE = {"gather": "g", "slice": "s", "reduce_scatter": "r", "move": "m", "stay": "k"}
REDUCE = {"sum": np.sum, "avg": np.mean, "product": np.prod, "min": np.min, "max": np.max}


def renamed(side: str, names: set[str]) -> str:
    """The side with `_at` appended to these names."""
    spaced = side.replace("(", " ( ").replace(")", " ) ").split()
    return " ".join(f"{word}_at" if word in names else word for word in spaced)


def oracle(case: Case, everyone: Any, coords: tuple[int, ...], reduce: Any) -> Any:
    """One rank's result from the inputs of all ranks, computed only by einops and indexing.

    everyone: the input at each coord, with shape (sizes of the dims of `case.roles`, *case.shape).
    coords:   the rank's coords, in the same order.

    Each dim has two axes: `tp` is the axis inside the tensor, and `tp_at` the one over ranks. A gathered or moved dim
    takes the axis over ranks to its place on the right. The axes that remain are indexed by this rank's coord, or
    reduced.
    """
    left, right = case.pattern.split("->")
    names = list(case.roles)
    moved = {name for name in names if case.roles[name] in "gm"}
    rest = [name for name in names if case.roles[name] in "smr"]
    ranks = [f"{name}_at" for name in names if case.roles[name] in "skr"]
    sizes = {n: everyone.shape[i] for i, n in enumerate(names) if n in left.replace("(", " ").replace(")", " ").split()}  # fmt: skip
    full = einops.rearrange(
        everyone,
        f"{' '.join(f'{n}_at' for n in names)} {left} -> {' '.join(rest + ranks)} {renamed(right, moved)}",
        **{**case.sizes, **sizes},
    )
    own = dict(zip(names, coords, strict=True))
    for name in rest:
        full = full[own[name]]
    summed = 0
    for name in [n.removesuffix("_at") for n in ranks]:
        if case.roles[name] == "r":
            summed += 1
            full = einops.rearrange(full, "first ... -> ... first")
        else:
            full = full[own[name]]
    for _ in range(summed):
        full = reduce(full, axis=-1)
    return full


def place(order: Any, rank: int) -> dict[str, int]:
    """A rank's base coords, found by searching the rank grid."""
    grid = np.arange(8) if order is None else np.array(order)
    at = np.argwhere(grid.reshape(2, 2, 2) == rank)[0]
    return dict(zip(DIMS, at.tolist(), strict=True))


def group(order: Any, rank: int, names: list[str]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The ranks at every coord of `names`, with the other coords of `rank`; and the coords of `rank` among them."""
    grid = (np.arange(8) if order is None else np.array(order)).reshape(2, 2, 2)
    parts = [part for name in names for part in PARTS[name]]
    own = place(order, rank)
    index = tuple(slice(None) if dim in parts else own[dim] for dim in DIMS)
    kept = [dim for dim in DIMS if dim in parts]
    ranks = grid[index].transpose([kept.index(part) for part in parts])
    ranks = ranks.reshape([2 ** len(PARTS[name]) for name in names])
    return ranks, tuple(np.argwhere(ranks == rank)[0].tolist())


def value(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small integers, so that sums and products are exact."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 5) % 11 - 4.0).reshape(shape)


def check_cases(mesh: Mesh, order: Any) -> None:
    for number, case in enumerate(CASES):
        ranks, coords = group(order, mesh.rank, list(case.roles))
        everyone = np.stack([value(r, case.shape) for r in ranks.reshape(-1)])
        everyone = everyone.reshape(*ranks.shape, *case.shape)
        want = oracle(case, everyone, coords, REDUCE[case.partial or "sum"])
        x = torch.from_numpy(value(mesh.rank, case.shape))
        gaps = x.T.contiguous().T if x.ndim == 2 else torch.stack([x, x], -1)[..., 0]
        given = gaps if number % 2 else x.clone()
        got = mesh.rearrange(given, case.pattern, partial=case.partial, **case.sizes)
        assert got.shape == want.shape, (case, got.shape, want.shape)
        assert np.array_equal(got.numpy(), want), case
        assert torch.equal(given, x), f"{case} changed its input"


@pytest.mark.mesh(**DIMS, merge=MERGE, views=VIEWS, rank_order=ORDERS[1], via="gloo")
def test_every_pattern_gives_what_gathering_everything_gives(mesh: Mesh) -> None:
    assert len(CASES) >= 40
    assert len({(case.pattern, case.partial) for case in CASES}) == len(CASES)
    check_cases(mesh, ORDERS[1])


def test_every_pattern_on_simulated_ranks() -> None:
    meshcomm.simulate(check_cases, dims=DIMS, merge=MERGE, views=VIEWS, args=(None,))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.pattern} {case.partial or ''}")
def test_the_steps_are_the_fewest(case: Case) -> None:
    layout = Layout(DIMS, merge=MERGE, views=VIEWS)
    recipe = explain_pattern(case.pattern, layout, case.shape, partial=case.partial, **case.sizes)
    assert {name: ROLE[role] for name, role in recipe.roles} == case.roles
    assert "".join(LETTER[step.kind] for step in recipe.steps) == case.steps
    # If every dim has one rank, no data moves in any pattern.
    solo = explain_pattern(
        case.pattern,
        Layout(dict.fromkeys(DIMS, 1), merge=MERGE, views={"expert": {"pp": 1, "ep": 1}}),
        tuple(1 if case.roles else n for n in case.shape),
        partial=case.partial,
        **(case.sizes if not case.roles else {}),
        **{n: 1 for n in case.sizes if case.roles},
    )
    assert solo.sent == 0
    assert not any(step.kind in ("all_gather", "all_to_all", "slice") for step in solo.steps)


# -- a dim of size 1, other dtypes, handed-down rules ---------------------------------------------


@pytest.mark.mesh(dp=1, tp=2, via="gloo")
def test_size_one_dtypes_empty_and_no_grad(mesh: Mesh) -> None:
    rearrange = mesh.rearrange
    c = mesh.coord("tp")
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(rearrange(x, "a b -> dp a b"), x[None])
    assert torch.equal(rearrange(x[None], "dp a b -> b a"), x.T)
    assert torch.equal(rearrange(x, "(dp a) b -> a b", partial="sum"), x)
    assert torch.equal(rearrange(x, "a (dp b) -> (dp a) b", dp=1), x)
    assert torch.equal(rearrange(x, "a (dp tp b) -> (dp a) b"), x[:, 2 * c : 2 * c + 2])
    grown = rearrange(x.requires_grad_(), "a b -> (dp a) b", grad="slice")
    grown.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4))  # type: ignore[arg-type]
    with pytest.raises(meshcomm.MeshcommError, match="avg of int64 is not possible on gloo"):
        rearrange(torch.arange(3), "(dp a) -> a", partial="avg")
    with pytest.raises(meshcomm.MeshcommError, match="sum of bool is not possible on"):
        rearrange(torch.ones(2, dtype=torch.bool), "(tp a) -> a", partial="sum")
    for dtype in (torch.bfloat16, torch.int32, torch.complex64, torch.bool):
        y = (torch.arange(6) % 2 + c).to(dtype).reshape(2, 3)
        want = torch.cat([(torch.arange(6) % 2 + i).to(dtype).reshape(2, 3) for i in range(2)], 1)
        assert torch.equal(rearrange(y, "a b -> a (tp b)"), want)
    for shape in ((0, 3), (2, 0)):
        assert rearrange(torch.ones(shape), "a b -> (tp a) b").shape == (shape[0] * 2, shape[1])
        assert rearrange(torch.ones(shape), "(tp a) b -> a (tp b)").shape == (shape[0] // 2, shape[1] * 2)
    # A recipe is not reused for another shape, and no gradient is recorded under no_grad.
    for n in (1, 2, 3):
        assert rearrange(torch.ones(n, 2), "a b -> a (tp b)").shape == (n, 4)
    with torch.no_grad():
        assert not rearrange(x, "a b -> a (tp b)").requires_grad
    assert rearrange(x.detach(), "a b -> a (tp b)", grad="slice").shape == (3, 8)


# -- gradients ------------------------------------------------------------------------------------

# The gradient rule of a gathered dim is "slice" if the ranks along it compute the same loss.
GRADIENTS: list[tuple[Case, Any]] = [
    (Case("b s h -> b s (tp h)", (2, 3, 4), {"tp": "g"}, ""), "slice"),
    (Case("b s h -> b s (tp h)", (2, 3, 4), {"tp": "g"}, ""), "reduce_scatter"),
    (Case("b h -> tp h b", (2, 3), {"tp": "g"}, ""), "reduce_scatter"),
    (Case("b h -> (b tp) h", (2, 3), {"tp": "g"}, ""), "slice"),
    (Case("b h -> (dp b) (tp h)", (2, 3), {"dp": "g", "tp": "g"}, ""), "reduce_scatter"),
    (
        Case("b h -> b (dp tp h)", (2, 3), {"dp": "g", "tp": "g"}, ""),
        {"dp": "reduce_scatter", "tp": "slice"},
    ),
    (Case("b s (tp h) -> b s h", (2, 3, 4), {"tp": "s"}, ""), None),
    (Case("(h dp) b -> b h", (6, 2), {"dp": "s"}, ""), None),
    (Case("b (dp tp h) -> b h", (2, 8), {"dp": "s", "tp": "s"}, ""), None),
    (Case("b s (tp h) -> b s h", (2, 3, 4), {"tp": "r"}, "", "sum"), None),
    (Case("b (h tp) -> h b", (2, 6), {"tp": "r"}, "", "avg"), None),
    (Case("b (dp tp h) -> b h", (2, 8), {"dp": "r", "tp": "r"}, "", "sum"), None),
    (Case("b s (tp h) d -> b (tp s) h d", (2, 3, 4, 2), {"tp": "m"}, ""), None),
    (Case("(ep e) c d -> e (ep c) d", (8, 3, 2), {"ep": "m"}, ""), None),
    (Case("(tp a) b -> b a tp", (4, 3), {"tp": "m"}, ""), None),
    (Case("(dp a) (tp b) -> (tp a) (dp b)", (4, 6), {"dp": "m", "tp": "m"}, ""), None),
    (Case("b tp h d -> d b (tp h)", (2, 2, 3, 2), {"tp": "k"}, ""), None),
    (Case("b (h w) c -> c b w h", (2, 6, 3), {}, "", None, {"h": 2}), None),
    (
        Case(
            "(dp b) s (tp h) d -> (pp b) (tp s) h d",
            (4, 3, 4, 2),
            {"pp": "g", "dp": "r", "tp": "m"},
            "",
            "sum",
        ),
        "reduce_scatter",
    ),
]


def weight(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return ((np.arange(int(np.prod(shape))) * 3 + rank * 7) % 13 - 5.0).reshape(shape)


def alike(case: Case, grad: Any) -> set[str]:
    """Dims along which all ranks compute the same loss from the result."""
    rules = grad if isinstance(grad, dict) else {d: grad for d, role in case.roles.items() if role == "g"}
    return {dim for dim, rule in rules.items() if rule == "slice"}


def first_of(order: Any, rank: int, case: Case, dims: set[str]) -> int:
    """The rank with coord 0 along `dims` and otherwise the coords of `rank`."""
    names = list(case.roles)
    ranks, coords = group(order, rank, names)
    return int(ranks[tuple(0 if n in dims else c for n, c in zip(names, coords, strict=True))])


def gradients(mesh: Mesh, order: Any) -> list[np.ndarray]:
    found = []
    for case, grad in GRADIENTS:
        sliced = {dim for dim, role in case.roles.items() if role == "s"}
        x = torch.from_numpy(value(first_of(order, mesh.rank, case, sliced), case.shape)).requires_grad_()
        y = mesh.rearrange(x, case.pattern, partial=case.partial, grad=grad, **case.sizes)
        w = weight(first_of(order, mesh.rank, case, alike(case, grad)), tuple(y.shape))
        (y.square() * torch.from_numpy(w)).sum().backward()
        assert x.grad is not None
        found.append(x.grad.numpy())
    return found


@pytest.mark.parametrize("order", ORDERS, ids=["identity", "permuted"])
def test_gradients_are_those_of_one_process(order: Any) -> None:
    by_rank = meshcomm.simulate(gradients, dims=DIMS, views=VIEWS, rank_order=order, args=(order,))
    for number, (case, grad) in enumerate(GRADIENTS):
        sliced = {dim for dim, role in case.roles.items() if role == "s"}
        # One leaf for each different input. Ranks with equal inputs share a leaf.
        source = [first_of(order, rank, case, sliced) for rank in range(8)]
        leaves = [torch.from_numpy(value(source[rank], case.shape)).requires_grad_() for rank in range(8)]
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(8):
            if first_of(order, rank, case, alike(case, grad)) != rank:
                continue  # another rank has the same loss, which counts once
            ranks, coords = group(order, rank, list(case.roles))
            everyone = torch.stack([leaves[source[r]] for r in ranks.reshape(-1)])
            everyone = everyone.reshape(*ranks.shape, *case.shape)
            reduce = torch.mean if case.partial == "avg" else torch.sum
            y = oracle(case, everyone, coords, lambda x, axis, f=reduce: f(x, dim=axis))
            loss = loss + (y.square() * torch.from_numpy(weight(rank, tuple(y.shape)))).sum()
        loss.backward()
        for rank in range(8):
            want = leaves[source[rank]].grad
            assert want is not None
            # Values are small integers or halves in float64, so the comparison is exact.
            assert np.array_equal(by_rank[rank][number], want.numpy()), (case, grad, rank)


# -- what is printed ------------------------------------------------------------------------------


def test_the_guide_shows_what_is_so() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guide" / "patterns.md"
    # Every row of the guide's first table is a case above, with the same call.
    rows = re.findall(r"^\| `([^`]*->[^`]*)`(?:, `partial=\"(\w+)\"`)? \| (\w+)", guide.read_text(), re.M)
    letters = {"all_gather": "g", "reduce_scatter": "r", "slice": "s", "all_to_all": "a", "nothing": ""}
    cases = {(case.pattern, case.partial or ""): case.steps for case in CASES}
    assert len(rows) >= 8
    for pattern, partial, call in rows:
        assert cases[pattern, partial].strip(".p") == letters[call], pattern
