"""The connections of a mesh's groups, to cut them: a call that waits for a rank that is gone then ends at once.

On torch 2.15, Gloo's `abort` and `shutdown` do not end a call that is under way. A broken connection of its group does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple, final

import psutil

_LISTENS: Final = psutil.CONN_LISTEN


class _Connection(NamedTuple):
    descriptor: int
    here: Any
    there: Any


@final
class Connections:
    """Those that this process makes within `making`; and later ones to a port that it began to listen at there.

    Two ranks of a large group of Gloo connect at their first message. Connections to addresses that the process was
    connected to before, as the store's, are only cut within `making`: other threads use them later.

    known: such addresses, where they are others.
    """

    def __init__(self, known: Collection[Any] | None = None) -> None:
        self._known = {each.there for each in _connected()} if known is None else known
        self._made: set[_Connection] = set()
        self._ports: set[int] = set()
        self._before: set[_Connection] | None = None

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """In the block groups are made, and nothing else is connected."""
        before, ports = _connected(), _ports()
        self._before = before
        try:
            yield
        finally:
            self._made |= {each for each in _connected() - before if each.there not in self._known}
            self._ports |= _ports() - ports
            self._before = None

    def cut(self) -> None:
        """Shut them down, from any thread. The descriptors stay open: who made them closes them."""
        now, before = _connected(), self._before
        found = {each for each in now if each in self._made or each.here.port in self._ports}
        if before is not None:
            found |= now - before
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
