"""`meshcomm parity`: the reference here, the mesh as a job of processes, and where they differ, the dim to blame.

`python -m meshcomm.train.parity_job FOLDER`, under a launcher, is one rank's part of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from meshcomm.config import Config, load
from meshcomm.errors import ConfigError, LaunchError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.launch.rank import as_rank
from meshcomm.mesh.environment import find_launch
from meshcomm.mesh.opening import init
from meshcomm.mesh.source import CONFIG_VARIABLE
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
# What belongs to the ranks of the whole mesh and has no place on a part of it.
_OF_ALL_RANKS: Final = ("rank_order", "ranks")

Start: TypeAlias = Callable[[Config, Sequence[str]], int]
# A file, and its arguments.
Script: TypeAlias = tuple[Path, Sequence[str]]
Run: TypeAlias = Callable[[Config], Sequence[Difference]]


@final
@dataclass(frozen=True)
class Blame:
    """The dims that make a difference: one alone, two together, or none, where only all of them do.

    ranks:      of the mesh with only these dims.
    difference: the worst on it; None where that run failed, or where only all dims together differ.
    """

    dims: tuple[str, ...]
    ranks: int
    difference: Difference | None

    @property
    def words(self) -> str:
        """One line: `first dim to blame: tp (alone, 2 ranks: weight of norm.weight, 3.1e-02)`."""
        if not self.dims:
            return "first dim to blame: none alone and no two: only all together"
        what = "the run failed"
        if self.difference is not None:
            one = self.difference
            what = f"{one.words}, {one.note or format(one.absolute, '.1e')}"
        how = "alone" if len(self.dims) == 1 else "together, neither alone"
        which = "first dim" if len(self.dims) == 1 else "first dims"
        return f"{which} to blame: {' and '.join(self.dims)} ({how}, {self.ranks} ranks: {what})"


@final
@dataclass(frozen=True)
class Parity:
    """What came of a comparison.

    differences: of every step's loss and norm and every parameter's weight and gradient, worst over all
                 ranks. first: what differed first. blamed: None where nothing differs.
    notes:       what was changed in the configuration for it. original: as of `Record`.
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
        """Whether nothing differs by more than the tolerance."""
        return self.first is None

    def facts(self) -> dict[str, Any]:
        """All of it as plain data; numbers that are not finite are None."""
        blame = self.blamed
        return {
            "config": self.config.source,
            "dims": dict(self.config.mesh.dims),
            "steps": self.steps,
            "tolerance": self.tolerance,
            "notes": list(self.notes),
            "original": self.original,
            "agrees": self.agrees,
            "first": self.first and _facts(self.first),
            "blame": blame
            and {
                "dims": list(blame.dims),
                "ranks": blame.ranks,
                "difference": blame.difference and _facts(blame.difference),
                "words": blame.words,
            },
            "differences": [_facts(one) for one in self.differences],
        }


def prove(
    config: Config, steps: int | None, tolerance: float, start: Start, script: Script | None = None
) -> Parity:
    """Run the same steps on one process and on the mesh of `config`, and compare.

    config: with every size known. steps: None: 20, or all where the training has fewer.
    script: what makes a Trainer, on the mesh that meshcomm.init() gives; None: what `config` says. On one process
            it finds all dims of the mesh, of size 1.
    start:  runs `python WORDS` as all ranks of a configuration's mesh; returns the exit code, after
            it has said what went wrong.
    Where they differ, smaller meshes are started too, until a dim is to blame. Nothing stays behind.

    Raises: ConfigError where there is nothing to compare, or for more steps than the training has;
            TrainingError where one process alone gets no finite numbers, or other outputs than the module itself; LaunchError where the run
            on the mesh fails; UnsupportedOp for a script with batch norms whose step has several micro-batches.
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
        known = _alone(exact, count, folder, start, script)
        joined: Callable[[Config], Config] = lambda config: config  # noqa: E731
        if known.batch_norms and _copies(exact) > 1:
            joined = partial(_joined, exact, script=script)
            known = _alone(joined(only(exact, ())), count, folder, start, script, _copies(exact))
            notes += (
                f"train.microbatch = {_together(exact)} on one process: batch norms see all ranks' samples",
            )
        for (kind, name), value in known.steps().items():
            if not math.isfinite(value):
                raise TrainingError(
                    f"on one process {name} gives nothing that a mesh could be compared with",
                    given=f"{kind} {value.item()}",
                    expected="finite numbers",
                    hint=f"a smaller train.lr, or --steps {max(1, int(name.split()[1]) - 1)}",
                )
        known.save(folder / _REFERENCE)
        on_mesh = partial(_on_mesh, steps=count, reference=known, folder=folder, start=start, script=script)

        def run(part: Config) -> list[Difference]:
            return on_mesh(joined(part), copies=_copies(exact))

        found = run(exact)
        ahead = first(found, tolerance)
        blamed = None if ahead is None else blame(exact, run, tolerance)
    return Parity(exact, count, tolerance, notes, tuple(found), ahead, blamed, known.original)


def _alone(
    config: Config, steps: int, folder: Path, start: Start, script: Script | None, copies: int = 1
) -> Record:
    """What the steps give on one process."""
    if script is not None:
        return Record.read(_job(only(config, ()), steps, folder, start, script, copies) / _REFERENCE)
    with init(one := reference(config)) as mesh:
        return record(mesh, one, steps, copies=copies, original=True)


def _copies(config: Config) -> int:
    """Ranks of a mesh that have different samples."""
    return 1 if config.parallel is None else config.parallel.copies(config.mesh.dims)


def _together(config: Config) -> int:
    """Samples of one micro-batch over all ranks."""
    assert config.train is not None
    return config.train.microbatch * _copies(config)


def _joined(whole: Config, part: Config, script: Script | None) -> Config:
    """`part` of a mesh with micro-batches that are, over all ranks, as large as on the whole one.

    Raises UnsupportedOp for a script with several of them in a step, whose samples nobody can put into their order.
    """
    assert whole.train is not None
    together = _together(whole)
    if script is not None and whole.train.global_batch != together:
        raise UnsupportedOp(
            "a script with batch norms and several micro-batches in a step cannot be compared with one process",
            given=f"train.global_batch = {whole.train.global_batch}, train.microbatch = {whole.train.microbatch} on "
            f"{_copies(whole)} ranks along data and shard",
            expected="one micro-batch in a step: batch norms see one at a time, and the script says which samples it has",
            hint=f"--set train.microbatch={whole.train.global_batch // _copies(whole)}",
        )
    return load(part, [f"train.microbatch={together // _copies(part)}"])


def _on_mesh(
    config: Config,
    *,
    steps: int,
    reference: Record,
    folder: Path,
    start: Start,
    script: Script | None,
    copies: int,
) -> list[Difference]:
    place = _job(config, steps, folder, start, script, copies)
    of_ranks = [json.loads(path.read_text()) for path in sorted(place.glob("rank*.json"))]
    return worst([[Difference(**each) for each in found] for found in of_ranks], reference.weights)


def _job(config: Config, steps: int, folder: Path, start: Start, script: Script | None, copies: int) -> Path:
    """Run all ranks of a mesh; the folder with what they found. A script on one rank leaves its record there."""
    place = Path(tempfile.mkdtemp(dir=folder))
    facts = config.model_dump(mode="json", exclude_unset=True)
    job: dict[str, Any] = {"config": facts, "steps": steps, "copies": copies}
    if script is not None:
        (place / _CONFIG).write_text(json.dumps(facts))
        job["script"] = [str(script[0]), list(script[1])]
    (place / _JOB).write_text(json.dumps(job))
    code = start(config, ["-m", "meshcomm.train.parity_job", str(place)])
    if code:
        dims = " ".join(f"{dim}={size}" for dim, size in config.mesh.dims.items())
        raise LaunchError(
            f"there is nothing to compare: the run on {dims} failed",
            given=f"exit code {code}; what was the cause stands above",
            expected=f"{steps} steps of training",
            hint="meshcomm train with the same configuration"
            if script is None
            else "meshcomm run CONFIG SCRIPT",
        )
    return place


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
    finite = one.absolute != math.inf
    return {**asdict(one), **({} if finite else {"absolute": None, "relative": None})}


def blame(config: Config, run: Run, tolerance: float) -> Blame:
    """Try the mesh with only one dim above 1 after the other, then with two.

    config: with every size known; its own run differs.
    run:    the differences of a configuration's mesh from the reference, worst over all ranks. A
            MeshcommError of it counts as a difference.
    """
    suspects = suspected(config)
    if len(suspects) == 1:
        return _tried(config, suspects, run, tolerance) or Blame((), 0, None)
    for count in (1, 2):
        if count == len(suspects):
            break
        for dims in combinations(suspects, count):
            found = _tried(config, dims, run, tolerance)
            if found is not None:
                return found
    return Blame((), 0, None)


def suspected(config: Config) -> tuple[str, ...]:
    """The dims that can be to blame: those of the base above 1, then the experts'."""
    dims = [dim for dim, size in config.mesh.dims.items() if size > 1]
    expert = None if config.parallel is None else config.parallel.expert
    if expert is not None and any(sizes.get(expert, 1) > 1 for sizes in config.mesh.views.values()):
        dims.append(expert)
    return tuple(dims)


def only(config: Config, dims: Iterable[str]) -> Config:
    """The same training on a smaller mesh, where only `dims` are above 1.

    The expert's dim is not one of the base but made of others: with it, the data's dim gets the size
    that it needs besides, and its view the rest. Without it, experts are not split.

    Raises ConfigError where there is no such mesh.
    """
    kept = set(dims)
    parallel = config.parallel
    if parallel is None:
        raise ConfigError(
            "a configuration without training has no dim to blame",
            given=f"{config.source} without [parallel]",
            expected="all of [parallel] [model] [data] [train]",
        )
    facts: dict[str, Any] = config.model_dump(exclude_unset=True)
    facts.pop("topology", None)
    mesh = {key: value for key, value in facts["mesh"].items() if key not in _OF_ALL_RANKS}
    mesh.pop("views", None)
    sizes = {dim: size if dim in kept else 1 for dim, size in config.mesh.dims.items()}
    expert, name = parallel.expert, config.expert_view
    section = dict(facts["parallel"])
    if expert in kept and expert is not None and name is not None:
        view = config.mesh.views[name]
        shared = (parallel.pipeline, parallel.tensor)
        carriers = [dim for dim in sizes if dim not in shared]
        more = view[expert] // math.gcd(view[expert], math.prod(sizes[dim] for dim in carriers))
        carrier = parallel.data if parallel.data in carriers else carriers[0]
        sizes[carrier or ""] *= more
        left = math.prod(sizes[dim] for dim in carriers) // view[expert]
        made = {}
        for dim in view:
            if dim in shared:
                made[dim] = sizes[dim]
            elif dim == expert:
                made[dim] = view[dim]
            else:
                made[dim], left = left, 1
        mesh["views"] = {name: made}
    else:
        section.pop("expert", None)
    known = {dim for dim, size in sizes.items() if size > 1} | set(config.mesh.merge)
    known |= set(mesh.get("views", {}).get(name, ()))
    options = {dim: value for dim, value in mesh.pop("options", {}).items() if dim in known}
    if options:
        mesh["options"] = options
    return load({**facts, "mesh": {**mesh, "dims": sizes}, "parallel": section})


def _tried(config: Config, dims: Sequence[str], run: Run, tolerance: float) -> Blame | None:
    try:
        part = only(config, dims)
    except ConfigError:
        # This training cannot run so; then it cannot be told either.
        return None
    ranks = math.prod(part.mesh.dims.values())
    try:
        found = max(run(part), key=lambda one: one.relative)
    except MeshcommError:
        return Blame(tuple(dims), ranks, None)
    return Blame(tuple(dims), ranks, found) if found.relative > tolerance else None


def differences(
    config: Config, steps: int, reference: Path, copies: int | None = None
) -> list[Difference] | None:
    """Run the steps on the mesh of `config`; this rank's differences from the record in `reference`.

    copies:    see `record`.
    Called by: every rank of the job. None on a rank that the mesh leaves out.
    """
    with init(config) as mesh:
        if not mesh.is_member:
            return None
        return compare(record(mesh, config, steps, copies=copies), Record.read(reference), mesh.rank)


def _of_script(
    folder: Path, facts: dict[str, Any], reference: Path | None, rank: int
) -> list[Difference] | None:
    """As `differences`, of what a script trains. Without a reference its record is written instead."""
    os.environ[CONFIG_VARIABLE] = str(folder / _CONFIG)
    path, arguments = facts["script"]
    found = record_script(Path(path), arguments, load(facts["config"]), facts["steps"])
    if reference is not None:
        return None if found is None else compare(found, Record.read(reference), rank)
    if found is None:
        raise TrainingError(
            "the script makes no step of a Trainer, so there is nothing to compare",
            given=path,
            expected="meshcomm.train.Trainer, and run() or step()",
            hint="with meshcomm.init() as mesh: Trainer(mesh, model=module).run(data)",
        )
    found.save(folder / _REFERENCE)
    return None


def main(folder: Path) -> None:
    """Run as a rank, and leave its differences in `folder`."""
    here = find_launch(os.environ)
    facts = json.loads((folder / _JOB).read_text())

    def body() -> None:
        known = folder.parent / _REFERENCE
        if "script" in facts:
            found = _of_script(folder, facts, known if known.is_file() else None, here.rank)
        else:
            found = differences(load(facts["config"]), facts["steps"], known, facts["copies"])
        if found is not None:
            # Read in the order of the ranks: of equal differences, the first rank's counts.
            (folder / f"rank{here.rank:06d}.json").write_text(json.dumps([asdict(one) for one in found]))

    as_rank(body, here, lambda: f"rank {here.rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
