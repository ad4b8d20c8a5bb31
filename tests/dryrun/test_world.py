"""Which ranks stand for all."""

from __future__ import annotations

import pytest

from meshcomm.dryrun.world import WHOLE, chosen
from meshcomm.layout import Layout


def test_a_small_world_is_run_whole() -> None:
    assert chosen(Layout({"dp": 4, "tp": 4})) == list(range(WHOLE))


def test_every_stage_the_ends_and_middles_of_each_dim_and_the_corners() -> None:
    layout = Layout({"pp": 16, "dp": 64, "tp": 8}, views={"expert": {"pp": 16, "edp": 8, "ep": 8, "tp": 8}})
    ranks = chosen(layout, "pp", sample=0)
    coords = [layout.coords(rank) for rank in ranks]
    assert {at["pp"] for at in coords} == set(range(16))
    for dim in ("dp", "tp"):
        assert {0, layout.size(dim) // 2, layout.size(dim) - 1} <= {at[dim] for at in coords}
    for pp in (0, 15):
        for dp in (0, 63):
            for tp in (0, 7):
                assert layout.get_rank(pp=pp, dp=dp, tp=tp) in ranks
    assert {layout.coord(rank, "ep") for rank in ranks} >= {0, 4, 7}
    assert len(ranks) < 40


def test_a_sample_and_what_is_asked_for() -> None:
    layout = Layout({"dp": 1024, "tp": 8})
    plain, more = chosen(layout, sample=0), chosen(layout, sample=5, also=[4321])
    assert set(plain) < set(more) and 4321 in more and len(more) == len(plain) + 6
    assert more == chosen(layout, sample=5, also=[4321])


@pytest.mark.parametrize("order", [None, list(range(31, -1, -1))])
def test_ranks_in_another_order(order: list[int] | None) -> None:
    layout = Layout({"dp": 8, "tp": 4}, rank_order=order)
    ranks = chosen(layout, sample=0)
    assert ranks == sorted(ranks) and layout.get_rank(dp=7, tp=3) in ranks
