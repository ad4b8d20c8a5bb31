"""Connecting to the job's store, and calls of it that end although torch's client waits for ever for a silent server."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# What a client that is about to succeed gets beyond its timeout.
_GRACE_S: Final = 0.5
_LOOK_S: Final = 1.0
# Most waits are shorter; they need no second connection.
_SOON_S: Final = 0.01
_POLL_S: Final = 0.001


def kind_of(store: dist.Store) -> str:
    """`TCPStore`, `FileStore`, `HashStore`, or the class of somebody else's: what is below every prefix."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store).__name__


def within(limit_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError after `limit_s` seconds.

    `call` is then left alone in a thread that keeps nobody from ending the process.
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
    their own, for as long as they last.
    """
    deadline = time.monotonic() + timeout_s
    if kind_of(store) == "TCPStore":
        soon = time.monotonic() + min(_SOON_S, timeout_s)
        while time.monotonic() < soon:
            if store.check(list(keys)):
                return True
            time.sleep(_POLL_S)
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


def find_tcp_store(
    host: str, port: int, world_size: int, *, hosts: bool, timeout: timedelta
) -> dist.TCPStore:
    """torch's store at `host`:`port`, whose calls get `timeout`; with `hosts`, its server is here.

    Nobody waits for the other ranks. Raises what torch does, and TimeoutError, which says what is at the
    address instead, about a second after the timeout.
    """

    def make() -> dist.TCPStore:
        return dist.TCPStore(
            host, port, world_size, hosts, timeout, wait_for_workers=False, multi_tenant=True
        )

    try:
        return within(timeout.total_seconds() + _GRACE_S, make)
    except TimeoutError as late:
        try:
            found = within(_LOOK_S, lambda: what_is_at(host, port))
        except TimeoutError:
            found = f"nothing that could be reached within {_LOOK_S:g} s"
        raise TimeoutError(f"at {host}:{port} there is {found}") from late


def what_is_at(host: str, port: int) -> str:
    """What is at an address where no store of torch answers, in words."""
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S) as connection:
            connection.settimeout(_LOOK_S / 4)
            try:
                said = connection.recv(64)
            except TimeoutError:
                return "a program that accepts connections and says nothing: no store of torch, or one that is stopped"
            return f"a program that says {said!r}: no store of torch" if said else "a program that hangs up"
    except OSError as error:
        return f"nobody to be reached: {error.strerror or error}"
