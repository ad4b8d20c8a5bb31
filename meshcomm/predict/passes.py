"""The order of passes in pipeline schedules, their timeline, and formulas for idle time and micro-batches in memory.

The orders are those of the schedules in torch.distributed.pipelining (torch 2.13):
GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021),
zero-bubble in its ZB-H1 form on interleaved stages (Qi et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal, NamedTuple, TypeAlias

from meshcomm.config.parallel import PipelineSchedule

# F: forward. B: full backward. I: backward for the inputs only. W: backward for the weights only.
Kind: TypeAlias = Literal["F", "B", "I", "W"]


class Pass(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ScheduleProperties(NamedTuple):
    """How a schedule runs backward passes. All schedules accumulate gradients in place.

    several_stages: whether a rank runs several stages instead of one.
    splits_backward: whether inputs and weights have separate backward passes, on all stages except stage 0. Graph nodes that
        both passes need may then run twice, and activations may be recomputed twice. torch then rejects modules compiled with
        torch.compile.
    hooks_fire: whether hooks from register_post_accumulate_grad_hook run once for each microbatch and parameter.
        If False, they run only on stage 0.
    """

    several_stages: bool
    splits_backward: bool
    hooks_fire: bool


def schedule_properties(schedule: PipelineSchedule) -> ScheduleProperties:
    """See `ScheduleProperties`."""
    zero_bubble = schedule == "zero_bubble"
    return ScheduleProperties(zero_bubble or schedule == "interleaved_1f1b", zero_bubble, not zero_bubble)


def orders(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> list[list[Pass]]:
    """Return each rank's passes in the order in which the rank runs them.

    Stage s is on rank s % ranks. `each` is the number of stages per rank, which some schedules require to be 1.
    `meshcomm.config.parallel.runs` defines the allowed numbers of microbatches.
    """
    return [_order(schedule, rank, ranks, each, microbatches) for rank in range(ranks)]


class Costs(NamedTuple):
    """The duration of each kind of pass, in slots. A full backward pass runs both halves, one after the other."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def of(self, pass_: Pass) -> float:
        """Return the duration of one pass."""
        halves = self.backward_input, self.backward_weight
        return {"F": self.forward, "B": sum(halves), "I": halves[0], "W": halves[1]}[pass_.kind]


class Slot(NamedTuple):
    """A pass with its start and end."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All passes of one step. ranks: the passes of each rank along the pipeline, in time order."""

    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def length(self) -> float:
        """The time from the start of the first pass to the end of the last pass on any rank."""
        return max(slots[-1].end for slots in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the step (0 to 1) that a rank spends waiting, averaged over the ranks."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        return 1 - busy / (self.length * len(self.ranks))

    def held(self, rank: int) -> int:
        """Return the largest number of activations that a rank keeps at the same time: one per microbatch and stage.

        An activation is kept from the forward pass to the end of the backward pass for the weights.
        """
        kinds = (slot.work.kind for slot in self.ranks[rank])
        return max(accumulate((kind == "F") - (kind in "BW") for kind in kinds))


def timeline(orders: Sequence[Sequence[Pass]], costs: Sequence[Costs] | None = None) -> Timeline:
    """Return the timeline in which each pass runs, in order, as soon as its rank is free and its input is ready.

    A forward pass waits for the previous stage's forward pass, and a backward pass for the next stage's backward pass.
    The loss is part of the last stage's forward pass. Messages take no time.

    costs: the costs of each stage. If None, a forward pass takes 1 slot and a backward pass takes 2.
    Raises AssertionError if ranks wait for one another in a cycle, which does not happen in any schedule.
    """
    stages = 1 + max(pass_.stage for order in orders for pass_ in order)
    costs = costs or [Costs()] * stages
    ends: dict[tuple[str, int, int], float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    waiting = True
    while waiting:
        waiting = False
        for order, done in zip(orders, slots, strict=True):
            while len(done) < len(order):
                pass_ = order[len(done)]
                # The time at which the input from another rank is ready; None if that is not known yet.
                kind, other = ("F", pass_.stage - 1) if pass_.kind == "F" else ("B", pass_.stage + 1)
                alone = pass_.kind == "W" or not 0 <= other < stages
                ready = 0 if alone else ends.get((kind, other, pass_.microbatch))
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0)
                done.append(Slot(pass_, start, start + costs[pass_.stage].of(pass_)))
                if pass_.kind != "W":
                    ends["F" if pass_.kind == "F" else "B", pass_.stage, pass_.microbatch] = done[-1].end
                waiting = True
    assert all(len(done) == len(order) for order, done in zip(orders, slots, strict=True)), "a circle"
    return Timeline(tuple(tuple(done) for done in slots))


def bubble(schedule: PipelineSchedule, ranks: int, each: int) -> float:
    """Return a rank's idle time per step, in units of one micro-batch's time, with p ranks and v stages per rank.

    gpipe and 1f1b: p - 1 (Huang et al. 2019, Narayanan et al. 2019). Interleaved: (p - 1) / v (Narayanan et
    al. 2021). Zero bubble: (p - 1) / (3 v) (Qi et al. 2024, ZB-H1 with passes of equal length).
    """
    if schedule in ("gpipe", "1f1b"):
        return ranks - 1
    return (ranks - 1) / each / (3 if schedule == "zero_bubble" else 1)


def microbatches_held(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> float:
    """Return the largest number of micro-batches that the first rank keeps, each with the activations of all its layers.

    gpipe: all micro-batches. 1f1b: one for each rank (Narayanan et al. 2019). Zero bubble: at most as many as 1f1b, on every
    rank (Qi et al. 2024, ZB-H1). Interleaved: 1 + (p - 1) / (p v) times as many as 1f1b, with p ranks and v stages per rank
    (Narayanan et al. 2021, Korthikanti et al. 2022).
    """
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return microbatches
    ahead = (ranks - 1) / each if schedule == "interleaved_1f1b" else 0
    return min(microbatches, ranks + ahead)


def _order(schedule: PipelineSchedule, rank: int, ranks: int, each: int, microbatches: int) -> list[Pass]:
    # A rank switches to its next stage after `turn` microbatches.
    turn = microbatches // max(1, microbatches // ranks) if each > 1 else microbatches
    forwards = _passes("F", rank, ranks, each, microbatches, turn)
    backwards = _passes("B", rank, ranks, each, microbatches, turn)
    # Each rank after this one counts once, or twice if stages are interleaved.
    behind = (ranks - 1 - rank) * (2 if schedule == "interleaved_1f1b" else 1)
    warm_up = len(forwards) if schedule == "gpipe" else (each - 1) * turn + behind
    # Run `warm_up` forward passes, then alternate one forward and one backward pass, then run the remaining backward passes.
    steady = [*chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))]
    order = [*forwards[:warm_up], *steady, *backwards[len(steady) // 2 :]]
    return _halve(order, rank) if schedule == "zero_bubble" else order


def _passes(kind: Kind, rank: int, ranks: int, each: int, microbatches: int, turn: int) -> list[Pass]:
    """Return the passes of `turn` microbatches through one stage after another, then those of the next `turn` microbatches."""
    stages = [rank + ranks * index for index in range(each)]
    return [
        Pass(kind, stage, microbatch)
        for start in range(0, microbatches, turn)
        for stage in (stages if kind == "F" else reversed(stages))
        for microbatch in range(start, start + turn)
    ]


def _halve(order: list[Pass], delay: int) -> list[Pass]:
    """Split each backward pass into two halves. The weight half runs `delay` backward passes later.

    Stage 0 sends no gradients, so it runs both halves as one pass when the weight half is due.
    """
    halved: list[Pass] = []
    waiting: list[Pass] = []
    # After the last backward pass, the remaining weight passes run.
    for pass_ in (*order, *[None] * len(order)):
        if pass_ is not None and pass_.kind != "B":
            halved.append(pass_)
            continue
        if pass_ is not None:
            waiting.append(pass_)
            if pass_.stage:
                halved.append(pass_._replace(kind="I"))
        if waiting and (pass_ is None or len(waiting) > delay):
            due = waiting.pop(0)
            halved.append(due._replace(kind="W" if due.stage else "B"))
    return halved
