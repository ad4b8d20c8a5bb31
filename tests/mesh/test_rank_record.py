"""Ranks read each other's records through the store: one asks for all, and a rank that does not answer is given up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from meshcomm.mesh.rank_record import RankRecord, RecordExchange
from meshcomm.watching.verdict import BlockedCall, diagnose
from tests.watching.test_verdict import status_of


class _BusyStore:
    """A store whose calls take `call_s`. Rank 1 has answered from look number `answers` on; rank 2 never answers."""

    def __init__(self, call_s: float, answers: int) -> None:
        self.looks = 0
        self._call_s = call_s
        self._answers = answers

    def add(self, key: str, number: int) -> int:
        return number

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        time.sleep(self._call_s)
        self.looks += "answer/1/1" in keys
        return keys == ["answer/1/1"] and self.looks >= self._answers

    def get(self, key: str) -> bytes:
        return b'{"rank": 1}'


@pytest.mark.faults
def test_on_a_busy_machine_answers_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcomm.mesh.rank_record._ANSWER_S", 0.3)
    monkeypatch.setattr("meshcomm.mesh.rank_record._LONGER", 40)
    # The eighth look comes after at least 0.8 s; on an idle machine it would come within 0.3 s.
    busy = RecordExchange(_BusyStore(0.1, 8), 0, 0.01)
    assert busy.limited(lambda: busy.ask([1])) == {1: {"rank": 1}}
    # A rank that never answers is still given up, and on an idle machine in time.
    idle = RecordExchange(_BusyStore(0.0, 1), 0, 0.01)
    began = time.monotonic()
    assert idle.ask([1, 2]) == {1: {"rank": 1}}
    assert time.monotonic() - began >= 0.3
    # A store that does not answer or stops halfway is given up as well.
    silent = RecordExchange(_BusyStore(3.0, 1), 0, 0.01)
    with pytest.raises(TimeoutError, match=r"no answer within 0.3 s"):
        silent.limited(lambda: silent.ask([1]))
    monkeypatch.setattr("meshcomm.mesh.rank_record._LONGER", 1)
    with pytest.raises(TimeoutError):
        idle.limited(lambda: time.sleep(20))


def test_no_answer_is_awaited_from_a_rank_that_has_left() -> None:
    """Neither of one whose process has ended, be it while it is asked, nor of one that has closed its mesh."""
    store, states = dist.HashStore(), {1: "ended", 2: "runs", 3: "runs"}

    def later() -> None:
        states[2] = "ended"
        RecordExchange(store, 3, 0.01).leave({"closed": True})

    timer = threading.Timer(0.2, later)
    timer.start()
    began = time.monotonic()
    assert RecordExchange(store, 0, 0.01, states.__getitem__).ask([1, 2, 3]) == {3: {"closed": True}}
    assert 0.2 <= time.monotonic() - began < 1.4
    timer.join()


class _CountingStore:
    """A store that counts its operations. Its ranks answer with `status_of`, except for the ranks in `silent`."""

    def __init__(self, store: Any, silent: tuple[int, ...]) -> None:
        self._store = store
        self._silent = silent
        self.operations = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.operations += 1
            result = method(*arguments)
            if name == "set" and arguments[0].startswith("ask/"):
                _, rank, number = arguments[0].split("/")
                if int(rank) not in self._silent:
                    status = status_of(int(rank), 9 if int(rank) else 8, (8, "all_reduce"))
                    self.operations += 2  # as a watchdog does when it finds a question
                    self._store.set(f"answer/{rank}/{number}", json.dumps(status))
            return result

        return counted


@pytest.mark.parametrize(("ranks", "silent"), [(8, (5,)), (64, ())])
def test_one_rank_asks_for_all_that_wait_in_a_call(
    ranks: int, silent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations of a hang diagnosis grow with the number of ranks, not with its square."""
    monkeypatch.setattr("meshcomm.mesh.rank_record._ANSWER_S", 0.5)
    store = _CountingStore(dist.HashStore(), silent)
    waiting = [rank for rank in range(1, ranks) if rank not in silent]
    asked: list[int] = []
    found: dict[int, Any] = {}

    def wait(rank: int) -> None:
        query = RecordExchange(store, rank, 0.01)

        def make() -> dict[str, Any]:
            asked.append(rank)
            statuses = query.ask([other for other in range(ranks) if other != rank])
            statuses[rank] = status_of(rank, 9, (8, "all_reduce"))
            return diagnose(BlockedCall(rank, "dp", range(ranks), 9), statuses)._asdict()

        found[rank] = query.shared("dp/9", make)

    with ThreadPoolExecutor(len(waiting)) as threads:
        list(threads.map(wait, waiting, timeout=60))
    assert len(asked) == 1
    assert all(each["missing"] == [0, *silent] for each in found.values()), found
    # Six operations of the asking rank and two of the asked rank, for each rank. Waiting ranks also look now and then.
    assert store.operations < 100 + 25 * ranks


def test_a_diagnosis_that_never_comes_is_made_by_the_next_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcomm.mesh.rank_record._ANSWER_S", 0.1)
    store = dist.HashStore()
    store.set("first/dp/9", "7")  # rank 7 was first, and has ended
    for rank in (1, 2):
        assert RecordExchange(store, rank, 0.01).shared("dp/9", lambda: {"own": rank}) == {"own": 1}


def test_a_diagnosis_of_a_rank_that_has_ended_is_not_awaited() -> None:
    store = dist.HashStore()
    store.set("first/dp/9", "7")
    began = time.monotonic()
    exchange = RecordExchange(store, 1, 0.01, {7: "ended"}.__getitem__)
    assert exchange.shared("dp/9", lambda: {"own": 1}) == {"own": 1} and time.monotonic() - began < 1.0


class Ending:
    """A recorder whose call times out after `looks` reads of its state."""

    counters: Mapping[str, Any] = {}
    messages = SimpleNamespace(waiting=None)

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def inside(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def status(self) -> dict[str, Any]:
        return {"last": {"inside": self.inside}}


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_a_call_that_fails_while_it_is_recorded_is_under_way_or_has_failed(looks: int) -> None:
    recorder: Any = Ending(looks)
    own = RankRecord(0, {"dp": 0}, [recorder])
    try:
        raise RuntimeError("Timed out waiting 15000ms for recv operation to complete")
    except RuntimeError:
        status = own.data()
    assert status["call_failed"] or status["groups"][0]["last"]["inside"], status
