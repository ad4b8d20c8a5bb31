"""Waiting for keys of the job's store, while other threads of this process go on using it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

# What most waits take less than; they need no second connection.
_SOON_S: Final = 0.01
_LOOK_S: Final = 0.001


def kind_of(store: dist.Store) -> str:
    """`TCPStore`, `FileStore`, `HashStore`, or the class of somebody else's: what is below every prefix."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def wait_for(store: Any, keys: Sequence[str], timeout_s: float) -> bool:
    """Whether all `keys` were set in time. Raises RuntimeError where the store fails.

    A TCPStore's client lets one call through at a time. A wait would keep out the thread that answers
    for this rank, and the others would take the rank for dead. So all but short waits have a client of
    their own, for as long as they last.
    """
    deadline = time.monotonic() + timeout_s
    if kind_of(store) == "TCPStore":
        soon = time.monotonic() + min(_SOON_S, timeout_s)
        while time.monotonic() < soon:
            if store.check(list(keys)):
                return True
            time.sleep(_LOOK_S)
        store = store.clone()
    # torch counts whole milliseconds, and some stores take none of them for "forever".
    left_ms = max(1, math.ceil((deadline - time.monotonic()) * 1000))
    try:
        store.wait(list(keys), timedelta(milliseconds=left_ms))
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            return False
        raise
    return True
