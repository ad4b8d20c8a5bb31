"""Each rank can be asked what it is doing, also while it is blocked: by a thread that watches the store."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from meshcomm.comm.handle import broken
from meshcomm.comm.lateness import host
from meshcomm.comm.message_check import MessageCheck
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.verdict import absent_from, described, lines_of, message_lines, unmatched
from meshcomm.errors import CollectiveTimeout, CommunicationError, PeerLost
from meshcomm.layout.sizes import fold
from meshcomm.mesh.overdue import Overdue
from meshcomm.transport.torch_private import calls_under_way

_PACKAGE = str(Path(__file__).parents[1])

# How long a failing call waits for the others to say what they are doing.
_ANSWER_S = 1.5

# How long closing waits for a store that has not been found silent: a busy host may take seconds to answer.
_CLOSES_S = 10.0


@final
class Watch:
    """Answers for one rank, and asks for it.

    A rank whose call failed sets a key for each rank of the group. Every rank looks at its own key
    a few times a second (less often in large worlds, so that the store sees 20,000 looks a second at
    most), and answers with its last call on each group and the line that its program is at.

    Args:
        store: a torch store under a prefix of this mesh's own.
        who: coords of this rank, by dim.
        reports: folder for this rank's report, written when it asks or is asked; "": none.
        compared: how many messages of each pair of ranks are compared at most; None: all.
        timeouts: seconds by the label of a group; a call that lasts much longer ends the process.
        end: ends the process for the error of such a call, from another thread than the blocked one.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        who: dict[str, int],
        world_size: int,
        reports: str,
        compared: int | None,
        timeouts: Callable[[str], float],
        end: Callable[[CommunicationError], None],
    ) -> None:
        self.timed = True
        self._store = store
        self._rank = rank
        self._coords = who
        self._reports = reports
        self._compared = compared
        self._interval = max(0.25, world_size / 20_000)
        self._recorders: list[tuple[Recorder, float]] = []
        self._timeouts = timeouts
        self._end = end
        self._failed: dict[str, Any] | None = None
        self._overdue = Overdue()
        self._main = threading.get_ident()
        self._stop = threading.Event()
        # Of a store that cannot be reached the calls do not return: what it said last is no answer.
        self._mute = False
        # Two, as a look at such a store never ends, and the backend must be watched all the same.
        self._threads = [
            threading.Thread(target=each, name=f"meshcomm-{name}", daemon=True)
            for name, each in (("answer", self._answer), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def record(self, label: str, ranks: list[int]) -> Recorder:
        """A recorder for one more group."""
        check = None
        if self._compared != 0:
            store = dist.PrefixStore("messages", self._store)
            check = MessageCheck(store, label, ranks, self._rank, self._compared)
        recorder = Recorder(label, ranks, self._inquire, check)
        self._recorders.append((recorder, self._timeouts(label)))
        return recorder

    def close(self) -> None:
        """Stop answering; who asks later finds what this rank had done. Harmless when repeated."""
        if self._stop.is_set():
            return
        atexit.unregister(self.close)
        self._stop.set()
        store, last = self._store, json.dumps({**self.status(), "closed": True})

        def tell() -> None:
            with contextlib.suppress(RuntimeError):
                store.set(f"closed/{self._rank}", last)

        # Nobody waits for a store that has stopped answering, least of all for one that was found so.
        telling = threading.Thread(target=tell, name="meshcomm-closed", daemon=True)
        telling.start()
        telling.join(0.0 if self._mute else _CLOSES_S)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(0.0 if telling.is_alive() else 5.0)
        for recorder, _ in self._recorders:
            recorder.close()
        # One where nobody answers, in place of a connection.
        self._store = dist.HashStore()

    # -- answering ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            blocked = self._overdue.find(self._recorders, time.monotonic())
            if blocked is not None:
                error = self._blocked(blocked)
                # Asking took a while, in which the backend may have given up or come to its end.
                if self._overdue.find(self._recorders, time.monotonic()) is blocked:
                    self._end(error)
                    return

    def _answer(self) -> None:
        number = 1
        while not self._stop.wait(self._interval):
            # A store that is gone has nobody left to answer.
            with contextlib.suppress(RuntimeError):
                while self._store.check([f"ask/{self._rank}/{number}"]):
                    self._store.set(f"answer/{self._rank}/{number}", json.dumps(self.status()))
                    self._write()
                    number += 1

    def status(self) -> dict[str, Any]:
        """What this rank is doing, as plain data."""
        return {
            "rank": self._rank,
            "coords": self._coords,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": time.time(),
            "main": _main_line(self._main),
            "torch": calls_under_way() if _in_torch(self._main) else [],
            "failed": self._failed,
            "groups": [each.status() for each, _ in self._recorders],
        }

    def _past(self) -> dict[str, Any]:
        """The last calls on every group with their times, and the clock that they were taken on."""
        past = [call for each, _ in self._recorders for call in each.history()]
        now = time.perf_counter()
        return {
            "clock": {"host": str(host()), "now_s": now, "ahead_s": time.time() - now},
            "history": sorted(past, key=lambda call: call["began"]),
        }

    def _write(self) -> None:
        if not self._reports:
            return
        folder = Path(self._reports)
        # A report that cannot be written must not hide the error that it is about.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            half = folder / f".rank{self._rank}.json"
            half.write_text(json.dumps({**self.status(), **self._past()}, indent=1))
            half.replace(folder / f"rank{self._rank}.json")

    def _blocked(self, recorder: Recorder) -> CommunicationError:
        """The error for a call that the backend should have given up."""
        status = self.status()
        error = self._verdict(
            recorder,
            f"a call inside the backend at {status['main']}",
            TimeoutError("the backend did not return; the process was ended"),
        )
        error.given = (
            f"{error.given}\nthe backend is past its timeout and cannot be interrupted: the process ends"
        )
        return error

    # -- asking ---------------------------------------------------------------------------------

    def _inquire(self, recorder: Recorder, where: str, error: BaseException) -> CommunicationError:
        """The error for a call that failed: who has not come, and what they do instead."""
        self._overdue.gave_up(recorder)
        return self._verdict(recorder, where, error)

    def _verdict(self, recorder: Recorder, where: str, error: BaseException) -> CommunicationError:
        found = recorder.status()
        waiting = found["messages"]["waiting"]
        if recorder.inside or waiting is None:
            last = found["last"] or {"number": 0, "call": "a call", "dim": "?", "site": "?"}
            waiting = None
            call = f"call {last['number']}"
            begun = f'{last["call"]} along "{last["dim"]}", {call}'
        else:
            last, call = waiting, described(waiting)
            begun = f'{call} along "{last["dim"]}"'
        # What fails after the first failure mostly follows from it.
        self._failed = self._failed or {
            "label": recorder.label,
            "error": str(error).splitlines()[:1],
            "call": begun,
            "site": last["site"],
            "waiting": waiting,
        }
        self._write()
        asked = self._ask([rank for rank in recorder.ranks if rank != self._rank])
        if asked is None:
            return self._unasked(recorder, where, error, f"{call} on {recorder.label}", last["site"])
        statuses = {**asked, self._rank: self.status()}
        said = " ".join(str(error).splitlines()[:1])
        if waiting is None:
            absent = absent_from(recorder.label, recorder.ranks, recorder.started, statuses)
            lines = lines_of(absent, statuses) or [
                f"every rank of the group has come to the call; moving its data failed: {said}"
            ]
            expected = "every rank of the group to make the same call and stay alive until it ends"
        else:
            absent = unmatched(self._rank, recorder.label, waiting, statuses)
            lines = message_lines(absent, statuses) or [
                f"both ends have begun every message of the call; moving the data failed: {said}"
            ]
            with contextlib.suppress(RuntimeError):
                for told in recorder.messages.differences():
                    lines += ["the other end found that the two ends differ:", *told.splitlines()]
            expected = (
                "a receive for every send, with the same tag, and both ends to stay alive until it ends"
            )
        if self._mute and absent:
            ranks = fold([each.rank for each in absent])
            lines = [
                f"rank{'s' if len(absent) > 1 else ''} {ranks} could not be asked: the job's store does not "
                "answer; the host that holds it has ended or cannot be reached from this one",
                said,
            ]
        kind, what = (
            (PeerLost, "lost a peer")
            if broken(error) or any(each.doing is None for each in absent)
            else (CollectiveTimeout, "did not end in time")
        )
        verdict = kind(
            f"{where} {what}",
            given="\n".join(
                [f"{call} on {recorder.label}, ranks {recorder.ranks}, at {last['site']}", *lines]
            ),
            expected=expected,
            hint=self._hint(not absent and "connecting" in said),
        )
        verdict.missing = tuple(dict.fromkeys(each.rank for each in absent))
        return verdict

    def _hint(self, unconnected: bool) -> str:
        if unconnected:
            # Gloo's word for an address that another rank offered and that leads nowhere from here.
            return "[network] interfaces; meshcomm doctor, under the launcher, shows at which address each rank is"
        if self._reports:
            return f"meshcomm report {self._reports} puts the ranks' reports together"
        return "look at the ranks named above"

    def _unasked(
        self, recorder: Recorder, where: str, error: BaseException, call: str, site: str
    ) -> CommunicationError:
        """The error where the store does not answer: what the backend alone can tell."""
        others = [rank for rank in recorder.ranks if rank != self._rank]
        lost = broken(error)
        # Of two ranks it is clear which one broke the connection.
        named = others if lost and len(others) == 1 else []
        lines = [f"{call}, ranks {recorder.ranks}, at {site}", *(str(error).splitlines()[:1])]
        lines += [f"rank {rank} broke the connection" for rank in named]
        kind, what = (PeerLost, "lost a peer") if lost else (CommunicationError, "failed")
        found = kind(
            f"{where} {what}, and nobody could be asked why: the job's store does not answer",
            given="\n".join(lines),
            expected="a store that lives as long as the job: in the launcher, or in rank 0",
            hint="look for the first error of the process that holds the store",
        )
        if isinstance(found, PeerLost):
            found.missing = tuple(named)
        return found

    def _ask(self, ranks: list[int]) -> dict[int, Any] | None:
        """The statuses of those of `ranks` that answer in time; None where the store does not."""
        answers: dict[int, Any] = {}
        broken_off, reached = threading.Event(), threading.Event()
        within_s = max(_ANSWER_S, 2 * self._interval)

        def collect() -> None:
            try:
                self._collect(ranks, answers, within_s, reached)
            except RuntimeError:
                broken_off.set()

        # The store may be served by a rank that is stopped, or the way to it be cut: then its calls do
        # not return.
        asking = threading.Thread(target=collect, daemon=True)
        asking.start()
        asking.join(within_s)
        self._mute = asking.is_alive() and not reached.is_set()
        return None if broken_off.is_set() and not answers else dict(answers)

    def _collect(
        self, ranks: list[int], answers: dict[int, Any], within_s: float, reached: threading.Event
    ) -> None:
        deadline = time.monotonic() + within_s
        numbers = {}
        for rank in ranks:
            numbers[rank] = self._store.add(f"asked/{rank}", 1)
            reached.set()
        for rank, number in numbers.items():
            self._store.set(f"ask/{rank}/{number}", str(self._rank))
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                for key in (f"answer/{rank}/{numbers[rank]}", f"closed/{rank}"):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = json.loads(self._store.get(key))
            time.sleep(0.02)


def _in_torch(thread: int) -> bool:
    """Whether the program is inside torch now: its recorder also keeps calls that are over."""
    frame = sys._current_frames().get(thread)
    return frame is not None and "/torch/" in frame.f_code.co_filename


def _main_line(thread: int) -> str:
    """file:line and function of the innermost frame of the program itself."""
    frame = sys._current_frames().get(thread)
    inner = frame
    while frame is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or "/torch/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    chosen = frame if frame is not None else inner
    if chosen is None:
        return "an unknown line"
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_name}"
