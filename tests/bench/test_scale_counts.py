"""What start-up costs at scale: published counts reproduced, and the formulas held against real processes."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshcomm
from meshcomm.bench.scale.connections import meshed, rings, sizes_of
from meshcomm.bench.scale.creators import (
    Family,
    count,
    deepspeed,
    device_mesh,
    megatron,
    nanotron,
    picotron,
    torchtitan,
)
from meshcomm.bench.scale.opening import GLOO_ADDRESS, GLOO_EACH, first_calls, gloo_at_once, opening
from meshcomm.bench.scale.page import WORLDS, asked_for, page
from meshcomm.config import load
from meshcomm.layout import Layout, Plan
from meshcomm.testing import Pool

LIST = "meshcomm1/agree/here"
DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_script_makes() -> None:
    text = (DOCS / "reference" / "startup.md").read_text()
    assert text == page(), "python -m meshcomm.bench.scale.page > docs/reference/startup.md"


# -- what others create -----------------------------------------------------------------------------


def test_counts_that_were_made_by_running_the_projects_code() -> None:
    """Megatron-Core with `new_group` replaced by a counter, torchtitan's sequence on the fake backend."""
    small = count(megatron(8, tp=2, pp=2))
    assert (small.calls, small.distinct, small.sets_of_0, small.member_0) == (95, 17, 6, 23)
    large = count(megatron(1024, tp=8, pp=8, cp=2, ep=8, etp=1))
    assert (large.calls, large.distinct, large.sets_of_0, large.member_0) == (5001, 1193, 11, 23)
    titan = count(torchtitan(8, pp=2, dp_shard=2, tp=2))
    assert (titan.calls, titan.fake, titan.distinct, titan.sets_of_0) == (94, 50, 12, 3)
    titan = count(torchtitan(1024, pp=8, dp_shard=8, cp=2, tp=8, ep=8))
    assert (titan.calls, titan.calls - titan.fake) == (5120, 3072)
    assert count(nanotron(8, pp=2, dp=2, cp=1, tp=2), once=True).calls + 1 == 24
    assert count(nanotron(1024, pp=8, dp=8, cp=2, tp=8), once=True).calls + 1 == 2001
    assert count(picotron(dp=2, pp=2, cp=1, tp=2)).calls == 26
    assert count(picotron(dp=8, pp=8, cp=2, tp=8)).calls == 976
    assert count(deepspeed(pp=8, dp=16, mp=8)).calls == 336
    assert count(device_mesh({"pp": 2, "dp": 2, "tp": 2})).calls == 12
    assert count(device_mesh({"pp": 8, "dp": 8, "cp": 2, "tp": 8})).calls == 896
    assert count(device_mesh({"pp": 16, "dp": 64, "cp": 2, "tp": 8})).calls == 11520


def test_the_groups_of_a_family_against_plain_loops() -> None:
    grid = {"pp": 2, "dp": 3, "cp": 2, "tp": 2}
    for axes in (("dp",), ("dp", "cp"), ("pp", "tp"), ("tp", "cp"), ("pp", "dp", "cp", "tp")):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(product(*map(range, grid.values()))):
            rest = tuple(coord for axis, coord in zip(grid, coords, strict=True) if axis not in axes)
            groups.setdefault(rest, []).append(rank)
        family = Family("x", grid, axes)
        assert family.groups().tolist() == list(groups.values())
        assert family.number == len(groups)
    ends = Family("x", grid, ("pp",), keep=(0, -1)).groups().tolist()
    assert ends == [[rank, rank + 12] for rank in range(12)]
    assert Family("x", {"pp": 1, "dp": 2}, ("pp",), keep=(0, -1)).groups().tolist() == [[0], [1]]


def test_a_plan_with_the_same_names_has_the_same_rank_sets() -> None:
    """All but the embedding's, which are no fibre: the first and last stage of each pipeline."""
    theirs = megatron(1024, tp=8, pp=8, cp=2, ep=8, etp=1)
    sets = {tuple(row) for family in theirs for row in family.groups().tolist() if len(row) > 1}
    embedding = {tuple(row) for family in theirs if family.keep for row in family.groups().tolist()}
    plan = asked_for(1024)["every name that Megatron makes"]
    created = [group.ranks for group in plan.groups() if group.shares is None]
    assert len(created) == len(set(created))
    assert set(created) == sets - embedding
    assert plan.for_rank(0).creations == 10


def calls_of_torch(dims: dict[str, int]) -> int:
    """`new_group` calls of init_device_mesh, by torch itself: one process that takes itself for rank 0 of many."""
    from torch.distributed import device_mesh as module

    real, calls = dist.new_group, 0

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args, **options)

    world = 1
    for size in dims.values():
        world *= size
    dist.init_process_group("fake", rank=0, world_size=world)
    module.new_group = counting
    try:
        init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    finally:
        module.new_group = real
        dist.destroy_process_group()
    return calls


def calls_of_titan(world: int, sizes: dict[str, int]) -> tuple[int, int]:
    """torchtitan's sequence with torch's own mesh: all calls of new_group, and those for fake groups."""
    from torch.distributed import device_mesh as module

    real = dist.new_group
    backends: list[Any] = []

    def counting(*args: Any, **options: Any) -> Any:
        backends.append(options.get("backend"))
        return real(*args, **options)

    pp, shard, cp, tp, ep = (sizes.get(name, 1) for name in ("pp", "dp_shard", "cp", "tp", "ep"))
    dist.init_process_group("fake", rank=0, world_size=world)
    module.new_group = counting
    try:
        mesh: Any = init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
        for grid in (
            {"pp": pp, "batch": shard, "cp": cp, "tp": tp},
            {"pp": pp, "dp_replicate": 1, "dp_shard": shard, "cp": cp, "tp": tp},
            {"pp": pp, "dp": shard, "cp": cp, "tp": tp},
            {"pp": pp, "dp_replicate": 1, "efsdp": shard * cp * tp // ep, "ep": ep},
        ):
            off = [name for name, size in grid.items() if (ep if name == "efsdp" else size) == 1]
            made = mesh._unflatten(
                0, tuple(grid.values()), tuple(grid), backend_override=dict.fromkeys(off, "fake")
            )
            if "batch" in grid:
                made["batch", "cp"]._flatten("loss")
    finally:
        module.new_group = real
        dist.destroy_process_group()
    return len(backends), backends.count("fake")


def test_torch_itself_calls_as_often(pool: Pool) -> None:
    for dims in WORLDS[1024], WORLDS[16384]:
        assert pool.run(calls_of_torch, dims, ranks=1) == [count(device_mesh(dims)).calls]
    small = {"pp": 2, "dp_shard": 2, "tp": 2}
    large = {"pp": 8, "dp_shard": 8, "cp": 2, "tp": 8, "ep": 8}
    for world, sizes in ((8, small), (1024, large)):
        ours = count(torchtitan(world, **sizes))
        assert pool.run(calls_of_titan, world, sizes, ranks=1) == [(ours.calls, ours.fake)]


# -- what a rank asks the store for, and connects to --------------------------------------------------


class Counting(dist.Store):
    """A store that writes down what it is asked, also by Gloo, and passes it on."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.told: list[tuple[str, str, int]] = []

    def taken(self) -> list[tuple[str, str, int]]:
        """What was asked since the last time, without the watch, which looks at its key all the time."""
        told, self.told = self.told, []
        return [each for each in told if "/watch/" not in each[1]]

    def _tell(self, call: str, key: str, moved: int) -> None:
        self.told.append((call, key, len(key) + moved))

    def set(self, key: str, value: Any) -> None:
        self._tell("set", key, len(value))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.inner.get(key)
        self._tell("get", key, len(value))
        return value

    def add(self, key: str, amount: int) -> int:
        value: int = self.inner.add(key, amount)
        self._tell("add", key, len(str(amount)) + len(str(value)))
        return value

    def append(self, key: str, value: Any) -> None:
        self._tell("append", key, len(value))
        self.inner.append(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self.inner.compare_set(key, expected, desired)
        self._tell("compare_set", key, len(expected) + len(desired) + len(value))
        return value

    def deleteKey(self, key: str) -> bool:
        gone: bool = self.inner.delete_key(key)
        return gone

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._tell("wait", key, 0)
        if timeout is None:
            self.inner.wait(keys)
        else:
            self.inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        for key in keys:
            self._tell("check", key, 0)
        there: bool = self.inner.check(keys)
        return there

    def has_extended_api(self) -> bool:
        return True


def counted() -> tuple[Counting, int, int]:
    """A counting store on the job's, this rank, and the number of ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    inner = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, False, timedelta(seconds=60))
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    return Counting(inner), rank, world


def connections() -> set[str]:
    """Established TCP connections of this process, by inode: a peer may just be closing older ones."""
    mine = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{each}")
        except OSError:
            continue
        if target.startswith("socket:["):
            mine.add(target[len("socket:[") : -1])
    established = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01" and fields[9] in mine:
                established.add(fields[9])
    return established


def ours_counted(mesh_config: dict[str, Any]) -> tuple[list[Any], list[Any], int, int]:
    store, rank, world = counted()
    before = connections()
    # As groups of more than 64 ranks connect; smaller ones do it while they are made.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    with meshcomm.init({"mesh": mesh_config}, store=store, rank=rank, world_size=world) as mesh:
        opened = store.taken()
        # Nobody calls before all have looked; at the store, as the backend would have to connect for it.
        mesh.barrier(timeout_s=30)
        idle = connections()
        mesh.barrier(timeout_s=30)
        store.taken()
        for name in mesh.layout.names:
            mesh.all_reduce(name, torch.ones(1))
        used, connected = store.taken(), connections()
        # Nobody closes before all have looked.
        mesh.barrier(timeout_s=30)
        return opened, used, len(idle - before), len(connected - before)


@pytest.mark.parametrize(
    "mesh_config",
    [
        {"dims": {"dp": 2}},
        {"dims": {"dp": 2, "tp": 2}, "merge": {"all": ["dp", "tp"]}},
        {"dims": {"pp": 2, "dp": 2, "tp": 2}, "merge": {"model": ["pp", "tp"], "same_as_ep": ["dp", "tp"]},
         "views": {"expert": {"pp": 2, "edp": 1, "ep": 4}}},
        {"dims": {"dp": 7}},
    ],
)  # fmt: skip
def test_a_real_rank_asks_and_connects_as_the_formulas_say(pool: Pool, mesh_config: dict[str, Any]) -> None:
    plan = load({"mesh": mesh_config}).plan(None).on("cpu", "gloo")
    world = plan.layout.world_size
    ranks = pool.run(ours_counted, mesh_config | {"device": "cpu"}, ranks=world)
    last = [any(key == LIST and call == "get" for call, key, _ in opened) for opened, *_ in ranks]
    assert last.count(True) == 1
    for rank, (opened, used, idle, connected) in enumerate(ranks):
        foreseen = opening(plan, rank, last=last[rank])
        # Whoever completes the agreement reads again while somebody has counted but not named itself.
        opened = [
            each
            for each, after in zip(opened, [*opened[1:], None], strict=True)
            if not (after is not None and each[:2] == after[:2] == ("get", LIST))
        ]
        assert [(call, key) for call, key, _ in opened] == [(each.call, each.key) for each in foreseen]
        # Host names and process numbers differ in length.
        assert sum(moved for *_, moved in opened) == pytest.approx(
            sum(each.moved for each in foreseen), rel=0.25
        )
        foreseen = first_calls(plan, rank)
        assert Counter((call, key, moved) for call, key, moved in used) == Counter(
            (each.call, each.key, each.moved) for each in foreseen
        )
        assert (idle, connected) == (0, rings(sizes_of(plan)))


def theirs_counted(dims: dict[str, int]) -> tuple[list[Any], list[Any], int]:
    store, rank, world = counted()
    before = connections()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    default = store.taken()
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    dist.barrier()
    found = default, store.taken(), len(connections() - before)
    dist.barrier()
    del mesh
    dist.destroy_process_group()
    return found


def test_torch_connects_all_with_all(pool: Pool) -> None:
    dims = {"dp": 2, "tp": 4}
    for default, created, connected in pool.run(
        theirs_counted, dims, ranks=8, env={"GLOO_SOCKET_IFNAME": "lo"}
    ):
        assert len(default) == gloo_at_once(8).calls == 17
        assert len(created) == gloo_at_once(2).calls + gloo_at_once(4).calls
        assert connected == meshed([8, 2, 4]) == 11
        for size, told in ((8, default), (2, created[:5]), (4, created[5:])):
            call, key, moved = told[0]
            assert (call, moved - len(key)) == ("set", GLOO_ADDRESS + GLOO_EACH * size)


def test_what_a_rank_asks_does_not_grow_with_the_world() -> None:
    small, large = (Plan(Layout({"pp": 8, "dp": dp, "cp": 2, "tp": 8})).on("cpu", "gloo") for dp in (8, 1024))
    for backend in ("gloo", "nccl"):
        assert len(opening(small, 0, backend=backend)) == len(opening(large, 0, backend=backend))
    assert len(first_calls(small, 77)) == len(first_calls(large, 77))
