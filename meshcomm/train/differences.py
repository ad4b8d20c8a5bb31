"""How far apart are two records of the same steps, and where first?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.train.parity import Record

Kind: TypeAlias = Literal["loss", "gradient norm", "weight", "gradient"]


@final
@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity between a rank's record and the reference.

    name:     "step 3" of a loss or a norm; the parameter of a weight or a gradient.
    relative: the absolute one by the largest value of the quantity in the reference, 1 at least: so
              what is large is judged by its digits, and what is about zero by how far from it.
    rank:     the first of those on which it is largest.
    note:     why there is nothing to subtract, or "".

    Both are infinite where a value is not finite, or where there is nothing to subtract.
    """

    kind: Kind
    name: str
    absolute: float
    relative: float
    rank: int = 0
    note: str = ""

    @property
    def words(self) -> str:
        """What it is a difference of: `loss of step 3`."""
        return f"{self.kind} of {self.name}"


def compare(ours: Record, theirs: Record, rank: int = 0) -> list[Difference]:
    """Differences of `ours`, a rank's, from the reference: of each step, then of each parameter it has."""
    found = []
    for step in range(max(len(ours.losses), len(theirs.losses))):
        for kind, mine, other in _stepwise(ours, theirs):
            found.append(_difference(kind, f"step {step + 1}", _at(mine, step), _at(other, step), rank))
    for name in ours.weights:
        found.append(
            _difference("weight", name, ours.weights[name], theirs.weights.get(name), rank),
        )
        found.append(
            _difference("gradient", name, ours.gradients.get(name), theirs.gradients.get(name), rank),
        )
    return found


def worst(of_ranks: Iterable[Sequence[Difference]], names: Iterable[str]) -> list[Difference]:
    """The largest difference of each quantity over all ranks; what no rank has of `names` is one too.

    names: of all parameters of the reference. In the order of `compare`, parameters of all stages.
    """
    found: dict[tuple[Kind, str], Difference] = {}
    for each in of_ranks:
        for one in each:
            known = found.setdefault((one.kind, one.name), one)
            if one.relative > known.relative:
                found[one.kind, one.name] = one
    for name in names:
        for kind in _PARAMETERS:
            if (kind, name) not in found:
                found[kind, name] = _difference(kind, name, None, None, 0)
    return list(found.values())


def first(differences: Iterable[Difference], tolerance: float) -> Difference | None:
    """What differs first by more than `tolerance`, as a program computes it: the loss of a step before
    its norm, both before those of the next step; then the worst parameter. None where nothing does.
    """
    over = [one for one in differences if one.relative > tolerance]
    steps = [one for one in over if one.kind in ("loss", "gradient norm")]
    if steps:
        return min(steps, key=lambda one: (int(one.name.split()[1]), one.kind != "loss"))
    return max(over, key=lambda one: one.relative, default=None)


_PARAMETERS: tuple[Kind, ...] = ("weight", "gradient")


def _stepwise(ours: Record, theirs: Record) -> tuple[tuple[Kind, tuple[float, ...], tuple[float, ...]], ...]:
    return ("loss", ours.losses, theirs.losses), ("gradient norm", ours.norms, theirs.norms)


def _at(values: tuple[float, ...], step: int) -> Tensor | None:
    return torch.tensor(values[step], dtype=torch.float64) if step < len(values) else None


def _difference(kind: Kind, name: str, mine: Tensor | None, other: Tensor | None, rank: int) -> Difference:
    infinite = float("inf")
    if mine is None or other is None:
        return Difference(kind, name, infinite, infinite, rank, "on one side only")
    a, b = mine.double(), other.double()
    if a.shape != b.shape:
        note = f"shape {tuple(a.shape)}, on one process {tuple(b.shape)}"
        return Difference(kind, name, infinite, infinite, rank, note)
    absolute = float((a - b).abs().max()) if a.numel() else 0.0
    if not math.isfinite(absolute):
        return Difference(kind, name, infinite, infinite, rank, "not finite")
    largest = float(b.abs().max()) if b.numel() else 0.0
    return Difference(kind, name, absolute, absolute / max(1.0, largest), rank)
