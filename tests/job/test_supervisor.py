"""How a supervisor follows processes, and in which order it ends and announces them; no process is started."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch.distributed as dist

from meshcomm.config.elastic import ElasticConfig
from meshcomm.job.replacing import Replacing
from meshcomm.job.supervisor import Supervisor, labels_of
from meshcomm.rendezvous import keys
from meshcomm.watching.ending import Failure, without_error


class Followed(Supervisor):
    """Each look returns the next exit codes. Records each action with the number of the generation announced by then."""

    def __init__(self, replacing: Replacing, looks: list[dict[int, int]]) -> None:
        super().__init__(replacing, labels_of(None, 3))
        self.running = {0, 1, 2}
        self.looks, self.done = looks, list[tuple[str, int, int]]()

    def start(self, process: int) -> None:
        self.done.append(("start", process, self.replacing.number))
        self.replacing.started(process)
        self.running.add(process)

    def look(self) -> dict[int, Failure]:
        if not self.looks:
            pytest.fail(f"it goes on waiting, after {self.done}")
        failures = {}
        for process, code in self.looks.pop(0).items():
            self.running.discard(process)
            failure = without_error(process, code, 0.0, self.name)
            if code == 0:
                self.completed.add(process)
            elif code > 0 or not self.loses_nothing(failure):
                failures[process] = failure
        return failures

    def end(self, process: int) -> None:
        self.running.discard(process)
        self.done.append(("end", process, self.replacing.number))

    def forget_errors(self, process: int) -> None:
        self.done.append(("forget", process, self.replacing.number))


def followed(looks: list[dict[int, int]], ended: bool = False, hung: int | None = None) -> Followed:
    replacing = Replacing(3, ElasticConfig(replace=2), now=lambda: 0.0, say=lambda *lines: None)
    store: Any = dist.HashStore()
    replacing.store = store
    for process in range(3):
        store.set(keys.OWNER.format(process), "process 1 on a host of another name")
    if ended:
        store.set(keys.ENDED, "")
    if hung is not None:
        store.set(keys.HUNG.format(0), json.dumps([hung, "is in no call"]))
    return Followed(replacing, looks)


def test_a_hung_process_is_ended_before_others_are_announced() -> None:
    each = followed([{}, {0: 0, 1: 0, 2: 0}], hung=1)
    each.follow()
    assert each.done[:2] == [("end", 1, 0), ("end", 1, 1)]
    assert each.done[2:4] == [("forget", 1, 1), ("start", 1, 1)]


@pytest.mark.parametrize("code", [-9, -6])
def test_a_signal_after_the_end_loses_nothing(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    each = followed([{1: code}, {0: 0, 2: 0}], ended=True)
    assert each.follow() == {} and each.completed == {0, 1, 2} and each.done == []
    assert "after the end; nothing is lost" in capsys.readouterr().err


def test_a_process_that_hangs_after_the_end_loses_nothing() -> None:
    each = followed([{0: 0}, {2: 0}, {}], ended=True, hung=1)
    assert each.follow() == {} and each.done == [("end", 1, 0)]


def test_an_exit_code_after_the_end_is_a_failure() -> None:
    each = followed([{0: 0, 2: 0}, {1: 3}], ended=True)
    assert each.follow()[1].code == 3
    # The others may end later. They do not meet a new process any more.
    each = followed([{1: 3}, {0: 0, 2: 0}], ended=True)
    assert each.follow()[1].code == 3 and each.done == []


def test_ranks_that_have_completed_cannot_be_met_again() -> None:
    """This also holds for processes on another host, where the launcher cannot see whether they run."""
    each = followed([{1: -9}, {0: 0, 2: 0}])
    (failure,) = each.follow().values()
    assert failure.code == 137 and not math.isnan(failure.time)
