"""The watchdogs of this process explain the error that it ends by, to itself and to the other ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from meshcomm.mesh.rank_failure import caused_by

if TYPE_CHECKING:
    from meshcomm.mesh.watchdog import Watchdog

# By when they began.
_ALL: WeakValueDictionary[int, Watchdog] = WeakValueDictionary()


def add(watchdog: Watchdog) -> None:
    """From now on it is asked."""
    _ALL[time.monotonic_ns()] = watchdog


def explained(error: BaseException) -> BaseException:
    """The error that explains `error`, by which the process ends, where a watchdog can; else `error`."""
    for watchdog in _latest():
        if (found := watchdog.explain(error)) is not None:
            return caused_by(found, error)
    return error


def leave_all() -> None:
    """Tell the other ranks that this one ends by the exception under way."""
    for watchdog in _latest():
        watchdog.close()


def latest_label() -> str | None:
    """This rank as errors call it, with its coords in the mesh that was opened last; None where there is none."""
    return next((watchdog.own.label for watchdog in _latest()), None)


def _latest() -> list[Watchdog]:
    return [each for _, each in sorted(_ALL.items(), reverse=True)]
