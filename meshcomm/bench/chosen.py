"""Which dims, operations and sizes are measured, and which not and why? Decided before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshcomm.errors import ConfigError
from meshcomm.layout import Family, Plan
from meshcomm.predict.times import Operation, counted_bytes


class Item(NamedTuple):
    """One operation of one size along one dim. size_bytes: as `counted_bytes` gives it."""

    dim: str
    operation: Operation
    size_bytes: int


class Skipped(NamedTuple):
    """What is not measured, and why. operation: None for all of them."""

    dim: str
    operation: str | None
    why: str


def chosen_dims(plan: Plan, asked: Sequence[str]) -> tuple[list[Family], list[Skipped]]:
    """The families to measure, in plan order; those left out.

    asked: names of dims, merged dims or views' dims; all with groups of their own where there is none.
    Raises UnknownDim, and ConfigError where nothing is left to measure.
    """
    for name in asked:
        plan.layout.digits(name)
    found, skipped = [], []
    for family in plan.families:
        if asked and family.name not in asked:
            continue
        if family.size == 1:
            skipped.append(Skipped(family.name, None, "one rank: nothing moves"))
        elif family.shares is not None and not asked:
            skipped.append(Skipped(family.name, None, f"its groups are those of {family.shares}"))
        else:
            found.append(family)
    if not found:
        sizes = ", ".join(f"{family.name} = {family.size}" for family in plan.families)
        raise ConfigError(
            "no dim to measure has two ranks or more",
            given=sizes + "".join(f", --dim {name}" for name in asked),
            expected="a dim along which something moves",
            hint="--set mesh.dims.DIM=2" if not asked else "leave --dim out",
        )
    return found, skipped


def items(families: Sequence[Family], operations: Sequence[Operation], sizes: Sequence[int]) -> list[Item]:
    """Every operation and size along every dim, sizes ascending, each once. Raises ConfigError."""
    found = [
        Item(family.name, operation, counted_bytes(operation, size, family.name, family.size))
        for family in families
        for operation in operations
        for size in sorted(sizes)
    ]
    return list(dict.fromkeys(found))
