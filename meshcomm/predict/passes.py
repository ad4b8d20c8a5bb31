"""The order of passes in pipeline schedules, their timeline, and formulas for idle time and micro-batches in memory.

The orders are the ones that the schedules of torch.distributed.pipelining use (torch 2.13):
GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021),
zero-bubble in its ZB-H1 form on interleaved stages (Qi et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal, NamedTuple, TypeAlias

from meshcomm.config.parallel import PipelineSchedule

# Forward; full backward; backward for the inputs only; backward for the weights only.
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

    several_stages: a rank runs two stages or more; otherwise one.
    splits_backward: inputs and weights have separate passes, on all stages except stage 0. A graph node that both
        need may run twice, and recomputation too. torch rejects modules from torch.compile.
    hooks_fire: register_post_accumulate_grad_hook is called once for each microbatch and parameter.
        If False, it is called only on stage 0.
    """

    several_stages: bool
    splits_backward: bool
    hooks_fire: bool


def schedule_properties(schedule: PipelineSchedule) -> ScheduleProperties:
    """See `ScheduleProperties`."""
    zero_bubble = schedule == "zero_bubble"
    return ScheduleProperties(zero_bubble or schedule == "interleaved_1f1b", zero_bubble, not zero_bubble)


def orders(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> list[list[Pass]]:
    """Return the passes of every rank, in the order in which it runs them.

    Stage s is on rank s % ranks. `each` is the number of stages on a rank; 1 for schedules with one stage per rank.
    `meshcomm.config.parallel.runs` defines the allowed numbers.
    """
    return [_order(schedule, rank, ranks, each, microbatches) for rank in range(ranks)]


class Costs(NamedTuple):
    """The duration of a pass, in slots. A full backward pass is both halves, one after the other."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def of(self, each: Pass) -> float:
        """Return the duration of one pass."""
        halves = self.backward_input, self.backward_weight
        return {"F": self.forward, "B": sum(halves), "I": halves[0], "W": halves[1]}[each.kind]


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
        """The time from the start of the first pass of any rank to the end of the last."""
        return max(slots[-1].end for slots in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the step, 0 to 1, in which a rank waits; the mean over the ranks."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        return 1 - busy / (self.length * len(self.ranks))

    def held(self, rank: int) -> int:
        """Return the most activations, counted as microbatches times stages, that a rank keeps at once.

        An activation is kept from the forward pass to the end of the backward pass for the weights.
        """
        kinds = (slot.work.kind for slot in self.ranks[rank])
        return max(accumulate((kind == "F") - (kind in "BW") for kind in kinds))


def timeline(orders: Sequence[Sequence[Pass]], costs: Sequence[Costs] | None = None) -> Timeline:
    """Run the passes of each rank in their order, each as soon as its rank is free and its input is ready.

    A forward pass needs the forward pass of the previous stage; a backward pass needs the backward pass of the next
    stage. The loss is part of the last stage's forward pass. Messages take no time.

    costs: cost of each stage. If None, 1 slot forward and 2 backward. Raises AssertionError if the orders wait for each other
    in a cycle, which no schedule does.
    """
    stages = 1 + max(each.stage for order in orders for each in order)
    costs = costs or [Costs()] * stages
    ends: dict[tuple[str, int, int], float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    waiting = True
    while waiting:
        waiting = False
        for order, done in zip(orders, slots, strict=True):
            while len(done) < len(order):
                each = order[len(done)]
                # The time when the input from another rank is ready; None if not known yet.
                kind, other = ("F", each.stage - 1) if each.kind == "F" else ("B", each.stage + 1)
                alone = each.kind == "W" or not 0 <= other < stages
                there = 0 if alone else ends.get((kind, other, each.microbatch))
                if there is None:
                    break
                start = max(there, done[-1].end if done else 0)
                done.append(Slot(each, start, start + costs[each.stage].of(each)))
                if each.kind != "W":
                    ends["F" if each.kind == "F" else "B", each.stage, each.microbatch] = done[-1].end
                waiting = True
    assert all(len(done) == len(order) for order, done in zip(orders, slots, strict=True)), "a circle"
    return Timeline(tuple(tuple(done) for done in slots))


def bubble(schedule: PipelineSchedule, ranks: int, each: int) -> float:
    """Return the idle time of a rank in a step, in units of one micro-batch's time.

    gpipe and 1f1b: p - 1 (Huang et al. 2019, Narayanan et al. 2019). Interleaved: (p - 1) / v (Narayanan et
    al. 2021). Zero bubble with v stages a rank: a third of that (Qi et al. 2024, ZB-H1 with equal passes).
    """
    if schedule in ("gpipe", "1f1b"):
        return ranks - 1
    return (ranks - 1) / each / (3 if schedule == "zero_bubble" else 1)


def microbatches_held(schedule: PipelineSchedule, ranks: int, each: int, microbatches: int) -> float:
    """Return the most micro-batches, each counted with all of a rank's layers, that the first rank keeps.

    gpipe: all. 1f1b: one for each rank (Narayanan et al. 2019). Zero bubble: no more than 1f1b, on every rank (Qi et al.
    2024, ZB-H1). Interleaved: 1 + (p - 1) / (p v) times as many (Narayanan et al. 2021, Korthikanti et al. 2022).
    """
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return microbatches
    ahead = (ranks - 1) / each if schedule == "interleaved_1f1b" else 0
    return min(microbatches, ranks + ahead)


def _order(schedule: PipelineSchedule, rank: int, ranks: int, each: int, microbatches: int) -> list[Pass]:
    # The stages of a rank take turns after `turn` microbatches.
    turn = microbatches // max(1, microbatches // ranks) if each > 1 else microbatches
    forwards = _passes("F", rank, ranks, each, microbatches, turn)
    backwards = _passes("B", rank, ranks, each, microbatches, turn)
    # Ranks between this one and the last count once, or twice where stages are interleaved.
    behind = (ranks - 1 - rank) * (2 if schedule == "interleaved_1f1b" else 1)
    warm_up = len(forwards) if schedule == "gpipe" else (each - 1) * turn + behind
    # `warm_up` forward passes, then alternate one forward and one backward, then the rest.
    steady = [*chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))]
    order = [*forwards[:warm_up], *steady, *backwards[len(steady) // 2 :]]
    return _halve(order, rank) if schedule == "zero_bubble" else order


def _passes(kind: Kind, rank: int, ranks: int, each: int, microbatches: int, turn: int) -> list[Pass]:
    """Return `turn` microbatches through one stage, then through the next; then the next microbatches."""
    stages = [rank + ranks * index for index in range(each)]
    return [
        Pass(kind, stage, microbatch)
        for start in range(0, microbatches, turn)
        for stage in (stages if kind == "F" else reversed(stages))
        for microbatch in range(start, start + turn)
    ]


def _halve(order: list[Pass], delay: int) -> list[Pass]:
    """Split backward passes in two halves, with the weight half `delay` backward passes later.

    Stage 0 sends no gradients, so it runs both halves as one, when the second is due.
    """
    halved: list[Pass] = []
    waiting: list[Pass] = []
    # After the last backward pass come the remaining passes for the weights.
    for each in (*order, *[None] * len(order)):
        if each is not None and each.kind != "B":
            halved.append(each)
            continue
        if each is not None:
            waiting.append(each)
            if each.stage:
                halved.append(each._replace(kind="I"))
        if waiting and (each is None or len(waiting) > delay):
            due = waiting.pop(0)
            halved.append(due._replace(kind="W" if due.stage else "B"))
    return halved
