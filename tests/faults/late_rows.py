"""A peer comes too late to a group's first call, when its ranks have not talked before.

Where ranks connect when they first talk, Gloo lets one of two connect and the other wait for five timeouts. Which of
them is decided by address and port, so that both are tried: one rank is late in one group, and the other in the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from meshcomm.errors import CollectiveTimeout
from meshcomm.mesh import Mesh
from tests.faults.row import TIMEOUT_S, Program, Rank, Row, check, everyone, row

_SQUARE: Final = {"dp": 2, "tp": 2}

Call = Callable[[Mesh, int], object]


def _x() -> torch.Tensor:
    return torch.ones(4)


def _late(call: Call, validate: int) -> Program:
    """In each group along dp one rank calls and the other comes too late; then all go on along tp."""

    def program(me: Rank) -> None:
        with me.mesh(validate_calls=validate, options={"tp": {"timeout_s": 30.0}}) as mesh:
            mesh.barrier(timeout_s=30)
            late = mesh.coord("tp")
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
    fault = "a peer comes too late; the program catches the error and goes on along tp"
    moment = "in the comparison of" if validate else f"in {name},"
    cells = f"late-{name} | {fault} | {moment} the first call on a group | dp"
    expected = everyone("", r1="CollectiveTimeout", r2="CollectiveTimeout")
    return row(cells, _late(call, validate), expected, {2: (0,), 1: (3,)}, dims=_SQUARE)


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
