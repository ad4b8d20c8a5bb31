"""`meshcomm parity`: run a reference on one process and a job on the mesh, and find the dim to blame if they differ.

`python -m meshcomm.train.parity_job FOLDER`, under a launcher, runs one rank of that job.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, LaunchError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.job.rank import as_rank
from meshcomm.mesh.opening import init
from meshcomm.mesh.source import CONFIG_VARIABLE
from meshcomm.rendezvous.launcher import find_launch
from meshcomm.train.parity import (
    Difference,
    Record,
    compare,
    first,
    in_float64,
    record,
    record_script,
    reference,
    worst,
)

STEPS = 20
_REFERENCE = "reference.pt"
_JOB = "job.json"
_CONFIG = "config.json"
# Settings that apply to the full mesh only.
_OF_ALL_RANKS: Final = ("rank_order", "ranks")

Start: TypeAlias = Callable[[Config, Sequence[str]], int]
# A file and its arguments.
Script: TypeAlias = tuple[Path, Sequence[str]]
Run: TypeAlias = Callable[[Config], Sequence[Difference]]


@final
@dataclass(frozen=True)
class Blame:
    """The dims that cause a difference: a single dim, a pair of dims, or none if only all dims together cause it.

    ranks:      the number of ranks in the mesh that has only these dims.
    difference: the largest difference on that mesh. None if the run failed, or if only all dims together cause it.
    """

    dims: tuple[str, ...]
    ranks: int
    difference: Difference | None

    @property
    def words(self) -> str:
        """One line: `first dim to blame: tp (alone, 2 ranks: weight of norm.weight, 3.1e-02)`."""
        if not self.dims:
            return "first dim to blame: no single dim and no pair, only all dims together"
        what = "the run failed"
        if self.difference is not None:
            difference = self.difference
            what = f"{difference.words}, {difference.note or format(difference.absolute, '.1e')}"
        how = "alone" if len(self.dims) == 1 else "together, neither alone"
        which = "first dim" if len(self.dims) == 1 else "first dims"
        return f"{which} to blame: {' and '.join(self.dims)} ({how}, {self.ranks} ranks: {what})"


@final
@dataclass(frozen=True)
class Parity:
    """The result of a comparison.

    differences: the largest difference on any rank, for the loss and norm of every step and the weight and gradient of
                 every parameter.
    first:       the first difference; None if nothing differs.
    blamed:      the dims to blame; None if nothing differs.
    notes:       the changes made to the configuration for the comparison.
    original:    see `Record`.
    """

    config: Config
    steps: int
    tolerance: float
    notes: tuple[str, ...]
    differences: tuple[Difference, ...]
    first: Difference | None
    blamed: Blame | None
    original: str = ""

    @property
    def agrees(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.first is None

    def facts(self) -> dict[str, Any]:
        """Return the result as plain data, with None for numbers that are not finite."""
        blamed = self.blamed
        return {
            "config": self.config.source,
            "dims": dict(self.config.mesh.dims),
            "steps": self.steps,
            "tolerance": self.tolerance,
            "notes": list(self.notes),
            "original": self.original,
            "agrees": self.agrees,
            "first": _facts(self.first),
            "blame": blamed
            and {**asdict(blamed), "difference": _facts(blamed.difference), "words": blamed.words},
            "differences": [_facts(difference) for difference in self.differences],
        }


def prove(
    config: Config, steps: int | None, tolerance: float, start: Start, script: Script | None = None
) -> Parity:
    """Run the same steps on one process and on the mesh of `config`, and compare the results.

    config: a configuration in which every size is known. steps: if None, 20, or all steps if there are fewer.
    script: a script that creates a Trainer on the mesh that meshcomm.init() returns. On one process, every dim of that mesh
            has size 1. If None, the training in `config` is run.
    start:  a function that runs `python WORDS` on all ranks of a mesh, prints errors and returns the exit code.
    If the results differ, smaller meshes are run until the dim to blame is found. No process keeps running after the call.

    Raises: ConfigError if there is nothing to compare, or if the training has fewer steps; TrainingError if the run on one
            process computes numbers that are not finite, or outputs that differ from the original module's; LaunchError if
            the run on the mesh fails; UnsupportedOp if a model with batch norms has several microbatches per step.
    """
    exact, notes = in_float64(config)
    count = _steps(exact, steps)
    if all(size == 1 for size in exact.mesh.dims.values()):
        raise ConfigError(
            "a mesh of one rank is already a single process",
            given=f"{config.source}: mesh.dims = {dict(exact.mesh.dims)}",
            expected="a dim of 2 or more",
            hint="--set mesh.dims.dp=2",
        )
    with tempfile.TemporaryDirectory(prefix="meshcomm-parity-") as name:
        runs = _Runs(exact, count, Path(name), start, script)
        original = runs.alone()
        if original.batch_norms and _copies(exact) > 1:
            runs = replace(runs, batch_norms=True)
            original = runs.alone()
            notes += ("one microbatch on every mesh, because batch norms see the samples of all ranks",)
        for (kind, step), value in original.steps().items():
            if not math.isfinite(value):
                raise TrainingError(
                    f"on one process, {step} has no finite result to compare a mesh with",
                    given=f"{kind} {value.item()}",
                    expected="finite numbers",
                    hint=f"a smaller train.lr, or --steps {max(1, int(step.split()[1]) - 1)}",
                )
        original.save(runs.folder / _REFERENCE)
        run = partial(runs.on_mesh, list(original.weights))
        differences_of_mesh = run(exact)
        ahead = first(differences_of_mesh, tolerance)
        blamed = None if ahead is None else blame(exact, run, tolerance)
    return Parity(
        exact, count, tolerance, notes, tuple(differences_of_mesh), ahead, blamed, original.original
    )


def _copies(config: Config) -> int:
    """Return the number of ranks that read different samples."""
    return 1 if config.parallel is None else config.parallel.copies(config.mesh.dims)


@final
@dataclass(frozen=True)
class _Runs:
    """Runs the first `steps` steps of `config` on its mesh, on parts of that mesh, and on one process.

    folder:      the folder for the files of all runs.
    batch_norms: whether the model has batch norms. If so, every run has the full mesh's total microbatch size.
    """

    config: Config
    steps: int
    folder: Path
    start: Start
    script: Script | None
    batch_norms: bool = False

    def alone(self) -> Record:
        """Return the record of one process."""
        if self.script is not None:
            return Record.read(self._job(self._sized(only(self.config, ()))) / _REFERENCE)
        config = reference(self._sized(only(self.config, ())) if self.batch_norms else self.config)
        with init(config) as mesh:
            return record(mesh, config, self.steps, original=True)

    def on_mesh(self, names: Sequence[str], part: Config) -> list[Difference]:
        """Return the largest differences between a part of the mesh and the reference. names: the reference's parameters."""
        place = self._job(self._sized(part))
        of_ranks = [json.loads(path.read_text()) for path in sorted(place.glob("rank*.json"))]
        return worst([[Difference(**difference) for difference in ours] for ours in of_ranks], names)

    def _sized(self, part: Config) -> Config:
        """Return `part`, with a single microbatch if the model has batch norms. Raises UnsupportedOp if a step has several."""
        if not self.batch_norms:
            return part
        train, copies = self.config.train, _copies(self.config)
        assert train is not None
        if train.global_batch_size != train.micro_batch_size * copies:
            raise UnsupportedOp(
                "batch norms with several microbatches in a step cannot be compared with one process",
                given=f"train.global_batch_size = {train.global_batch_size}, train.micro_batch_size = {train.micro_batch_size} on "
                f"{copies} ranks along data and shard",
                expected="one microbatch per step, because batch norms see one microbatch at a time",
                hint=f"--set train.micro_batch_size={train.global_batch_size // copies}",
            )
        return load_config(part, [f"train.micro_batch_size={train.global_batch_size // _copies(part)}"])

    def _job(self, part: Config) -> Path:
        """Run all ranks of a mesh, and return the folder with their results. A script on one rank writes its record there."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        facts = part.model_dump(mode="json", exclude_unset=True)
        job: dict[str, Any] = {"config": facts, "steps": self.steps}
        if self.script is not None:
            (place / _CONFIG).write_text(json.dumps(facts))
            job["script"] = [str(self.script[0]), list(self.script[1])]
        (place / _JOB).write_text(json.dumps(job))
        code = self.start(part, ["-m", "meshcomm.train.parity_job", str(place)])
        if code:
            dims = " ".join(f"{dim}={size}" for dim, size in part.mesh.dims.items())
            command = "train with the same configuration" if self.script is None else "run CONFIG SCRIPT"
            raise LaunchError(
                f"there is nothing to compare: the run on {dims} failed",
                given=f"exit code {code}; the cause is printed above",
                expected=f"{self.steps} steps of training",
                hint=f"meshcomm {command}",
            )
        return place


def _steps(config: Config, asked: int | None) -> int:
    assert config.train is not None
    most = config.train.steps
    if asked is not None and asked > most:
        raise ConfigError(
            f"--steps {asked} exceeds the number of training steps",
            given=f"--steps {asked}, train.steps = {most}",
            expected=f"1 to {most}",
            hint=f"--steps {most}",
        )
    return min(STEPS, most) if asked is None else asked


def _facts(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None or difference.absolute != math.inf:
        return difference and asdict(difference)
    return {**asdict(difference), "absolute": None, "relative": None}


def blame(config: Config, run: Run, tolerance: float) -> Blame:
    """Run the mesh with only one dim larger than 1, for each dim in turn, and then with each pair of dims.

    config: a configuration in which every size is known, and whose run differs from the reference.
    run:    a function that returns the largest differences between a configuration's mesh and the reference. A
            MeshcommError that it raises counts as a difference.
    """
    suspects = suspected(config)
    for count in (1, 2):
        if count == len(suspects) > 1:
            break
        for dims in combinations(suspects, count):
            if blamed := _tried(config, dims, run, tolerance):
                return blamed
    return Blame((), 0, None)


def suspected(config: Config) -> tuple[str, ...]:
    """Return the dims that may be to blame: the dims of the base mesh with a size above 1, followed by the expert dim."""
    dims = [dim for dim, size in config.mesh.dims.items() if size > 1]
    expert = None if config.parallel is None else config.parallel.expert
    if expert is not None and any(sizes.get(expert, 1) > 1 for sizes in config.mesh.views.values()):
        dims.append(expert)
    return tuple(dims)


def only(config: Config, dims: Iterable[str]) -> Config:
    """Return `config` with a smaller mesh, in which only `dims` have a size above 1.

    The expert dim is not part of the base mesh but a view of other dims. If the expert dim is kept, the data dim grows as far
    as the expert dim needs, and another dim of the view gets the remaining ranks. Otherwise experts are not split. Raises
    ConfigError if there is no such mesh.
    """
    kept_dims, parallel = set(dims), config.parallel
    assert parallel is not None
    facts: dict[str, Any] = config.model_dump(exclude_unset=True)
    facts.pop("topology", None)
    mesh = {key: value for key, value in facts["mesh"].items() if key not in _OF_ALL_RANKS}
    mesh.pop("views", None)
    sizes = {dim: size if dim in kept_dims else 1 for dim, size in config.mesh.dims.items()}
    expert, name = parallel.expert, config.expert_view
    section = dict(facts["parallel"])
    if expert in kept_dims and expert is not None and name is not None:
        view = config.mesh.views[name]
        shared = (parallel.pipeline, parallel.tensor)
        carriers = [dim for dim in sizes if dim not in shared]
        more = view[expert] // math.gcd(view[expert], math.prod(sizes[dim] for dim in carriers))
        carrier = parallel.data if parallel.data in carriers else carriers[0]
        sizes[carrier or ""] *= more
        sizes_of_view = {dim: sizes[dim] if dim in shared else 1 for dim in view} | {expert: view[expert]}
        # The first of the other dims gets the remaining ranks.
        for dim in [dim for dim in view if dim not in (*shared, expert)][:1]:
            sizes_of_view[dim] = math.prod(sizes[dim] for dim in carriers) // view[expert]
        mesh["views"] = {name: sizes_of_view}
    else:
        section.pop("expert", None)
    known_dims = {dim for dim, size in sizes.items() if size > 1} | set(config.mesh.merge)
    known_dims |= set(mesh.get("views", {}).get(name, ()))
    options = {dim: value for dim, value in mesh.pop("options", {}).items() if dim in known_dims}
    if options:
        mesh["options"] = options
    return load_config({**facts, "mesh": {**mesh, "dims": sizes}, "parallel": section})


def _tried(config: Config, dims: Sequence[str], run: Run, tolerance: float) -> Blame | None:
    try:
        part = only(config, dims)
    except ConfigError:
        return None  # this training cannot run on such a mesh
    ranks = math.prod(part.mesh.dims.values())
    try:
        largest = max(run(part), key=attrgetter("relative"))
    except MeshcommError:
        return Blame(tuple(dims), ranks, None)
    return Blame(tuple(dims), ranks, largest) if largest.relative > tolerance else None


def differences(config: Config, steps: int, reference: Path) -> list[Difference] | None:
    """Run the steps on the mesh of `config`, and return this rank's differences from the record in `reference`.

    Called by: every rank of the job. Returns None on a rank that is not part of the mesh.
    """
    with init(config) as mesh:
        if not mesh.is_member:
            return None
        return compare(record(mesh, config, steps), Record.read(reference), mesh.rank)


def main(folder: Path) -> None:
    """Run one rank, and write its differences into `folder`. Without a reference, write a script's record instead."""
    launch = find_launch(os.environ)
    facts = json.loads((folder / _JOB).read_text())
    config, steps, reference_file = load_config(facts["config"]), facts["steps"], folder.parent / _REFERENCE

    def body() -> None:
        if "script" not in facts:
            found_differences = differences(config, steps, reference_file)
        else:
            os.environ[CONFIG_VARIABLE] = str(folder / _CONFIG)
            path, arguments = facts["script"]
            ours = record_script(Path(path), arguments, config, steps)
            if not reference_file.is_file():
                _save(ours, folder, path)
                return
            found_differences = (
                None if ours is None else compare(ours, Record.read(reference_file), launch.rank)
            )
        if found_differences is not None:
            # Files are read in rank order, so that the lowest rank is reported for equal differences.
            (folder / f"rank{launch.rank:06d}.json").write_text(
                json.dumps([asdict(difference) for difference in found_differences])
            )

    as_rank(body, launch, lambda: f"rank {launch.rank}")


def _save(recorded: Record | None, folder: Path, script: str) -> None:
    if recorded is None:
        raise TrainingError(
            "the script runs no Trainer steps, so there is nothing to compare",
            given=script,
            expected="meshcomm.train.Trainer, and run() or step()",
            hint="write: with meshcomm.init() as mesh: Trainer(mesh, model=module).run(data)",
        )
    recorded.save(folder / _REFERENCE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
