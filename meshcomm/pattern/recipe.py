"""A pattern turned into steps, as a value: what is done to the local tensor, and what is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias, final

from meshcomm.pattern.dims import MeshDims
from meshcomm.pattern.parse import Side, text_of
from meshcomm.pattern.roles import Roles


@dataclass(frozen=True, slots=True)
class Step:
    """One thing done to the local tensor. `axes`: what its axes are afterwards. `shape`: their
    lengths, or None where the recipe was made without a shape."""

    axes: Side
    shape: tuple[int, ...] | None


@final
@dataclass(frozen=True, slots=True)
class Reshape(Step):
    """Split and join axes; values keep their order."""

    def __str__(self) -> str:
        return "reshape"


@final
@dataclass(frozen=True, slots=True)
class Permute(Step):
    """Reorder axes: axis i is what axis `order[i]` was."""

    order: tuple[int, ...]

    def __str__(self) -> str:
        return f"permute {' '.join(map(str, self.order))}"


@dataclass(frozen=True, slots=True)
class _DimStep(Step):
    """A step along a mesh dim of `size` ranks."""

    dim: str
    size: int


@final
@dataclass(frozen=True, slots=True)
class Slice(_DimStep):
    """Keep part number `coord` of the `size` equal parts of an axis. Nothing is sent."""

    axis: int

    def __str__(self) -> str:
        return f"slice along {self.dim}, axis {self.axis}"


@final
@dataclass(frozen=True, slots=True)
class AllGather(_DimStep):
    """Join what all ranks along the dim have, in coord order, along an axis."""

    axis: int

    def __str__(self) -> str:
        return f"all_gather along {self.dim}, axis {self.axis}"


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(_DimStep):
    """Reduce over the ranks along the dim, keep part number `coord` of an axis."""

    axis: int
    op: str

    def __str__(self) -> str:
        return f"reduce_scatter ({self.op}) along {self.dim}, axis {self.axis}"


@final
@dataclass(frozen=True, slots=True)
class AllToAll(_DimStep):
    """Part c of the split axis goes to coord c; what comes in is joined along the other axis."""

    split_axis: int
    concat_axis: int

    def __str__(self) -> str:
        return f"all_to_all along {self.dim}, split axis {self.split_axis}, join axis {self.concat_axis}"


AnyStep: TypeAlias = Reshape | Permute | Slice | AllGather | ReduceScatter | AllToAll

_WORDS = {
    "gather": "gathered from all ranks along it",
    "slice": "this rank's slice is kept, nothing is sent",
    "reduce_scatter": "reduced over the ranks along it, this rank's slice is kept",
    "move": "moves: slices are exchanged between all ranks along it",
    "stay": "stays where it is, nothing is sent",
}


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps of a pattern, in order; made by `explain_pattern`, or inside `mesh.rearrange`.

    text:   the pattern.
    dims:   (name, size) of every dim of the mesh that the pattern names.
    roles:  (name, role) of the same dims; a role follows from the pattern alone, not from sizes.
    before: the local tensor's axes at the start, and their lengths, None without a shape.
    copies: how often the local tensor is copied in memory, at most, if it comes contiguous.

    `str` of it is a table of the steps with axes, shapes and what each rank sends.
    """

    text: str
    dims: MeshDims
    roles: Roles
    partial: str | None
    before: Side
    shape: tuple[int, ...] | None
    steps: tuple[AnyStep, ...]
    copies: int

    @property
    def gathered(self) -> tuple[str, ...]:
        """The dims that are gathered, those of size 1 included."""
        return tuple(name for name, role in self.roles if role == "gather")

    @property
    def axes(self) -> Side:
        """The local tensor's axes at the end."""
        return self.steps[-1].axes if self.steps else self.before

    @property
    def result_shape(self) -> tuple[int, ...] | None:
        """The local tensor's shape at the end; None without a shape."""
        return self.steps[-1].shape if self.steps else self.shape

    @property
    def sent(self) -> int | None:
        """Elements that each rank sends to others, all steps together; None without a shape.

        Counted as by an algorithm that sends each slice once: ring or pairwise.
        """
        if self.shape is None:
            return None
        total, shape = 0, self.shape
        for step in self.steps:
            total += _pieces(step) * _piece(step, shape)
            assert step.shape is not None
            shape = step.shape
        return total

    def __str__(self) -> str:
        mesh = " ".join(f"{name}={size}" for name, size in self.dims)
        lines = [f"{self.text.strip()}    on {'mesh ' + mesh if mesh else 'each rank by itself'}"]
        lines += [f"  {name}: {_WORDS[role]}" for name, role in self.roles]
        rows = [("step", "axes", "shape", "each rank sends")]
        rows.append(("x", text_of(self.before) or "0-dim", _shape_text(self.shape), ""))
        axes, shape = self.before, self.shape
        for step in self.steps:
            after = text_of(step.axes) or "0-dim"
            rows.append((str(step), after, _shape_text(step.shape), _sent_text(step, axes, shape)))
            axes, shape = step.axes, step.shape
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            lines.append("  " + f"{'  '.join(cells)}  {row[3]}".rstrip())
        if self.sent is not None:
            lines.append(f"  sent by each rank: {self.sent} elements, times the bytes of one")
        return "\n".join(lines)


def _pieces(step: AnyStep) -> int:
    """How many slices a rank sends in a step."""
    return step.size - 1 if isinstance(step, AllGather | ReduceScatter | AllToAll) else 0


def _piece(step: AnyStep, shape: tuple[int, ...]) -> int:
    """Elements of one slice that a step sends, `shape` being the shape before it."""
    whole = math.prod(shape)
    return whole // step.size if isinstance(step, ReduceScatter | AllToAll) else whole


def _sent_text(step: AnyStep, axes: Side, shape: tuple[int, ...] | None) -> str:
    count = _pieces(step)
    if count == 0:
        return ""
    if shape is not None:
        each = _piece(step, shape)
        return f"{count} x {each} = {count * each}" if count > 1 else str(each)
    assert isinstance(step, AllGather | ReduceScatter | AllToAll)
    cut = isinstance(step, ReduceScatter | AllToAll)
    names = [name for group in axes for name in group if not (cut and name == step.dim)]
    return f"{count} x {'*'.join(names) or '1'}"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else str(shape)
