"""The job's store: every kind of torch store gives the same answers, and a mesh works on each of them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import BarrierTimeout, MeshClosed, StoreError, StoreTimeout, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.barriers import monitored_barrier
from meshcomm.rendezvous.store import Limited, MeshStore, kind_of
from meshcomm.testing import Pool

KINDS = ("TCPStore", "FileStore", "HashStore", "PrefixStore")


def torch_store(kind: str, folder: Path) -> dist.Store:
    if kind == "FileStore":
        return dist.FileStore(str(folder / "store"), 1)
    if kind == "HashStore":
        return dist.HashStore()
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    return dist.PrefixStore("outer", dist.PrefixStore("inner", tcp)) if kind == "PrefixStore" else tcp


@pytest.fixture(params=KINDS)
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    return torch_store(request.param, tmp_path)


@pytest.fixture
def store(raw: dist.Store) -> MeshStore:
    raw.set("user key", "of somebody else")
    return MeshStore(dist.PrefixStore("mesh", raw), "rank 3 (dp=1 tp=1)", 20)


def test_one_key(store: MeshStore) -> None:
    for value in ("text", "é", b"\x00\xff", bytearray(b"array"), "", b""):
        store.set("k", value)
        assert store.get("k") == (value.encode() if isinstance(value, str) else bytes(value))
    store.set("l", "")
    store.wait(["k", "l"])
    assert store.check(["k", "l"]) and store.check([]) and not store.check(["k", "user key"])
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False and not store.check(["k"])


def test_counters(store: MeshStore) -> None:
    assert [store.add("n", by) for by in (3, -5, 0)] == [3, -2, -2]
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42
    assert store.add("big", 2**62) == 2**62
    for text in ("hello", "", "1x", "0x10", " 1"):
        store.set("text", text)
        with pytest.raises(StoreError, match="an integer, as add stores it"):
            store.add("text", 1)
        assert store.get("text") == text.encode()
    with pytest.raises(StoreError, match="a sum of 64 bits"):
        store.add("big", 2**62)
    assert store.add("big", 0) == 2**62  # the store still answers


def test_append_adds_or_is_refused(store: MeshStore) -> None:
    if "FileStore" in repr(store):
        with pytest.raises(UnsupportedOp, match=r"on rank 3 \(dp=1 tp=1\): not possible on a FileStore"):
            store.append("log", "x")
        assert not store.check(["log"])
        file = store.torch_store
        file.append("log", "x")
        file.append("log", "x")
        assert file.get("log") == b"x", "torch's FileStore appends now: take the refusal out"
        return
    for part in ("x", "x", b"\xff"):
        store.append("log", part)
    assert store.get("log") == b"xx\xff"


def test_why_add_looks_first() -> None:
    server = torch_store("TCPStore", Path())
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    client.set("text", "hello")
    with pytest.raises(RuntimeError):
        client.add("text", 1)
    with pytest.raises(RuntimeError):
        client.get("text")  # the connection stays broken
    told = MeshStore(client, "rank 0 (dp=0)", 5)
    with pytest.raises(StoreError, match=r"store.get on rank 0 \(dp=0\): the job's TCPStore failed"):
        told.get("text")


def test_compare_set(store: MeshStore) -> None:
    assert store.compare_set("c", "x", "y") == b"x" and not store.check(["c"])
    assert store.compare_set("c", "", "one") == b"one"
    assert store.compare_set("c", "two", "three") == b"one"
    assert store.compare_set("c", b"one", b"\xfe") == b"\xfe" == store.get("c")
    store.set("e", "")
    assert store.compare_set("e", "", "v") == b"v"


def test_a_key_that_never_comes_is_named_with_the_rank_and_the_seconds(store: MeshStore) -> None:
    store.set("here", "1")
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("gone", 0.05),
        "wait": lambda: store.wait(["here", "gone"], 0.05),
    }
    kind = kind_of(store.torch_store)
    for name, act in calls.items():
        took: list[float] = []
        # torch's FileStore would take whole seconds every time; a busy machine does so only occasionally.
        while not took or (took[-1] > 0.9 and len(took) < 10):
            started = time.monotonic()
            with pytest.raises(StoreTimeout) as caught:
                act()
            took.append(time.monotonic() - started)
        assert 0.04 < took[-1] < (0.9 if kind == "FileStore" else 5), took
        of = 1 if name == "get" else 2
        assert str(caught.value) == (
            f'store.{name} on rank 3 (dp=1 tp=1): "gone" not set within 0.05 s\n'
            f"  given:    1 of {of} keys missing, {kind}\n"
            "  expected: another rank to set the key\n"
            "  try:      check the rank that sets it; or set timeout_s=..."
        )
    with pytest.raises(UnsupportedOp, match="is not a valid timeout"):
        store.get("gone", 0)
    assert store.get("here") == b"1"


def test_a_key_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        store = MeshStore(torch_store(kind, tmp_path / kind), "rank 0", 20)
        other = store.torch_store.clone()
        threading.Timer(0.05, lambda other=other: other.set("late", "now")).start()
        assert store.get("late") == b"now"


def test_wrong_types_are_refused(store: MeshStore) -> None:
    for act, what in (
        (lambda: store.set("k", 3), "a value of type int"),
        (lambda: store.set(3, "k"), "a list of str"),
        (lambda: store.get(b"k"), "a list of str"),
        (lambda: store.wait("key"), "given:    'key'"),
        (lambda: store.compare_set("k", 1, "2"), "a value of type int"),
    ):
        with pytest.raises(StoreError, match=re.escape(what)):
            act()


def test_a_closed_mesh_refuses_every_method(store: MeshStore) -> None:
    store.set("k", "v")
    store.close()
    arguments: dict[str, tuple[Any, ...]] = {
        "get": ("k",),
        "delete_key": ("k",),
        "set": ("k", "v"),
        "add": ("k", 1),
        "append": ("k", "v"),
        "compare_set": ("k", "v", "w"),
        "check": (["k"],),
        "wait": (["k"],),
    }
    for name, given in arguments.items():
        with pytest.raises(MeshClosed, match=r"on rank 3 \(dp=1 tp=1\): the mesh is closed"):
            getattr(store, name)(*given)
    with pytest.raises(MeshClosed):
        _ = store.torch_store


# -- on real processes ------------------------------------------------------------------------------


def shared_store(kind: str, folder: str, world_size: int) -> dist.Store:
    if kind == "FileStore":
        return dist.FileStore(str(Path(folder, "store")), world_size)
    port = int(os.environ["MASTER_PORT"])
    tcp = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    return dist.PrefixStore("mine", tcp) if kind == "PrefixStore" else tcp


def carried(kind: str, folder: str, world_size: int) -> None:
    rank = int(os.environ["RANK"])
    for turn in range(2):  # the second mesh of the job meets in the same store
        with meshcomm.init(
            dims={"dp": 2, "tp": -1},
            device="cpu",
            timeout_s=20,
            store=shared_store(kind, folder, world_size),
            rank=rank,
            world_size=world_size,
        ) as mesh:
            assert ("FileStore" if kind == "FileStore" else "TCPStore") in repr(mesh.store)
            assert mesh.all_gather("dp", torch.tensor([rank])).tolist() == mesh.ranks("dp")
            assert mesh.store.torch_store.list_keys() == [] or turn == 0  # not even the first mesh's keys
            mesh.barrier()
            used(mesh, rank, world_size)
            store = mesh.store
        with pytest.raises(MeshClosed):
            store.get("n")


def used(mesh: Any, rank: int, world_size: int) -> None:
    """Many ranks use the store at once, and no write is lost."""
    store = mesh.store
    store.set(f"at/{rank}", f"{mesh.coords}")
    assert (
        store.get(f"at/{(rank + 1) % world_size}") == str(mesh.get_coords((rank + 1) % world_size)).encode()
    )
    for _ in range(20):
        store.add("n", 1)
    done = 0
    while done < 10:  # a lock made of compare_set
        if store.compare_set("lock", "", str(rank)) == str(rank).encode():
            seen = int(store.get("guarded")) if store.check(["guarded"]) else 0
            store.set("guarded", str(seen + 1))
            store.set("lock", "")
            done += 1
    appends = "FileStore" not in repr(store)
    if appends:
        store.append("log", "x")
    mesh.barrier()
    assert store.add("n", 0) == 20 * world_size
    assert store.get("guarded") == str(10 * world_size).encode()
    if appends:
        assert store.get("log") == b"x" * world_size
    assert len(store.torch_store.list_keys()) == world_size + 3 + appends
    mesh.barrier()


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "PrefixStore"])
def test_any_store_carries_a_mesh(pool: Pool, tmp_path: Path, kind: str) -> None:
    pool.run(carried, kind, str(tmp_path), 4, ranks=4)


def test_a_hash_store_carries_a_mesh_of_one_process() -> None:
    with meshcomm.init(
        dims={"dp": 1}, device="cpu", timeout_s=20, store=dist.HashStore(), rank=0, world_size=1
    ) as mesh:
        assert mesh.all_reduce("dp", torch.ones(2)).tolist() == [1.0, 1.0]
        assert mesh.store.add("n", 2) == 2 and "HashStore" in repr(mesh.store)


@pytest.mark.mesh(dp=2, ranks=[1, 3], world_size=4, via="gloo")
def test_ranks_outside_the_mesh_share_the_store(mesh: Mesh) -> None:
    mesh.store.set(f"{mesh.rank}", "here")
    mesh.store.wait([str(rank) for rank in range(4)])
    if not mesh.is_member:
        with pytest.raises(StoreTimeout, match=rf"on rank {mesh.rank} \(not in the mesh\)"):
            mesh.store.get("gone", 0.01)


# -- a store whose server is stopped: torch's client would wait forever ---------------------------------------


def serves(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


# Each call has a separate client, because torch makes the calls on one client wait for each other.
CALLS: dict[str, Callable[[dist.Store], object]] = {
    "get": lambda client: mesh_store(client).get("there"),
    "wait": lambda client: mesh_store(client).wait(["there"]),
    "add": lambda client: mesh_store(client).add("n", 1),
    "barrier": lambda client: monitored_barrier(
        dist.PrefixStore("barrier", client), 0, [0, 1], 0.3, "barrier along dp on rank 0"
    ),
}


def mesh_store(client: dist.Store) -> MeshStore:
    return MeshStore(dist.PrefixStore("mesh", client), "rank 3 (dp=1 tp=1)", 0.3)


@pytest.mark.faults
def test_calls_on_a_store_that_was_stopped_end_and_name_it(pool: Pool) -> None:
    """All calls run at once, on clients that have used the store before."""
    context = get_context("forkserver")  # the pool's context, in which torch is loaded
    ours, theirs = context.Pipe()
    server = context.Process(target=serves, args=(theirs,), daemon=True)
    server.start()
    threads = ThreadPoolExecutor(len(CALLS))
    try:
        port = ours.recv()
        clients = [
            dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
            for _ in CALLS
        ]
        for client in clients:
            client.set("there", "before")
            assert client.get("there") == b"before"
        os.kill(server.pid or 0, signal.SIGSTOP)
        calls = zip(CALLS.items(), clients, strict=True)
        ended = {name: threads.submit(call, client) for (name, call), client in calls}
        errors = {name: each.exception(30) for name, each in ended.items()}
        began = time.monotonic()
        for _ in range(3):
            with pytest.raises(StoreTimeout):
                mesh_store(clients[0]).check(["there"])
            with pytest.raises(RuntimeError, match="does not answer"):
                Limited(clients[0], lambda: 60.0).get("there")
        again_s = time.monotonic() - began
    finally:
        server.kill()
        server.join()
        threads.shutdown(wait=False)
    # The store is waited for once, and then no longer.
    assert again_s < 15.0
    silent = errors.pop("barrier")
    assert isinstance(silent, BarrierTimeout) and silent.missing == ()
    assert "has not answered for 0.3 s" in str(silent)
    for name, error in errors.items():
        assert isinstance(error, StoreTimeout)
        assert str(error).startswith(f"store.{name} on rank 3 (dp=1 tp=1): the job's TCPStore has not")
