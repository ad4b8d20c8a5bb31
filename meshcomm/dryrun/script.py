"""Run a script as one simulated rank of a world."""

from __future__ import annotations

import io
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final
from unittest.mock import patch

import numpy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from meshcomm.comm.spans import Span
from meshcomm.config.mesh import MeshConfig
from meshcomm.dryrun.hollow import Hollow
from meshcomm.dryrun.rank import (
    BETWEEN,
    Event,
    PartNames,
    Passes,
    RankStep,
    TrafficRow,
    alone,
    pretended_world,
    summed,
)
from meshcomm.dryrun.torch_groups import TorchGroups
from meshcomm.dryrun.world import failure_of
from meshcomm.errors import LaunchError, MeshcommError, UnsupportedOp
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from meshcomm.mesh.runtime import PRETENDED
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE, MeshOnly, Settings, new_job
from meshcomm.parallel.compose import Engine
from meshcomm.train.trainer import RECORDER, StepRecorder


class Script(NamedTuple):
    """A script as `meshcomm run` would start it. config, overrides: used by `meshcomm.init()` without arguments.

    steps: the script is stopped after this many steps of `mesh.step()` or of a Trainer. objects: pickled objects that
    rank 0 broadcast to all ranks in an earlier run.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: int = 2
    objects: tuple[list[bytes], ...] = ()


# Ranks of a host, for programs that read the environment variables.
_PER_HOST: Final = 8
_WHOLE: Final = "the whole program"


class _Enough(BaseException):
    """The requested steps have been recorded. Not an Exception, so that no script catches it."""


@final
class ProgramRecorder(Passes, StepRecorder):
    """Records the calls of an unchanged program that creates one mesh (see `Pretended`) or only groups of torch.

    steps: the program is stopped after this many steps, and the last one is reported. 0: it runs to its end, and all of it
    is reported. Steps are counted by the mesh or by a Trainer. Without a mesh, the first optimizer counts. looks: if True, the
    program is stopped as soon as it has a mesh, or ends its first step.
    """

    def __init__(self, steps: int, looks: bool = False, objects: Iterable[list[bytes]] = ()) -> None:
        super().__init__()
        self._left, self._looks = steps, looks
        self.objects = list(objects)
        self._optimizer: Optimizer | None = None
        self.torch: TorchGroups | None = None
        # The mesh may be closed at the end.
        self.mesh: Mesh | None = None
        self.asked: Settings | None = None
        self.groups: dict[str, list[int]] = {}
        self.part = _WHOLE
        self.part_begins: Event | None = None

    def settings(self, asked: Settings) -> Settings:
        """See Pretended."""
        self.asked = asked
        return alone(asked)

    def opened(self, mesh: Mesh) -> None:
        """See Pretended. Raises UnsupportedOp for a second mesh."""
        if self.mesh is not None:
            raise UnsupportedOp(
                "a dry run follows one mesh, and the program creates another",
                given=f"{dict(self.mesh.layout.dims)}, then {dict(mesh.layout.dims)}",
                expected="one mesh of all ranks",
                hint="views and merged dims of one mesh",
            )
        self.mesh, self.groups = mesh, dict(mesh.metrics.groups)
        if self._looks:
            raise _Enough
        mesh.metrics.trace_into(self)

    def layout_of(self, who: str) -> Layout:
        """Return the dims of the mesh, or of the program's DeviceMesh.

        Raises LaunchError if the program creates no group.
        """
        if self.mesh is not None:
            return self.mesh.layout
        if self.torch is None or not self.torch.ranks:
            raise LaunchError(
                f"{who} creates no mesh and makes no call on a group of torch",
                given=f"{who}, run as one rank of a world",
                expected="a script that calls meshcomm.init, or torch.distributed",
                hint="examples/hello_mesh.py",
            )
        return self.torch.layout

    def keep(self, span: Span) -> Span:
        """See Spans."""
        if span.group and span.group not in self.groups:
            self.groups |= {} if self.mesh is None else self.mesh.metrics.groups
            self.groups |= {} if self.torch is None else self.torch.ranks
        return super().keep(span)

    def optimized(self, optimizer: Optimizer, *_: Any) -> None:
        """Record an optimizer step. It ends a step of the program if the program opens no mesh."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if self.mesh is None and optimizer is self._optimizer:
            if self._looks:
                raise _Enough
            self.step(0)

    def stretch(self) -> tuple[str, bool]:
        """See Passes. Outside of passes, memory that the program allocates counts as memory of a forward pass."""
        name, forward = super().stretch()
        return name, forward or name == BETWEEN

    def stepped(self, engine: Engine) -> None:
        """See StepRecorder."""
        if self.mesh is not None:
            self.mesh.step()

    def step(self, number: int) -> None:
        """See Spans."""
        super().step(number)
        self._left -= 1
        if not self._left:
            self.part = "one step" if self.part_begins else "the start and one step"
            raise _Enough
        self.part_begins = Event("part", len(self.calls), self.flops())
        self.events.append(self.part_begins)

    def ended(self) -> None:
        """Record that the program or its last step has ended."""
        if self.part == _WHOLE:
            self.part_begins = None
        # Only the last "part" event separates the reported part.
        self.events = [each for each in self.events if each.kind != "part" or each is self.part_begins]


def script_step(script: Script, rank: int, world: int) -> RankStep:
    """Run `script` as rank `rank` of `world`, to its end or the end of its last step. Its output is dropped.

    Raises what the script raises, and LaunchError if it creates no mesh or exits with a code.
    """
    recorder = ProgramRecorder(script.steps, objects=script.objects)
    return recorded_step(rank, world, partial(_execute, script, rank, world), recorder)


def mesh_of_script(script: Script, world: int) -> tuple[Layout, Settings, tuple[list[bytes], ...]]:
    """Return the layout and the settings of a script's mesh, found by running the script as rank 0 until it creates one.

    Also return the objects that the script has broadcast to all ranks until then; see `Script`.
    """
    recorder = ProgramRecorder(0, looks=True)
    try:
        ledger = recorder.ledger(hollow=True)
        with PartNames(ledger), _inside(recorder, 0, world, Hollow(ledger, recorder)):
            _execute(script, 0, world)
    except MeshcommError:
        raise
    except Exception as error:
        raise failure_of(error, f"rank 0 of {world}") from error
    asked = recorder.asked or MeshOnly(MeshConfig(dims={"world": -1}))
    return recorder.layout_of(str(script.path)), asked, tuple(recorder.objects)


def recorded_step(rank: int, world: int, program: Callable[[], None], recorder: ProgramRecorder) -> RankStep:
    """Call `program`, which creates a mesh, as rank `rank` of `world`. Raises what the program raises."""
    ledger = recorder.ledger(hollow=True)
    with (
        _seeded(rank),
        PartNames(ledger) as names,
        _inside(recorder, rank, world, Hollow(ledger, recorder)),
    ):
        program()
    recorder.ended()
    coords = recorder.layout_of("the program").coords(rank)
    step = recorder.step_of(rank, coords, recorder.groups, ledger)
    # The mesh may be closed by now and no longer count.
    calls = recorder.calls[recorder.part_begins.call if recorder.part_begins else 0 :]
    rows = summed(TrafficRow(span.lane, span.call, 1, span.nbytes) for span in calls)
    count = sum(names.elements.values())
    return step._replace(parameters=count, rows=rows, part=recorder.part, begins=recorder.part_begins)


@contextmanager
def _seeded(rank: int) -> Iterator[None]:
    """Seed Python's and NumPy's generators differently on each rank, as in separate processes, and the same in each dry run."""
    python, plain = random.getstate(), numpy.random.get_state()
    random.seed(rank)
    numpy.random.seed(rank)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(plain)


@contextmanager
def _inside(
    recorder: ProgramRecorder, rank: int, world: int, mode: AbstractContextManager[Any]
) -> Iterator[None]:
    """A world of which only this rank exists. `_Enough` ends it silently."""
    token, trainers = PRETENDED.set(recorder), RECORDER.set(recorder)
    recorder.torch = groups = TorchGroups(recorder, rank, world)
    hook = register_optimizer_step_post_hook(recorder.optimized)
    try:
        with pretended_world(rank, world, groups.made, recorder.objects), groups, mode, suppress(_Enough):
            yield
    finally:
        hook.remove()
        PRETENDED.reset(token)
        RECORDER.reset(trainers)


def _execute(script: Script, rank: int, world: int) -> None:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    # torchrun sets these too. No process listens at this address.
    variables |= {"LOCAL_RANK": str(rank % _PER_HOST), "LOCAL_WORLD_SIZE": str(min(world, _PER_HOST))}
    variables |= {"GROUP_RANK": str(rank // _PER_HOST), "GROUP_WORLD_SIZE": str(-(-world // _PER_HOST))}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    # Nothing is computed, and tracing takes longer than running. torch reads this variable when it loads its compiler.
    variables["TORCH_COMPILE_DISABLE"] = "1"
    loaded = sys.modules.get("torch._dynamo.config")
    if script.config is not None:
        variables |= {CONFIG_VARIABLE: str(script.config), OVERRIDES_VARIABLE: "\n".join(script.overrides)}
    with (
        patch.dict(os.environ, variables),
        nullcontext() if loaded is None else patch.object(loaded, "disable", True),
        patch.object(sys, "argv", [str(script.path), *script.arguments]),
        # As `python SCRIPT` does: imports search the script's folder first.
        patch.object(sys, "path", [str(script.path.resolve().parent), *sys.path]),
        redirect_stdout(io.StringIO()),
        new_job(),
    ):
        try:
            runpy.run_path(str(script.path), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise LaunchError(
                    f"{script.path} ended with exit code {ended.code} as rank {rank}",
                    given=f"sys.exit({ended.code!r})",
                    expected="a script that runs to its end",
                    hint=f"meshcomm simulate {script.path}",
                ) from None
