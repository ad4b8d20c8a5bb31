"""What a schedule of passes asks of backward, and in closed form how long a rank waits and how much it keeps.

The schedules are those of torch.distributed.pipelining (torch 2.13): GPipe (Huang et al. 2019), 1F1B (Narayanan et al.
2019), interleaved 1F1B (Narayanan et al. 2021), zero-bubble in its ZB-H1 form on interleaved stages (Qi et al. 2024).
"""

from __future__ import annotations

from typing import NamedTuple

from meshcomm.config.parallel import PipelineSchedule


class ScheduleProperties(NamedTuple):
    """How a schedule runs backward passes. All add gradients in place.

    several_stages: a rank runs two stages or more; otherwise one.
    splits_backward: inputs and weights have passes of their own, on all stages but stage 0: a node
        of the graph that both need may run twice, as may what is recomputed; torch refuses modules from torch.compile.
    hooks_fire: register_post_accumulate_grad_hook is called once for each microbatch and parameter.
        Where not, only stage 0 does so.
    """

    several_stages: bool
    splits_backward: bool
    hooks_fire: bool


def schedule_properties(schedule: PipelineSchedule) -> ScheduleProperties:
    """See `ScheduleProperties`."""
    zero_bubble = schedule == "zero_bubble"
    return ScheduleProperties(zero_bubble or schedule == "interleaved_1f1b", zero_bubble, not zero_bubble)


def bubble(schedule: PipelineSchedule, ranks: int, each: int) -> float:
    """How many micro-batches' time a rank stands idle in a step.

    gpipe and 1f1b p - 1 (Huang et al. 2019, Narayanan et al. 2019); interleaved (p - 1) / v (Narayanan et
    al. 2021); zero bubble, on v stages a rank, a third of that (Qi et al. 2024, ZB-H1 with equal passes).
    """
    if schedule in ("gpipe", "1f1b"):
        return ranks - 1
    return (ranks - 1) / each / (3 if schedule == "zero_bubble" else 1)


def microbatches_held(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> float:
    """Micro-batches, each counted with all of a rank's layers, that the first rank keeps at most.

    gpipe all; 1f1b one for each rank (Narayanan et al. 2019), and zero bubble no more, on every rank (Qi et al.
    2024, ZB-H1); interleaved 1 + (p - 1) / (p v) as many (Narayanan et al. 2021, Korthikanti et al. 2022).
    """
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return microbatches
    ahead = (ranks - 1) / each if schedule == "interleaved_1f1b" else 0
    return min(microbatches, ranks + ahead)
