"""Rank arithmetic against plain nested loops, and wrong layouts."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest

from meshcomm.errors import LayoutError, UnknownDim
from meshcomm.layout import Layout, Plan


def random_layout(rng: random.Random) -> tuple[dict[str, int], list[int] | None]:
    names = rng.sample(["pp", "dp", "cp", "tp", "ep"], rng.randint(1, 5))
    dims = {name: rng.choice([1, 1, 2, 2, 3, 4, 5]) for name in names}
    world = math.prod(dims.values())
    return dims, rng.sample(range(world), world) if rng.random() < 0.5 else None


def loop_grid(dims: dict[str, int], order: list[int] | None) -> dict[tuple[int, ...], int]:
    """coords -> rank, counted through the row-major grid."""
    grid = {}
    for position, coords in enumerate(itertools.product(*(range(size) for size in dims.values()))):
        grid[coords] = position if order is None else order[position]
    return grid


@pytest.mark.parametrize("seed", range(200))
def test_groups_equal_nested_loops(seed: int) -> None:
    rng = random.Random(seed)
    dims, order = random_layout(rng)
    layout = Layout(dims, rank_order=order)
    grid = loop_grid(dims, order)
    names = list(dims)
    assert layout.world_size == len(grid)

    for chosen in [rng.sample(names, rng.randint(1, len(names))) for _ in range(3)] + [[n] for n in names]:
        rest = [name for name in names if name not in chosen]
        expected = []
        for fixed in itertools.product(*(range(dims[name]) for name in rest)):
            row = []
            for moving in itertools.product(*(range(dims[name]) for name in chosen)):
                at = dict(zip(rest, fixed, strict=True)) | dict(zip(chosen, moving, strict=True))
                row.append(grid[tuple(at[name] for name in names)])
            expected.append(row)
        key = tuple(chosen) if len(chosen) > 1 or rng.random() < 0.5 else chosen[0]
        assert layout.groups(key).tolist() == expected
        for index, row in enumerate(expected):
            for coord, rank in enumerate(row):
                assert layout.group_of(rank, key).tolist() == row
                assert layout.group_index(rank, key) == index
                assert layout.coord(rank, key) == coord

    for coords, rank in grid.items():
        at = dict(zip(names, coords, strict=True))
        assert layout.coords(rank) == at
        assert layout.get_rank(**at) == rank
        for name, offset in itertools.product(names, (-2, -1, 0, 1, 3)):
            target = at[name] + offset
            wrapped = grid[tuple(c if n != name else target % dims[name] for n, c in at.items())]
            assert layout.neighbor_rank(rank, name, offset) == wrapped
            inside = 0 <= target < dims[name]
            assert layout.neighbor_rank(rank, name, offset, wrap=False) == (wrapped if inside else None)


def test_the_expert_view_shares_pp_and_gets_its_own_groups() -> None:
    layout = Layout({"dp": 4, "tp": 2}, views={"expert": {"edp": 2, "ep": -1}}, merge={"all": ("dp", "tp")})
    assert dict(layout.views["expert"]) == {"edp": 2, "ep": 4}
    assert layout.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups("edp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.coords(6, "expert") == {"edp": 1, "ep": 2}
    assert layout.get_rank(edp=1, ep=2) == 6
    with pytest.raises(UnknownDim, match="the mesh has no view 'exprt'") as caught:
        layout.coords(1, "exprt")
    assert caught.value.hint == 'did you mean "expert"?'
    with pytest.raises(UnknownDim, match='"ep", "tp"\\) do not belong to one factorization'):
        layout.groups(("ep", "tp"))


def test_a_shared_view_dim_must_mean_the_same_groups() -> None:
    Layout({"pp": 2, "dp": 2, "tp": 2}, views={"expert": {"pp": 2, "ep": 4}})
    with pytest.raises(LayoutError) as caught:
        Layout({"pp": 2, "dp": 2, "tp": 2}, views={"expert": {"ep": 4, "pp": 2}})
    assert str(caught.value) == (
        'view expert and the base share the dim "pp", but its groups differ between them\n'
        "  given:    size 2, stride 1 in expert; size 2, stride 4 in dims\n"
        "  expected: a shared dim with the same groups in both\n"
        "  try:      rename it in views.expert, or place and size it as in dims"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": {}}, "dims is empty"),
        ({"dims": {"a b": 2}}, "'a b' cannot be the name of a dim"),
        ({"dims": {"_a": 2}}, "'_a' cannot be the name of a dim"),
        ({"dims": {"a": 0}}, "dims.a = 0 is not a size"),
        ({"dims": {"a": -1}}, "dims.a = -1 is not a size"),
        ({"dims": {"a": True}}, "dims.a = True is not a size"),
        ({"dims": {"a": 2}, "rank_order": [0]}, "rank_order lists 1 ranks for a mesh of 2"),
        ({"dims": {"a": 2}, "rank_order": [0, 0]}, "rank_order is not a permutation"),
        ({"dims": {"a": 2}, "rank_order": [0, -1]}, "rank_order is not a permutation"),
        ({"dims": {"a": 2, "b": 2}, "merge": {"a": ("a", "b")}}, "merge.a has the same name as a dim"),
        ({"dims": {"a": 2, "b": 2}, "merge": {"m": ("a",)}}, "merge.m merges 1 dim(s)"),
        ({"dims": {"a": 2, "b": 2}, "merge": {"m": ("a", "a")}}, '("a", "a") name a dim twice'),
        ({"dims": {"a": 2, "b": 2}, "merge": {"m": ("a", "c")}}, "the mesh has no dim 'c'"),
        ({"dims": {"a": 2}, "views": {"v": {"x": 0, "y": -1}}}, "views.v.x = 0 is not a size"),
        ({"dims": {"a": 2}, "views": {"v": {"x": 3}}}, "view v does not fit the world: 3, world is 2"),
        ({"dims": {"a": 2, "b": 2}, "merge": {"m": "ab"}}, "merge.m is not a list of dims"),
        ({"dims": {"a": 2}, "merge": ["ab"]}, "merge is not a mapping from names to lists of dims"),
        ({"dims": {"a": 2}, "views": {"v": 4}}, "views.v is not a mapping from names to sizes"),
        (
            {"dims": {"a": 2}, "views": [("v", {"c": 4})]},
            "views is not a mapping from names to sizes by name",
        ),
        ({"dims": [("a", 2), ("b", 2)]}, "dims is not a mapping from names to sizes"),
        ({"dims": {"a": 2}, "rank_order": "01"}, "rank_order is not a list of ranks"),
        ({"dims": {"a": 2}, "rank_order": [10**30, 1]}, "rank_order is not a permutation"),
    ],
)
def test_a_wrong_layout_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).splitlines()[0] == message
    assert caught.value.given and caught.value.expected and caught.value.hint


def test_coords_and_ranks_outside_the_mesh() -> None:
    layout = Layout({"dp": 2, "tp": 2})
    for call, message in (
        (lambda: layout.coords(4), "rank 4 is not in the mesh"),
        (lambda: layout.coords(-1), "rank -1 is not in the mesh"),
        (lambda: layout.rank_of(-1), "the mesh has no position -1"),
        (lambda: layout.rank_of(4), "the mesh has no position 4"),
        (lambda: layout.get_rank(dp=0), "the coords do not identify one rank"),
        (lambda: layout.get_rank(dp=0, tp=2), "tp=2 is outside the mesh"),
        (lambda: layout.get_rank(dp=0, ttp=1), "the mesh has no dim 'ttp'"),
        (lambda: layout.size("pt"), "the mesh has no dim 'pt'"),
        (lambda: layout.size(()), "not a dim or a tuple of dims: ()"),
        (lambda: layout.size(["dp"]), "not a dim or a tuple of dims: ['dp']"),  # type: ignore[arg-type]
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        assert str(caught.value).splitlines()[0] == message
    for of in (layout, Layout({"dp": 2, "tp": 2}, rank_order=[3, 2, 1, 0])):
        for rank in of.groups("dp").ravel():  # NumPy's integers
            assert of.coords(rank) == of.coords(int(rank)) and of.label(rank) == of.label(int(rank))


@pytest.mark.parametrize(
    ("dims", "hint"),
    [
        ("pt", 'did you mean "tp"?'),
        ("TP", 'did you mean "tp"?'),
        ("tq", 'did you mean "tp"?'),
        ("mdl", 'did you mean "model"?'),
        ("xp", "one of these, or a tuple of them"),  # as similar to pp as to dp and tp
        (("dp", "tpp"), 'did you mean "tp"?'),
        (["dp", "tp"], "('dp', 'tp')"),
        ((["dp"],), "one of these names"),
        (None, "one of these names"),
    ],
)
def test_a_mistyped_dim_is_told_which_was_meant(dims: Any, hint: str) -> None:
    layout = Layout({"pp": 2, "dp": 2, "tp": 2}, merge={"model": ("pp", "tp")})
    with pytest.raises(UnknownDim) as caught:
        layout.digits(dims)
    assert caught.value.hint == hint
    assert 'pp (2), dp (2), tp (2); merged: model ("pp", "tp")' in str(caught.value.expected)


@pytest.mark.parametrize("x", [np.ones(3), [np.ones(3), np.ones(2)], (np.ones(3),)])
def test_a_tensor_in_the_place_of_dims_says_that_dims_come_first(x: Any) -> None:
    with pytest.raises(UnknownDim) as caught:
        Layout({"dp": 2, "tp": 2}).size(x)
    kind = type(x).__name__
    assert str(caught.value) == (
        f"got a {kind} where dims are expected\n"
        f"  given:    a {kind} as the first argument\n"
        "  expected: the dims first, then the tensor: one of dp (2), tp (2)\n"
        '  try:      swap the arguments, as in mesh.all_reduce("dp", x)'
    )


_CUBE = Layout(
    {"pp": 2, "dp": 2, "tp": 2}, rank_order=[1, 0, 2, 3, 4, 5, 6, 7], merge={"model": ("pp", "tp")}
)
_REFUSED: tuple[Any, ...] = (0.5, 1.0, True, np.True_, np.float32(1), "1", None, [1])


@pytest.mark.parametrize("wrong", _REFUSED, ids=repr)
@pytest.mark.parametrize(
    "ask",
    [
        lambda n: _CUBE.get_rank(pp=n, dp=0, tp=0),
        lambda n: _CUBE.neighbor_rank(0, "tp", n),
        lambda n: _CUBE.neighbor_rank(n, "tp", 1),
        lambda n: _CUBE.coords(n),
        lambda n: _CUBE.coord(n, "dp"),
        lambda n: _CUBE.position(n),
        lambda n: _CUBE.rank_of(n),
        lambda n: _CUBE.group_of(n, "model").tolist(),
        lambda n: _CUBE.group_index(n, "model"),
        lambda n: Layout({"dp": 2}, rank_order=[n, 0]).ranks.tolist(),
        lambda n: Layout({"dp": n}).world_size,
    ],
)
def test_ints_are_taken_and_nothing_that_looks_like_one(ask: Any, wrong: object) -> None:
    assert ask(np.int32(1)) == ask(np.int64(1)) == ask(1)
    with pytest.raises(LayoutError):
        ask(wrong)
    assert wrong not in _CUBE and np.int64(1) in _CUBE


def test_a_layout_is_a_value() -> None:
    for name in ("world_size", "dims", "merge", "_order", "unheard_of"):
        with pytest.raises(LayoutError, match=f"cannot be changed: {name}"):
            setattr(_CUBE, name, 3)
        with pytest.raises(LayoutError, match=f"cannot be changed: {name}"):
            delattr(_CUBE, name)
    view = Layout({"dp": np.int64(4)}, views={"v": {"ep": -1}}, merge={})  # type: ignore[dict-item]
    for layout in (_CUBE, view, Plan(_CUBE).layout):
        for other in (copy.copy(layout), copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
            assert other == layout and hash(other) == hash(layout) and repr(other) == repr(layout)
    plan = Plan(_CUBE)
    assert pickle.loads(pickle.dumps(plan)) == plan
    # The layout copies the given order, so the caller may change it.
    order = np.array([1, 0], dtype=np.int64)
    layout = Layout({"dp": 2}, rank_order=order)
    order[:] = 0
    assert layout.ranks.tolist() == [1, 0]
