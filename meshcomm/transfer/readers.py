"""Who reads weights, and when they may be written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import final

from meshcomm.errors import UnsupportedOp


@final
class Readers:
    """Threads that read weights, and one that writes them. The writer waits for readers; later readers wait for the writer.

    A thread that reads already, and the writer itself, read again without waiting.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._reading: Counter[int] = Counter()
        self._writer: int | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In this context, nobody writes, unless this thread does."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._writer in (None, me) or me in self._reading)
            self._reading[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading[me] -= 1
                if not self._reading[me]:
                    del self._reading[me]
                self._changed.notify_all()

    def check(self) -> None:
        """Raise UnsupportedOp if this thread reads or writes, and would wait for itself if it wrote."""
        me = get_ident()
        if me in self._reading or self._writer == me:
            where = "on_commit" if self._writer == me else "reading()"
            raise UnsupportedOp(
                f"pull() inside {where}, in the same thread, would wait for itself",
                given=f"weights.pull() inside {where}",
                expected=f"pull() after {where} has ended",
            )

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[None]:
        """In this context, nobody else reads. Raises TimeoutError if readers have not ended within `timeout_s` seconds."""
        me = get_ident()
        with self._changed:
            self._writer = me
            if not self._changed.wait_for(lambda: not self._reading, timeout_s):
                self._let_go()
                raise TimeoutError(f"a thread has been reading() for more than {timeout_s:g} s")
        try:
            yield
        finally:
            with self._changed:
                self._let_go()

    def _let_go(self) -> None:
        self._writer = None
        self._changed.notify_all()
