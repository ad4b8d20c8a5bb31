"""The record of one rank, as other ranks and `meshcomm report` read it: its last calls on each group, and its line."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final, final

from meshcomm.comm.callsite import is_ours, thread_frames
from meshcomm.comm.flight_recorder import FlightRecorder
from meshcomm.comm.spans import host
from meshcomm.layout.sizes import rank_text

_LIBRARY: Final = f"{Path(threading.__file__).parent}{os.sep}"


@final
class RankRecord:
    """Made by the main thread of a rank; any thread may read it.

    label: the rank with its coords. failed: the first call that failed, see `FailedCall.facts`; None: none has.
    thread: the error by which another thread of the program ended, "" for none.

    Args:
        recorders: of the rank's groups; the list may grow.
        reports: folder of this run for its ranks' reports, inside that of all runs; "": none.
    """

    def __init__(
        self, rank: int, coords: Mapping[str, int], recorders: Sequence[FlightRecorder], reports: str = ""
    ) -> None:
        self.rank, self.coords, self.recorders = rank, dict(coords), recorders
        self.label = rank_text(rank, coords)
        self.failed: dict[str, Any] | None = None
        self.thread = ""
        self._main = threading.get_ident()
        self._reports = reports

    @property
    def main_line(self) -> str:
        """file:line and function of the innermost frame of the program itself."""
        stack = stack_of(self._main)
        own = [place for place in stack if not is_library(place[0])]
        for file, line, name in (own or stack)[:1]:
            return f"{file}:{line} in {name}"
        return "an unknown line"

    @property
    def reports(self) -> str:
        """The folder of all runs' reports; that of this run is the newest in it."""
        return os.path.dirname(self._reports) or self._reports

    def data(self, differs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The record as plain data. differs: a difference between the steps of ranks, see `find_desync`."""
        return {
            "rank": self.rank,
            "coords": self.coords,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "time": time.time(),
            "main": self.main_line,
            "thread": self.thread,
            "failed": self.failed,
            "differs": differs,
            "groups": [recorder.status() for recorder in list(self.recorders)],
        }

    def write(self, differs: Mapping[str, Any] | None = None) -> bool:
        """Write this rank's report: the record, and its last calls with the clock of their times. Whether it was written."""
        if not self._reports:
            return False
        history = [call for recorder in list(self.recorders) for call in recorder.history()]
        now = time.perf_counter()
        report = {
            **self.data(differs),
            "clock": {"host": str(host()), "now_s": now, "ahead_s": time.time() - now},
            "history": sorted(history, key=lambda call: call["began"]),
        }
        folder = Path(self._reports)
        # A report that cannot be written must not hide the error that it is about.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            half = folder / f".rank{self.rank}.json"
            half.write_text(json.dumps(report, indent=1))
            half.replace(folder / f"rank{self.rank}.json")
            return True
        return False

    def thread_ended(self, error: BaseException, thread: str) -> None:
        """A thread of the program has ended by an error; ranks that wait for this one read it."""
        at = "".join(
            f", at {frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)[-1:]
        )
        self.thread = f"its thread {thread} raised {one_line(error)}{at}"


def error_under_way() -> str:
    """The error that the program is leaving by, or has been ended by, in one line; "" where there is none."""
    error = sys.exception() or getattr(sys, "last_value", None)
    return "" if error is None or isinstance(error, SystemExit) else one_line(error)


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def stack_of(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of a thread, the innermost first.

    No frame is kept: one that holds itself keeps its callers' locals, the tensors and connections of a failed call among
    them, until Python looks for cycles.
    """
    found = []
    frame = thread_frames().get(thread)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def is_library(file: str) -> bool:
    """Whether a file is of this package, of torch, or of Python's own library, where a wait for the store is."""
    return is_ours(file) or (file.startswith(_LIBRARY) and "-packages" not in file)
