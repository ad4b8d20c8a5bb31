"""Another program on the host writes to a job's store: forged values are refused and named, and no rank acts on them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import meshcomm
from meshcomm.config.elastic import ElasticConfig
from meshcomm.errors import CommunicationError, StoreError
from meshcomm.job.replacing import Replacing
from meshcomm.rendezvous.generation import Announcement, announce, announcement_of, have_met, is_waiting
from meshcomm.rendezvous.signed import SECRET_VARIABLE, SignedStore, signed, unsigned
from meshcomm.testing import Pool
from tests.forked_jobs import Job

SECOND: Final = timedelta(seconds=1)
CONNECTED: Final = timedelta(seconds=20)


def new_store(kind: str, folder: Path) -> Any:
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=CONNECTED)
    return dist.HashStore() if kind == "hash" else dist.FileStore(str(folder / str(time.monotonic_ns())), 1)


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_whoever_has_the_secret_sees_a_store_of_torch(kind: str, tmp_path: Path) -> None:
    """A signed store and torch's own store give the same answer to each call, and the prefixes make the same keys."""
    own = new_store(kind, tmp_path)
    plain: list[Any] = [own, dist.PrefixStore("b", dist.PrefixStore("a", own))]
    ours: list[Any] = [SignedStore(new_store(kind, tmp_path), "secret")]
    ours.append(ours[0].prefixed("a").prefixed("b"))
    extended = own.has_extended_api() and kind != "file"
    for store in (0, 1):
        for call, *given in (
            ("set", "key", "text"),
            ("get", "key"),
            ("set", "key", "a\nb" * 1000),
            ("get", "key"),
            ("set", "empty", ""),
            ("get", "empty"),
            ("compare_set", "new", "", "first"),
            ("compare_set", "new", "", "second"),
            ("compare_set", "new", "first", "third"),
            ("compare_set", "none", "is", "not"),
            ("check", ["key", "new"]),
            ("check", ["key", "none"]),
            ("add", "count", 3),
            ("add", "count", -1),
            *([("append", "list", each) for each in ("one\n", "two\n")] if extended else []),
            *([("get", "list"), ("multi_get", ["key", "list", "new"])] if extended else []),
            ("wait", ["key", "new"], SECOND),
            ("delete_key", "new"),
            ("check", ["new"]),
        ):
            answers = [getattr(each[store], call)(*given) for each in (plain, ours)]
            if call != "delete_key" or kind != "file":  # torch's file store always returns True
                assert answers[0] == answers[1], (call, given)
    assert ours[0].get("a/b/key") if kind != "file" else True


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_what_nobody_of_the_job_has_written_is_refused_wherever_it_is_read(kind: str, tmp_path: Path) -> None:
    own = new_store(kind, tmp_path)
    ours = SignedStore(own, "secret").prefixed("generation1")
    there = dist.PrefixStore("generation1", own)
    ours.set("verdict", "agree")
    value = there.get("verdict")
    other = SignedStore(own, "another").prefixed("generation1")
    reads: list[Callable[[str], object]] = [
        ours.get,
        lambda key: ours.check([key]),
        lambda key: ours.wait([key], SECOND),
        lambda key: ours.compare_set(key, "", "mine"),
        lambda key: ours.multi_get([key]),
        ours.clone().get if kind == "tcp" else ours.get,
    ]
    forged = {
        "plain": b"agree",
        "empty": b"",
        "of another key": value,
        "cut": value[:-1],
        "longer": value + b"s",
        "with more behind": value + b"agree",
    }
    SignedStore(own, "secret").prefixed("generation0").set("of another generation", "agree")
    forged["of another generation"] = dist.PrefixStore("generation0", own).get("of another generation")
    other.set("of another job", "agree")
    forged["of another job"] = there.get("of another job")
    for key, data in forged.items():
        there.set(key, data)
        # torch's file store and HashStore treat a key with an empty value as unset when it is compared and set.
        for read in reads if data else reads[:1]:
            with pytest.raises(
                StoreError, match=f'refused the value of "generation1/{key}" in the job.s store: no process'
            ):
                read(key)
    assert ours.get("verdict") == b"agree"


def test_the_secret_is_of_the_job_that_the_launcher_started() -> None:
    store = dist.HashStore()
    rank = {SECRET_VARIABLE: "secret", "MESHCOMM_JOB": "/tmp/job7", "TORCHELASTIC_RUN_ID": "job7"}
    assert isinstance(signed(store, env=rank), SignedStore) and unsigned(signed(store, env=rank)) is store
    # torchrun that was started in a rank, and launchers that give no secret.
    for env in (rank | {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "job7"}, {}):
        assert signed(store, env=env) is store


def test_a_launcher_refuses_what_no_rank_has_written() -> None:
    own = dist.HashStore()
    ours = SignedStore(own, "secret")
    for number, (key, read) in enumerate(
        (
            ("meshcomm/waits/1/0", lambda: is_waiting(ours, 1, 0)),
            ("meshcomm/generation/1/met", lambda: have_met(ours, 1)),
            ("meshcomm/generation/2", lambda: announcement_of(ours, 2)),
            ("meshcomm/owner/0", lambda: replacing.unmet([0])),
        )
    ):
        replacing = Replacing(2, ElasticConfig(replace=1))
        replacing.store, replacing.number = ours, number and 1
        announce(ours, 1, Announcement(lost={1: "was ended by SIGKILL"}))
        own.set(key, "forged")
        if key == "meshcomm/owner/0":
            own.delete_key("meshcomm/generation/1/met")
            replacing.last = {1: None}  # type: ignore[dict-item]
        with pytest.raises(StoreError, match=f'refused the value of "{key}"'):
            read()


# -- on ranks ----------------------------------------------------------------------------------------


def foreign() -> Any:
    """The store as another program sees it: torch's store of this rank's job, without the secret."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=CONNECTED)
    return dist.PrefixStore(f"run-{os.environ['TORCHELASTIC_RUN_ID']}", store)


def refusal(what: str) -> None:
    """Let another program forge values that the next mesh reads; the error of this rank names the key."""
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=10) as mesh:
        store, rank = foreign(), mesh.rank
        number = int(mesh._state.held.prefix.removeprefix("meshcomm"))
        here, following = f"meshcomm{number}", f"meshcomm{number + 1}"
        if what == "a step":
            key = f"{here}/mesh/watch/desync/desync"
            mesh.all_reduce("dp", torch.ones(1))
            mesh.debug.monitored_barrier("dp", timeout_s=10)
            store.set(key, json.dumps({"forged": True}))
            with pytest.raises(StoreError, match=f'refused the value of "{key}"'):
                for _ in range(500):
                    mesh.step()
                    time.sleep(0.01)
            mesh.debug.monitored_barrier("dp", timeout_s=10)
            store.delete_key(key)
            return
        if what == "a barrier":
            # If another program changes the counter, the barrier still does not open.
            if rank == 0:
                store.add(f"{here}/mesh/barrier/dp/0/1/come", 1)
            else:
                time.sleep(0.3)
                store.set("rank 1 comes", "")
            mesh.debug.monitored_barrier("dp", timeout_s=10)
            assert store.check(["rank 1 comes"])
            return
        mesh.debug.monitored_barrier("dp", timeout_s=10)
        key = f"{following}/agree/verdict" if "verdict" in what else "another"
        forged = (
            store.get(f"{here}/agree/verdict") if what == "a replayed verdict" else b"agree 20260101-000000 2"
        )
        store.set(key, forged)
        mesh.debug.monitored_barrier("dp", timeout_s=10)
    if what == "an address":
        key = f"{following}/groups/{following}/dp/0//cpu//0/0"
        own = SignedStore.set

        def overwritten(self: SignedStore, name: str, value: bytes) -> None:
            own(self, name, value)
            if key.endswith(name):
                store.set(key, b"an address of another program")

        SignedStore.set = overwritten  # type: ignore[method-assign]
        try:
            # The rank that refuses leaves the other one alone. If that one has read the address before it was
            # overwritten, it can connect, and its first call ends.
            with (
                pytest.raises((StoreError, CommunicationError)) as caught,
                meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=5) as mesh,
            ):
                mesh.all_reduce("dp", torch.ones(1))
        finally:
            SignedStore.set = own  # type: ignore[method-assign]
        assert rank or caught.value.what.startswith(f'refused the value of "{key}" in the job')
        return
    with pytest.raises(StoreError, match=f'refused the value of "{key}"'):
        meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=10)


@pytest.mark.parametrize("what", ["a verdict", "a replayed verdict", "a step", "a barrier", "an address"])
def test_a_forged_value_ends_in_an_error_that_names_its_key(pool: Pool, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    job = {SECRET_VARIABLE: "secret", "MESHCOMM_JOB": str(folder), "TORCHELASTIC_RUN_ID": "job"}
    pool.run(refusal, what, ranks=2, env=job)


# Rank 1 announces a generation, as if a launcher had replaced rank 0.
FORGES = """
import json, os, time, meshcomm, torch
import torch.distributed as dist
with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=10) as mesh:
    if mesh.rank == 1:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        forged = {"lost": {"0": "was ended"}, "new": {"0": "was ended"}, "processes": [], "dims": {}}
        store.set(f"run-{os.environ['TORCHELASTIC_RUN_ID']}/meshcomm/generation/1", json.dumps(forged))
    for step in range(20):
        time.sleep(0.02)
        assert mesh.all_reduce("dp", torch.ones(1)).item() == 2
    print(f"{mesh.elastic.generation.number} after {step + 1} steps\\n", end="")
"""


def test_a_forged_generation_moves_no_rank(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORGES)
    job = Job(pool, tmp_path, *["-m", "meshcomm", "run", "--world-size", "2", "--replace", "1", "script.py"])
    code, out, err = job.finish()
    assert (code, out) == (0, "0 after 20 steps\n" * 2), err
    for process in range(2):
        assert (
            f'meshcomm: process {process} refused the value of "meshcomm/generation/1" in the job\'s store'
            in err
        )
