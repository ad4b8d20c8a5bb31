"""The store calls and the connections of a rank while its mesh opens do not grow with the number of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.rendezvous.keys import TWICE
from meshcomm.testing import Pool

pytestmark = pytest.mark.long


class Counting(dist.Store):
    """A store that records its calls, including the calls of Gloo, and forwards them."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.told: list[tuple[str, str]] = []

    def taken(self) -> list[tuple[str, str]]:
        """The calls since the last time, without the watch, which polls its keys all the time."""
        told, self.told = self.told, []
        return [each for each in told if "/watch/" not in each[1] and not each[1].endswith(TWICE)]

    def deleteKey(self, key: str) -> bool:
        gone: bool = self.inner.delete_key(key)
        return gone

    def has_extended_api(self) -> bool:
        return True


def _passed_on(name: str) -> Callable[..., Any]:
    def ask(self: Counting, keys: str | list[str], *rest: Any) -> Any:
        self.told += [(name, key) for key in ([keys] if isinstance(keys, str) else keys)]
        return getattr(self.inner, name)(keys, *rest)

    return ask


for _name in ("set", "get", "add", "append", "compare_set", "wait", "check"):
    setattr(Counting, _name, _passed_on(_name))


def counted() -> tuple[Counting, int, int]:
    """A counting store over the job's store, this rank, and the number of ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    inner = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, False, timedelta(seconds=60))
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    return Counting(inner), rank, world


def connections() -> set[str]:
    """Established TCP connections of this process, by inode, because a peer may still be closing older ones."""
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


def asked(dims: dict[str, int]) -> tuple[list[tuple[str, str]], list[tuple[str, str]], int, int]:
    """Store calls and new connections: while the mesh opens, and after a first all_reduce along every dim."""
    store, rank, world = counted()
    before = connections()
    # Groups of more than 64 ranks connect like this; smaller ones connect while they are created.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    with meshcomm.init(dims=dims, device="cpu", store=store, rank=rank, world_size=world) as mesh:
        opened = store.taken()
        # No rank calls before all have counted. The barrier is in the store, because the backend would connect for it.
        mesh.debug.monitored_barrier(timeout_s=30)
        idle = connections()
        mesh.debug.monitored_barrier(timeout_s=30)
        store.taken()
        for name in mesh.layout.names:
            mesh.all_reduce(name, torch.ones(1))
        used, connected = store.taken(), connections()
        # No rank closes before all have counted.
        mesh.debug.monitored_barrier(timeout_s=30)
    return opened, used, len(idle - before), len(connected - before)


def test_what_a_rank_asks_and_connects_to_does_not_grow_with_the_world(pool: Pool) -> None:
    found = {}
    for dp in (3, 4):
        ranks = pool.run(asked, {"pp": 2, "dp": dp}, ranks=2 * dp)
        # The rank that completes the agreement reads the list of ranks, and reads it again until every rank is in it.
        lists = [
            sum(key.endswith("/agree/here") and call == "get" for call, key in each[0]) for each in ranks
        ]
        assert sum(map(bool, lists)) == 1
        others = [each for each, reads in zip(ranks, lists, strict=True) if not reads]
        (found[dp],) = {(len(opened), len(used), idle, connected) for opened, used, idle, connected in others}
    # No connection before the first call, then one to each neighbour in the rings of pp and dp. Each neighbour takes
    # two store calls.
    assert found[3] == found[4] == (found[3][0], 6, 0, 3)
    assert found[3][0] == 9


def closed_at_once() -> int:
    """Rank 1 reads the address of its peer late: the peer has already closed its mesh, unless closing waits for rank 1."""
    store, rank, world = counted()
    if rank == 1:
        ask = store.get

        def late(key: str) -> Any:
            found = ask(key)
            if "/groups/" in key:
                time.sleep(1.5)
            return found

        store.get = late
    with meshcomm.init(dims={"dp": world}, device="cpu", store=store, rank=rank, world_size=world) as mesh:
        return mesh.rank


@pytest.mark.faults
def test_a_mesh_that_closes_unused_waits_until_all_ranks_have_their_groups(pool: Pool) -> None:
    assert pool.run(closed_at_once, ranks=2) == [0, 1]
