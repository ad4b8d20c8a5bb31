"""Errors for wrong patterns: each describes the mistake and a fix, and a similar pattern is accepted."""

from __future__ import annotations

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

MESH = Layout(
    {"pp": 2, "dp": 2, "tp": 4},
    merge={"model": ("pp", "tp")},
    views={"expert": {"pp": 2, "ep": 8}},
)


# A refused pattern | the tensor's shape | sizes and partial. Below: a text of the error, its suggestion, and a pattern that
# is accepted.
BAD = """
b s h | 2 3 4 |
    no "->"
    try: "b s h -> b s h", and then change the right side
    good: b s h -> b s (tp h) | 2 3 4 |
b -> s -> h | 2 |
    2 times "->"
    try: one rearrange for each arrow
    good: b -> b | 2 |
b, h -> b h | 2 3 |
    unknown character ',', on the left
    try: spaces between names, without ','
    good: b h -> b h | 2 3 |
b (s (tp h)) -> b s h | 2 8 |
    axis composition is one-level (brackets inside brackets not allowed), on the left
    try: leave out the inner parentheses: (a b c) is row-major already
    good: b (s tp h) -> b s h | 2 8 | s=1
b tp h) -> b h | 2 8 |
    brackets are not balanced, on the left
    try: add "("
    good: b (tp h) -> b h | 2 8 |
b (tp h -> b h | 2 8 |
    imbalanced parentheses, on the left
    try: add ")"
    good: b (tp h) -> b h | 2 8 |
b 2h -> b 2h | 2 8 |
    invalid axis identifier: 2h, on the left
    try: letters, digits and inner underscores, not starting with a digit, as in "h2"
    good: b h2 -> b h2 | 2 8 |
b h_ -> b h_ | 2 8 |
    invalid axis identifier: h_, on the left
    try: letters, digits and inner underscores, not starting with a digit, as in "h2"
    good: b h -> b h | 2 8 |
b (2 h) -> b h 2 | 2 8 |
    the number 2 as an axis, on the left
    try: a name and its size: rearrange(x, "... n ...", n=2)
    good: b (n h) -> b h n | 2 8 | n=2
b b -> b | 2 2 |
    indexing expression contains duplicate dimension "b", on the left
    try: another name for one of them, as in "b2"
    good: b c -> c b | 2 2 |
b h -> tp b (tp h) | 2 2 |
    indexing expression contains duplicate dimension "tp", on the right
    try: another name for one of them, as in "tp2"
    good: b h -> tp b h | 2 2 |
... b ... -> b ... | 2 2 |
    expression may contain dots only inside ellipsis (...); only one ellipsis for tensor, on the left
    try: one ... and names for the other axes
    good: ... b -> b ... | 2 2 |
b ... -> b | 2 2 |
    an ellipsis on the left only
    try: ... on the right, or a name for each axis
    good: b ... -> ... b | 2 2 |
b -> b ... | 2 |
    an ellipsis on the right only
    try: ... on the left, or a name for each axis
    good: b ... -> ... b | 2 |
(b ...) -> b ... | 4 |
    an ellipsis in parentheses on the left
    try: ... without the parentheses, or a name for each axis
    good: b ... -> (b ...) | 4 |
b . h -> b h | 2 2 |
    expression may contain dots only inside ellipsis (...), on the left
    try: one ... and names for the other axes
    good: b ... h -> b ... h | 2 2 |
b s h -> b s | 2 3 4 |
    axis "h" is on the left only, and the mesh has no dim of that name
    try: einops.reduce for a reduction over "h", or "h" on the right
    good: b s tp -> b s | 2 3 4 |
b s h -> b s (tq h) | 2 3 4 |
    axis "tq" is on the right only, and the mesh has no dim of that name
    try: did you mean "tp"?
    good: b s h -> b s (tp h) | 2 3 4 |
b s -> b s k | 2 3 |
    axis "k" is on the right only, and the mesh has no dim of that name
    try: einops.repeat for a new axis "k", or 1 for an axis of length 1
    good: b s -> b s 1 | 2 3 |
b s h -> b s (tp h) | 2 3 4 | partial='sum'
    partial="sum" has no effect: no mesh dim is on the left only
    try: remove partial="sum", or put the dim on the left: "(tp h) ... -> h ..."
    good: b s (tp h) -> b s h | 2 3 4 | partial='sum'
b (tp h) -> b h | 2 8 | partial='mean'
    partial='mean' is not a reduction
    try: partial="avg"
    good: b (tp h) -> b h | 2 8 | partial='avg'
b (tp h) -> b h | 2 8 | partial='maxx'
    partial='maxx' is not a reduction
    try: partial="max"
    good: b (tp h) -> b h | 2 8 | partial='max'
b (tp h) -> b h | 2 8 | w=2
    a size for "w", which the pattern does not have
    try: remove w=2
    good: b (tp h) -> b h | 2 8 | h=2
b (tp h) -> b h | 2 8 | h=2.0
    h=2.0 is not a size
    try: h=2
    good: b (tp h) -> b h | 2 8 | h=2
b (tp h) -> b h | 2 8 | h=-1
    h=-1 is not a size
    try: remove h=-1
    good: b (tp h) -> b h | 2 8 | h=2
b (tp h) -> b h | 2 8 | tp=2
    tp=2, but "tp" is a dim of the mesh and has size 4
    try: remove tp=2
    good: b (tp h) -> b h | 2 8 | tp=4
b (tp h) -> b h | 2 8 3 |
    the left side has 2 axes, x has 3
    try: ... for axes that do not change
    good: b (tp h) ... -> b h ... | 2 8 3 |
b s h ... -> b (tp s) h ... | 2 8 |
    the left side has 3 or more axes, x has 2
    try: a name for each axis of x
    good: b s ... -> b (tp s) ... | 2 8 |
b (tp h) -> b h | 2 10 |
    axis 1 of x, (tp h), cannot be split: tp=4, the length is 10
    try: pad the axis to 12
    good: b h -> b (tp h) | 2 10 |
b (x y) -> b y x | 2 10 | x=4
    axis 1 of x, (x y), cannot be split: x=4, the length is 10
    try: pad the axis to 12
    good: b (x y) -> b y x | 2 10 | x=5
b (x y) -> b y x | 2 10 |
    axis 1 of x, (x y), does not determine x and y
    try: rearrange(x, pattern, x=...)
    good: b (x y) -> b y x | 2 10 | y=2
b (x tp y) -> b x y | 2 8 |
    axis 1 of x, (x tp y), does not determine x and y
    try: rearrange(x, pattern, x=...)
    good: b (x tp y) -> b x y | 2 8 | x=2
b h -> h b | 2 8 | h=4
    axis 1 of x, h, has a different length: h=4, the length is 8
    try: h=8
    good: b h -> h b | 2 8 | h=8
b (x y) -> b y x | 2 10 | x=4, y=2
    axis 1 of x, (x y), has a different length: x=4 * y=2 = 8, the length is 10
    try: x=5
    good: b (x y) -> b y x | 2 10 | x=5, y=2
tp b h -> b h | 2 3 8 |
    axis 0 of x, tp, has a different length: tp=4, the length is 2
    try: (tp n): each of the 4 ranks has n of them
    good: tp b h -> b h | 4 2 3 |
(dp tp) h -> h | 4 3 |
    axis 0 of x, (dp tp), has a different length: dp=2 * tp=4 = 8, the length is 4
    try: (dp tp n): each of the 8 ranks has n of them
    good: (dp b) h -> b h | 4 3 |
b 1 h -> b h | 2 2 3 |
    axis 1 of x, 1, has a different length: 1 in the pattern, the length is 2
    try: a name for the axis
    good: b c h -> b c h | 2 2 3 |
b (x y) -> b y x | 2 0 | x=0
    axis 1 of x, (x y), does not determine y
    try: rearrange(x, pattern, y=...)
    good: b y -> y b | 2 0 |
b (model s) -> (tp b) s | 2 16 |
    the dims "model" and "tp" overlap: a rank's coords along them depend on each other
    try: one rearrange for "model" and another for "tp"
    good: b (model s) -> (dp b) s | 2 16 |
(ep t) e -> t (dp e) | 8 2 |
    the dims "ep" and "dp" overlap: a rank's coords along them depend on each other
    try: one rearrange for "ep" and another for "dp"
    good: (ep t) e -> t (pp e) | 8 2 |
tp b h -> tp h b | 4 2 3 |
    unclear whether to move data between ranks: "tp" keeps one neighbor and changes the other
    try: two patterns, one that moves the dim and one that reorders the axes
    good: tp b h -> b tp h | 4 2 3 |
(dp tp h) -> (tp dp h) | 8 |
    unclear whether to move data between ranks: "dp" and "tp" swap places
    try: two patterns, one that moves the dim and one that reorders the axes
    good: (dp tp h) -> (dp tp h) | 8 |
"""


@dataclass(frozen=True)
class Asked:
    """A pattern, the shape of its tensor, and further arguments."""

    pattern: str
    shape: tuple[int, ...]
    args: dict[str, Any]

    @staticmethod
    def read(line: str) -> Asked:
        pattern, shape, args = (part.strip() for part in f"{line} ".split(" |"))
        return Asked(pattern, tuple(map(int, shape.replace("-", "").split())), eval(f"dict({args})"))


def table() -> list[tuple[Asked, str, str, Asked]]:
    lines = BAD.strip().splitlines()
    found = []
    for bad, what, way, good in zip(lines[::4], lines[1::4], lines[2::4], lines[3::4], strict=True):
        way, good = way.strip().removeprefix("try: "), good.strip().removeprefix("good: ")
        found.append((Asked.read(bad), what.strip(), way, Asked.read(good)))
    return found


@pytest.mark.parametrize(("bad", "what", "way", "good"), table())
def test_bad_patterns_say_what_is_wrong(bad: Asked, what: str, way: str, good: Asked) -> None:
    with pytest.raises(PatternError) as caught:
        explain_pattern(bad.pattern, MESH, bad.shape, **bad.args)
    said = " ".join(str(caught.value).split())
    assert said.startswith(
        f'rearrange: {what} given: "{bad.pattern}" x of shape {bad.shape}, mesh pp=2 dp=2 '
    )
    assert said.endswith(f" try: {way}")
    assert explain_pattern(good.pattern, MESH, good.shape, **good.args).text == good.pattern


def test_a_pattern_is_a_text() -> None:
    with pytest.raises(PatternError, match=r"the pattern is not a string\n  given:    int 7\n"):
        explain_pattern(7, MESH, (2,))  # type: ignore[arg-type]


def test_without_a_shape_an_ellipsis_is_not_known() -> None:
    with pytest.raises(PatternError, match="the number of axes of an ellipsis is not known without"):
        explain_pattern("... h -> ... (tp h)", MESH)
    assert explain_pattern("b h -> b (tp h)", MESH).shape is None
    with pytest.raises(LayoutError, match="is not a size"):
        explain_pattern("b h -> b (tp h)", {"tp": 0})


# -- on a tensor: everything is refused before anything is sent -----------------------------------


def silent(mesh: Layout = MESH) -> Callable[..., torch.Tensor]:
    """`mesh.rearrange` on a mesh without communicators."""

    def explain(dims: Dims) -> Communicator:
        raise AssertionError(f"something would have been sent along {dims}")

    at = CommunicatorCache(explain)
    run = Rearranger(mesh, at, Functional(at, object), "rank 5 (pp=0 dp=1 tp=1)").run

    def rearrange(
        x: Any, pattern: Any, /, *, partial: Any = None, grad: Any = None, **sizes: Any
    ) -> torch.Tensor:
        return run(x, pattern, partial, grad, sizes)

    return rearrange


AT = "rank 5 (pp=0 dp=1 tp=1)"


def refused(kind: type[MeshcommError], what: str, x: Any, pattern: Any, *, way: str, **args: Any) -> None:
    with pytest.raises(kind) as caught:
        silent()(x, pattern, **args)
    error = caught.value
    assert error.what == what and AT in error.given and error.hint is not None and way in error.hint


X = torch.ones(2, 8)
G = torch.ones(2, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "what", "x", "pattern", "args", "way"),
    [
        (
            PatternError,
            "rearrange: axis 1 of x, (tp h), cannot be split: tp=4, the length is 6",
            torch.ones(2, 6),
            "b (tp h) -> b h",
            {},
            "pad the axis to 8",
        ),
        (ShapeError, "rearrange needs a torch.Tensor, got list", [X], "b h -> h b", {}, "torch.stack(x)"),
        # Values that cannot be cache keys.
        (
            PatternError,
            "rearrange: partial=['sum'] is not a reduction",
            X,
            "b (tp h) -> b h",
            {"partial": ["sum"]},
            'partial="sum"',
        ),
        (PatternError, "rearrange: h=[2] is not a size", X, "b (tp h) -> b h", {"h": [2]}, "remove h=[2]"),
        # The gradient of a gather must be given. A reduction may have no gradient.
        (
            AutogradError,
            'rearrange: the gradient through the all_gather along "tp" is not determined',
            G,
            "b h -> b (tp h)",
            {},
            'grad="slice" otherwise',
        ),
        (
            AutogradError,
            'rearrange: partial="max" has no gradient',
            G,
            "b (tp h) -> b h",
            {"partial": "max"},
            "x.detach()",
        ),
    ],
)
def test_what_a_tensor_is_refused_for(
    kind: type[MeshcommError], what: str, x: Any, pattern: str, args: dict[str, Any], way: str
) -> None:
    refused(kind, what, x, pattern, way=way, **args)


@pytest.mark.parametrize("x", [X, G], ids=["plain", "needs gradients"])
def test_gradient_rules_are_checked_with_and_without_gradients(x: torch.Tensor) -> None:
    what = "rearrange: no gradient rule 'sum'"
    refused(AutogradError, what, x, "b h -> b (tp h)", grad="sum", way='grad={"tp": "slice"}')
    what, way = (
        "rearrange: grad must have one rule for each gathered dim",
        'grad={"dp": "slice", "tp": "slice"}',
    )
    refused(AutogradError, what, x, "b h -> (dp b) (tp h)", grad={"tp": "slice"}, way=way)
    what = "rearrange: grad='slice' has no effect: no mesh dim is on the right only"
    refused(PatternError, what, x, "b (tp h) -> b h", grad="slice", way="remove grad='slice'")


def test_what_is_local_needs_no_communicator() -> None:
    rearrange = silent()
    assert torch.equal(rearrange(X, "b (x y) -> (b y) x", x=2), X.reshape(2, 2, 4).mT.reshape(8, 2))
    assert rearrange(G, "b (tp h) -> (tp h) b").requires_grad
    # An axis may be named like a parameter.
    assert rearrange(X, "pattern (x self) -> pattern x self", x=4).shape == (2, 4, 2)
