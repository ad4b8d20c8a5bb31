"""Random programs of functional collectives, and their result on one process that holds the tensors of all ranks. Plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIDE = 4
# Every value of a program is a (SIDE, SIDE) tensor on each rank.
Values = list[Tensor]
# From the x of every rank of a group to the y of every rank.
Whole = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def through(value: Tensor, *paths: Tensor) -> Tensor:
    """The value of `value`, with the gradient of `paths`."""
    return value.detach() + torch.stack([path - path.detach() for path in paths]).sum(0)


def total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def put(x: Tensor, place: int, places: int) -> Tensor:
    return torch.cat([x if other == place else torch.zeros_like(x) for other in range(places)])


def exchanged(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.cat([x.chunk(len(xs), 0)[me] for x in xs], 1) for me in range(len(xs))]


def one_of(xs: Sequence[Tensor], me: int) -> Tensor:
    return through(xs[me].chunk(len(xs))[me], *(x.chunk(len(xs))[me] for x in xs))


WHOLE: dict[str, Whole] = {
    "all_reduce": lambda xs: [total(xs)] * len(xs),
    "all_reduce avg": lambda xs: [total(xs) / len(xs)] * len(xs),
    "all_reduce identity": lambda xs: [through(total(xs), x) for x in xs],
    "all_gather": lambda xs: [torch.cat(list(xs))] * len(xs),
    "all_gather slice": lambda xs: [
        through(torch.cat(list(xs)), put(x, me, len(xs))) for me, x in enumerate(xs)
    ],
    "reduce_scatter": lambda xs: total(xs).chunk(len(xs)),
    "all_to_all": exchanged,
    "shift": lambda xs: [xs[me - 1] for me in range(len(xs))],
    "shift back": lambda xs: [xs[(me + 1) % len(xs)] for me in range(len(xs))],
    "rearrange": lambda xs: total(xs).t().chunk(len(xs)),
    "rearrange gather": lambda xs: [torch.cat([x.t() for x in xs], 1)] * len(xs),
    # These send nothing, and are defined only if all ranks have the same x.
    "identity": lambda xs: [through(x, *xs) for x in xs],
    "slice": lambda xs: [one_of(xs, me) for me in range(len(xs))],
}
LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "square": lambda x: x * x / 4,
    "transposed": lambda x: x.t() * 0.5,
    "rows": lambda x: torch.cat([x[1:], x[:1] * 2]),
}


@dataclass(frozen=True)
class Step:
    """kind: "call", "local", "checkpoint" or "break".

    at:      index of the value that it takes. call: the collective, or the local function. group: the dim to call along.
    used:    who uses the result of a call: "all" ranks, as a new value; "none"; or one rank, "0" or "1", which adds it to
             the value that it was computed from. Only results that all ranks use are differentiated.
    changed: whether the rank changes the sent tensor in place afterwards, and sends it again.
    of:      a constant that the call takes instead of a value. body: the steps of a checkpoint.
    """

    kind: str
    at: int = 0
    call: str = ""
    group: str = ""
    used: str = "all"
    changed: bool = False
    of: float | None = None
    body: tuple[Step, ...] = ()


def drawn(
    rng: random.Random, groups: Sequence[str], known: int, breaks: bool, depth: int = 0
) -> tuple[Step, ...]:
    """The steps of a program. known: the number of values so far. breaks: whether its graph breaks.

    A program with breaks has no checkpoint, because torch runs that sometimes eagerly and sometimes in a graph.
    """
    steps: list[Step] = []
    for _ in range(rng.randint(2, 4) if depth else rng.randint(4, 9)):
        chance = rng.random()
        at = rng.randrange(known)
        if chance < 0.14 and steps and steps[-1].kind == "call":
            steps.append(steps[-1])  # repeats the previous call
        elif chance < 0.32:
            steps.append(Step("local", at, rng.choice(list(LOCAL))))
        elif chance < 0.44 and not depth and not breaks:
            steps.append(Step("checkpoint", at, body=drawn(rng, groups, 1, False, 1)))
        elif chance < 0.52 and breaks:
            steps.append(Step("break"))
            continue
        else:
            used = rng.choice(("all", "all", "all", "none", "0", "1", "0"))
            free = used != "all"
            steps.append(
                Step(
                    "call",
                    at,
                    rng.choice(list(WHOLE)),
                    rng.choice(list(groups)),
                    used,
                    free and rng.random() < 0.3,
                    rng.choice((None, None, None, 0.5)) if free else None,
                )
            )
        known += steps[-1].used == "all"
    return tuple(steps)


def square(y: Tensor) -> Tensor:
    """Bring the result of a call to (SIDE, SIDE)."""
    for _ in range(2):
        y = y.reshape(-1, SIDE, y.shape[1]).sum(0) if y.shape[0] > SIDE else y.repeat(SIDE // y.shape[0], 1)
        y = y.t() * 0.5
    return y


def loss_of(values: Values) -> Tensor:
    """The loss of one rank, which depends on every value."""
    weight = torch.arange(1, SIDE * SIDE + 1, dtype=torch.float64).view(SIDE, SIDE) / 9
    return torch.stack([(value.sin() * weight * (k + 1)).sum() for k, value in enumerate(values)]).sum()


def constant(of: float, rank: int) -> Tensor:
    return torch.full((SIDE, SIDE), of * (rank + 1), dtype=torch.float64)


def start(seed: int, rank: int) -> Tensor:
    return torch.randn(
        SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank)
    )


def run_whole(
    steps: Sequence[Step], values: list[Values], groups: dict[str, list[list[int]]]
) -> list[Values]:
    """Run a program on one process. values: the values of each rank; new ones are appended. groups: ranks by name."""

    def called(step: Step, xs: Values) -> Values:
        ys = list(xs)
        for ranks in groups[step.group]:
            for rank, y in zip(ranks, WHOLE[step.call]([xs[rank] for rank in ranks]), strict=True):
                ys[rank] = square(y)
        return ys

    for step in steps:
        xs = [mine[step.at] for mine in values] if step.kind != "break" else []
        if step.kind == "local":
            ys = [LOCAL[step.call](x) for x in xs]
        elif step.kind == "checkpoint":
            ys = [mine[-1] for mine in run_whole(step.body, [[x] for x in xs], groups)]
        elif step.kind == "call" and step.used == "all":
            ys = called(step, alike(step, xs, groups))
        elif step.kind == "call":
            sent = [x.detach() if step.of is None else constant(step.of, rank) for rank, x in enumerate(xs)]
            found = called(step, alike(step, sent, groups))
            if step.changed:
                again = called(step, alike(step, [x * 3 for x in sent], groups))
                found = [a + b for a, b in zip(found, again, strict=True)]
            for rank, mine in enumerate(values):
                if step.used == str(rank):
                    mine[step.at] = mine[step.at] + found[rank]
            continue
        else:
            continue
        for mine, y in zip(values, ys, strict=True):
            mine.append(y)
    return values


def alike(step: Step, xs: Values, groups: dict[str, list[list[int]]]) -> Values:
    """The inputs of identity and slice: the sum over the group, which is the same on all ranks."""
    if step.call not in ("identity", "slice"):
        return xs
    ys = list(xs)
    for ranks in groups[step.group]:
        for rank in ranks:
            ys[rank] = total([xs[other] for other in ranks])
    return ys


def wanted(
    seed: int, steps: Sequence[Step], world: int, groups: dict[str, list[list[int]]]
) -> list[tuple[Any, Any]]:
    """The loss of each rank, and the gradient of its x under the sum of all losses."""
    xs = [start(seed, rank).requires_grad_() for rank in range(world)]
    losses = [loss_of(mine) for mine in run_whole(steps, [[x] for x in xs], groups)]
    torch.stack(losses).sum().backward()
    return [(loss.detach(), x.grad) for loss, x in zip(losses, xs, strict=True)]
