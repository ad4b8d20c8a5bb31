"""A pattern as a list of steps: operations on the local tensor, and the data that each operation sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final

from meshcomm.layout.sizes import coords_text
from meshcomm.pattern.parse import Side, text_of

Role: TypeAlias = Literal["gather", "slice", "reduce_scatter", "move", "stay"]
Kind: TypeAlias = Literal["rearrange", "slice", "all_gather", "reduce_scatter", "all_to_all"]

_ROLES: Final[dict[Role, str]] = {
    "gather": "gathered from all ranks along it",
    "slice": "this rank's slice is kept, nothing is sent",
    "reduce_scatter": "reduced over the ranks along it, this rank's slice is kept",
    "move": "moves: slices are exchanged between all ranks along it",
    "stay": "stays where it is, nothing is sent",
}
_STEPS: Final[dict[Kind, str]] = {
    "rearrange": "rearrange",
    "slice": "slice along {dim}, axis {0}",
    "all_gather": "all_gather along {dim}, axis {0}",
    "reduce_scatter": "reduce_scatter ({1}) along {dim}, axis {0}",
    "all_to_all": "all_to_all along {dim}, split axis {0}, join axis {1}",
}


@final
@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One operation on the local tensor.

    kind:  rearrange (a local einops operation), slice (keeps this rank's part of `size` equal parts), or a
           collective along `dim`.
    axes:  the tensor's axes after the step. shape: the lengths of these axes; None for a recipe without a shape.
    dim, size: the mesh dim and its size; "" and 1 for a rearrange.
    args:  arguments as for the communicator's methods. slice, all_gather: (axis,). reduce_scatter: (axis, op).
           all_to_all: (split axis, concat axis). rearrange: the einops pattern, and the lengths of its names.
    piece: number of elements in each slice that is sent; for a recipe without a shape, the names of the slice's
           axes, such as "b*s".
    """

    kind: Kind
    axes: Side
    shape: tuple[int, ...] | None
    dim: str = ""
    size: int = 1
    args: tuple[Any, ...] = ()
    piece: int | str = 0

    @property
    def pieces(self) -> int:
        """Number of slices that a rank sends."""
        return 0 if self.kind == "slice" else self.size - 1

    @property
    def sends(self) -> str:
        """The number of elements that each rank sends, such as `3 x 60 = 180`; "" if none."""
        if self.pieces == 0:
            return ""
        if isinstance(self.piece, str):
            return f"{self.pieces} x {self.piece}"
        return (
            f"{self.pieces} x {self.piece} = {self.pieces * self.piece}"
            if self.pieces > 1
            else f"{self.piece}"
        )

    def __str__(self) -> str:
        return _STEPS[self.kind].format(*self.args, dim=self.dim)


@final
@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps of a pattern, in order. `str` returns a table of the steps with their axes, shapes and sent data.

    text:   the pattern. dims, roles: (name, size) and (name, role) of every mesh dim in the pattern.
    before: the local tensor's axes before the first step. shape: the lengths of these axes; None if not given.
    copies: the maximum number of times that the local tensor is copied in memory, for a contiguous input.
    """

    text: str
    dims: tuple[tuple[str, int], ...]
    roles: tuple[tuple[str, Role], ...]
    partial: str | None
    before: Side
    shape: tuple[int, ...] | None
    steps: tuple[RecipeStep, ...]
    copies: int

    @property
    def gathered(self) -> tuple[str, ...]:
        """The dims that are gathered, including dims of size 1."""
        return tuple(name for name, role in self.roles if role == "gather")

    @property
    def axes(self) -> Side:
        """The local tensor's axes after the last step."""
        return self.steps[-1].axes if self.steps else self.before

    @property
    def result_shape(self) -> tuple[int, ...] | None:
        """The local tensor's shape after the last step, or None for a recipe without a shape."""
        return self.steps[-1].shape if self.steps else self.shape

    @property
    def sent(self) -> int | None:
        """Number of elements that each rank sends in all steps, or None for a recipe without a shape.

        The count assumes a ring or pairwise algorithm, which sends each slice once.
        """
        return None if self.shape is None else sum(step.pieces * int(step.piece) for step in self.steps)

    def __str__(self) -> str:
        mesh = coords_text(dict(self.dims))
        lines = [f"{self.text.strip()}    on {'mesh ' + mesh if mesh else 'each rank separately'}"]
        lines += [f"  {name}: {_ROLES[role]}" for name, role in self.roles]
        rows = [("step", "axes", "shape", "each rank sends")]
        begin = ("x", self.before, self.shape, "")
        for name, axes, shape, sends in (begin, *((str(s), s.axes, s.shape, s.sends) for s in self.steps)):
            rows.append((name, text_of(axes) or "0-dim", "" if shape is None else str(shape), sends))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            lines.append("  " + f"{'  '.join(cells)}  {row[3]}".rstrip())
        if self.sent is not None:
            lines.append(f"  sent by each rank: {self.sent} elements, times the bytes per element")
        return "\n".join(lines)
