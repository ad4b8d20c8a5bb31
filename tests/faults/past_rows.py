"""Faults in programs that never call the mesh: torch's own parallelism on the mesh's groups.

Each program builds its model on groups or slices of the mesh, then trains as torch's documentation shows. Needs torch's
hooks of process groups, so torch 2.14 or newer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from meshcomm.mesh import Mesh
from tests.faults.row import DIFFERS_S, TIMEOUT_S, Program, Rank, Row, everyone, opened, row, without

_STEPS: Final = 60
# A step in each program after the calls that are compared.
_LATE: Final = 40

Model = Callable[[torch.Tensor], torch.Tensor]
Build = Callable[[Mesh, Rank], Model]
Fault = Callable[[Rank], Any]


def _fsdp(mesh: Mesh, me: Rank, swapped: bool = False) -> Model:
    """FSDP2 over dp, with one group of all-gathers for each layer."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
    for part in (first, second):
        fully_shard(part, mesh=mesh["dp"])
    order = [second, first] if swapped else [first, second]
    model = nn.Sequential(*order)
    fully_shard(model, mesh=mesh["dp"])
    return model


def _tensor(mesh: Mesh, me: Rank) -> Model:
    """Tensor parallel by DTensor over tp."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _ddp(mesh: Mesh, me: Rank) -> Model:
    """DDP over dp."""
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(8, 8), process_group=mesh.group("dp"))


def _trains(build: Build, at: int, fault: Fault) -> Program:
    """Every rank trains; at step `at`, `fault` gives each rank's input, or None to leave out the step."""

    def program(me: Rank, mesh: Mesh) -> None:
        model = build(mesh, me)
        for step in range(_STEPS):
            x = torch.ones(4, 8)
            if step == at:
                x = fault(me)
                if x is None:
                    continue
            y = model(x).sum()
            if x.requires_grad:  # the fault that leaves out the backward
                continue
            y.backward()

    return opened(program)


def _on(victim: int, does: Fault) -> Fault:
    def fault(me: Rank) -> Any:
        if me.number == victim:
            me.strike()
            return does(me)
        return torch.ones(4, 8)

    return fault


def _skips(me: Rank) -> None:
    """The rank leaves out forward and backward of one step."""
    return


def _no_backward(me: Rank) -> torch.Tensor:
    return torch.ones(4, 8, requires_grad=True)


def _strikes(me: Rank) -> None:
    me.strike()


# A rank that sleeps longer than the timeout of the others.
_SLEEPS_S: Final = TIMEOUT_S + 4


def _sleeps(me: Rank) -> torch.Tensor:
    time.sleep(_SLEEPS_S)
    return torch.ones(4, 8)


# The last error is raised by the sleeping rank after it wakes up.
AWAKE_S: Final = _SLEEPS_S + DIFFERS_S


def _dies(me: Rank) -> None:
    me.end("SIGKILL")


def _wider(me: Rank) -> torch.Tensor:
    return torch.ones(6, 8)


def _swaps(mesh: Mesh, me: Rank) -> Model:
    if me.number == 1:
        me.strike()
    return _fsdp(mesh, me, swapped=me.number == 1)


def _both(mesh: Mesh, me: Rank) -> Model:
    """Tensor parallel over tp inside FSDP2 over dp."""
    model = _tensor(mesh, me)
    assert isinstance(model, nn.Module)
    fully_shard(model, mesh=mesh["dp"])
    return model


def _pipelines(at: int, fault: Fault) -> Program:
    """GPipe with two stages over pp, by torch's own schedules."""

    def program(me: Rank, mesh: Mesh) -> None:
        torch.manual_seed(0)
        here, group = mesh.coord("pp"), mesh.group("pp")
        stage = PipelineStage(nn.Linear(8, 8), here, 2, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).sum())
        for step in range(20):
            if step == at and me.number == 1 and fault(me) is None:
                continue
            if here == 0:
                schedule.step(torch.ones(4, 8))
            else:
                schedule.step(target=torch.ones(4, 8))

    return opened(program)


def _sends_late(me: Rank, mesh: Mesh) -> None:
    """Send to a rank whose connection is known to be closed: Gloo raises before it has a Work."""
    x, group = torch.ones(8), mesh.group("pp")
    if me.number:
        dist.recv(x, group=group, group_src=0)
        _dies(me)
    dist.send(x, group=group, group_dst=1)
    time.sleep(1.0)
    dist.isend(x, group=group, group_dst=1)


_LINE: Final = {"dp": 4}
_TENSOR: Final = {"tp": 4}
_PAIR: Final = {"pp": 2}
_SQUARE: Final = {"dp": 2, "tp": 2}
_ANY: Final = "CallMismatchError|CollectiveTimeout|PeerLost"
_LOST: Final = "PeerLost"


def _row(
    cells: str, program: Program, dims: dict[str, int], victim: int, error: str = _ANY, **more: Any
) -> Row:
    """cells: name | fault | dim."""
    name, fault, dim = cells.split(" | ")
    expected = everyone(error, prod(dims.values()))
    if fault == "SIGKILL":
        expected = without(everyone(_LOST, prod(dims.values())), victim)
    if fault == "skipped step":
        # Its calls equal the others' calls, one step ahead: it ends before them, without an error.
        expected[victim] = ""
    cells = f"past-{name} | {fault} | outside the mesh | {dim}"
    return row(cells, program, expected, more.pop("named", (victim,)), dims=dims, **more)


def _late(build: Build, victim: int, does: Fault) -> Program:
    return _trains(build, _LATE, _on(victim, does))


_DIFFERS: Final = "CallMismatchError"

ROWS: Final = [
    _row(
        "fsdp-order | other layer order | dp",
        *(_trains(_swaps, -1, _on(1, _skips)), _LINE, 1, _DIFFERS),
        promise_s=DIFFERS_S,
        quick=True,
    ),
    _row("fsdp-skip | skipped backward | dp", _trains(_fsdp, 1, _on(2, _no_backward)), _LINE, 2, _DIFFERS),
    _row("fsdp-skip-late | skipped step | dp", _late(_fsdp, 2, _skips), _LINE, 2),
    _row("fsdp-asleep | asleep | dp", _late(_fsdp, 3, _sleeps), _LINE, 3, promise_s=AWAKE_S),
    _row("fsdp-dead | SIGKILL | dp", _late(_fsdp, 0, _dies), _LINE, 0),
    _row(
        "tensor-shape | other shape | tp",
        *(_trains(_tensor, 1, _on(1, _wider)), _TENSOR, 1, _DIFFERS),
        promise_s=DIFFERS_S,
    ),
    _row(
        "fsdp-tensor-skip | skipped step | dp", _late(_both, 3, _skips), _SQUARE, 3, named={1: (3,), 2: (3,)}
    ),
    _row("tensor-dead | SIGKILL | tp", _late(_tensor, 2, _dies), _TENSOR, 2),
    _row("ddp-skip | skipped step | dp", _late(_ddp, 1, _skips), _LINE, 1),
    _row("ddp-asleep | asleep | dp", _late(_ddp, 0, _sleeps), _LINE, 0, promise_s=AWAKE_S),
    _row("pipeline-skip | skipped step | pp", _pipelines(10, _strikes), _PAIR, 1),
    _row("pipeline-dead | SIGKILL | pp", _pipelines(10, _dies), _PAIR, 1),
    _row("sends-late | SIGKILL | pp", opened(_sends_late), _PAIR, 1),
]
