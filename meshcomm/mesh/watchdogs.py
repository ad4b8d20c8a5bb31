"""Lets this process's watchdogs explain the error that ends the process, for this rank and the other ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from meshcomm.mesh.rank_failure import caused_by

if TYPE_CHECKING:
    from meshcomm.mesh.watchdog import Watchdog

# The watchdogs in the order in which they started.
_ALL: WeakValueDictionary[int, Watchdog] = WeakValueDictionary()


def add(watchdog: Watchdog) -> None:
    """Ask this watchdog about errors from now on."""
    _ALL[time.monotonic_ns()] = watchdog


def explained(error: BaseException) -> BaseException:
    """Return the explanation of `error`, which ends the process, if a watchdog has one; otherwise `error`."""
    for watchdog in _latest():
        if (found := watchdog.explain(error)) is not None:
            return caused_by(found, error)
    return error


def leave_all() -> None:
    """Report to the other ranks that this rank ends with the current exception."""
    for watchdog in _latest():
        watchdog.close()


def latest_label() -> str | None:
    """Return this rank's name in errors, with its coords in the last mesh opened, or None if there is no mesh."""
    found = latest()
    return None if found is None else found.own.label


def latest() -> Watchdog | None:
    """Return the watchdog that started last, of those that still exist."""
    return next(iter(_latest()), None)


def _latest() -> list[Watchdog]:
    return [each for _, each in sorted(_ALL.items(), reverse=True)]
