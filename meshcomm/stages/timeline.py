"""When does each pass run if it starts as soon as it can, and how long does a rank stand idle?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshcomm.stages.orders import Pass


class Costs(NamedTuple):
    """How long a pass takes, in slots. A whole backward pass is both its halves one after the other."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    @property
    def backward(self) -> float:
        """A whole backward pass."""
        return self.backward_input + self.backward_weight

    def of(self, each: Pass) -> float:
        """One pass of a stage of weight 1."""
        by_kind = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weight,
        }
        return by_kind[each.kind]


class Slot(NamedTuple):
    """A pass, and from when to when it runs."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All passes of one step. ranks: those of each rank along the pipeline, in time."""

    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def length(self) -> float:
        """From the first pass of any rank to the end of the last."""
        return max(slots[-1].end for slots in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of the step, 0 to 1, in which a rank waits, as the mean over the ranks."""
        busy = sum(slot.end - slot.start for slots in self.ranks for slot in slots)
        return 1 - busy / (self.length * len(self.ranks))

    def held(self, rank: int) -> int:
        """The most activations, counted as microbatches times stages, that a rank keeps at once.

        They are kept from the forward pass to the end of the backward pass for the weights.
        """
        most = now = 0
        for slot in self.ranks[rank]:
            if slot.work.kind == "F":
                now += 1
                most = max(most, now)
            elif slot.work.kind in "BW":
                now -= 1
        return most


def timeline(
    orders: Sequence[Sequence[Pass]], costs: Costs | None = None, weights: Sequence[float] | None = None
) -> Timeline:
    """Run the passes of each rank in their order, each as soon as its rank is free and its input there.

    A forward pass needs that of the stage before, a backward pass that of the stage behind, and
    the loss is part of the last stage's forward pass. Messages take no time.

    Args:
        orders: as `meshcomm.stages.orders` gives them.
        costs: None: 1 slot forward, 2 backward.
        weights: of each stage, what its passes take beside those of another; None: all equal.

    Raises AssertionError where the orders wait for each other in a circle: no schedule's do.
    """
    costs = costs or Costs()
    stages = 1 + max(each.stage for order in orders for each in order)
    weights = weights or [1] * stages
    ends: dict[tuple[str, int, int], float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]

    def ready(each: Pass) -> float | None:
        """When what it needs from other ranks is there; None: not known yet."""
        if each.kind == "F":
            needs = ("F", each.stage - 1, each.microbatch) if each.stage else None
        elif each.kind == "W":
            needs = None
        else:
            needs = ("B", each.stage + 1, each.microbatch) if each.stage < stages - 1 else None
        return 0 if needs is None else ends.get(needs)

    moved = True
    while moved:
        moved = False
        for order, done in zip(orders, slots, strict=True):
            while len(done) < len(order):
                each = order[len(done)]
                there = ready(each)
                if there is None:
                    break
                start = max(there, done[-1].end if done else 0)
                end = start + costs.of(each) * weights[each.stage]
                done.append(Slot(each, start, end))
                if each.kind != "W":
                    ends["F" if each.kind == "F" else "B", each.stage, each.microbatch] = end
                moved = True
    assert all(len(done) == len(order) for order, done in zip(orders, slots, strict=True)), "a circle"
    return Timeline(tuple(tuple(done) for done in slots))
