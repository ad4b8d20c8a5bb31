"""Groups of a mesh: when torch splits the default group, and the options that torch gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshcomm.config.mesh import DimOptions, MeshConfig
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import groups
from meshcomm.mesh.source import MeshOnly
from meshcomm.transport import SoloTransport


@pytest.mark.parametrize(
    ("default", "bound", "splits"),
    [("nccl", "cuda:0", True), ("gloo", "cuda:0", False), ("nccl", None, False)],
)
def test_only_a_bound_default_group_of_nccl_is_split(
    default: str, bound: str | None, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "default_group", lambda: None)
    monkeypatch.setattr(groups, "backend_of", lambda group: default)
    monkeypatch.setattr(groups, "bound_device", lambda: bound and torch.device(bound))
    plan = MeshOnly(MeshConfig(dims={"dp": 2, "tp": 2})).plan(4).on("cuda", "nccl")
    made: list[bool] = []
    solo = SoloTransport(torch.device("cpu"), "gloo")
    monkeypatch.setattr(groups.GroupMaker, "open", lambda maker, group, split: made.append(split) or solo)
    meeting: Any = SimpleNamespace(world_size=4)
    held: Any = None
    maker = groups.GroupMaker(meeting, torch.device("cuda"), "m", None, held)
    maker.transports(plan, plan.for_rank(0), {})
    assert made == [splits] * 2


def test_options_of_a_dim_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gets the options of a dim for its NCCL group; a torch without NCCL refuses them."""
    own = {"high_priority": True, "min_ctas": 2, "max_ctas": 4, "cga_cluster_size": 1, "split_share": True}
    config = MeshConfig(
        dims={"dp": 2, "tp": 2}, device="cuda", backend="nccl", options={"tp": DimOptions(**own)}
    )
    plan, given = config.plan(4), list[Any]()
    monkeypatch.setattr(groups, "create_group", lambda *, options, **_: given.append(options))
    monkeypatch.setattr(groups, "ProcessGroupTransport", lambda *_, **__: None)

    def opened(name: str, split: bool) -> None:
        group = next(each for each in plan.for_rank(0).groups if each.name == name)
        groups.open_group(group, 0, dist.HashStore(), "m", torch.device("cuda", 0), True, split)

    if not hasattr(dist, "ProcessGroupNCCL"):
        with pytest.raises(UnsupportedOp, match=r"high_priority and min_ctas .* has no effect on nccl"):
            opened("tp", True)
        return
    opened("dp", True)
    opened("tp", True)
    assert given[0] is None and given[1].is_high_priority_stream
    assert [getattr(given[1].config, name) for name in list(own)[1:]] == [2, 4, 1, 1]
    with pytest.raises(UnsupportedOp, match="split_share has no effect: the group has its own communicator"):
        opened("tp", False)
