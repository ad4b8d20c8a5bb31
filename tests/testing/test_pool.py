"""The pool of ranks: its report of a rank that died, and of a rank that is late."""

from __future__ import annotations

import faulthandler
import os
import resource
import threading
import time

import pytest
import torch

import meshcomm
from meshcomm.mesh import watched
from meshcomm.testing import Pool
from meshcomm.testing.pool import Limits, RankFailure
from tests.group_hooks import needs_group_hooks


def crash_in_one_rank(of_rank: int) -> None:
    if int(os.environ["RANK"]) == of_rank:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler._sigsegv()  # type: ignore[attr-defined]


def test_a_rank_that_dies_of_a_fault_shows_where(pool: Pool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(crash_in_one_rank, 1, ranks=2)
    assert set(failure.value.by_rank) == {1}
    assert "was killed by SIGSEGV" in str(failure.value) and "in crash_in_one_rank" in str(failure.value)


def stay_away() -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    time.sleep(30)


def test_a_late_rank_shows_its_main_thread_alone(pool: Pool) -> None:
    # With all threads, faulthandler also reads threads that C++ is just creating, which sometimes killed the rank.
    (late,) = pool.call(stay_away, ranks=1, limits=Limits(timeout_s=1))
    assert late.state == "late" and "in stay_away" in late.text
    assert late.stack.count("most recent call first") == 1


def watch_and_forget() -> None:
    meshcomm.watch()


def watches() -> int:
    return len(watched._LAST)


@needs_group_hooks
def test_a_watch_ends_with_its_test(pool: Pool) -> None:
    # Otherwise it would watch the next test's groups on some of their ranks, and wait for the others.
    pool.run(watch_and_forget, ranks=2)
    assert pool.run(watches, ranks=4) == [0] * 4


def makes_other_tensors(changes: bool) -> tuple[torch.dtype, int]:
    made = torch.ones(1).dtype, os.getpid()
    if changes:
        torch.set_default_dtype(torch.float64)
    return made


def test_a_default_dtype_ends_with_its_test(pool: Pool) -> None:
    before, after = (pool.run(makes_other_tensors, changes, ranks=2) for changes in (True, False))
    assert {process for _, process in before} & {process for _, process in after}
    assert {dtype for dtype, _ in [*before, *after]} == {torch.float32}
