"""The connections of a mesh's groups. Cutting a connection immediately ends calls that wait for a lost rank.

On torch 2.15, Gloo's `abort` and `shutdown` do not end a running call, but a broken connection of its group does.
NCCL's calls wait on the device and use no connection within a host, so only `abort` ends them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar, final

T = TypeVar("T")

_DESCRIPTORS: Final = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


class Connection(NamedTuple):
    """A TCP connection of this process. here, there: its ends, as (host, port)."""

    descriptor: int
    here: tuple[str, int]
    there: tuple[str, int]


@final
class Connections:
    """The connections that this process makes inside `making`, and later connections to ports opened there.

    Two ranks of a large Gloo group connect when they exchange their first message. Connections to previously known
    addresses, such as the store's, are cut only inside `making`, because other threads use them later. Connections made by
    `own` are always cut.

    aborts: functions that drop the groups' queued calls.
    """

    def __init__(self) -> None:
        self._known = {connection.there for connection in connections()}
        self._made: set[Connection] = set()
        self._ports: set[int] = set()
        self._before: set[Connection] | None = None
        self._aborting = threading.Thread()
        self.aborts: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Inside the block, the caller creates groups and makes no other connections."""
        before, ports = connections(), _ports()
        self._before = before
        try:
            yield
        finally:
            self._made |= {
                connection for connection in connections() - before if connection.there not in self._known
            }
            self._ports |= _ports() - ports
            self._before = None

    def own(self, connect: Callable[[], T]) -> T:
        """Return the result of `connect`, whose connections no other code uses."""
        before = connections()
        connected = connect()
        self._made |= connections() - before
        return connected

    def cut(self) -> None:
        """Shut down connections and abort queued calls, from any thread. The connections' owners close the descriptors."""
        # Use a thread, because aborting a communicator waits for CUDA graphs that contain its calls.
        if self.aborts and not self._aborting.is_alive():
            self._aborting = threading.Thread(
                target=abort_all, args=([*self.aborts],), name="meshcomm-abort", daemon=True
            )
            self._aborting.start()
        now, before = connections(), self._before
        opened = {
            connection for connection in now if connection in self._made or connection.here[1] in self._ports
        }
        if before is not None:
            opened |= now - before
        for each in opened:
            with contextlib.suppress(OSError), _copy_of(each.descriptor) as copy:
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


def connections() -> set[Connection]:
    """Return the TCP connections of this process."""
    return {
        Connection(descriptor, end.getsockname()[:2], there)
        for descriptor, end in _sockets()
        if (there := _peer(end)) is not None
    }


def _ports() -> set[int]:
    """Return the ports on which this process listens."""
    return {
        end.getsockname()[1]
        for _, end in _sockets()
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _peer(end: socket.socket) -> tuple[str, int] | None:
    try:
        host, port, *_ = end.getpeername()
    except OSError:
        return None
    return host, port


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets with their descriptors, each as a copy that is closed afterwards.

    Only this process's descriptors are read. The system's table of connections, as psutil reads it, takes 10 ms.
    """
    for descriptor in _descriptors():
        # Another thread may close descriptors meanwhile.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with _copy_of(descriptor) as end:
                    if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                        yield descriptor, end


def _descriptors() -> Sequence[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        # Reading the folder takes a descriptor, and this process has no more.
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@contextlib.contextmanager
def _copy_of(descriptor: int) -> Iterator[socket.socket]:
    blocks = os.get_blocking(descriptor)
    try:
        copied = os.dup(descriptor)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        end = socket.socket(fileno=descriptor)
        try:
            yield end
        finally:
            end.detach()
        return
    with socket.socket(fileno=copied) as copy:
        if socket.getdefaulttimeout() is not None:
            # Then a new socket object sets its descriptor to non-blocking, and with it the one that was copied.
            os.set_blocking(descriptor, blocks)
        yield copy
