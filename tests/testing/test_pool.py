"""The pool of ranks: what it tells of a rank that died."""

from __future__ import annotations

import faulthandler
import os
import resource

import pytest

from meshcomm.testing import Pool
from meshcomm.testing.pool import RankFailure


def crash_in_one_rank(of_rank: int) -> None:
    if int(os.environ["RANK"]) == of_rank:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler._sigsegv()  # type: ignore[attr-defined]


def test_a_rank_that_dies_of_a_fault_shows_where(pool: Pool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(crash_in_one_rank, 1, ranks=2)
    assert set(failure.value.by_rank) == {1}
    assert "was killed by SIGSEGV" in str(failure.value) and "in crash_in_one_rank" in str(failure.value)
