"""A mesh gives back what it took, on success and after an exception."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import meshcomm
from meshcomm.errors import PeerLost
from meshcomm.testing import Pool
from tests.ranks import on_ranks

linux = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads and files as Linux shows them"
)
PLANE = {"dp": 2, "tp": 2}


def held() -> tuple[int, int]:
    """Open file descriptors and threads of this process, including C++ threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def cycle() -> None:
    with meshcomm.init(dims=PLANE, merge={"grad": ["dp", "tp"]}, device="cpu", timeout_s=30) as mesh:
        for dim in PLANE:
            mesh.all_reduce(dim, torch.ones(4))
        mesh.all_reduce("grad", torch.ones(4))
        mesh.functional.all_gather("tp", torch.ones(2, requires_grad=True), grad="slice").sum().backward()


@pytest.mark.faults
@linux
@on_ranks(4)
def test_twenty_cycles_return_files_and_threads() -> None:
    cycle()  # objects that torch creates once and keeps
    gc.collect()  # garbage of other tests in this process
    before = held()
    for _ in range(20):
        cycle()
    assert all(abs(now - then) <= 2 for now, then in zip(held(), before, strict=True)), (held(), before)


@linux
@on_ranks(2)
def test_a_device_mesh_that_is_kept_keeps_no_group() -> None:
    """The program keeps the DeviceMeshes of five meshes, as torch's caches do."""
    kept, before = [], (0, 0)
    for number in range(6):
        with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
            kept.append(mesh["dp"])
            split = DTensor.from_local(torch.ones(1), mesh["dp"], [Shard(0)], run_check=False)
            assert split.full_tensor().tolist() == [1.0, 1.0]
        if not number:
            before = held()
    gc.collect()
    with pytest.raises(Exception, match="meshcomm"):
        kept[0].get_group()
    assert all(now <= then + 2 for now, then in zip(held(), before, strict=True)), (held(), before)


@on_ranks(4)
def test_after_an_exception_the_next_mesh_works() -> None:
    # An earlier test may have left a mesh open.
    before = {*threading.enumerate()}
    for odd, peer in ((0, 2), (3, 1)):  # along dp
        rank = int(os.environ["RANK"])
        kinds = {odd: ValueError, peer: PeerLost}
        with (
            pytest.raises(kinds[rank]) if rank in kinds else nullcontext(),
            meshcomm.init(dims=PLANE, device="cpu", timeout_s=30) as mesh,
        ):
            mesh.warm_up()
            if mesh.rank == odd:
                raise ValueError("one rank's own mistake")
            mesh.all_reduce("dp", torch.ones(1))
    with meshcomm.init(dims=PLANE, device="cpu", timeout_s=30) as mesh:
        assert mesh.all_reduce("tp", torch.ones(1)).item() == 2
    # A mesh that is closed because of an error does not wait long for its thread.
    ends = time.monotonic() + 10
    while [each for each in {*threading.enumerate()} - before if each.name.startswith("meshcomm-watch")]:
        assert time.monotonic() < ends
        time.sleep(0.05)


def with_a_kept_error(call: str) -> tuple[str, tuple[int, int], tuple[int, int]]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
        mesh.warm_up()  # objects that torch creates once and keeps
    gc.collect()
    before = held()
    kept: BaseException | None = None
    try:
        # A first message waits half of this time for its peer.
        with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=5) as mesh:
            mesh.warm_up()
            if mesh.rank == 0:
                raise ValueError("one rank's own mistake")
            if call == "recv":
                mesh.recv("dp", torch.ones(1), src=0)
            mesh.all_reduce("dp", torch.ones(1))
    except (ValueError, meshcomm.MeshcommError) as error:
        kept = error
    return type(kept).__name__, before, held()


@linux
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_an_error_that_is_kept_keeps_no_group(pool: Pool, call: str) -> None:
    found = pool.run(with_a_kept_error, call, ranks=2)
    assert [name for name, _, _ in found] == ["ValueError", "PeerLost"]
    for _, before, after in found:
        assert after == before


@on_ranks(4)
def test_a_program_may_destroy_groups_before_the_mesh_closes() -> None:
    with meshcomm.init(dims={**PLANE, "pp": 1}, device="cpu", timeout_s=30) as mesh:
        dist.destroy_process_group(mesh.group("dp"))
        assert mesh.all_reduce("tp", torch.ones(1)).item() == 2
    assert not dist.is_initialized()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 4, False)
    for again in (False, True):
        with meshcomm.init(dims=PLANE, device="cpu", timeout_s=30) as mesh:
            dist.destroy_process_group()
            if again:
                dist.init_process_group(
                    "gloo", store=dist.PrefixStore("user", store), rank=mesh.rank, world_size=4
                )
        # The mesh leaves a default group alone that the program has created since then.
        assert dist.is_initialized() is again
    dist.destroy_process_group()
