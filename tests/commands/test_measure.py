"""The measurements behind `meshcomm bench`: bandwidths, dims that are measured, and the order of rounds."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from meshcomm.commands.measure import Item, chosen_dims, in_turn, items, row_facts
from meshcomm.config import load_config
from meshcomm.errors import ConfigError, UnknownDim
from meshcomm.layout import Plan
from meshcomm.predict.times import COUNTED, OPERATIONS, Operation


def test_bandwidths_by_hand() -> None:
    # 4 ranks, 3 MB in 2 ms: the algorithm bandwidth is 1.5 GB/s, and the bus bandwidth is half as much again.
    facts = row_facts("dp", 4, "all_reduce", 3_000_000, 7, ([0.001, 0.002, 0.009], [0.004, 0.001, 0.006]))
    ours, theirs = facts["meshcomm"], facts["torch"]
    assert (ours["seconds"], ours["least_s"], ours["most_s"]) == (0.002, 0.001, 0.009)
    assert (ours["algbw_gbytes_s"], ours["busbw_gbytes_s"]) == (pytest.approx(1.5), pytest.approx(2.25))
    assert theirs["busbw_gbytes_s"] == pytest.approx(2.25 / 2)
    # The rounds' ratios are 0.25, 2 and 1.5. The ratio of the medians would be 0.5.
    assert facts["ratio"] == pytest.approx(1.5)
    assert set(OPERATIONS) == set(COUNTED) == set(get_args(Operation))


def plan(**mesh: Any) -> Plan:
    return load_config({"mesh": {"device": "cpu", **mesh}}).plan(None).on("cpu", "gloo")


def test_dims_are_measured_once_and_the_others_are_named() -> None:
    several = plan(
        dims={"pp": 1, "dp": 2, "tp": 2},
        merge={"model": ["pp", "tp"], "all": ["dp", "tp"]},
        views={"expert": {"edp": 1, "ep": 4}},
    )
    found, skipped = chosen_dims(several, ())
    assert [family.name for family in found] == ["dp", "tp", "all"]
    assert {each.dim: each.why for each in skipped} == {
        "pp": "one rank: nothing moves",
        "model": "it shares the groups of tp",
        "edp": "one rank: nothing moves",
        "ep": "it shares the groups of all",
    }
    found, skipped = chosen_dims(several, ["model"])
    assert [family.name for family in found] == ["model"] and skipped == []
    with pytest.raises(UnknownDim, match=r"no dim 'tpp'\n(.*\n)*.*did you mean"):
        chosen_dims(several, ["tpp"])
    with pytest.raises(ConfigError, match=r"two ranks or more\n.*pp = 1.*--dim pp\n(.*\n)*.*leave --dim out"):
        chosen_dims(several, ["pp"])
    three = plan(dims={"dp": 3})
    # 4,097 and 4,096 bytes are rounded to the same three parts.
    assert items(chosen_dims(three, ())[0], ["all_gather", "reduce"], [4097, 8, 4096][::2]) == [
        Item("dp", "all_gather", 4092),
        Item("dp", "reduce", 4096),
    ]


def test_rounds_go_forwards_and_backwards_and_the_device_is_waited_for() -> None:
    said: list[str] = []
    ways = {"a": lambda: said.append("a"), "b": lambda: said.append("b")}
    found = in_turn(ways, 2, 2, align=lambda: said.append("|"), finish=lambda: said.append("."))
    assert "".join(said) == "|bb.|aa." + "|aa.|bb." + "|bb.|aa."
    assert {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}
