"""Faults in programs that open their mesh without `with`, in torch's own parallelism, and on groups made by torch.

The error that Python itself reports at its end is the one that counts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshcomm.mesh import Mesh
from tests.faults import past_rows
from tests.faults.past_rows import AWAKE_S, _ddp, _fsdp, _on, _pipelines, _skips, _sleeps, _tensor, _trains
from tests.faults.row import TIMEOUT_S, Program, Rank, Row, everyone, row

_LINE: Final = {"dp": 4}
_TENSOR: Final = {"tp": 4}
_LOST: Final = "CollectiveTimeout|PeerLost"
_ANY: Final = "CallMismatchError|CollectiveTimeout|PeerLost"
_LATE: Final = 40


def _dtensor(mesh: Mesh, me: Rank) -> Any:
    """A DTensor over dp that an all-gather makes whole on every rank."""
    device_mesh = mesh["dp"]

    def gathered(x: torch.Tensor) -> torch.Tensor:
        held = DTensor.from_local(x.requires_grad_(), device_mesh, [Shard(0)])
        return held.full_tensor()

    return gathered


def _on_group(group: Callable[[Mesh], Any]) -> Callable[[Mesh, Rank], Any]:
    """An all-reduce on a group of torch in each step."""

    def build(mesh: Mesh, me: Rank) -> Any:
        on = group(mesh)

        def reduced(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=on)
            return x.requires_grad_()

        return reduced

    return build


_default = _on_group(lambda mesh: None)
_new = _on_group(lambda mesh: dist.new_group(list(range(4)), timeout=timedelta(seconds=TIMEOUT_S)))


def _raises(me: Rank) -> Any:
    raise ValueError("planted")


def _exits(me: Rank) -> Any:
    os._exit(0)


def _in_thread(program: Program) -> Program:
    """The same program in a thread, which the main thread waits for."""

    def threaded(me: Rank) -> None:
        thread = threading.Thread(target=partial(program, me), name="trainer")
        thread.start()
        thread.join()

    return threaded


def _row(
    name: str, fault: str, build: Any, victim: int, does: Any, own: str, dims: Any = _LINE, **more: Any
) -> Row:
    program = more.pop("program", None) or _trains(build, _LATE, _on(victim, does))
    if fault == "asleep":
        more["promise_s"] = AWAKE_S
    expected = everyone(more.pop("error", _LOST), 4, **{f"r{victim}": own})
    cells = f"bare-{name} | {fault} | without with | {next(iter(dims))}"
    return row(cells, program, expected, (victim,), dims=dims, bare=True, **more)


_KINDS: Final = (
    ("fsdp", _fsdp, _LINE),
    ("ddp", _ddp, _LINE),
    ("dtensor", _dtensor, _LINE),
    ("tensor", _tensor, _TENSOR),
)

ROWS: Final = [
    *(
        _row(
            f"{name}-{what}",
            fault,
            build,
            2,
            does,
            own,
            dims,
            error=_ANY,
            quick=(name, what) == ("fsdp", "skip"),
        )
        for name, build, dims in _KINDS
        for what, fault, does, own in (
            ("skip", "skipped step", _skips, ""),
            ("raises", "exception", _raises, "ValueError"),
            ("asleep", "asleep", _sleeps, _ANY),
        )
    ),
    *(
        replace(each, name=each.name.replace("past-", "bare-"), moment="without with", bare=True)
        for each in past_rows.ROWS
        if each.name in ("past-pipeline-skip", "past-pipeline-dead", "past-fsdp-dead")
    ),
    row(
        "bare-pipeline-raises | exception | without with | pp",
        *(_pipelines(10, lambda me: (me.strike(), _raises(me))), {0: _LOST, 1: "ValueError"}, (1,)),
        dims={"pp": 2},
        bare=True,
    ),
    *(
        _row(f"{name}-{what}", fault, build, 3, does, own, quick=(name, what) == ("new-group", "exits"))
        for name, build in (("default", _default), ("new-group", _new))
        for what, fault, does, own in (
            ("exits", "os._exit(0)", _exits, "exit code 0"),
            ("raises", "exception", _raises, "ValueError"),
            ("asleep", "asleep", _sleeps, _LOST),
        )
    ),
    _row("exits", "os._exit(0)", _ddp, 1, _exits, "exit code 0"),
    _row(
        "thread-raises",
        "exception in a thread",
        None,
        1,
        None,
        "ValueError",
        program=_in_thread(_trains(_ddp, _LATE, _on(1, _raises))),
    ),
]
