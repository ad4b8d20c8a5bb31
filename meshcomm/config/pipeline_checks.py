"""Are there layers for every stage, and which numbers of micro-batches does a schedule run?"""

from __future__ import annotations

from collections.abc import Iterator

from meshcomm.config.parallel import PipelineSchedule
from meshcomm.config.problems import Problem, either
from meshcomm.config.training_setup import Setup


def stage_problems(setup: Setup) -> Iterator[Problem]:
    """Stages that would have no layer."""
    parallel, layers = setup.parallel, setup.model.layers
    ranks = setup.size("pipeline")
    if ranks is None or ranks == 1 or setup.broken.touches("model.layers", "parallel.stages_per_rank"):
        return
    each = parallel.stages_per_rank
    stages = ranks * each
    if layers >= stages:
        return
    dim = setup.dim("pipeline")
    ways = [f"model.layers = {stages}"]
    if each > 2 and layers // ranks >= 2:
        ways.append(f"parallel.stages_per_rank = {layers // ranks}")
    if layers >= each:
        ways.append(f"mesh.dims.{dim} = {layers // each}")
    product = "" if each == 1 else f"{ranks}*{each} = "
    yield Problem(
        "model.layers",
        f"fewer layers than stages: {layers} < {product}{stages}",
        given=f"layers = {layers}, mesh.dims.{dim} = {ranks}"
        + ("" if each == 1 else f", stages_per_rank = {each}"),
        expected="at least one layer for each stage",
        hint=either(ways),
    )


def runs(schedule: PipelineSchedule, microbatches: int, ranks: int) -> bool:
    """Whether a schedule runs so many micro-batches in a step on so many ranks.

    interleaved_1f1b takes one micro-batch per rank in each round (Narayanan et al. 2021).
    zero_bubble takes microbatches // ranks rounds of equal length: what ScheduleInterleavedZeroBubble
    of torch 2.13 asks for; its ScheduleZBVZeroBubble runs any number.
    """
    if ranks == 1:
        return True
    if schedule == "gpipe":
        return microbatches >= 1
    if microbatches < ranks:
        return False
    if schedule == "interleaved_1f1b":
        return microbatches % ranks == 0
    return schedule == "1f1b" or microbatches % (microbatches // ranks) == 0
