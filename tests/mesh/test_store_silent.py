"""A store whose server is stopped: torch's client would wait without end; these calls end in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshcomm.errors import BarrierTimeout, StoreTimeout
from meshcomm.mesh.barriers import monitored_barrier
from meshcomm.mesh.store import MeshStore

SERVER = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


# Each call on a client of its own. Of the calls on one client, torch lets the others wait for the first.
CALLS: dict[str, Callable[[dist.Store], object]] = {
    "get": lambda client: mesh_store(client).get("there"),
    "wait": lambda client: mesh_store(client).wait(["there"]),
    "add": lambda client: mesh_store(client).add("n", 1),
    "barrier": lambda client: monitored_barrier(
        dist.PrefixStore("barrier", client), 0, [0, 1], 0.3, "barrier along dp on rank 0"
    ),
}


def mesh_store(client: dist.Store) -> MeshStore:
    return MeshStore(dist.PrefixStore("mesh", client), lambda: "rank 3 (dp=1 tp=1)", 0.3)


def ended(call: Callable[[dist.Store], object], client: dist.Store) -> tuple[Exception | None, float]:
    """What the call raised, and how long it took."""
    began = time.monotonic()
    try:
        call(client)
    except Exception as error:
        return error, time.monotonic() - began
    return None, time.monotonic() - began


@pytest.fixture(scope="module")
def silent() -> dict[str, tuple[Exception | None, float]]:
    """How each of CALLS ended, all made at once on clients that were served once, and then no more."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = [
            dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
            for _ in CALLS
        ]
        for client in clients:
            client.set("there", "before")
            assert client.get("there") == b"before"
        os.kill(server.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(len(CALLS)) as threads:
            return dict(zip(CALLS, threads.map(ended, CALLS.values(), clients), strict=True))
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("name", ["get", "wait", "add"])
def test_a_call_names_the_store_and_the_seconds(
    silent: dict[str, tuple[Exception | None, float]], name: str
) -> None:
    error, took = silent[name]
    assert isinstance(error, StoreTimeout)
    assert str(error).startswith(f"store.{name} on rank 3 (dp=1 tp=1): the job's TCPStore has not")
    assert took < 30


def test_a_barrier_says_that_nothing_is_known_of_the_others(
    silent: dict[str, tuple[Exception | None, float]],
) -> None:
    error, took = silent["barrier"]
    assert isinstance(error, BarrierTimeout)
    assert re.search(r"has not answered for 0\.3 s", str(error))
    assert error.missing == ()
    assert took < 30
