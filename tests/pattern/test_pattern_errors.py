"""What a wrong pattern is told: each bad one beside a good one, with its exact message."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from meshcomm.comm import Communicator, CommunicatorCache, Functional
from meshcomm.errors import AutogradError, LayoutError, MeshcommError, PatternError, ShapeError
from meshcomm.layout import Dims, Layout
from meshcomm.pattern import explain_pattern
from meshcomm.pattern.apply import Rearranger
from meshcomm.pattern.parse import parse

MESH = Layout(
    {"pp": 2, "dp": 2, "tp": 4},
    merge={"model": ("pp", "tp")},
    views={"expert": {"pp": 2, "ep": 8}},
)


@dataclass(frozen=True)
class Bad:
    """A pattern that must be refused, what is said, and one that is right."""

    pattern: Any
    shape: tuple[int, ...]
    args: dict[str, Any]
    text: str
    good: str
    good_shape: tuple[int, ...]
    good_args: dict[str, Any]


BAD = [
    Bad(
        "b s h",
        (2, 3, 4),
        {},
        """
        rearrange: no "->"
          given:    "b s h"
                    x of shape (2, 3, 4), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: one "->" between the axes before and the axes after
          try:      "b s h -> b s h", and then change the right side
        """,
        good="b s h -> b s (tp h)",
        good_shape=(2, 3, 4),
        good_args={},
    ),
    Bad(
        "b -> s -> h",
        (2,),
        {},
        """
        rearrange: 2 times "->"
          given:    "b -> s -> h"
                    x of shape (2,), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: one "->" between the axes before and the axes after
          try:      one rearrange for each arrow
        """,
        good="b -> b",
        good_shape=(2,),
        good_args={},
    ),
    Bad(
        7,
        (2,),
        {},
        """
        rearrange: the pattern is not a text
          given:    int 7
                    x of shape (2,), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: two sides and an arrow, as in "b s h -> b s (tp h)"
          try:      mesh.rearrange(x, pattern): the tensor comes first
        """,
        good="b -> b",
        good_shape=(2,),
        good_args={},
    ),
    Bad(
        "b, h -> b h",
        (2, 3),
        {},
        """
        rearrange: unknown character ','
          given:    "b, h -> b h"
                    x of shape (2, 3), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: names, parentheses, 1, an ellipsis of three dots, spaces
          try:      spaces between names
        """,
        good="b h -> b h",
        good_shape=(2, 3),
        good_args={},
    ),
    Bad(
        "b (s (tp h)) -> b s h",
        (2, 8),
        {},
        """
        rearrange: parentheses inside parentheses on the left
          given:    "b (s (tp h)) -> b s h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: parentheses of one level: (a b c) is row-major already
          try:      leave out the inner ones
        """,
        good="b (s tp h) -> b s h",
        good_shape=(2, 8),
        good_args={"s": 1},
    ),
    Bad(
        "b tp h) -> b h",
        (2, 8),
        {},
        """
        rearrange: ")" without "(" on the left
          given:    "b tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: balanced parentheses
          try:      add "("
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={},
    ),
    Bad(
        "b (tp h -> b h",
        (2, 8),
        {},
        """
        rearrange: "(" without ")" on the left
          given:    "b (tp h -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: balanced parentheses
          try:      add ")"
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={},
    ),
    Bad(
        "b 2h -> b 2h",
        (2, 8),
        {},
        """
        rearrange: "2h" cannot be the name of an axis
          given:    "b 2h -> b 2h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: letters, digits and inner underscores, not starting with a digit, as in "h2"
          try:      rename the axis
        """,
        good="b h2 -> b h2",
        good_shape=(2, 8),
        good_args={},
    ),
    Bad(
        "b h_ -> b h_",
        (2, 8),
        {},
        """
        rearrange: "h_" cannot be the name of an axis
          given:    "b h_ -> b h_"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: letters, digits and inner underscores, not starting with a digit, as in "h2"
          try:      rename the axis
        """,
        good="b h -> b h",
        good_shape=(2, 8),
        good_args={},
    ),
    Bad(
        "b (2 h) -> b h 2",
        (2, 8),
        {},
        """
        rearrange: the number 2 as an axis
          given:    "b (2 h) -> b h 2"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: names, or 1 for an axis of length 1
          try:      a name and its size: rearrange(x, "... n ...", n=2)
        """,
        good="b (n h) -> b h n",
        good_shape=(2, 8),
        good_args={"n": 2},
    ),
    Bad(
        "b b -> b",
        (2, 2),
        {},
        """
        rearrange: axis "b" twice on the left
          given:    "b b -> b"
                    x of shape (2, 2), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: each name once on a side
          try:      another name for one of them, as in "b2"
        """,
        good="b c -> c b",
        good_shape=(2, 2),
        good_args={},
    ),
    Bad(
        "b h -> tp b (tp h)",
        (2, 2),
        {},
        """
        rearrange: axis "tp" twice on the right
          given:    "b h -> tp b (tp h)"
                    x of shape (2, 2), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: each name once on a side
          try:      another name for one of them, as in "tp2"
        """,
        good="b h -> tp b h",
        good_shape=(2, 2),
        good_args={},
    ),
    Bad(
        "... b ... -> b ...",
        (2, 2),
        {},
        """
        rearrange: two ellipses on the left
          given:    "... b ... -> b ..."
                    x of shape (2, 2), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: each name once on a side
          try:      one ellipsis and names for the other axes
        """,
        good="... b -> b ...",
        good_shape=(2, 2),
        good_args={},
    ),
    Bad(
        "b ... -> b",
        (2, 2),
        {},
        """
        rearrange: an ellipsis on the left only
          given:    "b ... -> b"
                    x of shape (2, 2), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: ... on the right as well: its axes stay
          try:      ... on the right, or a name for each axis
        """,
        good="b ... -> ... b",
        good_shape=(2, 2),
        good_args={},
    ),
    Bad(
        "b -> b ...",
        (2,),
        {},
        """
        rearrange: an ellipsis on the right only
          given:    "b -> b ..."
                    x of shape (2,), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: ... on the left as well: its axes stay
          try:      ... on the left, or a name for each axis
        """,
        good="b ... -> ... b",
        good_shape=(2,),
        good_args={},
    ),
    Bad(
        "(b ...) -> b ...",
        (4,),
        {},
        """
        rearrange: an ellipsis in parentheses on the left
          given:    "(b ...) -> b ..."
                    x of shape (4,), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: an ellipsis that stands alone on the left: how many axes it is must follow from x
          try:      ... without the parentheses, or a name for each axis
        """,
        good="b ... -> (b ...)",
        good_shape=(4,),
        good_args={},
    ),
    Bad(
        "b . h -> b h",
        (2, 2),
        {},
        """
        rearrange: unknown character '.'
          given:    "b . h -> b h"
                    x of shape (2, 2), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: names, parentheses, 1, an ellipsis of three dots, spaces
          try:      remove '.'
        """,
        good="b ... h -> b ... h",
        good_shape=(2, 2),
        good_args={},
    ),
    Bad(
        "b s h -> b s",
        (2, 3, 4),
        {},
        """
        rearrange: axis "h" is on the left only, and the mesh has no dim of that name
          given:    "b s h -> b s"
                    x of shape (2, 3, 4), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: every tensor axis on both sides: a missing axis is never a reduction
          try:      einops.reduce for a reduction over "h", or "h" on the right
        """,
        good="b s tp -> b s",
        good_shape=(2, 3, 4),
        good_args={},
    ),
    Bad(
        "b s h -> b s (tq h)",
        (2, 3, 4),
        {},
        """
        rearrange: axis "tq" is on the right only, and the mesh has no dim of that name
          given:    "b s h -> b s (tq h)"
                    x of shape (2, 3, 4), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: every tensor axis on both sides, or a mesh dim: pp, model, dp, ep, tp
          try:      did you mean "tp"?
        """,
        good="b s h -> b s (tp h)",
        good_shape=(2, 3, 4),
        good_args={},
    ),
    Bad(
        "b s -> b s k",
        (2, 3),
        {},
        """
        rearrange: axis "k" is on the right only, and the mesh has no dim of that name
          given:    "b s -> b s k"
                    x of shape (2, 3), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: every tensor axis on both sides, or a mesh dim: pp, model, dp, ep, tp
          try:      einops.repeat for a new axis "k", or 1 for an axis of length 1
        """,
        good="b s -> b s 1",
        good_shape=(2, 3),
        good_args={},
    ),
    Bad(
        "b s h -> b s (tp h)",
        (2, 3, 4),
        {"partial": "sum"},
        """
        rearrange: partial="sum" has no effect: no mesh dim is on the left only
          given:    "b s h -> b s (tp h)"
                    x of shape (2, 3, 4), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a mesh dim on the left that is missing on the right, over which values are added
          try:      remove partial="sum", or put the dim on the left: "(tp h) ... -> h ..."
        """,
        good="b s (tp h) -> b s h",
        good_shape=(2, 3, 4),
        good_args={"partial": "sum"},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8),
        {"partial": "mean"},
        """
        rearrange: partial='mean' is not a reduction
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: one of sum, avg, product, min, max; or None to keep this rank's slice
          try:      partial="avg"
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={"partial": "avg"},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8),
        {"partial": "maxx"},
        """
        rearrange: partial='maxx' is not a reduction
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: one of sum, avg, product, min, max; or None to keep this rank's slice
          try:      partial="max"
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={"partial": "max"},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8),
        {"w": 2},
        """
        rearrange: a size for "w", which the pattern does not have
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: sizes of axes of the pattern: b, tp, h
          try:      remove w=2
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={"h": 2},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8),
        {"h": 2.0},
        """
        rearrange: h=2.0 is not a size
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a whole number, 0 or more
          try:      h=2
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={"h": 2},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8),
        {"h": -1},
        """
        rearrange: h=-1 is not a size
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a whole number, 0 or more
          try:      remove h=-1
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={"h": 2},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8),
        {"tp": 2},
        """
        rearrange: tp=2, but "tp" is a dim of the mesh and has size 4
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: tp=4, or no size: the mesh knows it
          try:      remove tp=2
        """,
        good="b (tp h) -> b h",
        good_shape=(2, 8),
        good_args={"tp": 4},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 8, 3),
        {},
        """
        rearrange: the left side has 2 axes, x has 3
          given:    "b (tp h) -> b h"
                    x of shape (2, 8, 3), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a tensor with 2 axes: b (tp h)
          try:      ... for axes that stay as they are
        """,
        good="b (tp h) ... -> b h ...",
        good_shape=(2, 8, 3),
        good_args={},
    ),
    Bad(
        "b s h ... -> b (tp s) h ...",
        (2, 8),
        {},
        """
        rearrange: the left side has 3 or more axes, x has 2
          given:    "b s h ... -> b (tp s) h ..."
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a tensor with 3 or more axes: b s h ...
          try:      a name for each axis of x
        """,
        good="b s ... -> b (tp s) ...",
        good_shape=(2, 8),
        good_args={},
    ),
    Bad(
        "b (tp h) -> b h",
        (2, 10),
        {},
        """
        rearrange: axis 1 of x, (tp h), cannot be split: tp=4, the length is 10
          given:    "b (tp h) -> b h"
                    x of shape (2, 10), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a length divisible by 4, got 10
          try:      pad the axis to 12
        """,
        good="b h -> b (tp h)",
        good_shape=(2, 10),
        good_args={},
    ),
    Bad(
        "b (x y) -> b y x",
        (2, 10),
        {"x": 4},
        """
        rearrange: axis 1 of x, (x y), cannot be split: x=4, the length is 10
          given:    "b (x y) -> b y x"
                    x of shape (2, 10), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a length divisible by 4, got 10
          try:      pad the axis to 12
        """,
        good="b (x y) -> b y x",
        good_shape=(2, 10),
        good_args={"x": 5},
    ),
    Bad(
        "b (x y) -> b y x",
        (2, 10),
        {},
        """
        rearrange: axis 1 of x, (x y), does not determine x and y
          given:    "b (x y) -> b y x"
                    x of shape (2, 10), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: sizes for all but one of x, y; together they are 10
          try:      rearrange(x, pattern, x=...)
        """,
        good="b (x y) -> b y x",
        good_shape=(2, 10),
        good_args={"y": 2},
    ),
    Bad(
        "b (x tp y) -> b x y",
        (2, 8),
        {},
        """
        rearrange: axis 1 of x, (x tp y), does not determine x and y
          given:    "b (x tp y) -> b x y"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: sizes for all but one of x, y; together they are 8
          try:      rearrange(x, pattern, x=...)
        """,
        good="b (x tp y) -> b x y",
        good_shape=(2, 8),
        good_args={"x": 2},
    ),
    Bad(
        "b h -> h b",
        (2, 8),
        {"h": 4},
        """
        rearrange: axis 1 of x, h, has another length: h=4, the length is 8
          given:    "b h -> h b"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: length 4, got 8
          try:      h=8
        """,
        good="b h -> h b",
        good_shape=(2, 8),
        good_args={"h": 8},
    ),
    Bad(
        "b (x y) -> b y x",
        (2, 10),
        {"x": 4, "y": 2},
        """
        rearrange: axis 1 of x, (x y), has another length: x=4 * y=2 = 8, the length is 10
          given:    "b (x y) -> b y x"
                    x of shape (2, 10), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: length 8, got 10
          try:      x=5
        """,
        good="b (x y) -> b y x",
        good_shape=(2, 10),
        good_args={"x": 5, "y": 2},
    ),
    Bad(
        "tp b h -> b h",
        (2, 3, 8),
        {},
        """
        rearrange: axis 0 of x, tp, has another length: tp=4, the length is 2
          given:    "tp b h -> b h"
                    x of shape (2, 3, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: length 4, got 2
          try:      (tp n): each of the 4 ranks has n of them
        """,
        good="tp b h -> b h",
        good_shape=(4, 2, 3),
        good_args={},
    ),
    Bad(
        "(dp tp) h -> h",
        (4, 3),
        {},
        """
        rearrange: axis 0 of x, (dp tp), has another length: dp=2 * tp=4 = 8, the length is 4
          given:    "(dp tp) h -> h"
                    x of shape (4, 3), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: length 8, got 4
          try:      (dp tp n): each of the 8 ranks has n of them
        """,
        good="(dp b) h -> b h",
        good_shape=(4, 3),
        good_args={},
    ),
    Bad(
        "b 1 h -> b h",
        (2, 2, 3),
        {},
        """
        rearrange: axis 1 of x, 1, has another length: 1 in the pattern, the length is 2
          given:    "b 1 h -> b h"
                    x of shape (2, 2, 3), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: length 1, got 2
          try:      a name for the axis
        """,
        good="b c h -> b c h",
        good_shape=(2, 2, 3),
        good_args={},
    ),
    Bad(
        "b (x y) -> b y x",
        (2, 0),
        {"x": 0},
        """
        rearrange: axis 1 of x, (x y), does not determine y
          given:    "b (x y) -> b y x"
                    x of shape (2, 0), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a size for each name of an axis of length 0
          try:      rearrange(x, pattern, y=...)
        """,
        good="b y -> y b",
        good_shape=(2, 0),
        good_args={},
    ),
    Bad(
        "b (model s) -> (tp b) s",
        (2, 16),
        {},
        """
        rearrange: the dims "model" and "tp" overlap: a rank's coords along them depend on each other
          given:    "b (model s) -> (tp b) s"
                    x of shape (2, 16), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: dims that are independent, as the dims of one factorisation are
          try:      one rearrange for "model" and another for "tp"
        """,
        good="b (model s) -> (dp b) s",
        good_shape=(2, 16),
        good_args={},
    ),
    Bad(
        "(ep t) e -> t (dp e)",
        (8, 2),
        {},
        """
        rearrange: the dims "ep" and "dp" overlap: a rank's coords along them depend on each other
          given:    "(ep t) e -> t (dp e)"
                    x of shape (8, 2), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: dims that are independent, as the dims of one factorisation are
          try:      one rearrange for "ep" and another for "dp"
        """,
        good="(ep t) e -> t (pp e)",
        good_shape=(8, 2),
        good_args={},
    ),
    Bad(
        "tp b h -> tp h b",
        (4, 2, 3),
        {},
        """
        rearrange: unclear whether to move data between ranks: "tp" keeps one neighbour and changes the other
          given:    "tp b h -> tp h b"
                    x of shape (4, 2, 3), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a dim whose neighbours are the same on both sides: it stays, nothing is sent;
                    or both different: it moves, all_to_all
          try:      two patterns, one that moves the dim and one that reorders the axes
        """,
        good="tp b h -> b tp h",
        good_shape=(4, 2, 3),
        good_args={},
    ),
    Bad(
        "(dp tp h) -> (tp dp h)",
        (8,),
        {},
        """
        rearrange: unclear whether to move data between ranks: "dp" and "tp" change places
          given:    "(dp tp h) -> (tp dp h)"
                    x of shape (8,), mesh pp=2 dp=2 tp=4 ep=8 model=8
          expected: a dim whose neighbours are the same on both sides: it stays, nothing is sent;
                    or both different: it moves, all_to_all
          try:      two patterns, one that moves the dim and one that reorders the axes
        """,
        good="(dp tp h) -> (dp tp h)",
        good_shape=(8,),
        good_args={},
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.pattern} {bad.args or ''}")
def test_bad_patterns_say_what_is_wrong(bad: Bad) -> None:
    with pytest.raises(PatternError) as caught:
        explain_pattern(bad.pattern, MESH, bad.shape, **bad.args)
    assert str(caught.value) == textwrap.dedent(bad.text).strip()
    assert explain_pattern(bad.good, MESH, bad.good_shape, **bad.good_args).text == bad.good


def test_there_are_enough_of_them() -> None:
    assert len(BAD) >= 25
    assert len({(str(bad.pattern), str(bad.args), bad.shape) for bad in BAD}) == len(BAD)


def test_a_pattern_alone_knows_no_mesh() -> None:
    with pytest.raises(PatternError) as caught:
        parse("b (h -> b h")
    assert str(caught.value) == textwrap.dedent(
        """\
        rearrange: "(" without ")" on the left
          given:    "b (h -> b h"
          expected: balanced parentheses
          try:      add ")\""""
    )


def test_without_a_shape_an_ellipsis_is_not_known() -> None:
    with pytest.raises(PatternError, match="how many axes an ellipsis stands for is not known without"):
        explain_pattern("... h -> ... (tp h)", MESH)
    assert explain_pattern("b h -> b (tp h)", MESH).shape is None
    with pytest.raises(LayoutError, match="is not a size"):
        explain_pattern("b h -> b (tp h)", {"tp": 0})


# -- on a tensor: everything is refused before anything is sent -----------------------------------


def silent() -> Callable[..., torch.Tensor]:
    """`mesh.rearrange` of a mesh whose communicators do not exist."""

    def explain(dims: Dims) -> Communicator:
        raise AssertionError(f"something would have been sent along {dims}")

    at = CommunicatorCache(explain)
    run = Rearranger(MESH, at, Functional(at), "rank 5 (pp=0 dp=1 tp=1)").run

    def rearrange(
        x: Any, pattern: Any, /, *, partial: Any = None, grad: Any = None, **sizes: Any
    ) -> torch.Tensor:
        return run(x, pattern, partial, grad, sizes)

    return rearrange


def refused(kind: type[MeshcommError], text: str, x: Any, pattern: Any, **args: Any) -> None:
    with pytest.raises(kind) as caught:
        silent()(x, pattern, **args)
    assert str(caught.value) == textwrap.dedent(text).strip()


X = torch.ones(2, 8)
G = torch.ones(2, 8, requires_grad=True)


def test_the_rank_stands_beside_shape_and_mesh() -> None:
    refused(
        PatternError,
        """
        rearrange: axis 1 of x, (tp h), cannot be split: tp=4, the length is 6
          given:    "b (tp h) -> b h"
                    x of shape (2, 6), mesh pp=2 dp=2 tp=4 ep=8 model=8, rank 5 (pp=0 dp=1 tp=1)
          expected: a length divisible by 4, got 6
          try:      pad the axis to 8
        """,
        torch.ones(2, 6),
        "b (tp h) -> b h",
    )


def test_not_a_tensor() -> None:
    refused(
        ShapeError,
        """
        rearrange needs a torch.Tensor, got list
          given:    list on rank 5 (pp=0 dp=1 tp=1)
          expected: a tensor, then a pattern
          try:      torch.as_tensor(x), or torch.stack(x) for a list of tensors
        """,
        [X],
        "b h -> h b",
    )


def test_what_no_cache_can_hold_is_refused_as_well() -> None:
    refused(
        PatternError,
        """
        rearrange: partial=['sum'] is not a reduction
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8, rank 5 (pp=0 dp=1 tp=1)
          expected: one of sum, avg, product, min, max; or None to keep this rank's slice
          try:      partial="sum"
        """,
        X,
        "b (tp h) -> b h",
        partial=["sum"],
    )
    refused(
        PatternError,
        """
        rearrange: h=[2] is not a size
          given:    "b (tp h) -> b h"
                    x of shape (2, 8), mesh pp=2 dp=2 tp=4 ep=8 model=8, rank 5 (pp=0 dp=1 tp=1)
          expected: a whole number, 0 or more
          try:      remove h=[2]
        """,
        X,
        "b (tp h) -> b h",
        h=[2],
    )


def test_a_gathered_gradient_is_never_guessed() -> None:
    refused(
        AutogradError,
        """
        rearrange: the gradient through the all_gather along "tp" is not determined
          given:    "b h -> b (tp h)" on rank 5 (pp=0 dp=1 tp=1)
                    x of shape (2, 8) with requires_grad=True, no grad=
          expected: grad="slice" where all ranks along the dim go on alike and compute one and the same loss,
                    grad="reduce_scatter" where they go on differently and their losses add up
          try:      grad="reduce_scatter" for what each rank uses on its own data or weights, grad="slice" otherwise
        """,
        G,
        "b h -> b (tp h)",
    )


def test_gradient_rules_are_checked_with_and_without_gradients() -> None:
    for x in (X, G):
        refused(
            AutogradError,
            """
            rearrange: no gradient rule 'sum'
              given:    grad='sum' for "b h -> b (tp h)" on rank 5 (pp=0 dp=1 tp=1)
              expected: "slice" or "reduce_scatter" for tp
              try:      grad="slice", or grad={"tp": "slice"}
            """,
            x,
            "b h -> b (tp h)",
            grad="sum",
        )
        refused(
            AutogradError,
            """
            rearrange: grad must have one rule for each gathered dim
              given:    grad={'tp': 'slice'} for "b h -> (dp b) (tp h)" on rank 5 (pp=0 dp=1 tp=1)
              expected: "slice" or "reduce_scatter" for dp, tp
              try:      grad="slice", or grad={"dp": "slice", "tp": "slice"}
            """,
            x,
            "b h -> (dp b) (tp h)",
            grad={"tp": "slice"},
        )
        refused(
            PatternError,
            """
            rearrange: grad='slice' has no effect: no mesh dim is on the right only
              given:    "b (tp h) -> b h" on rank 5 (pp=0 dp=1 tp=1)
              expected: a gathered dim; the gradients of all others are determined
              try:      remove grad='slice'
            """,
            x,
            "b (tp h) -> b h",
            grad="slice",
        )


def test_a_reduction_without_a_gradient() -> None:
    refused(
        AutogradError,
        """
        rearrange: partial="max" has no gradient
          given:    "b (tp h) -> b h" on rank 5 (pp=0 dp=1 tp=1)
                    x of shape (2, 8) with requires_grad=True
          expected: partial="sum" or partial="avg", or a tensor without gradients
          try:      x.detach()
        """,
        G,
        "b (tp h) -> b h",
        partial="max",
    )


def test_what_is_local_needs_no_communicator() -> None:
    rearrange = silent()
    assert torch.equal(rearrange(X, "b (x y) -> (b y) x", x=2), X.reshape(2, 2, 4).mT.reshape(8, 2))
    assert rearrange(G, "b (tp h) -> (tp h) b").requires_grad
    # An axis may have the name of a parameter.
    assert rearrange(X, "pattern (x self) -> pattern x self", x=4).shape == (2, 4, 2)
