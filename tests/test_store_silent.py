"""A store whose server is stopped: torch's client would wait without end; these calls end in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshcomm.errors import BarrierTimeout, StoreTimeout
from meshcomm.mesh.barrier import meet_at_store
from meshcomm.mesh.store import MeshStore

SERVER = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def stopped() -> Iterator[dist.Store]:
    """A client that was served once, and then no more."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
        client.set("there", "before")
        assert client.get("there") == b"before"
        os.kill(server.pid, signal.SIGSTOP)
        yield client
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    "call",
    [lambda store: store.get("there"), lambda store: store.wait(["there"]), lambda store: store.add("n", 1)],
    ids=["get", "wait", "add"],
)
def test_a_call_names_the_store_and_the_seconds(
    stopped: dist.Store, call: Callable[[MeshStore], object]
) -> None:
    store = MeshStore(dist.PrefixStore("mesh", stopped), lambda: "rank 3 (dp=1 tp=1)", 0.3)
    began = time.monotonic()
    with pytest.raises(
        StoreTimeout, match=r"^store\.\w+ on rank 3 \(dp=1 tp=1\): the job's TCPStore has not"
    ):
        call(store)
    assert time.monotonic() - began < 30


def test_a_barrier_says_that_nothing_is_known_of_the_others(stopped: dist.Store) -> None:
    with pytest.raises(BarrierTimeout, match=r"has not answered for 0\.3 s") as caught:
        meet_at_store(dist.PrefixStore("barrier", stopped), 0, [0, 1], 0.3, "barrier along dp on rank 0")
    assert caught.value.missing == ()
