"""A call that Gloo will not give up in time is made to fail: its connections are ended from outside.

Gloo, connecting when ranks first talk, lets one of two ranks wait for the other to connect, for five times the
timeout, and nothing in torch ends that wait (`abort` does nothing, torch 2.13). Who connects says in eight bytes
which rank of the group it is. So this rank connects to itself in the name of the one that does not come, and
hangs up: Gloo then finds that connection closed, and the call that waits for it fails as for a lost peer.
docs/design/overdue.md says more.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

Address: TypeAlias = tuple[str, int]

# How long Gloo gets to notice, and its caller to return, before the next rank's wait is ended.
_NOTICES_S: Final = 0.01
_CONNECTS_S: Final = 1.0

# Each wait that nobody had begun costs the listener a file descriptor.
_MOST: Final = 128


def by_nearness(coord: int, size: int) -> list[int]:
    """The other coords of a group, those first that its algorithms connect first: rings, trees, then the rest.

    >>> by_nearness(0, 8)
    [1, 7, 2, 6, 4, 3, 5]
    """

    def nearness(other: int) -> tuple[bool, int]:
        apart = min((other - coord) % size, (coord - other) % size)
        return apart & (apart - 1) != 0, apart

    return sorted((other for other in range(size) if other != coord), key=nearness)


def address_in(published: bytes) -> Address:
    """Host and port in what a rank of a Gloo group has put into the store. Raises ValueError for anything else."""
    try:
        (host_length,) = struct.unpack_from("=Q", published)
        (length,) = struct.unpack_from("=Q", published, 8 + host_length)
        found = published[16 + host_length : 16 + host_length + length]
        (family,) = struct.unpack_from("=H", found)
        (port,) = struct.unpack_from("!H", found, 2)
        if family in (socket.AF_INET, socket.AF_INET6):
            ip = found[4:8] if family == socket.AF_INET else found[8:24]
            return socket.inet_ntop(family, ip), port
    except (struct.error, OverflowError) as error:
        raise ValueError("no address of Gloo's") from error
    raise ValueError(f"an address of family {family}")


def end_waits(own: Address, coords: Iterable[int], over: Callable[[], bool]) -> None:
    """End this rank's waits for `coords` to connect. One that is connected is not touched.

    own: where this rank's group listens. over: whether the call has returned; then nothing more is done.
    """
    for coord in list(coords)[:_MOST]:
        with contextlib.suppress(OSError), socket.create_connection(own, _CONNECTS_S) as caller:
            caller.sendall(struct.pack("=q", coord))
        time.sleep(_NOTICES_S)
        if over():
            return


def hang_up(own: Address, others: Callable[[], Sequence[Address]]) -> None:
    """End the connections that a group has: those to where it listens, and to where `others` listen.

    Others is only called where there may be one. Linux; elsewhere this does nothing.
    """
    with contextlib.ExitStack() as kept:
        found = []
        for connection in _connections():
            kept.enter_context(connection)
            with contextlib.suppress(OSError):
                here, there = connection.getsockname()[:2], connection.getpeername()[:2]
                if here == own:
                    _shut(connection)
                else:
                    found.append((connection, there))
        listening = set(others()) if found else set()
        for connection, there in found:
            if there in listening:
                _shut(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> list[socket.socket]:
    """This process's sockets, each by a descriptor of its own."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(socket.socket(fileno=os.dup(int(name))))
    return found
