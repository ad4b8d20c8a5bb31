"""Which frames of a traceback are the user's, and where threads are."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import meshcomm
from meshcomm.comm.callsite import is_ours, stack_of
from meshcomm.testing import Pool

TORCH, OWN = Path(torch.__file__).parent, Path(meshcomm.__file__).parent


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        (TORCH / "nn/modules/module.py", True),
        (OWN / "comm/along.py", True),
        (f"{TORCH}titan/train.py", False),
        (f"{TORCH}vision/models/resnet.py", False),
        (f"{OWN}_tools/train.py", False),
        (OWN / "bench/overhead.py", False),
        (os.__file__, False),
    ],
)
def test_a_package_whose_name_begins_alike_is_the_users(file: str | Path, ours: bool) -> None:
    assert is_ours(str(file)) is ours


def test_the_stack_of_a_thread_and_one_s_own() -> None:
    done = threading.Event()

    def waits() -> None:
        done.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.1)
    found = stack_of(thread.ident or 0)
    done.set()
    thread.join()
    assert (__file__, waits.__code__.co_firstlineno + 1, "waits") in found
    assert found[-1][2] == "_bootstrap"
    own = [(file, name) for file, _, name in stack_of(threading.get_ident()) if not is_ours(file)]
    assert own[0] == (__file__, "test_the_stack_of_a_thread_and_one_s_own")
    assert stack_of(-1) == []


class Local:
    """Something that a failed call holds."""


def test_a_stack_keeps_no_frame() -> None:
    def fails() -> weakref.ref[Local]:
        local = Local()
        stack_of(threading.get_ident())
        return weakref.ref(local)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


def watched_for_frames() -> int:
    seen: list[int] = []
    frames, sys._current_frames = sys._current_frames, lambda: seen.append(1) or frames()  # type: ignore[func-returns-value]
    try:
        with meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=0.5) as mesh:
            mesh.all_reduce("dp", torch.ones(1))
            time.sleep(1.5)
            return len(seen)
    finally:
        sys._current_frames = frames


def test_an_open_mesh_makes_no_frames_of_running_threads(pool: Pool) -> None:
    # Python 3.11 has died by SIGSEGV where another thread walked them.
    assert pool.run(watched_for_frames, ranks=2) == [0, 0]
