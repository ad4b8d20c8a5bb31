"""A peer comes too late to a group's first call, and is the one of the two that Gloo lets connect.

The other waits for it inside Gloo, for five times the timeout, unless meshcomm ends that wait.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Final

import torch

from meshcomm.errors import CollectiveTimeout
from meshcomm.mesh import Mesh
from meshcomm.transport.torch_private import gloo_address
from tests.faults.row import FIRST_S, TIMEOUT_S, Program, Rank, Row, check

_SQUARE: Final = {"dp": 2, "tp": 2}

Call = Callable[[Mesh, int], object]


def connecting(mesh: Mesh, dim: str) -> int:
    """The coord along `dim` that Gloo lets connect to the other, of two: address, then port as it lies in memory."""

    def order(coord: int) -> tuple[bytes, int]:
        address = gloo_address(mesh.group(dim), coord)
        assert address is not None
        (port,) = struct.unpack("@H", struct.pack("!H", address[1]))
        return socket.inet_aton(address[0]), port

    return max(range(2), key=order)


def _x() -> torch.Tensor:
    return torch.ones(4)


def _late(call: Call, validate: int) -> Program:
    """In each group along dp one rank calls and the other comes too late; then all go on along tp."""

    def program(me: Rank) -> None:
        with me.mesh(validate_calls=validate, options={"tp": {"timeout_s": 30.0}}) as mesh:
            mesh.barrier(timeout_s=30)
            late = connecting(mesh, "dp")
            error = None
            if mesh.coord("dp") == late:
                time.sleep(TIMEOUT_S + 3)
            else:
                me.strike()
                try:
                    call(mesh, late)
                except CollectiveTimeout as raised:
                    error, me.raised_at = raised, time.monotonic()
            check(mesh.all_reduce("tp", _x()), 2.0)
            # Nobody leaves while another may still be asked.
            mesh.barrier(timeout_s=30)
            if error is not None:
                raise error

    return program


def _row(name: str, call: Call, validate: int = 0) -> Row:
    return Row(
        f"late-{name}",
        "a peer comes too late; the program catches the error and goes on along tp",
        "in the comparison of the first call on a group"
        if validate
        else f"in {name}, the first call on a group",
        "dp",
        _late(call, validate),
        dict.fromkeys(range(4), "CollectiveTimeout|"),
        {0: (2,), 1: (3,), 2: (0,), 3: (1,)},
        FIRST_S,
        _SQUARE,
    )


def _wait_for_all(mesh: Mesh, late: int) -> None:
    for handle in [mesh.all_reduce("dp", _x(), async_op=True) for _ in range(3)]:
        handle.wait()


ROWS: Final = [
    _row("all_reduce", lambda mesh, late: mesh.all_reduce("dp", _x())),
    _row("compared", lambda mesh, late: mesh.all_reduce("dp", _x()), validate=64),
    _row("handle.wait", _wait_for_all),
    _row("barrier", lambda mesh, late: mesh.barrier("dp")),
    _row("recv", lambda mesh, late: mesh.recv("dp", _x(), src=late)),
    _row("send", lambda mesh, late: mesh.send("dp", _x(), late)),
    _row("exchange", lambda mesh, late: mesh.exchange("dp", [(_x(), late)], [(_x(), late)])),
]
