"""The pool of warm ranks: which of them are used again."""

from __future__ import annotations

import os
import threading
import time

from meshcomm.testing import Pool


def with_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    return os.getpid()


def test_a_rank_that_is_left_with_many_threads_is_replaced(pool: Pool) -> None:
    first = pool.run(with_threads, 0, ranks=1)
    assert pool.run(with_threads, 200, ranks=1) == first
    second = pool.run(with_threads, 0, ranks=1)
    assert second != first
    assert pool.run(with_threads, 0, ranks=1) == second
