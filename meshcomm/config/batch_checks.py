"""Does the batch fall into equal parts along the data's dims, and into micro-batches that the pipeline runs?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshcomm.config.nearest import nearest
from meshcomm.config.parallel import Part
from meshcomm.config.pipeline_checks import runs
from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup, remainder
from meshcomm.config.wording import toml


def batch_problems(setup: Setup) -> Iterator[Problem]:
    """Samples that do not fall into equal parts, or into too few or too many micro-batches."""
    if setup.broken.touches("train.global_batch", "train.microbatch"):
        return
    parts: list[Part] = [part for part in setup.parallel.parts if part in ("data", "shard")]
    known = [size for part in parts if (size := setup.size(part)) is not None]
    if len(known) < len(parts):
        return
    split = math.prod(known)
    batch, micro = setup.train.global_batch, setup.train.microbatch

    def fits(batch: int, split: int, micro: int) -> bool:
        return batch % (split * micro) == 0 and _runs(setup, batch // (split * micro))

    batches = [f"train.global_batch = {n}" for n in nearest(batch, lambda n: fits(n, split, micro))]
    micros = [f"train.microbatch = {n}" for n in nearest(micro, lambda n: fits(batch, split, n))]
    names = [setup.dim(part) for part in parts]
    each = batch // split
    if batch % split:
        others = []
        for part, size in zip(parts, known, strict=True):
            rest = split // size
            near = nearest(size, lambda n, rest=rest: fits(batch, n * rest, micro), 1)  # type: ignore[misc]
            others += [f"{setup.key(part)} = {n}" for n in near]
        yield Problem(
            "train.global_batch",
            f"not divisible by {'*'.join(names)}: {remainder(batch, split)}",
            given=f"global_batch = {batch}{setup.given(parts)}",
            expected=f"equally many samples for each of the {split} ranks along {' and '.join(names)}",
            hint=either([*batches, *others]),
        )
    elif each % micro:
        quotient = f"{batch}/{split} = {each}"
        yield Problem(
            "train.microbatch",
            f"does not divide a rank's samples: {quotient}, {remainder(each, micro)}",
            given=f"global_batch = {batch}, microbatch = {micro}{setup.given(parts)}",
            expected=f"a divisor of {each}",
            hint=either([*micros, *batches[:1]]),
        )
    elif not _runs(setup, each // micro):
        yield _not_run(setup, f"{batch}/{split}/{micro}", each // micro, [*micros[:1], *batches[:1]])


def _runs(setup: Setup, microbatches: int) -> bool:
    ranks = setup.size("pipeline")
    if ranks is None or setup.broken.touches("parallel.schedule"):
        return True
    return runs(setup.parallel.schedule, microbatches, ranks)


def _not_run(setup: Setup, quotient: str, number: int, ways: list[str]) -> Problem:
    """The schedule does not run the micro-batches that there are."""
    train, parallel, schedule = setup.train, setup.parallel, setup.parallel.schedule
    dim, ranks = setup.dim("pipeline"), setup.size("pipeline") or 1
    given = f"global_batch = {train.global_batch}, microbatch = {train.microbatch}, mesh.dims.{dim} = {ranks}"
    if schedule != "1f1b":
        given += f", schedule = {toml(schedule)}"
    one_stage = " and parallel.stages_per_rank = 1" if parallel.stages_per_rank > 1 else ""
    ways.append(f'parallel.schedule = "gpipe"{one_stage}')
    if number < ranks:
        what = "stages" if schedule == "1f1b" else f"ranks along {dim}"
        return Problem(
            "train.microbatch",
            f"fewer micro-batches than {what}: {quotient} = {number} < {ranks}",
            given=given,
            expected="at least one micro-batch for each "
            + ("stage of 1f1b" if schedule == "1f1b" else f"rank of {schedule}"),
            hint=either(ways),
        )
    if schedule == "interleaved_1f1b":
        return Problem(
            "train.microbatch",
            f"micro-batches are not a multiple of {dim}: {quotient} = {number}, {remainder(number, ranks)}",
            given=given,
            expected=f"whole rounds of {ranks} micro-batches, one for each rank along {dim}",
            hint=either(ways),
        )
    rounds = number // ranks
    return Problem(
        "train.microbatch",
        f"micro-batches do not fall into {rounds} equal rounds: {quotient} = {number}, "
        f"{number} // {ranks} = {rounds}, {remainder(number, rounds)}",
        given=given,
        expected=f"as many micro-batches in each round of {schedule}, at least one for each rank along {dim}",
        hint=either(ways),
    )
