"""Several jobs among the ranks of one pool, each with its own store, default group and mesh."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.rendezvous.exposure import serve_on_loopback
from meshcomm.testing import Pool
from meshcomm.testing.pool import Ended, Limits

# Meshes open in this time also on a busy machine.
OPENS_S: Final = 60.0
_LIMIT: Final = timedelta(seconds=OPENS_S)


class Place(NamedTuple):
    """This process's place among all jobs. number: among all processes. shared: a store of all jobs, for the test."""

    job: str
    rank: int
    world_size: int
    number: int
    port: int
    shared_port: int

    def mesh(self, **keys: Any) -> Mesh:
        """The job's mesh, of the single dim "dp" by default."""
        keys = {"dims": {"dp": self.world_size}, "timeout_s": OPENS_S, "device": "cpu", **keys}
        return meshcomm.init(**keys, store=client(self.port), rank=self.rank, world_size=self.world_size)

    @property
    def shared(self) -> dist.TCPStore:
        """A new client of the store of all jobs."""
        return client(self.shared_port)

    def tell(self, what: str) -> None:
        """Tell the other processes that this one has reached a point."""
        self.shared.set(f"told/{what}/{self.number}", str(os.getpid()))

    def until(self, what: str, *numbers: int) -> list[int]:
        """Wait until these processes have reached the point. Returns their process ids."""
        keys = [f"told/{what}/{number}" for number in numbers]
        self.shared.wait(keys, _LIMIT)
        return [int(self.shared.get(key)) for key in keys]


def client(port: int) -> dist.TCPStore:
    """A client of a store on this host."""
    return dist.TCPStore("127.0.0.1", port, None, False, _LIMIT, wait_for_workers=False)


def run(
    pool: Pool, folder: Path, body: Callable[..., Any], *args: Any, timeout_s: float = 100.0, **sizes: int
) -> list[Ended]:
    """Call `body(place, *args)` on the processes of jobs of these sizes. Returns how each call ended, in the order of the jobs."""
    with ExitStack() as stores:
        ports = {job: stores.enter_context(served()) for job in (*sizes, "shared")}
        call = partial(_body, sizes, ports, str(folder), body, *args)
        return pool.call(call, ranks=sum(sizes.values()), limits=Limits(timeout_s, settle_s=40.0))


@contextmanager
def served() -> Iterator[int]:
    """Serve a store, and return its port."""
    store = serve_on_loopback("127.0.0.1", 0, _LIMIT)
    assert store is not None
    yield store.port
    del store


def _body(
    sizes: Mapping[str, int], ports: Mapping[str, int], folder: str, body: Callable[..., Any], *args: Any
) -> Any:
    number = rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.chdir(folder)
    for job, size in sizes.items():
        if rank < size:
            return body(Place(job, rank, size, number, ports[job], ports["shared"]), *args)
        rank -= size
    raise AssertionError(number)


def values(ended: list[Ended]) -> list[Any]:
    """What the calls returned. Fails if one of them did not return."""
    assert [end.state for end in ended] == ["returned"] * len(ended), "\n".join(end.text for end in ended)
    return [end.value for end in ended]


def error_of(call: Callable[[], object]) -> tuple[str, str, tuple[int, ...], float]:
    """Return the kind, the text and the missing ranks of the error of a call, and its seconds."""
    began = time.monotonic()
    try:
        call()
    except meshcomm.MeshcommError as error:
        missing: tuple[int, ...] = getattr(error, "missing", ())
        return type(error).__name__, str(error), missing, time.monotonic() - began
    return "none", "", (), time.monotonic() - began
