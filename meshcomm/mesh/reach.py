"""Does a store answer at an address? torch's client waits for ever for what accepts and says nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# What a client that is about to succeed gets beyond its timeout.
_GRACE_S: Final = 0.5
_LOOK_S: Final = 1.0


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

    thread = threading.Thread(target=run, name="meshcomm-reach", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return returned[0]


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
