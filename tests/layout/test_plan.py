"""The plan: which groups are one, their order, labels and fingerprint."""

from __future__ import annotations

import math
import random

import pytest

from meshcomm.errors import UnknownDim
from meshcomm.layout import GroupOptions, Layout, Plan
from tests.layout.test_layout import random_layout


def test_equal_ranks_and_options_are_one_group() -> None:
    layout = Layout(
        {"pp": 2, "dp": 2, "cp": 1, "tp": 2},
        merge={"grad": ("dp", "cp"), "model": ("pp", "tp"), "turned": ("tp", "pp"), "half": ("dp", "tp")},
        views={"expert": {"pp": 2, "ep": 4}},
    )
    plan = Plan(layout)
    shares = {family.name: family.shares for family in plan.families}
    assert shares == {
        "pp": None,
        "dp": None,
        "cp": None,
        "tp": None,
        "grad": "dp",
        "model": None,
        "turned": None,  # the same ranks in another order, so other coords
        "half": None,
        "ep": "half",
    }
    creating = [family.name for family in plan.families if family.creates]
    assert creating == ["pp", "dp", "tp", "model", "turned", "half"]
    own_lane = Plan(
        layout, options={"grad": GroupOptions(comm_id="overlap"), "ep": GroupOptions(timeout_s=5.0)}
    )
    assert own_lane.family("grad").shares is None
    assert own_lane.family("ep").shares is None


def test_sharing_is_decided_by_the_ranks_themselves() -> None:
    """Two names share a communicator exactly if all their groups are equal, element for element."""
    rng = random.Random(3)
    for _ in range(60):
        dims, order = random_layout(rng)
        names = list(dims)
        merge = {
            f"m{i}": tuple(rng.sample(names, rng.randint(2, len(names)))) for i in range(3) if len(names) > 1
        }
        layout = Layout(dims, order, merge=merge)
        for family in Plan(layout).families:
            if family.size == 1:
                continue
            same = [
                other.name
                for other in Plan(layout).families
                if other.size == family.size
                and layout.groups(other.name).tolist() == layout.groups(family.name).tolist()
            ]
            assert family.shares == (None if same[0] == family.name else same[0])


@pytest.mark.parametrize("seed", range(20))
def test_a_group_s_label_is_that_of_no_other_group_of_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    dims, order = random_layout(rng)
    names, world = list(dims), math.prod(dims.values())
    merge = {f"m{i}": tuple(rng.sample(names, rng.randint(2, len(names)))) for i in range(3) if names[1:]}
    views = {view: {f"{view}x": math.gcd(world, rng.randint(2, 12)), f"{view}y": -1} for view in "vw"}
    labels = [group.label for group in Plan(Layout(dims, order, merge=merge, views=views)).groups()]
    assert len(labels) == len(set(labels)) and (labels or world == 1)


def test_the_plan_lists_every_group_once_in_one_order() -> None:
    plan = Plan(Layout({"pp": 2, "dp": 2, "tp": 2}, merge={"model": ("pp", "tp")}))
    groups = list(plan.groups())
    assert [(group.name, group.index) for group in groups] == [
        *[(name, index) for name in ("pp", "dp", "tp") for index in range(4)],
        ("model", 0),
        ("model", 1),
    ]
    for rank in range(8):
        mine = plan.for_rank(rank)
        assert list(mine.groups) == [group for group in groups if rank in group.ranks]
        for group in mine.groups:
            assert group.coords == {n: c for n, c in mine.coords.items() if n not in group.dims}
            assert plan.layout.coord(rank, group.name) == group.ranks.index(rank)


def test_the_fingerprint_sees_all_that_must_agree() -> None:
    base = Layout({"pp": 2, "dp": 2, "tp": 2})
    variants = [
        Plan(base),
        Plan(Layout({"pp": 2, "tp": 2, "dp": 2})),
        Plan(Layout({"pp": 4, "dp": 1, "tp": 2})),
        Plan(Layout({"pp": 2, "dp": 2, "tp": 2}, rank_order=[1, 0, 2, 3, 4, 5, 6, 7])),
        Plan(Layout({"pp": 2, "dp": 2, "tp": 2}, merge={"model": ("pp", "tp")})),
        Plan(Layout({"pp": 2, "dp": 2, "tp": 2}, views={"e": {"ep": 8}})),
        Plan(base, GroupOptions(timeout_s=5.0)),
        Plan(base, options={"tp": GroupOptions(backend="gloo")}),
        Plan(base, options={"tp": GroupOptions(comm_id="a")}),
        Plan(base, options={"tp": GroupOptions(extra=(("high_priority", True),))}),
        Plan(base, device="cpu"),
    ]
    assert len({plan.fingerprint for plan in variants}) == len(variants)
    assert Plan(Layout({"pp": 2, "dp": 2, "tp": 2})).fingerprint == variants[0].fingerprint
    # The value is fixed, because old and new processes refuse each other if it changes. Change it only on purpose.
    assert variants[0].fingerprint == "597cebf28fd063f1"


def test_a_plan_at_131072_ranks_enumerates_nothing() -> None:
    plan = Plan(Layout({"pp": 8, "dp": 2048, "tp": 8}))
    mine = plan.for_rank(77_777)
    assert mine.coords == {"pp": 4, "dp": 1530, "tp": 1}
    assert [len(group.ranks) for group in mine.groups] == [8, 2048, 8]
    assert mine.groups[1].ranks[1530] == 77_777


def test_the_family_that_covers_dims() -> None:
    plan = Plan(Layout({"pp": 2, "dp": 2, "tp": 2}, merge={"model": ("dp", "tp")}))
    for dims, name in (("tp", "tp"), (("dp", "tp"), "model"), ("model", "model"), (("pp", "tp"), None)):
        found = plan.covering(dims)
        assert (found and found.name) == name
    with pytest.raises(UnknownDim):
        plan.covering("ep")
