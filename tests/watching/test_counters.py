"""A call is counted once, from its beginning until its data is there."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.collectives import Call
from meshcomm.mesh import Mesh
from meshcomm.watching.counters import CallCounter, PendingCall, counter_of


def test_a_call_in_two_parts_is_one_that_lasts_until_the_data_is_there() -> None:
    def body(mesh: Mesh) -> list[tuple[str, bool, int]]:
        comm = mesh._at["dp"]
        start, start_p2p, seen = comm.transport.start, comm.transport.start_p2p, []

        def note() -> None:
            last = comm.recorder.last()
            assert last is not None
            seen.append((last["call"], last["inside"], last["number"]))

        def watched(call: Call) -> Any:
            if call.lengths:
                note()
            return start(call)

        def watched_p2p(*given: Any) -> Any:
            note()
            return start_p2p(*given)

        comm.transport.start = watched  # type: ignore[method-assign]
        comm.transport.start_p2p = watched_p2p  # type: ignore[method-assign]
        mesh.all_gather("dp", torch.ones(1 + mesh.rank), uneven=True)
        mesh.all_to_all("dp", torch.ones(5), input_split_sizes=[2, 3])
        assert not comm.recorder.inside
        return seen

    for seen in meshcomm.simulate(body, dims={"dp": 2}):
        assert seen == [("all_gather", True, 1), ("all_to_all", True, 2)]


def test_a_failed_call_ends_and_an_unwaited_one_does_not_count() -> None:
    total = CallCounter("tp", "all_reduce")
    later = PendingCall(total, 100, began=1.0, left=1.5)
    assert (total.calls, total.async_op.calls) == (0, 0)
    now = time.perf_counter()
    later.waited(now)
    later.waited(time.perf_counter())  # a second work of the same call
    assert (total.async_op.calls, total.async_op.nbytes) == (1, 100)
    assert total.async_op.span_s == pytest.approx(later.over - 1.0)
    assert 0.5 <= total.async_op.seconds < 5
    blocking = PendingCall(total, 7, began=now, left=now)
    blocking.at_once()
    blocking.waited(now)
    assert (total.calls, total.nbytes, total.async_op.calls) == (1, 7, 1)
    assert counter_of({("tp", "all_reduce", False): total}, "tp", "all_reduce") is total
