"""Handle termination signals: all ranks finish the step, save a checkpoint and end the run."""

from __future__ import annotations

import signal
import threading
from typing import Any, Final, Self, final

from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first
from meshcomm.train.callbacks import Callback

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_ASKED: Final = "meshcomm.train/asked"
_AGREED: Final = "meshcomm.train/agreed"


@final
class Signals(Callback):
    """Ends the run on all ranks after the same step if any rank receives SIGTERM or SIGUSR1.

    Use this as a context manager in the main thread. In other threads, signals have their usual effect on this rank. Only
    the first signal counts, because a launcher may forward a signal that Slurm or systemd has also sent to the ranks. After
    a signal has ended the run, further signals are ignored, because the program is about to exit.

    Signals reach the ranks at different times. A rank that receives a signal sets a key in the job's store. When the first
    rank finds this key, it sets a second key before its next step. No rank can finish that step without the first rank, so
    all ranks find the second key when they check after that step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._number, self._told = 0, False
        self._usual: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if is_first(self._mesh):
            # An earlier run on this mesh may have left these keys.
            for key in (_ASKED, _AGREED):
                self._mesh.store.delete_key(key)
        if threading.current_thread() is threading.main_thread():
            self._usual = {number: signal.signal(number, self._received) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._usual.items():
            signal.signal(number, signal.SIG_IGN if self.stop else handler)
        self._usual = {}

    def look(self, step: int) -> None:
        """Check whether the run ends after this step. Called by: every rank, after the same steps, once results are known."""
        store = self._mesh.store
        if self._number and not self._told:
            self._told = True
            store.set(_ASKED, f"{signal.Signals(self._number).name} to {self._mesh.label}")
        if store.check([_AGREED]):
            decided, _, self.reason = store.get(_AGREED).decode().partition(" ")
            self.stop = int(decided) < step
        elif is_first(self._mesh) and store.check([_ASKED]):
            store.set(_AGREED, f"{step} {store.get(_ASKED).decode()}")

    def _received(self, number: int, frame: object) -> None:
        self._number = self._number or number
