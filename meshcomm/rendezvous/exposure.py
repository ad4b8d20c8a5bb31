"""Checks whether other hosts or users can reach the rendezvous. A single-host job gets a local-only store or a warning.

As tested with torch 2.13, a TCPStore server listens on every address of its host, even if it was given 127.0.0.1. It has
no authentication, so anyone who can reach the port can read, change and delete keys.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist

from meshcomm.errors import LaunchError

_OPEN: Final = (
    "an address that only this host can reach, 127.0.0.1: torch's TCPStore has no authentication,\n"
    "so anyone who reaches it can read and change everything that the ranks exchange"
)


class ExposedRendezvous(UserWarning):
    """Other hosts or users can reach the processes' rendezvous."""


def is_loopback(host: str) -> bool:
    """Return whether `host` can only mean this host. The host's own name does not count, because other hosts may resolve
    it differently.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "[::1]", "::ffff:127.0.0.1")]
    [True, True, True, True, True]
    >>> [is_loopback(host) for host in ("10.0.0.7", "node7", "0.0.0.0", "::")]
    [False, False, False, False]
    """
    bare = host.removeprefix("[").removesuffix("]")
    if bare.lower() in ("localhost", "localhost."):
        return True
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def serve_on_loopback(host: str, port: int, timeout: timedelta) -> dist.TCPStore | None:
    """Return a store server that listens only on the loopback address `host`, or None if `host` is not a loopback address
    or the port is in use.

    Called by: the rank that hosts the store, before `torch.distributed.rendezvous`, which finds a server in the same
    process by port. Keep the result until that call.
    """
    if not is_loopback(host):
        return None
    try:
        bare = host.strip("[]")
        family = socket.AF_INET6 if ":" in bare else socket.AF_INET
        listener = socket.create_server((bare, port), family=family, backlog=2048)
    except OSError:
        return None
    # From this point on, the server owns the socket.
    return dist.TCPStore(
        bare,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def listening(port: int) -> list[str]:
    """Return this host's addresses that have a listener on `port`. Empty if the system does not report them."""
    import psutil

    with suppress(psutil.AccessDenied):
        connections = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        return [
            connection.laddr.ip
            for connection in connections
            if connection.laddr and connection.laddr.port == port
        ]
    return []


def exposed_store(host: str, port: int, setting: str, world_size: int) -> LaunchError | None:
    """Return the problem if others can reach a single-host job's store at `host`.

    setting: the setting that the error suggests.
    """
    outside = [address for address in listening(port) if not is_loopback(address)]
    if is_loopback(host) and not outside:
        return None
    ranks = f"all {world_size} ranks are" if world_size > 1 else "its one rank is"
    where = f"; it listens on {' and '.join(outside)}" if outside else ""
    return LaunchError(
        f"others can reach the job's store at {host}:{port}, though {ranks} on this host",
        given=f"{host}:{port}{where}",
        expected=_OPEN,
        hint=setting
        if not is_loopback(host)
        else f"meshcomm run CONFIG SCRIPT or meshcomm train CONFIG, whose store listens only on 127.0.0.1;\n"
        f"or a firewall for port {port}: the store of torchrun's agent listens on every address",
    )


def exposed_file(path: str) -> LaunchError | None:
    """Return the problem with a rendezvous file's folder, or None if there is none or the folder cannot be examined."""
    folder = Path(path).absolute().parent
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return None
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return None
    return LaunchError(
        f"any user can replace the rendezvous file {path}",
        given=f"the folder {folder} with mode {stat.S_IMODE(mode):04o}",
        expected="a folder that others cannot write to, or one with the sticky bit, like /tmp",
        hint=f"chmod o-w {folder}, or another process.path",
    )
