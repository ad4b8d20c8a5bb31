"""The `[mesh]` section: its plan and its options, and meshes in the notation of Megatron-Core and torchtitan."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from meshcomm.config import DimOptions, MeshConfig
from meshcomm.errors import ConfigError
from meshcomm.layout import GroupOptions, Layout


def by_order(sizes: dict[str, int], order: list[str], wanted: str) -> list[list[int]]:
    """Megatron's rule: ranks in a group differ only in the wanted dims. The first dim of the order changes fastest."""
    place = {}
    for rank in range(math.prod(sizes.values())):
        rest, coords = rank, {}
        for name in order:
            rest, coords[name] = divmod(rest, sizes[name])
        key = tuple(coords[name] for name in order if name not in wanted.split("-"))
        place.setdefault(key, []).append(rank)
    return sorted(place.values())


def groups(layout: Layout, name: str) -> list[list[int]]:
    return sorted(map(sorted, layout.groups(name).tolist()))


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "cp-tp-dp-ep-pp", "tp-pp-cp-ep-dp"])
def test_megatrons_orders(order: str) -> None:
    names, checked = order.split("-"), 0
    for tp, cp, pp, ep, etp in itertools.product([1, 2], [1, 2], [1, 2], [2, 4], [None, 1, 2]):
        own = tp if etp is None else etp
        world = tp * cp * pp * ep * own * 2
        dense = {"tp": tp, "cp": cp, "pp": pp, "ep": 1, "dp": world // (tp * cp * pp)}
        expert = {"tp": own, "cp": 1, "pp": pp, "ep": ep, "dp": world // (own * ep * pp)}
        merge = {"dp_cp": ("dp", "cp"), "mp": ("pp", "tp")}
        mesh = MeshConfig.from_megatron(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order, merge=merge)
        if by_order(dense, names, "pp") != by_order(expert, names, "pp"):
            # Megatron refuses it, too.
            with pytest.raises(ConfigError, match='share the dim "pp"'):
                mesh.layout(world)
            continue
        layout = mesh.layout(world)
        for name, tokens in {
            "tp": "tp",
            "cp": "cp",
            "dp": "dp",
            "pp": "pp",
            "dp_cp": "dp-cp",
            "mp": "tp-pp",
        }.items():
            assert groups(layout, name) == by_order(dense, names, tokens), (order, name)
        for name, tokens in {"etp": "tp", "ep": "ep", "edp": "dp"}.items():
            assert groups(layout, name) == by_order(expert, names, tokens), (order, name)
        checked += 1
    assert checked >= 24


def test_a_mesh_of_megatron_without_experts() -> None:
    mesh = MeshConfig.from_megatron(tp=2, order="tp-pp-dp", timeout_s=30)
    assert mesh.dims == {"cp": 1, "dp": -1, "pp": 1, "tp": 2} and not mesh.views and mesh.timeout_s == 30


@pytest.mark.parametrize("order", ["tp-dp-xp", "tp-tp-dp", "", 3])
def test_what_is_no_order_of_megatron(order: str) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)order: not an order.*given: .*expected: some of tp, cp, ep, dp, pp"
    ):
        MeshConfig.from_megatron(tp=2, order=order)


def test_torchtitans_dims() -> None:
    for pp, rows, shard, cp, tp, ep in itertools.product([1, 2], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2]):
        world = pp * rows * shard * cp * tp
        if (shard * cp * tp) % ep:
            continue
        dims = SimpleNamespace(
            pp=pp, dp_replicate=rows, dp_shard=shard, cp=cp, tp=tp, ep=ep, world_size=world
        )
        layout = MeshConfig.from_parallel_dims(dims, timeout_s=30).layout(world)
        grid = np.arange(world)
        dense, sparse = grid.reshape(pp, rows, shard, cp, tp), grid.reshape(pp, rows, -1, ep)
        expected = {
            "batch": dense.transpose(0, 3, 4, 1, 2).reshape(-1, rows * shard),
            "loss": dense.transpose(0, 4, 1, 2, 3).reshape(-1, rows * shard * cp),
            "fsdp": dense.transpose(0, 1, 4, 2, 3).reshape(-1, shard * cp),
            "tp": dense.reshape(-1, tp),
        }
        if ep > 1:
            expected["ep"] = sparse.reshape(-1, ep)
            expected["efsdp"] = sparse.transpose(0, 1, 3, 2).reshape(-1, sparse.shape[2])
        for name, ranks in expected.items():
            assert groups(layout, name) == sorted(ranks.tolist()), name


def test_options_of_a_group() -> None:
    mesh = MeshConfig(
        dims={"pp": 2, "tp": 2},
        device="cuda",
        backend="nccl",
        timeout_s=5,
        options={
            "pp": DimOptions(high_priority=True, max_ctas=4),
            "tp": DimOptions(backend="gloo", timeout_s=7, comm_id="l"),
        },
    )
    pp, tp = mesh.plan(None).families
    assert pp.options == GroupOptions("nccl", 5.0, "", (("high_priority", True), ("max_ctas", 4)))
    assert tp.options == GroupOptions("gloo", 7.0, "l")


def test_a_mesh_on_some_ranks_of_the_world() -> None:
    mesh = MeshConfig(dims={"dp": -1, "tp": 2}, ranks=(2, 3, 6, 7))
    for world in (None, 8, 100):
        layout = mesh.layout(world)
        assert layout.world_size == 4
        assert layout.groups("tp").tolist() == [[2, 3], [6, 7]]
        assert 0 not in layout
        assert 6 in layout
    turned = MeshConfig(dims={"dp": 2, "tp": 2}, ranks=(2, 3, 6, 7), rank_order=(7, 6, 3, 2))
    assert turned.layout(8).groups("tp").tolist() == [[7, 6], [3, 2]]


def test_a_rank_order_gives_the_size_of_an_open_mesh() -> None:
    mesh = MeshConfig(dims={"dp": -1, "tp": 2}, rank_order=(5, 4, 3, 2, 1, 0))
    assert mesh.sizes(None) == mesh.sizes(6) == {"dp": 3, "tp": 2}
