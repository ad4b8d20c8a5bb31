"""The connections of a mesh's groups. Cutting a connection immediately ends calls that wait for a lost rank.

On torch 2.15, Gloo's `abort` and `shutdown` do not end a running call, but a broken connection of its group does.
NCCL's calls wait on the device and use no connection within a host, so only `abort` ends them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar, final

import psutil

T = TypeVar("T")

_LISTENS: Final = psutil.CONN_LISTEN


class _Connection(NamedTuple):
    descriptor: int
    here: Any
    there: Any


@final
class Connections:
    """The connections that this process makes inside `making`, and later connections to ports opened there.

    Two ranks of a large Gloo group connect when they exchange their first message. Connections to previously known
    addresses, such as the store's, are cut only inside `making`, because other threads use them later. Connections made by
    `own` are always cut.

    aborts: functions that drop the groups' queued calls.
    """

    def __init__(self) -> None:
        self._known = {connection.there for connection in _connected()}
        self._made: set[_Connection] = set()
        self._ports: set[int] = set()
        self._before: set[_Connection] | None = None
        self._aborting = threading.Thread()
        self.aborts: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Inside the block, the caller creates groups and makes no other connections."""
        before, ports = _connected(), _ports()
        self._before = before
        try:
            yield
        finally:
            self._made |= {
                connection for connection in _connected() - before if connection.there not in self._known
            }
            self._ports |= _ports() - ports
            self._before = None

    def own(self, connect: Callable[[], T]) -> T:
        """Return the result of `connect`, whose connections no other code uses."""
        before = _connected()
        connected = connect()
        self._made |= _connected() - before
        return connected

    def cut(self) -> None:
        """Shut down connections and abort queued calls, from any thread. The connections' owners close the descriptors."""
        # Use a thread, because aborting a communicator waits for CUDA graphs that contain its calls.
        if self.aborts and not self._aborting.is_alive():
            self._aborting = threading.Thread(
                target=abort_all, args=([*self.aborts],), name="meshcomm-abort", daemon=True
            )
            self._aborting.start()
        now, before = _connected(), self._before
        opened = {
            connection
            for connection in now
            if connection in self._made or connection.here.port in self._ports
        }
        if before is not None:
            opened |= now - before
        for each in opened:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as copy:
                # Shutting down a listening socket would make Gloo end the process.
                copy.getpeername()
                copy.shutdown(socket.SHUT_RDWR)


def abort_all(aborts: Iterable[Callable[[], object]]) -> None:
    """Abort groups, and return when all aborts have completed.

    All groups are aborted at the same time, because the abort of one communicator may wait for the kernels of all others on
    the device, see https://github.com/pytorch/pytorch/issues/119797.
    """

    def run(abort: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            abort()

    threads = [threading.Thread(target=run, args=(abort,), daemon=True) for abort in aborts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _connected() -> set[_Connection]:
    connections = psutil.Process().net_connections("tcp")
    return {
        _Connection(connection.fd, connection.laddr, connection.raddr)
        for connection in connections
        if connection.raddr
    }


def _ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == _LISTENS}
