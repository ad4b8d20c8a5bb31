"""How long calls have run: by the clock, and on queues, as with NCCL, where a call that cannot end is named."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshcomm.errors import MeshcommError
from meshcomm.testing import Pool
from meshcomm.transport.base import P2P
from meshcomm.transport.torch_private import bindings, unfinished_collectives
from meshcomm.watching import timer as timers
from meshcomm.watching.counters import counter_of
from meshcomm.watching.messages import Batch
from meshcomm.watching.recorder import FlightRecorder
from meshcomm.watching.timer import GRACE_S, CallTimer, queued_in
from tests.forked_jobs import Job
from tests.watching.queued_program import OF_OTHERS_S

pytestmark = pytest.mark.long

PROGRAM = str(Path(__file__).with_name("queued_program.py"))

# Patterns of the cause in the launcher's last lines; rank 1 shares its "dp" group with rank 3.
CAUSES = {
    "skips": r"rank 3 \(dp=1 tp=1\) has not arrived: it has closed the mesh.*\n(.*\n)*.*(it waited for rank 3|rank 3 .*ended with exit code 0 while rank 1 waited)",
    "deaf": r"send to rank [23], message 1 .*\n(.*\n)*.*(it waited for rank [23]|rank [23] .*ended with exit code 0 while rank [01] waited)",
    "raises": r"rank 3.* failed: ValueError: a fault of the program",
    "killed": r"rank 3.* was ended by SIGKILL",
    "asleep": r"rank 3 .*waited for it\n.*CollectiveTimeout.*it waited for rank 3",
    "shape": r"rank [13] .* failed: CallMismatchError",  # a tie of two
}
# Two faults in steady state (70 calls) run in every suite. The other rows, some with fewer calls, are marked `faults`.
ROWS = [
    pytest.param(
        fault,
        calls,
        marks=[] if calls == 70 and fault in ("raises", "killed") else [pytest.mark.faults],
    )
    for fault in CAUSES
    for calls in (70, 0, 10, 64)
]


# As torch 2.11 wrote it on an H200: an all_reduce and an exchange that a peer has not reached, after another exchange.
# The messages of an exchange stay "scheduled"; the entry named "nccl:coalesced" is the exchange as a whole.
RECORDED = """{"entries": [
 {"collective_seq_id": 20, "is_p2p": true, "p2p_seq_id": 13, "pg_id": 1, "process_group": ["meshcomm1/dp/0", "dp[tp=0]"],
  "profiling_name": "nccl:send 0->1", "record_id": 57, "retired": false, "state": "scheduled", "timeout_ms": 90000},
 {"collective_seq_id": 21, "is_p2p": false, "p2p_seq_id": 13, "pg_id": 1, "process_group": ["meshcomm1/dp/0", "dp[tp=0]"],
  "profiling_name": "nccl:all_reduce", "record_id": 59, "retired": false, "state": "scheduled", "timeout_ms": 90000},
 {"collective_seq_id": 21, "is_p2p": true, "p2p_seq_id": 14, "pg_id": 1, "process_group": ["meshcomm1/dp/0", "dp[tp=0]"],
  "profiling_name": "nccl:recv 0<-1", "record_id": 60, "retired": false, "state": "scheduled", "timeout_ms": 90000},
 {"collective_seq_id": 21, "is_p2p": false, "p2p_seq_id": 14, "pg_id": 1, "process_group": ["meshcomm1/dp/0", "dp[tp=0]"],
  "profiling_name": "nccl:coalesced", "record_id": 62, "retired": false, "state": "scheduled", "timeout_ms": 90000}],
 "pg_status": {"1": {"last_completed_collective": "13", "last_enqueued_collective": "14", "last_started_collective": "-1"}},
 "version": "2.10"}"""


def test_what_nccl_has_not_ended_is_read_from_torch_s_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_dump_nccl_trace_json", lambda **given: RECORDED.encode(), raising=False)
    assert unfinished_collectives() == {"meshcomm1/dp/0": [(59, "nccl:all_reduce")]}
    monkeypatch.delattr(bindings, "_dump_nccl_trace_json")
    assert unfinished_collectives() == {}


def test_without_hooks_a_call_that_no_recorder_knows_is_not_taken_for_the_last_one_that_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.13 and older report no call outside the mesh, such as FSDP's calls on its group."""
    recorder = FlightRecorder("fsdp", [0, 1], lambda *_: MeshcommError("?"))
    recorder.ordered, recorder.group_name = True, "meshcomm1/fsdp/0"
    counter = counter_of(recorder.counters, "fsdp", "all_reduce")
    for _ in range(3):
        with recorder.call(None, counter, 16, None, sys._getframe()):
            pass
    for names, number in (
        (["nccl:all_reduce"], 3),
        (["nccl:all_reduce", "nccl:all_reduce"], 2),
        (["nccl:_all_gather_base"], 0),
    ):
        calls = {"meshcomm1/fsdp/0": list(enumerate(names, 7))}
        found = queued_in(recorder, None, calls.copy, 1.0)
        assert found is not None and found.number == number
        assert queued_in(recorder, found, calls.copy, 2.0) is found
    assert queued_in(recorder, found, dict, 3.0) is None
    # Training queues one unknown call after another: each look finds a different call, so none is stuck.
    timer, recorder.timeout_s = CallTimer(), lambda: 8.0
    for second in range(60):
        queued = {"meshcomm1/fsdp/0": [(second if second < 30 else 30, "nccl:_all_gather_base")]}
        monkeypatch.setattr(timers, "unfinished_collectives", queued.copy)
        assert bool(timer.stuck([recorder], float(second))) is (second > 38)


def test_of_calls_that_wait_for_each_other_the_first_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look between the two calls sees only the second one; still, the error names the first one."""
    recorders, queued = [], {}
    for dim in ("tp", "dp"):
        recorder = FlightRecorder(dim, [0, 1], lambda *_: MeshcommError("?"))
        recorder.ordered, recorder.group_name, recorder.timeout_s = True, dim, lambda: 3.0
        recorders.append(recorder)
    for recorder in reversed(recorders):
        with recorder.call(
            None, counter_of(recorder.counters, recorder.label, "all_reduce"), 16, None, sys._getframe()
        ):
            pass
        queued[recorder.label] = [(7, "nccl:all_reduce")]
    timer, began = CallTimer(), time.monotonic()
    monkeypatch.setattr(timers, "unfinished_collectives", lambda: {"tp": queued["tp"]})
    assert timer.stuck(recorders, began) == []
    monkeypatch.setattr(timers, "unfinished_collectives", queued.copy)
    looks = [timer.stuck(recorders, began + 0.4 * look) for look in range(1, 9)]
    assert looks[:-1] == [[]] * 7 and looks[-1][0][0].label == "dp"


@pytest.mark.parametrize(("fault", "calls"), ROWS)
def test_a_fault_is_named_while_the_host_waits_for_a_value(
    pool: Pool, tmp_path: Path, fault: str, calls: int
) -> None:
    job = Job(pool, tmp_path, "-m", "meshcomm", "run", "--world-size", "4", PROGRAM, fault, str(calls))
    code, out, err = job.finish()
    assert code != 0
    assert re.search(CAUSES[fault], err), err
    assert time.time() - float(re.findall(r"fault at (\S+)", out)[0]) < OF_OTHERS_S + 10, err


def test_a_call_is_overdue_by_the_clock_alone() -> None:
    recorder = FlightRecorder("tp", [0, 1], lambda *_: pytest.fail("nobody asked"))
    recorder.timeout_s = lambda: 3.0
    timer = CallTimer()
    counter = counter_of(recorder.counters, "tp", "all_reduce")

    def call() -> FlightRecorder:
        return recorder.call(recorder, counter, 8, torch.ones(2), sys._getframe())  # type: ignore[arg-type]

    def late(now: float) -> bool:
        return bool(timer.overdue([recorder], now))

    assert not late(0.0)
    with call():
        assert not late(10.0)  # the time counts from here
        assert not late(13.0 + GRACE_S)
        assert late(13.1 + GRACE_S)
    with call():  # another call restarts the time
        assert not late(70.0)
        assert not late(73.0 + GRACE_S)
        assert late(73.1 + GRACE_S)
    message = recorder.messages.begin("tp", Batch("recv", [P2P("recv", torch.ones(2), 1, 0)]), True)
    assert not late(80.0)
    assert late(83.1 + GRACE_S)
    message.ended()
    recorder.messages.waiting = None
    with call():
        waited = recorder.later()
    assert waited is not None and not late(200.0)  # no thread waits for it yet
    since = waited.waits()
    assert not late(210.0)
    assert late(213.1 + GRACE_S)
    waited.waited(since)
    assert not late(220.0)
    # The Work of a call outside the mesh is asked only when its time is up.
    done, stuck = _Work(True), _Work(False)
    for work, overdue in ((done, False), (stuck, True)):
        recorder.work = work
        assert not late(300.0)
        assert not late(303.0 + GRACE_S)
        assert work.asked == 0
        assert late(303.1 + GRACE_S) is overdue


class _Work:
    """A backend's Work that counts its queries."""

    def __init__(self, done: bool) -> None:
        self.asked = 0
        self._done = done

    def is_completed(self) -> bool:
        self.asked += 1
        return self._done


def test_a_call_that_an_interrupt_leaves_is_over() -> None:
    recorder = FlightRecorder("tp", [0, 1], lambda *_: pytest.fail("nobody asked"))
    counter = counter_of(recorder.counters, "tp", "all_reduce")
    with pytest.raises(KeyboardInterrupt), recorder.call(recorder, counter, 8, None, sys._getframe()):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert not recorder.inside
    timer = CallTimer()
    recorder.timeout_s = lambda: 3.0
    assert [timer.overdue([recorder], now) for now in (0.0, 100.0)] == [[], []]


def test_a_queued_call_is_watched_again_after_a_capture() -> None:
    recorder = FlightRecorder("dp", [0, 1])
    work = Mock(
        **{"is_completed.side_effect": RuntimeError("operation not permitted when stream is capturing")}
    )
    recorder.ordered, recorder.work = True, work
    recorder.timeout_s = lambda: 8.0
    timer, watched = CallTimer(), [recorder]
    assert timer.stuck(watched, 0.0) == []
    work.is_completed = lambda: False
    assert timer.stuck(watched, 10.0) == []
    assert timer.stuck(watched, 18.0) == []
    assert [each for each, _ in timer.stuck(watched, 19.0)] == [recorder]


def test_each_wait_for_a_message_has_its_own_time() -> None:
    """A program may wait again and again, each time for less than the group's timeout."""
    timer, recorder = CallTimer(), FlightRecorder("dp", [0, 1])
    recorder.timeout_s = lambda: 2.0
    message = Mock(over=0.0)
    recorder.messages.waiting = message
    limit_s = 2.0 + GRACE_S
    for wait in range(4):
        assert timer.overdue([recorder], wait * limit_s) == []
        assert timer.overdue([recorder], (wait + 0.9) * limit_s) == []
        # This wait ends, and the next one begins before the timer looks again.
        message.over = 1.0 + wait
    assert timer.overdue([recorder], 4 * limit_s) == []
    assert timer.overdue([recorder], 5.1 * limit_s) == [(recorder, message)]
