"""`meshcomm parity`: the reference here, the mesh as a job of processes, and what comes of both as facts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

from meshcomm.config import Config
from meshcomm.errors import ConfigError, LaunchError
from meshcomm.mesh.opening import init
from meshcomm.train.blame import Blame, blame
from meshcomm.train.differences import Difference, first, worst
from meshcomm.train.parity import Record, finite, in_float64, record, reference
from meshcomm.train.parity_rank import REFERENCE, read, write

STEPS = 20

Start: TypeAlias = Callable[[Config, Sequence[str]], int]


@final
@dataclass(frozen=True)
class Parity:
    """What came of a comparison.

    differences: of every step's loss and norm and every parameter's weight and gradient, worst over all
                 ranks. first: what differed first. blamed: None where nothing differs.
    notes:       what was changed in the configuration for it.
    """

    config: Config
    steps: int
    tolerance: float
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]
    first: Difference | None
    blamed: Blame | None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return self.first is None

    def facts(self) -> dict[str, Any]:
        """All of it as plain data; numbers that are not finite are None."""
        return {
            "config": self.config.source,
            "dims": dict(self.config.mesh.dims),
            "steps": self.steps,
            "tolerance": self.tolerance,
            "notes": list(self.notes),
            "agrees": self.agrees,
            "first": None if self.first is None else _facts(self.first),
            "blame": None
            if self.blamed is None
            else {
                "dims": list(self.blamed.dims),
                "ranks": self.blamed.ranks,
                "difference": None if self.blamed.difference is None else _facts(self.blamed.difference),
                "words": self.blamed.words,
            },
            "differences": [_facts(one) for one in self.differences],
        }


def prove(config: Config, steps: int | None, tolerance: float, start: Start) -> Parity:
    """Run the same steps on one process, which is this one, and on the mesh of `config`, and compare.

    config: with every size known. steps: None: 20, or all where the training has fewer.
    start:  runs `python WORDS` as all ranks of a configuration's mesh; returns the exit code, after
            it has said what went wrong.
    Where they differ, smaller meshes are started too, until a dim is to blame. Nothing stays behind.

    Raises: ConfigError where there is nothing to compare, or for more steps than the training has;
            TrainingError where one process alone gets no finite numbers; LaunchError where the run
            on the mesh fails.
    """
    exact, notes = in_float64(config)
    count = _steps(exact, steps)
    if all(size == 1 for size in exact.mesh.dims.values()):
        raise ConfigError(
            "a mesh of one rank is one process already",
            given=f"{config.source}: mesh.dims = {dict(exact.mesh.dims)}",
            expected="a dim of 2 or more",
            hint="--set mesh.dims.dp=2",
        )
    with tempfile.TemporaryDirectory(prefix="meshcomm-parity-") as name:
        folder = Path(name)
        one = reference(exact)
        with init(one) as mesh:
            known = finite(record(mesh, one, count))
        known.save(folder / REFERENCE)
        run = partial(_on_mesh, steps=count, reference=known, folder=folder, start=start)
        found = run(exact)
        ahead = first(found, tolerance)
        blamed = None if ahead is None else blame(exact, run, tolerance)
    return Parity(exact, count, tolerance, notes, tuple(found), ahead, blamed)


def _on_mesh(
    config: Config, *, steps: int, reference: Record, folder: Path, start: Start
) -> list[Difference]:
    place = Path(tempfile.mkdtemp(dir=folder))
    write(place, config, steps)
    code = start(config, ["-m", "meshcomm.train.parity_rank", str(place)])
    if code:
        dims = " ".join(f"{dim}={size}" for dim, size in config.mesh.dims.items())
        raise LaunchError(
            f"there is nothing to compare: the run on {dims} failed",
            given=f"exit code {code}; what was the cause stands above",
            expected=f"{steps} steps of training",
            hint="meshcomm train with the same configuration",
        )
    return worst(read(place), reference.weights)


def _steps(config: Config, given: int | None) -> int:
    assert config.train is not None
    most = config.train.steps
    if given is not None and given > most:
        raise ConfigError(
            f"--steps {given} is more than the training has",
            given=f"--steps {given}, train.steps = {most}",
            expected=f"1 to {most}",
            hint=f"--steps {most}",
        )
    return min(STEPS, most) if given is None else given


def _facts(one: Difference) -> dict[str, Any]:
    finite = one.absolute != float("inf")
    return {
        **asdict(one),
        "absolute": one.absolute if finite else None,
        "relative": one.relative if finite else None,
    }
