"""What an asynchronous call returns: wait once or twice, get the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, TypeVar, final

from meshcomm.errors import CommunicationError
from meshcomm.transport import Work

T = TypeVar("T")


@final
class Handle(Generic[T]):
    """One call under way. `wait()` returns what the blocking call would have returned."""

    __slots__ = ("_finish", "_result", "_where", "_works")

    def __init__(self, works: Sequence[Work], finish: Callable[[], T], where: Callable[[], str]) -> None:
        self._works: Sequence[Work] | None = works
        self._finish = finish
        self._where = where
        self._result: T | None = None

    def wait(self, timeout: timedelta | None = None) -> T:
        """Block until the call is over and return its result; again: return it at once.

        Raises CommunicationError, whose cause is the backend's own error.
        """
        if self._works is not None:
            wait_all(self._works, self._where, timeout)
            self._works = None
            self._result = self._finish()
        return self._result  # type: ignore[return-value]

    def is_completed(self) -> bool:
        """Whether `wait` would return without blocking."""
        return self._works is None or all(work.is_completed() for work in self._works)


def wait_all(works: Sequence[Work], where: Callable[[], str], timeout: timedelta | None = None) -> None:
    """Wait for every one of `works`; a backend's failure becomes a CommunicationError.

    `where` is only called for the message of an error.
    """
    try:
        for work in works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
    except RuntimeError as error:
        raise failure(where(), error) from error


def failure(where: str, error: BaseException) -> CommunicationError:
    """The backend's error with the dim, the coords and the operation around it."""
    first = str(error).strip().splitlines()
    return CommunicationError(
        f"{where} failed",
        given=first[0] if first else type(error).__name__,
        expected="every rank of the group to make the same call and stay alive until it ends",
        hint="look for the first error of the other ranks; this one may only follow from it",
    )
