"""A script, or a function of a mesh, as one rank of a world that nobody has."""

from __future__ import annotations

import io
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final
from unittest.mock import patch

import numpy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshcomm.comm.spans import Span
from meshcomm.config import Config
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
from meshcomm.dryrun.world import failure_of
from meshcomm.errors import LaunchError, MeshcommError, UnsupportedOp
from meshcomm.layout import Layout
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import PRETENDED
from meshcomm.mesh.source import CONFIG_VARIABLE, OVERRIDES_VARIABLE, Settings, new_job
from meshcomm.parallel.compose import Engine
from meshcomm.train.trainer import RECORDER, StepRecorder


class Script(NamedTuple):
    """What `meshcomm run` would start. config, overrides: what its `meshcomm.init()` without arguments makes its mesh from.

    steps: after so many of `mesh.step()`, or of a Trainer, it is left.
    """

    path: Path
    arguments: tuple[str, ...] = ()
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    steps: int = 2


_WHOLE: Final = "the whole program"


class _Enough(BaseException):
    """What was asked for has been seen. No Exception: no script should catch it."""


@final
class _ScriptRecorder(Passes):
    """The calls of a program, which is left after its last step, the part that is reported. steps: 0: it runs to its end,
    and all of it is reported.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps
        # Of the program's mesh, which may be closed at the end.
        self.mesh: Mesh | None = None
        self.groups: dict[str, list[int]] = {}
        self.part = _WHOLE
        self.begins: Event | None = None

    def keep(self, span: Span) -> Span:
        """See Spans."""
        if self.mesh is not None and span.group and span.group not in self.groups:
            self.groups |= self.mesh.metrics.groups
        return super().keep(span)

    def stretch(self) -> tuple[str, bool]:
        """See Passes; outside of passes the memory of a program's own is taken for that of a forward pass."""
        name, forward = super().stretch()
        return name, forward or name == BETWEEN

    def step(self, number: int) -> None:
        """See Spans."""
        super().step(number)
        self._left -= 1
        if not self._left:
            self.part = "one step" if self.begins else "the start and one step"
            raise _Enough
        self.begins = Event("part", len(self.calls), self.flops(), BETWEEN)
        self.events.append(self.begins)

    def ended(self) -> None:
        """The program has ended before its last step."""
        if self.part == _WHOLE:
            self.begins = None
        # Only the last one divides.
        self.events = [each for each in self.events if each.kind != "part" or each is self.begins]


@final
class _Trained(StepRecorder):
    """Trainers whose steps are told to the mesh."""

    def __init__(self, inside: _Inside) -> None:
        self._inside = inside

    def stepped(self, engine: Engine) -> None:
        """See StepRecorder."""
        if self._inside.mesh is not None:
            self._inside.mesh.step()


@final
class _Inside:
    """See `Pretended`. looked: left as soon as there is a mesh."""

    def __init__(self, recorder: _ScriptRecorder, looked: bool = False) -> None:
        self.mesh: Mesh | None = None
        self.asked: Settings | None = None
        self._recorder = recorder
        self._looked = looked

    def settings(self, asked: Settings) -> Settings:
        """See Pretended."""
        self.asked = asked
        return alone(asked)

    def opened(self, mesh: Mesh) -> None:
        """See Pretended. Raises UnsupportedOp for a second mesh."""
        if self.mesh is not None:
            raise UnsupportedOp(
                "a dry run follows one mesh, and the program makes another",
                given=f"{dict(self.mesh.layout.dims)}, then {dict(mesh.layout.dims)}",
                expected="one mesh of all ranks",
                hint="views and merged dims of one mesh",
            )
        self.mesh = self._recorder.mesh = mesh
        self._recorder.groups = dict(mesh.metrics.groups)
        if self._looked:
            raise _Enough
        mesh.metrics.trace_into(self._recorder)


def script_step(script: Script, rank: int, world: int) -> RankStep:
    """Run `script` as rank `rank` of `world`, to its end or that of its last step; what it prints is dropped.

    Raises what the script raises; LaunchError where it makes no mesh, or exits with a code.
    """
    return _recorded(
        rank, world, partial(_execute, script, rank, world), _Inside(_ScriptRecorder(script.steps))
    )


def function_step(function: Callable[[Mesh], object], config: Config, rank: int, world: int) -> RankStep:
    """Call `function` with the mesh of `config` as rank `rank` of `world`. Raises what it raises."""

    def run() -> None:
        with init(config) as mesh:
            function(mesh)

    return _recorded(rank, world, run, _Inside(_ScriptRecorder(0)))


def mesh_of_script(script: Script, world: int) -> tuple[Layout, Settings]:
    """The layout that a script makes its mesh of, and from what, by running it as rank 0 until there is one."""
    inside = _Inside(_ScriptRecorder(0), looked=True)
    try:
        with _inside(inside, 0, world, []):
            _execute(script, 0, world)
    except MeshcommError:
        raise
    except Exception as error:
        raise failure_of(error, f"rank 0 of {world}") from error
    mesh = _mesh(inside, str(script.path))
    assert inside.asked is not None
    return mesh.layout, inside.asked


def _recorded(rank: int, world: int, run: Callable[[], None], inside: _Inside) -> RankStep:
    recorder = inside._recorder
    ledger = recorder.ledger(hollow=True)
    hollow = Hollow(ledger, recorder)
    modes = [hollow, _steps_counted(hollow)]
    with _seeded(rank), PartNames(ledger) as names, _inside(inside, rank, world, modes):
        run()
    recorder.ended()
    mesh = _mesh(inside, "the program")
    step = recorder.step_of(mesh, recorder.groups, ledger)
    # The mesh may be closed by now, and counts no more.
    calls = recorder.calls[recorder.begins.call if recorder.begins else 0 :]
    rows = summed(TrafficRow(span.lane, span.call, 1, span.nbytes) for span in calls)
    count = sum(names.elements.values())
    return step._replace(parameters=count, rows=rows, part=recorder.part, begins=recorder.begins)


@contextmanager
def _seeded(rank: int) -> Iterator[None]:
    """Python's and NumPy's generators begin differently on each rank, as in processes, and equally in each dry run."""
    python, plain = random.getstate(), numpy.random.get_state()
    random.seed(rank)
    numpy.random.seed(rank)
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(plain)


@contextmanager
def _inside(inside: _Inside, rank: int, world: int, modes: Sequence[Any]) -> Iterator[None]:
    """A world of which only this rank exists, left without a sound where enough has been seen."""
    token, trainers = PRETENDED.set(inside), RECORDER.set(_Trained(inside))
    try:
        with pretended_world(rank, world), ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            with suppress(_Enough):
                yield
    finally:
        PRETENDED.reset(token)
        RECORDER.reset(trainers)


def _mesh(inside: _Inside, who: str) -> Mesh:
    if inside.mesh is None:
        raise LaunchError(
            f"{who} makes no mesh",
            given=f"{who}, run as one rank of a world",
            expected="a script that calls meshcomm.init",
            hint="examples/hello_mesh.py",
        )
    return inside.mesh


def _execute(script: Script, rank: int, world: int) -> None:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    if script.config is not None:
        variables |= {CONFIG_VARIABLE: str(script.config), OVERRIDES_VARIABLE: "\n".join(script.overrides)}
    with (
        patch.dict(os.environ, variables),
        patch.object(sys, "argv", [str(script.path), *script.arguments]),
        # As `python SCRIPT` does: imports are looked for beside the script first.
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


@contextmanager
def _steps_counted(hollow: Hollow) -> Iterator[None]:
    """While it is entered, an optimizer that counts its steps in a tensor finds 1 there: it divides by what follows from it."""

    def before(*_: Any) -> None:
        hollow.answer = 1

    def after(*_: Any) -> None:
        hollow.answer = 0

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
