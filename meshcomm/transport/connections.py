"""The connections of a mesh's groups, to cut them: a call that waits for a rank that is gone then ends at once.

Gloo cannot be told to give up a call: its `abort` and `shutdown` leave a call that is under way as it is (tried on
torch 2.15), which ends when a connection of its group breaks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, Final, NamedTuple, final

import psutil

_LISTENS: Final = psutil.CONN_LISTEN


class _Connection(NamedTuple):
    descriptor: int
    here: Any
    there: Any


@final
class Connections:
    """Those that this process makes from now on, until `complete`; and later ones to a port that it listened at by then.

    Two ranks of a large group of Gloo connect at their first message, after `complete`.
    """

    def __init__(self) -> None:
        self._before = _connected()
        self._ports_before = _ports()
        self._made: set[_Connection] | None = None
        self._ports: set[int] = set()

    def complete(self) -> None:
        """All groups are made: what this process connects to from now on is its own affair.

        The store, to which it was connected before, is left alone from now on: other threads use it.
        """
        known = {each.there for each in self._before}
        self._made = {each for each in _connected() - self._before if each.there not in known}
        self._ports = _ports() - self._ports_before

    def cut(self) -> None:
        """Shut them down, from any thread. The descriptors stay open: who made them closes them."""
        now = _connected()
        if self._made is None:
            found = now - self._before
        else:
            found = {each for each in now if each in self._made or each.here.port in self._ports}
        for each in found:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as copy:
                # Shutting down a socket that listens would end the process, by Gloo.
                copy.getpeername()
                copy.shutdown(socket.SHUT_RDWR)


def _connected() -> set[_Connection]:
    found = psutil.Process().net_connections("tcp")
    return {_Connection(each.fd, each.laddr, each.raddr) for each in found if each.raddr}


def _ports() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in found if each.status == _LISTENS}
