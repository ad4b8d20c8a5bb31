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
from pathlib import Path
from typing import Any, final

from meshcomm.comm.handle import broken
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.verdict import absent_from, lines_of
from meshcomm.errors import CollectiveTimeout, CommunicationError, PeerLost

_PACKAGE = str(Path(__file__).parents[1])

# How long a failing call waits for the others to say what they are doing.
_ANSWER_S = 1.5


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
    """

    def __init__(self, store: Any, rank: int, who: dict[str, int], world_size: int, reports: str) -> None:
        self._store = store
        self._rank = rank
        self._coords = who
        self._reports = reports
        self._interval = max(0.25, world_size / 20_000)
        self._recorders: list[Recorder] = []
        self._failed: dict[str, Any] | None = None
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meshcomm-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def record(self, label: str, ranks: list[int]) -> Recorder:
        """A recorder for one more group."""
        recorder = Recorder(label, ranks, self._inquire)
        self._recorders.append(recorder)
        return recorder

    def close(self) -> None:
        """Stop answering. Harmless when repeated."""
        atexit.unregister(self.close)
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # -- answering ------------------------------------------------------------------------------

    def _watch(self) -> None:
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
            "failed": self._failed,
            "groups": [
                {"label": each.label, "ranks": each.ranks, "started": each.started, "last": each.last()}
                for each in self._recorders
            ],
        }

    def _write(self) -> None:
        if not self._reports:
            return
        folder = Path(self._reports)
        # A report that cannot be written must not hide the error that it is about.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            half = folder / f".rank{self._rank}.json"
            half.write_text(json.dumps(self.status(), indent=1))
            half.replace(folder / f"rank{self._rank}.json")

    # -- asking ---------------------------------------------------------------------------------

    def _inquire(self, recorder: Recorder, where: str, error: BaseException) -> CommunicationError:
        """The error for a call that failed: who has not come to it, and what they do instead."""
        last = recorder.last() or {"number": recorder.started, "call": "a call", "dim": "?", "site": "?"}
        self._failed = {"label": recorder.label, "error": str(error).splitlines()[:1], **last}
        self._write()
        statuses = self._ask([rank for rank in recorder.ranks if rank != self._rank])
        statuses[self._rank] = self.status()
        absent = absent_from(recorder.label, recorder.ranks, recorder.started, statuses)
        kind, what = (
            (PeerLost, "lost a peer")
            if broken(error) or any(each.doing is None for each in absent)
            else (CollectiveTimeout, "did not end in time")
        )
        lines = lines_of(absent, statuses) or [
            "every rank of the group has come to the call; moving its data failed"
        ]
        found = kind(
            f"{where} {what}",
            given="\n".join(
                [
                    f"call {last['number']} on {recorder.label}, ranks {recorder.ranks}, at {last['site']}",
                    *lines,
                ]
            ),
            expected="every rank of the group to make the same call and stay alive until it ends",
            hint=f"meshcomm report {self._reports} puts the ranks' reports together"
            if self._reports
            else "look at the ranks named above",
        )
        found.missing = tuple(each.rank for each in absent)
        return found

    def _ask(self, ranks: list[int]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        with contextlib.suppress(RuntimeError):
            numbers = {rank: self._store.add(f"asked/{rank}", 1) for rank in ranks}
            for rank, number in numbers.items():
                self._store.set(f"ask/{rank}/{number}", str(self._rank))
            deadline = time.monotonic() + max(_ANSWER_S, 2 * self._interval)
            while len(answers) < len(ranks) and time.monotonic() < deadline:
                for rank in ranks:
                    key = f"answer/{rank}/{numbers[rank]}"
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = json.loads(self._store.get(key))
                time.sleep(0.02)
        return answers


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
