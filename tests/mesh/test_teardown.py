"""What a mesh took, it gives back: on success and after an exception."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import meshcomm
from meshcomm.testing import Pool

DIMS = {"pp": 2, "dp": 2, "tp": 2}
PLANE = {"dp": 2, "tp": 2}


def held() -> tuple[int, int]:
    """Open file descriptors and threads of this process, those of C++ too."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def cycle() -> None:
    with meshcomm.init(dims=PLANE, merge={"grad": ["dp", "tp"]}, device="cpu", timeout_s=30) as mesh:
        for dim in PLANE:
            mesh.all_reduce(dim, torch.ones(4))
        mesh.all_reduce("grad", torch.ones(4))
        mesh.functional.all_gather("tp", torch.ones(2, requires_grad=True), grad="slice").sum().backward()


def cycles(count: int) -> list[tuple[int, int]]:
    cycle()  # what torch makes once and keeps
    gc.collect()  # what other tests left in this process
    counts = [held()]
    for _ in range(count):
        cycle()
        counts.append(held())
    return counts


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads and files as Linux shows them"
)
def test_twenty_cycles_return_files_and_threads(pool: Pool) -> None:
    for counts in pool.run(cycles, 20, ranks=4):
        (files, threads), (files_after, threads_after) = counts[0], counts[-1]
        assert abs(files_after - files) <= 2, counts
        assert abs(threads_after - threads) <= 2, counts


def kept_device_meshes() -> tuple[tuple[int, int], tuple[int, int], list[str]]:
    """What is held before and after five meshes whose DeviceMeshes the program keeps, as torch's caches do."""
    kept, before, texts = [], (0, 0), []
    for number in range(6):
        with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
            kept.append(mesh["dp"])
            split = DTensor.from_local(torch.ones(1), mesh["dp"], [Shard(0)], run_check=False)
            assert split.full_tensor().tolist() == [1.0, 1.0]
        if not number:
            before = held()
    gc.collect()
    for each in kept[:1]:
        with pytest.raises(Exception, match="meshcomm") as caught:
            each.get_group()
        texts.append(str(caught.value))
    return before, held(), texts


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads and files as Linux shows them"
)
def test_a_device_mesh_that_is_kept_keeps_no_group(pool: Pool) -> None:
    for (files, threads), (files_after, threads_after), _ in pool.run(kept_device_meshes, ranks=2):
        assert files_after <= files + 2 and threads_after <= threads + 2


def after_an_exception() -> Any:
    texts = []
    for odd in (0, 5):
        try:
            with meshcomm.init(dims=DIMS, device="cpu", timeout_s=30) as mesh:
                mesh.warm_up()
                if mesh.rank == odd:
                    raise ValueError("one rank's own mistake")
                mesh.all_reduce("dp", torch.ones(1))
        except ValueError as error:
            texts.append(f"ValueError: {error}")
        except meshcomm.MeshcommError as error:
            texts.append(type(error).__name__)
        else:
            texts.append("ok")
    with meshcomm.init(dims=DIMS, device="cpu", timeout_s=30) as mesh:
        total = mesh.all_reduce("tp", torch.ones(1)).item()
    return texts, total, [t.name for t in threading.enumerate() if t.name == "meshcomm-watch"]


def test_after_an_exception_the_next_mesh_works(pool: Pool) -> None:
    found = pool.run(after_an_exception)
    peers = {0: 2, 5: 7}  # along dp
    for rank, (texts, total, threads) in enumerate(found):
        expected = [
            "ValueError: one rank's own mistake" if rank == odd else "PeerLost" if rank == peer else "ok"
            for odd, peer in peers.items()
        ]
        assert (texts, total, threads) == (expected, 2.0, [])


def with_a_kept_error(call: str) -> tuple[str, tuple[int, int], tuple[int, int]]:
    with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
        mesh.warm_up()  # what torch makes once and keeps
    gc.collect()
    before = held()
    kept: BaseException | None = None
    try:
        with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30) as mesh:
            mesh.warm_up()
            if mesh.rank == 0:
                raise ValueError("one rank's own mistake")
            if call == "recv":
                mesh.recv("dp", torch.ones(1), src=0)
            mesh.all_reduce("dp", torch.ones(1))
    except (ValueError, meshcomm.MeshcommError) as error:
        kept = error
    return type(kept).__name__, before, held()


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads and files as Linux shows them"
)
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
def test_an_error_that_is_kept_keeps_no_group(pool: Pool, call: str) -> None:
    found = pool.run(with_a_kept_error, call, ranks=2)
    assert [name for name, _, _ in found] == ["ValueError", "PeerLost"]
    for _, before, after in found:
        assert after == before
