"""Random patterns against einops: local patterns, dims of one rank, and mesh dims on the tensors of all ranks."""

from __future__ import annotations

import itertools
import random
from math import prod
from typing import Any

import einops
import numpy as np
import torch
from einops import EinopsError

import meshcomm
from meshcomm.errors import PatternError
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from meshcomm.pattern import explain_pattern
from tests.pattern.test_apply import ROLE, Case, oracle
from tests.pattern.test_plan import silent


def by_einops(x: torch.Tensor, pattern: str, sizes: dict[str, int]) -> torch.Tensor | None:
    """The result of einops, or None if einops refuses the pattern."""
    try:
        return einops.rearrange(x, pattern, **sizes)
    except (EinopsError, ZeroDivisionError, ValueError):
        return None


def by_meshcomm(x: torch.Tensor, pattern: str, sizes: dict[str, int], mesh: Layout) -> torch.Tensor | None:
    """The result on a rank of `mesh` when nothing may be sent, or None if the pattern is refused."""
    try:
        return silent(mesh)(x, pattern, **sizes)
    except PatternError as error:
        # A complete refusal has the pattern, an expectation and a hint.
        whole = (error.given or "").startswith(f'"{pattern}"') and error.expected and error.hint
        return None if whole else torch.full((1,), torch.nan)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


NAMES = ("a", "b", "c", "d2", "e_f")


def drawn_side(draw: random.Random, names: list[str]) -> str:
    """A side with these names in any order and grouping, and some 1s."""
    names = [*names, *draw.choices(["1", "()"], k=draw.choice([0, 0, 1, 2]))]
    draw.shuffle(names)
    words, inside = [], False
    for name in names:
        if name != "()" and not inside and draw.random() < 0.3:
            words.append("(")
            inside = True
        if inside and (name == "()" or draw.random() < 0.2):
            words.append(")")
            inside = False
        words.append(name)
    return " ".join([*words, *(")" * inside)])


def drawn_pattern(draw: random.Random) -> tuple[str, tuple[int, ...], dict[str, int]]:
    """A pattern without mesh dims, which may be wrong; the shape of its tensor; and sizes."""
    names = draw.sample(NAMES, draw.randint(0, 4))
    if draw.random() < 0.5:
        names.append("...")
    left, right = drawn_side(draw, names), drawn_side(draw, names)
    if draw.random() < 0.9 and "..." in names:
        # einops allows it outside of parentheses on the left.
        left = f"{left.replace('...', '')} ..."
    lengths = {name: draw.choice([0, 1, 1, 2, 2, 3]) for name in NAMES}
    shape: list[int] = []
    words = left.replace("(", " ( ").replace(")", " ) ").split()
    inside = False
    for word in words:
        if word == "...":
            shape += draw.choices([1, 2, 3], k=0 if inside else draw.randint(0, 2))
        elif word in "()":
            inside = word == "("
            shape += [1] * inside
        elif inside:
            shape[-1] *= lengths.get(word, 1)
        else:
            shape.append(lengths.get(word, 1))
    given = {name: lengths[name] for name in names if name != "..." and draw.random() < 0.7}
    if draw.random() < 0.15:
        text = f"{left} -> {right}"
        at = draw.randrange(len(text))
        left, arrow, right = (text[:at] + draw.choice(["", "(", ")", "2", "a", "...", " ", "_"]) + text[at + 1 :]).partition("->")  # fmt: skip
        return f"{left}{arrow}{right}", tuple(shape), given
    if shape and draw.random() < 0.1:
        shape[draw.randrange(len(shape))] += 1
    return f"{left} -> {right}", tuple(shape), given


def test_random_patterns_give_what_einops_gives() -> None:
    draw, mesh = random.Random(0), Layout({"tp": 4})
    right = 0
    for _ in range(3000):
        pattern, shape, sizes = drawn_pattern(draw)
        x = torch.arange(float(np.prod(shape))).reshape(shape)
        want = by_einops(x, pattern, sizes)
        assert same(by_meshcomm(x, pattern, sizes, mesh), want), (pattern, shape, sizes, want)
        right += want is not None
    assert 1000 < right < 2500


def test_a_dim_of_one_rank_is_an_axis_of_length_one() -> None:
    draw, mesh = random.Random(1), Layout({"dp": 1, "tp": 1})
    compared = 0
    for _ in range(2500):
        pattern, shape, sizes = drawn_pattern(draw)
        x = torch.arange(float(np.prod(shape))).reshape(shape)
        sides = pattern.split("->")
        for dim, side in itertools.product(mesh.dims, range(len(sides))):
            # Replaces a 1, which einops reads.
            if draw.random() < 0.5:
                sides[side] = sides[side].replace(" 1", f" {dim}", 1)
        text = "->".join(sides)
        try:
            explain_pattern(text, mesh, shape, **sizes)
        except PatternError as error:
            if "unclear whether to move" in str(error):
                continue
        want = by_einops(x, pattern, sizes)
        assert same(by_meshcomm(x, text, sizes, mesh), want), (text, pattern, shape, sizes, want)
        compared += want is not None and text != pattern
    assert compared > 400


DIMS = {"dp": 2, "tp": 3}
OPS: dict[str | None, Any] = {None: np.sum, "sum": np.sum, "max": np.max}


def drawn_case(draw: random.Random) -> Case | None:
    """A pattern with mesh dims, with the role of each; None if the pattern is refused as unclear."""
    axes = {name: draw.randint(1, 3) for name in draw.sample(NAMES, draw.randint(0, 3))}
    where = {dim: draw.choice(["left", "right", "both"]) for dim in DIMS if draw.random() < 0.8}
    sides = [
        drawn_side(draw, [*axes, *(dim for dim, at in where.items() if at in (side, "both"))])
        for side in ("left", "right")
    ]
    lengths = {**axes, **DIMS, "()": 1, "1": 1}
    shape = einops.rearrange(
        np.zeros([lengths[name] for name in [*axes, *(d for d in where if d in sides[0].split())]]),
        f"{' '.join([*axes, *(d for d in where if d in sides[0].split())])} -> {sides[0]}",
    ).shape
    partial = draw.choice([None, "sum", "max"]) if "left" in where.values() else None
    try:
        recipe = explain_pattern(" -> ".join(sides), DIMS, shape, partial=partial, **axes)
    except PatternError as error:
        if "unclear whether to move" in str(error):
            return None
        raise
    # No more is sent than when gathering everything, and the steps are the same without a shape.
    whole = prod(DIMS.values()) * prod(shape)
    assert recipe.sent is not None and recipe.sent <= whole * (len(recipe.steps) + 1)
    symbolic = explain_pattern(" -> ".join(sides), DIMS, partial=partial, **axes)
    assert [str(step) for step in symbolic.steps] == [str(step) for step in recipe.steps]
    assert symbolic.sent is None and str(symbolic).count("\n") == str(recipe).count("\n") - 1
    roles = {name: ROLE[role] for name, role in recipe.roles}
    return Case(" -> ".join(sides), shape, roles, "", partial, axes)


def check_drawn(mesh: Mesh, cases: list[Case], everyone: list[Any]) -> None:
    """Each rank gets the result of einops and indexing on the tensors of all ranks at once."""
    own = mesh.coords
    for case, grid in zip(cases, everyone, strict=True):
        x = torch.tensor(grid[own["dp"], own["tp"]])
        got = mesh.rearrange(x, case.pattern, partial=case.partial, **case.sizes)
        # All coords of the pattern's dims, and this rank's coord of the others.
        index = tuple(slice(None) if dim in case.roles else own[dim] for dim in DIMS)
        # Like a recipe, `oracle` has the dims in the mesh's order.
        coords = tuple(own[dim] for dim in case.roles)
        want = oracle(case, np.asarray(grid[index]), coords, OPS[case.partial])
        assert got.shape == want.shape and np.array_equal(got.numpy(), want), case


def test_random_patterns_with_mesh_dims_against_einops_on_the_whole_tensor() -> None:
    draw = random.Random(2)
    cases = [case for _ in range(600) if (case := drawn_case(draw)) is not None]
    assert len(cases) > 400
    numbers = np.random.default_rng(0)
    everyone = [numbers.integers(-9, 9, (2, 3, *case.shape)).astype(float) for case in cases]
    meshcomm.simulate(check_drawn, dims=DIMS, args=(cases, everyone))
