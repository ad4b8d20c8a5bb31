"""Different calls on one group, whole steps that a rank leaves out, and torch's groups next to the mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from meshcomm.mesh import Mesh
from tests.faults.call_rows import differs
from tests.faults.row import TIMEOUT_S, Program, Rank, Row, everyone, opened, row

_ODD: Final = 2
_LINE: Final = {"dp": 4}
# A second until the first rank of the group compares, and one poll each to report the difference and to see it.
_FOUND_S: Final = 2.0

Call = Callable[[Mesh], object]


def _differs(cells: str, odd: Call, usual: Call, before: int = 0, **more: Any) -> Row:
    """Like `differs`, after some of the usual calls."""

    def call(mesh: Mesh, is_odd: bool) -> None:
        (odd if is_odd else usual)(mesh)

    return differs(cells, call, first=lambda mesh: [usual(mesh) for _ in range(before)], **more)


def _reduces(mesh: Mesh) -> object:
    return mesh.all_reduce("dp", torch.ones(4))


def _outside(size: int, made: bool) -> Call:
    """A call on the default group, or on a group that `dist.new_group` makes for it."""

    def call(mesh: Mesh) -> object:
        return dist.all_reduce(torch.ones(size), group=dist.new_group() if made else None)

    return call


def _without_a_step(steps: int, pause_s: float) -> Program:
    """Equal calls in every step; the odd rank leaves out all of step 3, including `mesh.step(3)`."""

    def program(me: Rank, mesh: Mesh) -> None:
        for step in range(1, steps + 1):
            if (me.number, step) == (_ODD, 3):
                me.strike()
                continue
            for _ in range(3):
                _reduces(mesh)
            mesh.step(step)
            time.sleep(pause_s)

    return opened(program, validate_calls=0)


ROWS = [
    _differs(
        "object-against-tensor | objects.broadcast where the others reduce | in all_reduce",
        lambda m: m.objects.broadcast("dp", {"step": 3}, 0),
        _reduces,
    ),
    _differs(
        "tensor-against-object | all_reduce where the others send objects | in objects.all_gather",
        _reduces,
        lambda m: m.objects.all_gather("dp", {"step": 3}),
        before=1,
    ),
    _differs(
        "barrier-against-object | barrier where the others send objects | in objects.broadcast",
        lambda m: m.barrier("dp"),
        lambda m: m.objects.broadcast("dp", {"step": 3}, 0),
        quick=True,
    ),
    _differs(
        'other-algorithm | algorithm = "tree" on one rank | in all_reduce',
        lambda m: m.all_reduce("dp", torch.ones(4), algorithm="tree"),
        _reduces,
        before=1,
    ),
    *(
        row(
            f"{name} | a whole step left out, mesh.step(3) included | in step 3 of {length} | dp",
            *(program, everyone("CallMismatchError"), (_ODD,), _FOUND_S + TIMEOUT_S),
            dims=_LINE,
        )
        for name, length, program in (
            ("skipped-step", "many", _without_a_step(100_000, 0.005)),
            ("skipped-step-short", "5", _without_a_step(5, 0.0)),
        )
    ),
    _differs(
        "default-group-shape | other shape in dist.all_reduce | outside the mesh",
        *(_outside(6, False), _outside(4, False)),
        before=1,
        dim="default group",
        quick=True,
    ),
    _differs(
        "new-group-shape | other shape in dist.all_reduce | outside the mesh",
        *(_outside(6, True), _outside(4, True)),
        dim="a group of dist.new_group",
    ),
]
