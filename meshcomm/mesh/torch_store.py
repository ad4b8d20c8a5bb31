"""Calls of torch's stores that always end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from meshcomm.comm.diagnosis import first_line
from meshcomm.errors import StoreError

T = TypeVar("T")

# What a server that is alive may need beyond the time that it was given.
GRACE_S: Final = 2.0

# Most waits are shorter; they need no second connection.
_SOON_S: Final = 0.01
_POLL_S: Final = 0.001


def store_failed(what: str, error: BaseException, about: str = "") -> StoreError:
    """The error for a store that failed. what: its first line. about: the keys, for its second."""
    return StoreError(
        what,
        given=f"{about}{first_line(error)}",
        expected="a store that lives as long as the job: in rank 0, in the launcher, or a file",
        hint="look for the first error of the process that holds the store",
    )


def prefixed(prefix: str, store: dist.Store) -> dist.Store:
    """`store` under a prefix; a store with a method `prefixed` makes it."""
    own = getattr(store, "prefixed", None)
    found: dist.Store = dist.PrefixStore(prefix, store) if own is None else own(prefix)
    return found


def kind_of(store: dist.Store) -> str:
    """`TCPStore`, `FileStore`, `HashStore`, or another class: the store below every prefix."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError after `limit_s` seconds.

    `call` then continues in a daemon thread.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="meshcomm-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return returned[0]


def wait_for(store: Any, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all `keys` were set in time. Raises RuntimeError where the store fails.

    A TCPStore's client lets one call through at a time. A wait would keep out the thread that answers
    for this rank, and the others would take the rank for dead. So all but short waits have a client of
    their own, for as long as they last. A FileStore is asked again and again: its own wait takes whole seconds.
    """
    kind, started = kind_of(store), time.monotonic()
    waited_s = 0.0
    while kind == "FileStore" or (kind == "TCPStore" and waited_s < _SOON_S):
        if store.check(list(keys)):
            return True
        time.sleep(_POLL_S if waited_s < _SOON_S else 10 * _POLL_S)
        waited_s = time.monotonic() - started
        if waited_s >= timeout_s:
            return False
    if kind == "TCPStore":
        store = store.clone()
    try:
        # torch counts whole milliseconds.
        store.wait(list(keys), timedelta(milliseconds=max(1, math.ceil((timeout_s - waited_s) * 1000))))
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            return False
        raise
    return True
