"""A rank is killed or stopped inside each collective, along each dim, or arrives too late at the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from meshcomm.collectives import Call
from meshcomm.errors import CollectiveTimeout
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from tests.faults.row import ENDS, TIMEOUT_S, End, Program, Rank, Row, both, check, everyone, opened, row

# Large enough to take a while to send: 512 KiB for each part.
_N: Final = 1 << 17


def _parts(*values: float) -> torch.Tensor:
    return torch.tensor(values).repeat_interleave(_N)


def _all_reduce(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    check(mesh.all_reduce(dim, torch.full((_N,), c + 1.0)), n * (n + 1) / 2)


def _reduce(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    found = mesh.reduce(dim, torch.full((_N,), c + 1.0), 0)
    if c == 0:
        check(found, n * (n + 1) / 2)


def _reduce_scatter(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    found = mesh.reduce_scatter(dim, _parts(*((c + 1.0) * (to + 1) for to in range(n))))
    check(found, (c + 1) * n * (n + 1) / 2)


def _broadcast(mesh: Mesh, dim: str) -> None:
    check(mesh.broadcast(dim, torch.full((_N,), mesh.coord(dim) + 7.0), 0), 7.0)


def _all_gather(mesh: Mesh, dim: str) -> None:
    found = mesh.all_gather(dim, torch.full((_N,), float(mesh.coord(dim))))
    check(found, _parts(*range(mesh.size(dim))))


def _gather(mesh: Mesh, dim: str) -> None:
    found = mesh.gather(dim, torch.full((_N,), float(mesh.coord(dim))), 0)
    if mesh.coord(dim) == 0:
        check(found, _parts(*range(mesh.size(dim))))


def _scatter(mesh: Mesh, dim: str) -> None:
    x = _parts(*range(mesh.size(dim))) if mesh.coord(dim) == 0 else None
    check(mesh.scatter(dim, x, 0), float(mesh.coord(dim)))


def _all_to_all(mesh: Mesh, dim: str) -> None:
    n, c = mesh.size(dim), mesh.coord(dim)
    found = mesh.all_to_all(dim, _parts(*(c * n + to for to in range(n))))
    check(found, _parts(*(source * n + c for source in range(n))))


def _barrier(mesh: Mesh, dim: str) -> None:
    mesh.barrier(dim)


CALLS: Final[dict[str, Callable[[Mesh, str], None]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def end_inside(me: Rank, mesh: Mesh, dim: str, call: str, how: End) -> None:
    """From now on, this rank ends once it has started its part of the backend's `call` along `dim`."""
    transport: Any = mesh._state.transports[dim]
    original = transport.start

    def instead(given: Call) -> Any:
        if given.row.name != call:
            return original(given)
        work = original(given._replace(blocking=False))
        me.end(how)
        del work
        return None

    transport.start = instead
    # Calls that were prepared before hold the backend's own functions.
    for prepared in mesh._at[dim].recorder.quick:
        prepared.clear()


_STEPS: Final = 20
_STRUCK: Final = 3


def ends_in(call: str, dim: str, victim: int, how: End) -> Program:
    """Every rank makes the same calls and checks all numbers; `victim` ends inside the fourth."""

    def act(me: Rank, mesh: Mesh) -> None:
        for step in range(_STEPS):
            if step == _STRUCK and me.number == victim:
                end_inside(me, mesh, dim, call, how)
            CALLS[call](mesh, dim)

    return opened(act, validate_calls=0)


def peers(dims: Mapping[str, int], dim: str, victim: int, error: str) -> dict[int, str]:
    """`error` on the other ranks of the victim's group along `dim`; all others end without an error."""
    layout = Layout(dims)
    group = {int(rank) for rank in layout.group_of(victim, dim)}
    return {
        int(rank): error if int(rank) in group else "" for rank in layout.ranks.flat if int(rank) != victim
    }


def _row(call: str, dims: Mapping[str, int], dim: str, victim: int, how: End, **more: Any) -> Row:
    shape = "".join(f"{name}{size}" for name, size in dims.items())
    cells = f"{how.lower()}-{call}-{shape}-{dim} | {how} | in {call} | {dim}"
    expected = peers(dims, dim, victim, "PeerLost")
    return row(cells, ends_in(call, dim, victim, how), expected, (victim,), dims=dims, **more)


# Groups of four, in which most survivors are not connected to the victim, and groups of two, while
# other groups have to continue. The dims take turns.
_LINES: Final = ("dp", "tp", "pp")
_SQUARES: Final = ("pp", "dp", "tp")


def _in_validation(how: End, me: Rank) -> None:
    """While calls are compared, the comparison is sent first."""
    with me.mesh() as mesh:
        for step in range(_STEPS):
            if step == _STRUCK and me.number == 2:
                end_inside(me, mesh, "dp", "all_reduce", how)
            CALLS["broadcast"](mesh, "dp")


def _before_the_first_call(how: End, me: Rank) -> None:
    """All meshes are open, but no two ranks of the group have communicated yet."""
    with me.mesh() as mesh:
        mesh.debug.monitored_barrier("dp", timeout_s=TIMEOUT_S)
        if me.number == 1:
            me.end(how)
        CALLS["all_reduce"](mesh, "tp")


# -- a peer is late for a group's first call, and its ranks have not communicated before -----------------
#
# When ranks connect at their first message, Gloo lets one of two connect, and the other wait for five timeouts. Address
# and port decide which one waits, so both are tried: in each of the two groups the other rank is late.

_SQUARE: Final = {"dp": 2, "tp": 2}

LateCall = Callable[[Mesh, int], object]


def _x() -> torch.Tensor:
    return torch.ones(4)


def _late(call: LateCall, validate: int) -> Program:
    """In each group along dp, one rank calls and the other is late; then all ranks continue along tp."""

    def program(me: Rank) -> None:
        with me.mesh(validate_calls=validate, options={"tp": {"timeout_s": 30.0}}) as mesh:
            mesh.debug.monitored_barrier(timeout_s=30)
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
            # No rank leaves while another may still need its answer.
            mesh.debug.monitored_barrier(timeout_s=30)
            if error is not None:
                raise error

    return program


def _late_row(name: str, call: LateCall, validate: int = 0) -> Row:
    fault = "a peer comes too late; the program catches the error and goes on along tp"
    moment = "in the comparison of" if validate else f"in {name},"
    cells = f"late-{name} | {fault} | {moment} the first call on a group | dp"
    expected = everyone("", r1="CollectiveTimeout", r2="CollectiveTimeout")
    return row(cells, _late(call, validate), expected, {2: (0,), 1: (3,)}, dims=_SQUARE)


def _wait_for_all(mesh: Mesh, late: int) -> None:
    for handle in [mesh.all_reduce("dp", _x(), async_op=True) for _ in range(3)]:
        handle.wait()


_LINE: Final = {"dp": 4}
_CUBE: Final = {"pp": 2, "dp": 2, "tp": 2}

ROWS = [
    *(
        _row(call, {_LINES[i % 3]: 4}, _LINES[i % 3], 2, "SIGKILL", quick=call == "all_reduce")
        for i, call in enumerate(CALLS)
    ),
    *(
        _row(call, {_SQUARES[i % 3]: 2, "cp": 2}, _SQUARES[i % 3], 3, "SIGSTOP")
        for i, call in enumerate(CALLS)
    ),
    *(_row("all_reduce", _CUBE, dim, 5, how) for how, dim in zip((*ENDS, "SIGKILL"), _CUBE, strict=True)),
    *both(
        "in-validation | in the comparison of a call | dp",
        *(_in_validation, peers(_LINE, "dp", 2, "PeerLost"), (2,)),
        dims=_LINE,
    ),
    *both(
        "before-the-first-call | before the first call on a group | tp",
        *(_before_the_first_call, peers({"dp": 2, "tp": 2}, "tp", 1, "PeerLost"), (1,)),
    ),
    _late_row("all_reduce", lambda mesh, late: mesh.all_reduce("dp", _x())),
    _late_row("compared", lambda mesh, late: mesh.all_reduce("dp", _x()), validate=64),
    _late_row("handle.wait", _wait_for_all),
    _late_row("barrier", lambda mesh, late: mesh.barrier("dp")),
    _late_row("recv", lambda mesh, late: mesh.recv("dp", _x(), src=late)),
    _late_row("send", lambda mesh, late: mesh.send("dp", _x(), late)),
    _late_row("exchange", lambda mesh, late: mesh.exchange("dp", [(_x(), late)], [(_x(), late)])),
]
