"""A rank is killed or stopped inside a collective, of every kind and along every dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from tests.faults.collectives import CALLS, end_inside
from tests.faults.row import ENDS, TIMEOUT_S, End, Program, Rank, Row, both, opened, row

_STEPS: Final = 20
_STRUCK: Final = 3


def ends_in(call: str, dim: str, victim: int, how: End) -> Program:
    """Every rank makes the same calls, all numbers checked; `victim` ends inside the fourth."""

    def act(me: Rank, mesh: Mesh) -> None:
        for step in range(_STEPS):
            if step == _STRUCK and me.number == victim:
                end_inside(me, mesh, dim, call, how)
            CALLS[call](mesh, dim)

    return opened(act, validate_calls=0)


def peers(dims: Mapping[str, int], dim: str, victim: int, error: str) -> dict[int, str]:
    """`error` on the other ranks of the victim's group along `dim`; the rest goes on."""
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


# Groups of four, where most survivors do not talk to the victim directly, and groups of two beside
# others that have to go on. The dims take turns.
_LINES: Final = ("dp", "tp", "pp")
_SQUARES: Final = ("pp", "dp", "tp")


def _in_validation(how: End, me: Rank) -> None:
    """While calls are compared, the first thing that moves is the comparison."""
    with me.mesh() as mesh:
        for step in range(_STEPS):
            if step == _STRUCK and me.number == 2:
                end_inside(me, mesh, "dp", "all_gather", how)
            CALLS["broadcast"](mesh, "dp")


def _before_the_first_call(how: End, me: Rank) -> None:
    """Everyone's mesh is open, and no two ranks of the group have talked yet."""
    with me.mesh() as mesh:
        mesh.barrier("dp", timeout_s=TIMEOUT_S)
        if me.number == 1:
            me.end(how)
        CALLS["all_reduce"](mesh, "tp")


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
]
