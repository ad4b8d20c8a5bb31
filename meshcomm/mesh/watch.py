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

from meshcomm.comm.message_check import MessageCheck
from meshcomm.comm.recorder import Recorder
from meshcomm.comm.stragglers import host
from meshcomm.errors import CallMismatchError, MeshcommError
from meshcomm.mesh.asking import Asking
from meshcomm.mesh.breaking import Breaking
from meshcomm.mesh.desync import DesyncMonitor
from meshcomm.mesh.failed_call import FailedCall
from meshcomm.mesh.overdue import Late, Overdue
from meshcomm.transport import Transport
from meshcomm.transport.torch_private import calls_under_way

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARY = str(Path(threading.__file__).parent)

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
        timeouts: seconds by the label of a group; a call that lasts much longer is broken off.
        end: ends the process for the error of a call that cannot be, from another thread than the blocked one.
        alone: the other ranks are no processes, and nobody there says what it does.
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
        end: Callable[[MeshcommError], None],
        alone: bool = False,
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
        self._breaking = Breaking(self._overdue)
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._asking = Asking(store, rank, self._interval)
        self._alone = alone
        own = dist.PrefixStore("desync", store)
        self._desync = DesyncMonitor(own, rank, who, self._recorders, world_size)
        # Two, as a look at such a store never ends, and the backend must be watched all the same.
        self._threads = [
            threading.Thread(target=each, name=f"meshcomm-{name}", daemon=True)
            for name, each in (("answer", self._answer), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def record(self, label: str, ranks: list[int], transport: Transport) -> Recorder:
        """A recorder for one more group, which `transport` carries."""
        check = None
        if self._compared != 0:
            store = dist.PrefixStore("messages", self._store)
            check = MessageCheck(store, label, ranks, self._rank, self._compared)
        recorder = Recorder(label, ranks, self._inquire, check)
        self._recorders.append((recorder, self._timeouts(label)))
        self._breaking.add(recorder, transport)
        return recorder

    def noted(self, step: int) -> None:
        """All groups have noted `step`. Raises CallMismatchError where ranks were found to differ in one."""
        self._desync.noted(step)

    def before_leaving(self) -> CallMismatchError | None:
        """The error where ranks differ in a step, as far as can be known within seconds, and it was not raised."""
        return None if self._alone else self._desync.before_leaving()

    def close(self) -> None:
        """Stop answering; who asks later finds what this rank had done. Harmless when repeated."""
        if self._stop.is_set():
            return
        atexit.unregister(self.close)
        # The store may end with this rank, and others are still to read what was found.
        time.sleep(self._desync.linger_s)
        self._stop.set()
        store, last = self._store, json.dumps({**self.status(), "closed": True, "raised": _raised()})

        def tell() -> None:
            with contextlib.suppress(RuntimeError):
                store.set(f"closed/{self._rank}", last)

        # Nobody waits for a store that has stopped answering, least of all for one that was found so.
        telling = threading.Thread(target=tell, name="meshcomm-closed", daemon=True)
        telling.start()
        telling.join(0.0 if self._asking.mute else _CLOSES_S)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(0.0 if telling.is_alive() else 5.0)
        for recorder, _ in self._recorders:
            recorder.close()
        # One where nobody answers, in place of a connection.
        self._store = dist.HashStore()
        self._asking = Asking(self._store, self._rank, self._interval)
        self._desync.let_go()

    # -- answering ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            found = self._overdue.find(self._recorders, time.monotonic()) or self._in_vain()
            if found is None:
                continue
            blocked, late = found
            if late is not Late.END:
                self._breaking.break_off(blocked, late)
                continue
            error = self._blocked(blocked)
            # Asking took a while, in which the backend may have given up or come to its end.
            if self._overdue.find(self._recorders, time.monotonic()) == found:
                self._end(error)
                return

    def _in_vain(self) -> tuple[Recorder, Late] | None:
        """A call to break off before its timeout: ranks differ in a step, so those that know do not come."""
        if self._desync.found is None:
            return None
        found = self._overdue.find([(recorder, 0.0) for recorder, _ in self._recorders], time.monotonic())
        return None if found is None or found[1] is Late.END else found

    def _answer(self) -> None:
        number = 1
        while not self._stop.wait(self._interval):
            # A store that is gone has nobody left to answer.
            with contextlib.suppress(RuntimeError):
                while self._store.check([f"ask/{self._rank}/{number}"]):
                    self._store.set(f"answer/{self._rank}/{number}", json.dumps(self.status()))
                    self._write()
                    number += 1
                if not self._alone:
                    self._desync.look(time.monotonic())

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
            "differs": self._desync.found,
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

    def _write(self) -> bool:
        """Whether this rank's report is there now."""
        if not self._reports:
            return False
        folder = Path(self._reports)
        # A report that cannot be written must not hide the error that it is about.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            half = folder / f".rank{self._rank}.json"
            half.write_text(json.dumps({**self.status(), **self._past()}, indent=1))
            half.replace(folder / f"rank{self._rank}.json")
            return True
        return False

    def _blocked(self, recorder: Recorder) -> MeshcommError:
        """The error for a call that the backend should have given up."""
        status = self.status()
        error = self._verdict(
            recorder,
            f"a call inside the backend at {status['main']}",
            TimeoutError("the backend could not be made to return; the process was ended"),
        )
        error.given = (
            f"{error.given}\nthe backend is past its timeout and cannot be made to return: the process ends"
        )
        return error

    def statuses(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """What each of `ranks` that answers is doing; may wait for seconds."""
        return (None if self._alone else self._asking.ask(ranks)) or {}

    # -- asking ---------------------------------------------------------------------------------

    def _inquire(self, recorder: Recorder, where: str, error: BaseException) -> MeshcommError:
        """The error for a call that failed: who has not come, and what they do instead."""
        error = self._breaking.explained(recorder, error)
        self._overdue.gave_up(recorder)
        return self._verdict(recorder, where, error)

    def _verdict(self, recorder: Recorder, where: str, error: BaseException) -> MeshcommError:
        failed = FailedCall(recorder, where, error)
        # What fails after the first failure mostly follows from it.
        self._failed = self._failed or failed.facts()
        reported = self._write()
        asked: dict[int, Any] | None = {}
        if self._desync.found is None:
            asked = self._asking.ask([rank for rank in recorder.ranks if rank != self._rank])
        statuses = {**(asked or {}), self._rank: self.status()}
        cause = self._desync.cause(statuses)
        if cause is not None:
            return cause
        if asked is None:
            return failed.unasked(self._rank)
        return failed.verdict(
            self._rank, statuses, mute=self._asking.mute, reports=self._reports if reported else ""
        )


def _raised() -> str:
    """The error that the program is leaving by, in one line, "" where it is in none."""
    error = sys.exception()
    if error is None or isinstance(error, SystemExit):
        return ""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _in_torch(thread: int) -> bool:
    """Whether the program is inside torch now: its recorder also keeps calls that are over."""
    frame = sys._current_frames().get(thread)
    return frame is not None and "/torch/" in frame.f_code.co_filename


def _is_not_the_programs(file: str) -> bool:
    """Whether a file is of this package, of torch, or of Python's own library, where a wait for the store is."""
    of_python = file.startswith(_LIBRARY) and "-packages" not in file
    return file.startswith(_PACKAGE) or "/torch/" in file or of_python


def _main_line(thread: int) -> str:
    """file:line and function of the innermost frame of the program itself."""
    frame = sys._current_frames().get(thread)
    inner = frame
    while frame is not None and _is_not_the_programs(frame.f_code.co_filename):
        frame = frame.f_back
    chosen = frame if frame is not None else inner
    if chosen is None:
        return "an unknown line"
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_name}"
