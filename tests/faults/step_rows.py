"""A call left out among equal calls: only the counts that `mesh.step` records show it."""

from __future__ import annotations

import time
from typing import Final

import torch

from meshcomm.mesh import Mesh
from tests.faults.row import MISSING_S, Program, Rank, check, everyone, opened, row

_ODD: Final = 2
_LINE: Final = {"dp": 4}
# Steps are compared once a second. It takes two periods to find the difference, because a step may just have been posted;
# then the timeout of the call that a rank is blocked in, and the usual time for a diagnosis.
_FOUND_S: Final = 2.0 + MISSING_S


def _program(steps: int, pause_s: float, odd_times: int) -> Program:
    """Equal calls in every step; the odd rank makes one of step 3 `odd_times` times."""

    def program(me: Rank, mesh: Mesh) -> None:
        for step in range(1, steps + 1):
            for place in range(3):
                differs = (me.number, step, place) == (_ODD, 3, 1)
                if differs:
                    me.strike()
                for _ in range(odd_times if differs else 1):
                    check(mesh.all_reduce("dp", torch.ones(4)), 4.0)
            mesh.step()
            time.sleep(pause_s)

    # With 0, no call is compared before its data moves.
    return opened(program, validate_calls=0)


ROWS = [
    row(
        f"{name} | {fault} among equal calls | in step 3 of {length}, mesh.step() used | dp",
        *(program, everyone("CallMismatchError"), (_ODD,), _FOUND_S),
        dims=_LINE,
    )
    for name, fault, length, program in (
        ("skipped-among-equal", "skipped call", "many", _program(100_000, 0.005, 0)),
        ("skipped-among-equal-short", "skipped call", "5", _program(5, 0.0, 0)),
        ("once-too-often", "a call made twice", "many", _program(100_000, 0.005, 2)),
    )
]
