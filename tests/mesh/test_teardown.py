"""What a mesh took, it gives back: on success, after an exception, and where close was forgotten."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.testing import Pool

DIMS = {"pp": 2, "dp": 2, "tp": 2}


def held() -> tuple[int, int]:
    """Open file descriptors and threads of this process, those of C++ too."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def cycle() -> None:
    with meshcomm.init(dims=DIMS, merge={"grad": ["pp", "dp"]}, device="cpu", timeout_s=30) as mesh:
        for dim in DIMS:
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
def test_fifty_cycles_return_files_and_threads(pool: Pool) -> None:
    for counts in pool.run(cycles, 50):
        (files, threads), (files_after, threads_after) = counts[0], counts[-1]
        assert abs(files_after - files) <= 2, counts
        assert abs(threads_after - threads) <= 2, counts


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


FORGOTTEN = """
import torch, meshcomm
mesh = meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=30)
mesh.all_reduce("dp", torch.ones(3))
handle = mesh.all_reduce("dp", torch.ones(3), async_op=True)
handle.wait()
"""


def test_a_forgotten_close_is_clean_and_silent(tmp_path: Path) -> None:
    script = tmp_path / "forgotten.py"
    script.write_text(FORGOTTEN)
    config = tmp_path / "mesh.toml"
    config.write_text("[mesh]\ndims = { dp = 2 }\n")
    done = subprocess.run(
        [sys.executable, "-W", "always", "-m", "meshcomm", "run", str(config), str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
