"""In which order does each rank run the passes of its stages?

The orders are those in which the schedules of torch.distributed.pipelining run them (torch 2.13):
GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021),
zero-bubble in its ZB-H1 form on interleaved stages (Qi et al. 2024).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, assert_never

from meshcomm.config.parallel import PipelineSchedule

# Forward; whole backward; backward for the inputs only; then for the weights.
Kind: TypeAlias = Literal["F", "B", "I", "W"]


class Pass(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ScheduleProperties(NamedTuple):
    """What whoever trains must know about how a schedule runs backward passes.

    several_stages: a rank runs two stages or more; otherwise one.
    splits_backward: inputs and weights have passes of their own, on all stages but stage 0: a node
        of the graph that both need may run twice, as may what is recomputed; modules from
        torch.compile are refused by torch.
    accumulates_in_place: gradients are added into the `.grad` that is there.
    hooks_fire: register_post_accumulate_grad_hook is called once for each microbatch and parameter.
        Where not, only stage 0 does so, and `Pipelined(on_stage_done=...)` says when a stage's
        gradients are complete; it does for every schedule.
    """

    several_stages: bool
    splits_backward: bool
    accumulates_in_place: bool
    hooks_fire: bool


def schedule_properties(schedule: PipelineSchedule) -> ScheduleProperties:
    """See `ScheduleProperties`."""
    zero_bubble = schedule == "zero_bubble"
    return ScheduleProperties(
        several_stages=zero_bubble or schedule == "interleaved_1f1b",
        splits_backward=zero_bubble,
        accumulates_in_place=True,
        hooks_fire=not zero_bubble,
    )


def orders(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> list[list[Pass]]:
    """The passes of every rank, in the order in which it runs them.

    Stage s lies on rank s % ranks; `each` is the number of stages on a rank, 1 where the schedule
    has no more. The numbers are what `meshcomm.config.pipeline_checks.runs` allows.
    """
    return [_order(schedule, rank, ranks, each, microbatches) for rank in range(ranks)]


def _order(schedule: PipelineSchedule, rank: int, ranks: int, each: int, microbatches: int) -> list[Pass]:
    # The stages of a rank take turns after so many microbatches.
    turn = microbatches // max(1, microbatches // ranks) if each > 1 else microbatches
    forwards = _passes("F", rank, ranks, each, microbatches, turn)
    backwards = _passes("B", rank, ranks, each, microbatches, turn)
    behind = ranks - 1 - rank  # ranks between this one and the last
    if schedule == "gpipe":
        return forwards + backwards
    if schedule == "1f1b":
        return _alternate(forwards, backwards, behind)
    if schedule == "interleaved_1f1b":
        return _alternate(forwards, backwards, (each - 1) * turn + 2 * behind)
    if schedule == "zero_bubble":
        return _halve(_alternate(forwards, backwards, (each - 1) * turn + behind), rank)
    assert_never(schedule)


def _passes(kind: Kind, rank: int, ranks: int, each: int, microbatches: int, turn: int) -> list[Pass]:
    """`turn` microbatches through one stage, then through the next; then the next microbatches."""
    stages = [rank + ranks * index for index in range(each)]
    return [
        Pass(kind, stage, microbatch)
        for start in range(0, microbatches, turn)
        for stage in (stages if kind == "F" else reversed(stages))
        for microbatch in range(start, start + turn)
    ]


def _alternate(forwards: list[Pass], backwards: list[Pass], warm_up: int) -> list[Pass]:
    """`warm_up` forward passes ahead, then one forward, one backward; then what is left."""
    ahead = min(warm_up, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [each for pair in pairs for each in pair]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]


def _halve(order: list[Pass], delay: int) -> list[Pass]:
    """Backward passes in two halves, that for the weights `delay` backward passes later.

    Stage 0 sends no gradients on, so it runs both halves as one, when the second is due.
    """
    halved: list[Pass] = []
    waiting: list[Pass] = []

    def weights() -> Pass:
        due = waiting.pop(0)
        return due._replace(kind="W" if due.stage else "B")

    for each in order:
        if each.kind != "B":
            halved.append(each)
            continue
        waiting.append(each)
        if each.stage:
            halved.append(each._replace(kind="I"))
        if len(waiting) > delay:
            halved.append(weights())
    while waiting:
        halved.append(weights())
    return halved
