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
from meshcomm.train.trainer import RECORDER, EnoughSteps, StepRecorder
from meshcomm.watching.spans import Span


class Script(NamedTuple):
    """A script as `meshcomm run` would start it. config, overrides: used if the script calls `meshcomm.init()` without
    arguments.

    steps: the script is stopped after this many steps, counted by `mesh.step()` or a Trainer. objects: the pickled objects
    that rank 0 broadcast to all ranks in an earlier run.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: int = 2
    objects: tuple[list[bytes], ...] = ()


# The assumed number of ranks per host, for programs that read the launcher's environment variables.
_PER_HOST: Final = 8
_WHOLE: Final = "the whole program"


@final
class ProgramRecorder(Passes, StepRecorder):
    """Records the calls of an unmodified program that creates one mesh (see `Pretended`) or only torch process groups.

    steps: the program is stopped after this many steps, and the last step is reported. If 0, the program runs to its end and
    is reported in full. Steps are counted by the mesh or a Trainer or, without a mesh, by the program's first optimizer.
    looks: if True, the program is stopped once it has created a mesh or finished its first step.
    """

    def __init__(self, steps: int, looks: bool = False, objects: Iterable[list[bytes]] = ()) -> None:
        super().__init__()
        self._left, self._looks = steps, looks
        self.objects = list(objects)
        self._optimizer: Optimizer | None = None
        self.torch: TorchGroups | None = None
        # Keep the mesh, because the program may have closed it by the end.
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
                "a dry run supports only one mesh, but the program creates a second one",
                given=f"{dict(self.mesh.layout.dims)}, then {dict(mesh.layout.dims)}",
                expected="one mesh of all ranks",
                hint="views and merged dims of one mesh",
            )
        self.mesh, self.groups = mesh, dict(mesh.debug.metrics.groups)
        if self._looks:
            raise EnoughSteps
        mesh.debug.metrics.trace_into(self)

    def layout_of(self, who: str) -> Layout:
        """Return the layout of the mesh, or of the program's DeviceMesh.

        Raises LaunchError if the program creates no mesh and makes no call on a process group. who: the program's name.
        """
        if self.mesh is not None:
            return self.mesh.layout
        if self.torch is None or not self.torch.ranks:
            raise LaunchError(
                f"{who} creates no mesh and makes no call on a torch process group",
                given=f"{who}, run as one rank of a world",
                expected="a script that calls meshcomm.init, or torch.distributed",
                hint="examples/hello_mesh.py",
            )
        return self.torch.layout

    def keep(self, span: Span) -> Span:
        """See Spans."""
        if span.group and span.group not in self.groups:
            self.groups |= {} if self.mesh is None else self.mesh.debug.metrics.groups
            self.groups |= {} if self.torch is None else self.torch.ranks
        return super().keep(span)

    def optimized(self, optimizer: Optimizer, *_: Any) -> None:
        """Record an optimizer step. Without a mesh, it ends a step of the program."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if self.mesh is None and optimizer is self._optimizer:
            if self._looks:
                raise EnoughSteps
            self.step(0)

    def stretch(self) -> tuple[str, bool]:
        """See Passes. Memory that the program allocates between passes counts as a forward pass's memory."""
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
            raise EnoughSteps
        self.happens("part", len(self.calls))
        self.part_begins = self.events[-1]

    def ended(self) -> None:
        """Record the end of the program or of its last step."""
        if self.part == _WHOLE:
            self.part_begins = None
        # Keep only the "part" event at which the reported part begins.
        self.events = [event for event in self.events if event.kind != "part" or event is self.part_begins]


def script_step(script: Script, rank: int, world: int) -> RankStep:
    """Run `script` as rank `rank` of `world`, to its end or to the end of its last step. The script's output is discarded.

    Raises whatever the script raises, and LaunchError if it creates no mesh or exits with a nonzero code.
    """
    recorder = ProgramRecorder(script.steps, objects=script.objects)
    return recorded_step(rank, world, partial(_execute, script, rank, world), recorder)


def mesh_of_script(script: Script, world: int) -> tuple[Layout, Settings, tuple[list[bytes], ...]]:
    """Run a script as rank 0 until it creates a mesh, and return the mesh's layout and settings.

    Also return the objects that the script has broadcast to all ranks up to that point; see `Script`.
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
    """Call `program` as rank `rank` of `world`, and return the recorded step. Raises whatever the program raises."""
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
    # Count the recorded calls, because the mesh may already be closed.
    calls = recorder.calls[recorder.part_begins.call if recorder.part_begins else 0 :]
    rows = summed(TrafficRow(span.lane, span.call, 1, span.nbytes) for span in calls)
    count = sum(names.elements.values())
    return step._replace(parameters=count, rows=rows, part=recorder.part, begins=recorder.part_begins)


@contextmanager
def _seeded(rank: int) -> Iterator[None]:
    """Seed Python's and NumPy's random generators by rank, so that ranks differ but every dry run is the same."""
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
    """Run the block as the only existing rank of a world. `EnoughSteps` ends the block without an error."""
    token, trainers = PRETENDED.set(recorder), RECORDER.set(recorder)
    recorder.torch = groups = TorchGroups(recorder, rank, world)
    hook = register_optimizer_step_post_hook(recorder.optimized)
    try:
        with pretended_world(rank, world, groups.made, recorder.objects), groups, mode, suppress(EnoughSteps):
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
    # Nothing is computed, so tracing would take longer than running. torch reads this variable when it loads its compiler.
    variables["TORCH_COMPILE_DISABLE"] = "1"
    loaded = sys.modules.get("torch._dynamo.config")
    if script.config is not None:
        variables |= {CONFIG_VARIABLE: str(script.config), OVERRIDES_VARIABLE: "\n".join(script.overrides)}
    with (
        patch.dict(os.environ, variables),
        nullcontext() if loaded is None else patch.object(loaded, "disable", True),
        patch.object(sys, "argv", [str(script.path), *script.arguments]),
        # As with `python SCRIPT`, imports search the script's folder first.
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
