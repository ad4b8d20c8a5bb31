"""The store does not answer whether ranks were lost: a failed call is explained without it, and a value is not used."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from meshcomm.errors import StoreError
from meshcomm.rendezvous.generation import AnnouncedGenerations
from meshcomm.testing import Pool


def ask_a_silent_store() -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    generations = AnnouncedGenerations(store, 0, 0)
    assert generations.lost("a call", False, confirms=True) is None
    generations._asks = SimpleNamespace(check=lambda _: time.sleep(3))
    generations.announced_s = 0.1
    assert generations.lost("a call", False) is None
    with pytest.raises(StoreError) as caught:
        generations.lost("a call", False, confirms=True)
    return str(caught.value)


def test_a_value_is_not_used_while_the_store_is_silent(pool: Pool) -> None:
    (text,) = pool.run(ask_a_silent_store, ranks=1)
    assert text.startswith("a call: the job's store does not answer")
    assert "expected: an answer within 0.1 s" in text
