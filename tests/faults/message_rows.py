"""Messages that do not match: no partner, the wrong partner, another shape, or a partner that dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from meshcomm.mesh import Mesh
from tests.faults.row import ENDS, TIMEOUT_S, End, Rank, Row, check, opened, row

_LINE: Final = {"pp": 4}
_LOST: Final = "PeerLost"
_LATE: Final = "CollectiveTimeout"

Act = Callable[[Rank, Mesh], object]


def _x(value: float, n: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def _stays(me: Rank, mesh: Mesh) -> None:
    """The rank stays alive and makes no call until the others have raised."""
    time.sleep(TIMEOUT_S + 2)


def _row(
    cells: str,
    acts: Mapping[int, Act],
    errors: Mapping[int, str],
    named: tuple[int, ...] | Mapping[int, tuple[int, ...]] = (2,),
    gone: tuple[int, ...] = (),
    quick: bool = False,
) -> Row:
    """Four ranks in a line along pp: one correct message to the right, then `acts`. Ranks without an act end."""

    def program(me: Rank, mesh: Mesh) -> None:
        found = mesh.shift("pp", _x(me.number), 1)
        check(found, float((me.number - 1) % 4))
        if me.number in acts:
            acts[me.number](me, mesh)

    expected = {rank: errors.get(rank, "") for rank in range(4) if rank not in gone}
    return row(f"{cells} | pp", opened(program), expected, named, dims=_LINE, quick=quick)


def _receives(src: int, n: int = 4, dtype: torch.dtype = torch.float32, tag: int = 0) -> Act:
    def act(me: Rank, mesh: Mesh) -> None:
        me.strike()
        check(mesh.recv("pp", _x(0, n, dtype), src=src, tag=tag), src + 10.0)

    return act


def _sends(dst: int, n: int = 4, dtype: torch.dtype = torch.float32, tag: int = 0) -> Act:
    def act(me: Rank, mesh: Mesh) -> None:
        me.strike()
        mesh.send("pp", _x(me.number + 10.0, n, dtype), dst, tag)

    return act


def _ends(how: End) -> Act:
    return lambda me, mesh: me.end(how)


def _raises(me: Rank, mesh: Mesh) -> None:
    me.strike()
    raise ValueError("no batch")


_LARGE: Final = 1 << 24


def _gone(how: End, name: str, moment: str, other: Act) -> Row:
    """Rank 2 ends when rank 1 needs it."""
    acts = {1: other, 2: _ends(how)}
    quick = (how, name) == ("SIGKILL", "recv")
    return _row(f"{how.lower()}-{name} | {how} | {moment}", acts, {1: _LOST}, gone=(2,), quick=quick)


def _shifts(me: Rank, mesh: Mesh) -> None:
    me.strike()
    mesh.shift("pp", _x(me.number), 1)


def _shifts_first(me: Rank, mesh: Mesh) -> None:
    _shifts(me, mesh)
    me.say("rank 0 has shifted")


def _ends_after_the_first(how: End, me: Rank, mesh: Mesh) -> None:
    """Rank 0's neighbours need rank 2, but rank 0 does not: it must not call after they have failed."""
    me.wait_for("rank 0 has shifted")
    me.end(how)


def _exchanges(me: Rank, mesh: Mesh) -> None:
    me.strike()
    mesh.exchange("pp", [(_x(1), 2)], [(_x(0), 2)])


def _any(me: Rank, mesh: Mesh) -> None:
    me.strike()
    mesh.recv_any("pp", _x(0))


def _two_sends(me: Rank, mesh: Mesh) -> None:
    """Sends two messages at once; the partner receives neither."""
    me.strike()
    handles = [mesh.isend("pp", _x(me.number, _LARGE), 2) for _ in range(2)]
    for handle in handles:
        handle.wait()


def _all_but_2(act: Act, other: Act) -> dict[int, Act]:
    return {0: act, 1: act, 2: other, 3: act}


# The first rank that sees the misfit raises and leaves. The other rank may see only that it left.
_REFUSED: Final = "CallMismatchError|PeerLost"

_MUTUAL: Final = {1: (2,), 2: (1,)}

ROWS = [
    *(
        each
        for how in ENDS
        for each in (
            _gone(how, "recv", "in recv: the sender", _receives(2)),
            _gone(how, "send", "in send: the receiver", _sends(2, _LARGE)),
            _gone(how, "exchange", "in exchange: the partner", _exchanges),
            _row(
                f"{how.lower()}-shift | {how} | in shift",
                {**_all_but_2(_shifts, partial(_ends_after_the_first, how)), 0: _shifts_first},
                {1: _LOST, 3: _LOST},
                gone=(2,),
            ),
        )
    ),
    _row("no-send | skipped send | in recv", {1: _receives(2), 2: _stays}, {1: _LATE}),
    _row("recv-after-the-end | the sender is done | in recv", {1: _receives(2)}, {1: _LOST}, quick=True),
    _row(
        "exception-sender | exception on one rank | in recv: the sender",
        {1: _receives(2), 2: _raises},
        {1: _LOST, 2: "ValueError"},
    ),
    _row("two-sends | two sends and no receive | in send", {1: _two_sends, 2: _stays}, {1: _LATE}),
    _row(
        "wrong-coord | receive from the wrong coord | in recv",
        {1: _receives(3), 2: _sends(1), 3: _stays},
        {1: _LATE, 2: f"{_LATE}|{_LOST}"},
        {1: (3,), 2: (1,)},
    ),
    _row(
        "both-receive | two ranks receive from each other | in recv",
        {1: _receives(2), 2: _receives(1)},
        # Both waits expire at once. On a busy machine one rank may be gone before the wait of the other expires.
        {1: f"{_LATE}|{_LOST}", 2: f"{_LATE}|{_LOST}"},
        _MUTUAL,
    ),
    _row(
        "other-tag | other tag | in recv",
        {1: _receives(2, tag=7), 2: _sends(1, tag=8)},
        {1: _LATE, 2: f"{_LATE}|{_LOST}"},
        _MUTUAL,
    ),
    _row("no-exchange | skipped exchange | in exchange", {1: _exchanges, 2: _stays}, {1: _LATE}),
    _row(
        "no-shift | skipped shift | in shift", _all_but_2(_shifts, _stays), {1: _LATE, 3: _LATE}, quick=True
    ),
    _row(
        "any-nobody | nobody sends | in recv_any",
        {0: _stays, 1: _any, 2: _stays, 3: _stays},
        {1: _LATE},
        {1: (0, 2, 3)},
    ),
    *(
        _row(
            f"message-{name} | other {fault} than the receiver's buffer | in recv",
            {1: _receives(2, room), 2: _sends(1, n, dtype)},
            {1: _REFUSED, 2: _REFUSED},
            _MUTUAL,
        )
        for name, fault, room, n, dtype in (
            ("longer", "shape: longer", 4, 6, torch.float32),
            ("shorter", "shape: shorter", 6, 4, torch.float32),
            ("dtype", "dtype", 4, 2, torch.float64),
        )
    ),
]
