"""How a program ends that left its mesh open: its error is explained, as by leaving a `with` block."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, final

from meshcomm.comm.diagnosis import Reason, reason_of
from meshcomm.errors import MeshcommError

# The error that explains another one, by which the thread of this name ("" for the main one) ends; None: there is none.
Explain = Callable[[BaseException, str], MeshcommError | None]


@final
class ExceptHooks:
    """Explains what Python reports as uncaught, in the main thread or another one, until `close`.

    The hooks that were there before get the explanation, with the original error as its cause. A hook that the program
    sets later and that calls this one gets the original.
    """

    def __init__(self, explain: Explain) -> None:
        self._explain: Explain = explain
        self._before, self._before_thread = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._main, self._thread

    def close(self) -> None:
        """Stop explaining, and restore the earlier hooks where these are still set."""
        self._explain = lambda error, thread: None
        if sys.excepthook == self._main:
            sys.excepthook = self._before
        if threading.excepthook == self._thread:
            threading.excepthook = self._before_thread

    def _main(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = self._explained(error, "")
        if found is None:
            self._before(kind, error, trace)
        else:
            self._before(type(found), found, found.__traceback__)

    def _thread(self, given: Any) -> None:
        name = given.thread.name if given.thread is not None else "unknown"
        error = given.exc_value
        found = None if error is None else self._explained(error, name)
        if found is not None:
            given = threading.ExceptHookArgs((type(found), found, found.__traceback__, given.thread))
        self._before_thread(given)

    def _explained(self, error: BaseException, thread: str) -> MeshcommError | None:
        try:
            found = self._explain(error, thread)
        except Exception:
            # The program's own error is what has to be seen.
            return None
        return None if found is None else caused_by(found, error)


def caused_by(explanation: MeshcommError, error: BaseException) -> MeshcommError:
    """What `raise explanation from error` raises, with the traceback of `error`, which shows how the program came to its call."""
    explanation.__cause__ = error
    return explanation.with_traceback(error.__traceback__)


def backend_error(error: BaseException) -> RuntimeError | None:
    """The error of torch about a peer or a timeout that `error` is, or was raised from; None where it is none.

    Of a SystemExit also the one that was being handled. None where it is explained already.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (link.__context__ if isinstance(link, SystemExit) else None)
    if any(isinstance(link, MeshcommError) for link in chain):
        return None
    innermost = next((link for link in reversed(chain) if isinstance(link, RuntimeError)), None)
    return None if innermost is None or reason_of(innermost) is Reason.OTHER else innermost


_current: Final = sys._current_exceptions


def handles_exceptions() -> bool:
    """Whether some thread is handling an exception now."""
    return any(found is not None and found != (None, None, None) for found in _current().values())
