"""A recipe as text, and what it sends."""

from __future__ import annotations

from meshcomm.pattern import explain_pattern

SHOWN = """\
(dp b) s (tp h) d -> (pp b) (tp s) h d    on mesh pp=2 dp=2 tp=4
  pp: gathered from all ranks along it
  dp: reduced over the ranks along it, this rank's slice is kept
  tp: moves: slices are exchanged between all ranks along it
  step                                            axes               shape          each rank sends
  x                                               (dp b) s (tp h) d  (4, 3, 8, 5)
  reduce_scatter (sum) along dp, axis 0           b s (tp h) d       (2, 3, 8, 5)   240
  all_to_all along tp, split axis 2, join axis 1  b (tp s) h d       (2, 12, 2, 5)  3 x 60 = 180
  all_gather along pp, axis 0                     (pp b) (tp s) h d  (4, 12, 2, 5)  240
  sent by each rank: 660 elements, times the bytes per element"""


def test_a_recipe_as_text() -> None:
    pattern = "(dp b) s (tp h) d -> (pp b) (tp s) h d"
    dims = {"pp": 2, "dp": 2, "tp": 4}
    assert str(explain_pattern(pattern, dims, (4, 3, 8, 5), partial="sum")) == SHOWN
    without_shape = str(explain_pattern(pattern, dims, partial="sum")).splitlines()
    assert without_shape[:4] == SHOWN.splitlines()[:4]
    sent = ("1 x b*s*tp*h*d", "3 x b*s*h*d", "1 x b*tp*s*h*d")
    assert all(line.endswith(each) for line, each in zip(without_shape[6:], sent, strict=True))
    assert str(explain_pattern("a b -> b a", dims)).splitlines()[0] == "a b -> b a    on each rank separately"


def test_what_is_sent_is_least() -> None:
    dims = {"pp": 2, "dp": 2, "tp": 4}
    # Steps that shrink the tensor come before steps that grow it.
    assert explain_pattern("b (tp h) -> (dp b) h", dims, (3, 8)).sent == 6
    assert explain_pattern("b (tp h) -> (dp b) h", dims, (3, 8), partial="sum").sent == 18 + 6
    # Ranks along inner dims are close, so these dims carry the larger share of a sum over two dims.
    recipe = explain_pattern("(dp tp a) -> a", dims, (16,), partial="sum")
    assert [step.dim for step in recipe.steps if step.kind == "reduce_scatter"] == ["tp", "dp"]
    recipe = explain_pattern("a -> (tp dp a)", dims, (16,))
    assert [step.dim for step in recipe.steps if step.kind == "all_gather"] == ["dp", "tp"]
