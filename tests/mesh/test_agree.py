"""All ranks agree through the store, and the error names who differs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import meshcomm
from meshcomm.errors import MeshMismatchError
from meshcomm.mesh import agree
from meshcomm.mesh.agree import leave_together
from meshcomm.testing import Pool
from meshcomm.watching.ending import failure_of, root_cause
from tests.forked_jobs import Job
from tests.ports import free_port

pytestmark = pytest.mark.long


class _Waits(Exception):
    """Raised where a rank would wait for a key that is not in the store yet."""


class Table:
    """A store in memory that the ranks of one thread use in turn. It counts its calls and the reads of the list.

    A rank that would wait leaves by `_Waits`, which is not a RuntimeError and so passes through the agreement.
    """

    timeout = timedelta(seconds=1)

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.calls = self.reads = 0

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        self.values[key] = found = self.values.get(key, 0) + amount
        assert -(1 << 63) <= found < 1 << 63, "the store adds 64-bit numbers with a sign"
        return int(found)

    def append(self, key: str, text: str) -> None:
        self.calls += 1
        self.values.setdefault(key, bytearray()).extend(text.encode())

    def set(self, key: str, text: str) -> None:
        self.calls += 1
        self.values[key] = text.encode()

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        self.calls += 1
        return bytes(self.values.setdefault(key, text.encode()))

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.calls += 1
        if key not in self.values:
            raise _Waits
        if key == "here":
            self.reads += 1
            assert self.reads <= _READS, "the list of who has come is read once for all"
        return bytes(self.values[key])


_READS = 20


def agreement(world: int, monkeypatch: pytest.MonkeyPatch, odd: int = -1) -> tuple[Table, list[int]]:
    """The store after `world` ranks have joined, and the calls of each rank. Rank `odd` expects one rank more; -1 for none."""
    store, calls = Table(), []

    def until_the_last(seconds: float) -> None:
        # A rank that looks again would see the others; here they join after it has left.
        raise _Waits

    monkeypatch.setattr(agree.time, "sleep", until_the_last)
    for rank in range(world):
        store.calls = 0
        with contextlib.suppress(_Waits, MeshMismatchError):
            agree.agree(store, rank, range(world + (rank == odd)), {"dims": {"dp": world}}, 60.0)
        calls.append(store.calls)
    return store, calls


@pytest.mark.parametrize("world", [1_024, 131_072])
@pytest.mark.deep_cases(r"\[131072")
def test_ranks_of_any_world_agree_in_three_calls_each_and_one_reads_the_list(
    world: int, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """docs/benchmarks.md lists these counts."""
    store, calls = agreement(world, monkeypatch)
    record_property("measured", f"{world} ranks: {calls[0]} calls each, {calls[-1]} of the last one")
    assert store.values["verdict"].startswith(b"agree ")
    assert calls == [3] * (world - 1) + [5] and store.reads == 1


def test_where_one_of_131072_ranks_expects_another_world_one_rank_watches_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = 131_072
    store, calls = agreement(world, monkeypatch, odd=40_000)
    # The watching rank has left after its first look. The others ask once who watches, and read nothing.
    assert store.reads == 1 and calls[:40_000] == [3] * 40_000 and set(calls[40_001:]) == {4}
    # The watching rank looks again after as many ranks have joined as most of them expect, and finds the verdict.
    monkeypatch.undo()
    agree._watch(store, time.monotonic() + 60)
    assert store.values["verdict"] == b"differ" and store.reads == 2


def scattered(hosts: str, order: list[int] | None = None) -> tuple[int | None, list[str], list[str]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank = int(os.environ["RANK"])
    # The placement of `srun -m cyclic` on two hosts.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree, "socket", SimpleNamespace(gethostname=lambda: hosts[rank]))
        dims = {"dp": 2, "tp": 2}
        with (
            warnings.catch_warnings(record=True) as caught,
            meshcomm.init(dims=dims, device="cpu", timeout_s=30, rank_order=order) as mesh,
        ):
            rows = [row.split() for row in str(mesh).splitlines()]
            links = [row[-1] for row in rows if row[1:2] == ["dim"] or row[:1] == ["node"]]
            return mesh.topology.ranks_per_node, links, [str(each.message) for each in caught]


def test_which_ranks_share_a_node_is_asked_of_the_ranks(pool: Pool) -> None:
    assert pool.run(scattered, "aabb", ranks=4) == [(2, ["network", "node", rank], []) for rank in "1133"]
    (first, *others) = pool.run(scattered, "abab", ranks=4)
    assert [first[:2], *others] == [
        (2, ["node", "network", "2"]),
        *((2, ["node", "network", r], []) for r in "323"),
    ]
    (warning,) = first[2]
    assert warning.startswith(
        "scattered-ranks: tp crosses nodes, because the ranks of a node are not consecutive\n"
    )
    assert "node 0: ranks 0 2; node 1: ranks 1 3" in warning
    assert warning.endswith("or mesh.rank_order = [0, 2, 1, 3]")
    # The rank order that the warning proposes.
    cured = pool.run(scattered, "abab", [0, 2, 1, 3], ranks=4)
    assert cured == [(2, ["network", "node", rank], []) for rank in "2323"]
    # In one half of the groups along either dim, ranks 2 3 and 1 3, all ranks share a node.
    assert pool.run(scattered, "abbb", ranks=4)[1][:2] == (3, ["50%", "50%", "3"])


DIFFERS = """
import os, sys, meshcomm
size = 4 if os.environ["RANK"] == "2" else 2
try:
    meshcomm.init(dims={"a": size, "b": -1}, device="cpu", timeout_s=60)
except meshcomm.MeshcommError as error:
    print(type(error).__name__, error.what)
"""


def test_rank_0_keeps_the_store_until_all_know_why_they_differ(pool: Pool, tmp_path: Path) -> None:
    # Rank 0 hosts the store, as in env:// without torchrun, and its program ends with the error.
    env = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Job(pool, tmp_path, "-c", DIFFERS, env={**env, "RANK": str(rank)}, name=f"{rank}-")
        for rank in range(4)
    ]
    said = [rank.finish()[1] for rank in ranks]
    assert said == ["MeshMismatchError the mesh differs between ranks: rank 2 of 4 is mismatched\n"] * 4


@pytest.mark.parametrize(
    ("sizes", "blamed", "given"),
    [
        ((2, 4), "ranks 0 1 do not agree", "rank 1: dp = 4; rank 0: 2"),
        ((4, 2, 4, 2), "ranks 0 1 2 3 do not agree", "ranks 1 3: dp = 2; ranks 0 2: 4"),
        ((4, 2, 2, 2), "rank 0 of 4 is mismatched", "rank 0: dp = 4; the others: 2"),
    ],
)
def test_without_a_majority_no_rank_is_blamed(sizes: tuple[int, ...], blamed: str, given: str) -> None:
    store, ranks = dist.HashStore(), range(len(sizes))

    def told(rank: int) -> MeshMismatchError:
        with pytest.raises(MeshMismatchError) as caught:
            agree.agree(store, rank, ranks, {"dp": sizes[rank]}, 20.0)
        return caught.value

    with ThreadPoolExecutor(len(sizes)) as threads:
        errors = list(threads.map(told, ranks, timeout=30))
    named = (0,) if "is mismatched" in blamed else tuple(ranks)
    for error in errors:
        assert error.what == f"the mesh differs between ranks: {blamed}"
        assert (error.given, error.mismatched_ranks) == (given, named)


def test_a_rank_that_holds_the_store_leaves_last() -> None:
    store = dist.HashStore()
    store.add("come", 3)  # one of them has died before it announced itself
    for rank in range(2):
        store.append("here", f"{rank} fingerprint 4 host\n")
    threading.Timer(0.3, lambda: leave_together(store, stays=False)).start()
    began = time.monotonic()
    leave_together(store, stays=True)
    assert store.add("left", 0) == 2 and time.monotonic() - began < 2.0


def test_ranks_that_come_after_the_timeout_say_the_same_as_the_others() -> None:
    """The texts must be equal, because a launcher prints an error that many ranks have only once."""
    world, store = range(12), dist.HashStore()
    said = []
    for rank in world:
        # Each rank arrives after the ranks before it have given up.
        with pytest.raises(MeshMismatchError) as caught:
            agree.agree(store, rank, world, {}, 0.05)
        said.append(caught.value)
    assert {error.what for error in said} == {
        "ranks 1 2 3 4 .. 11 (11) of 12 never arrived to agree on the mesh"
    }
    for rank, error in enumerate(said):
        assert error.missing == tuple(range(1, 12))
        late = f"rank {rank} has arrived since, after the others had given up"
        assert (late in str(error.given)) is (rank > 0) and ("longer timeout_s" in str(error.hint)) is (
            rank > 0
        )
    # Of twelve equal errors, the launcher prints one, and one line for the others.
    failures = [failure_of(error, rank, f"rank {rank}") for rank, error in enumerate(said)]
    root, others = root_cause(failures, 12, "rank {}".format)
    assert (
        "11 (11) of 12 never arrived" in root.what
        and others[0] == "ranks 1-11: the same"
        and len(others) == 2
    )
