"""Finds the steps for a pattern that send the fewest bytes and, among these, make the fewest copies. Has no side effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any

from meshcomm.errors import LayoutError, PatternError
from meshcomm.layout import Layout
from meshcomm.layout.sizes import coords_text
from meshcomm.pattern.parse import Group, Pattern, Side, names_of, parse, text_of
from meshcomm.pattern.recipe import Kind, Recipe, RecipeStep, Role
from meshcomm.pattern.roles import MeshDims, Shape, Sizes, check_apart, lengths, mesh_dims, roles
from meshcomm.reductions import REDUCTIONS

# The call for each role, in the order that sends the fewest bytes. Slices are first: they send nothing and make all later
# calls smaller. Then come calls that shrink the tensor, calls that keep its size, and calls that enlarge it.
_CALLS: Mapping[Role, Kind] = {
    "slice": "slice",
    "reduce_scatter": "reduce_scatter",
    "move": "all_to_all",
    "gather": "all_gather",
}


def explain_pattern(
    pattern: str,
    dims: Mapping[str, int] | Layout,
    /,
    shape: tuple[int, ...] | None = None,
    *,
    partial: str | None = None,
    **sizes: int,
) -> Recipe:
    """Return the steps that `mesh.rearrange(x, pattern, partial=partial, **sizes)` runs, as a Recipe.

    Requires neither a process group nor torch. Print the result to read the steps.

    Args:
        pattern: see `Mesh.rearrange`.
        dims:    the mesh: name -> size, outermost first, or a Layout.
        shape:   shape of each rank's local tensor. If None, the steps contain no sizes, and the pattern must
                 not contain an ellipsis.
        partial: as for `Mesh.rearrange`.
        sizes:   lengths of axes, as for `Mesh.rearrange`.

    Raises PatternError; LayoutError if `dims` do not form a mesh.

    >>> print(explain_pattern("b s (cp h) d -> b (cp s) h d", {"dp": 2, "cp": 4}, (2, 8, 16, 4)))
    b s (cp h) d -> b (cp s) h d    on mesh cp=4
      cp: moves: slices are exchanged between all ranks along it
      step                                            axes          shape          each rank sends
      x                                               b s (cp h) d  (2, 8, 16, 4)
      all_to_all along cp, split axis 2, join axis 1  b (cp s) h d  (2, 32, 4, 4)  3 x 256 = 768
      sent by each rank: 768 elements, times the bytes per element
    """
    if not isinstance(dims, (Layout, Mapping)):
        raise LayoutError(
            "explain_pattern needs a mesh",
            given=f"dims: a {type(dims).__name__}",
            expected="name -> size, outermost first, or a Layout",
            hint='explain_pattern(pattern, {"dp": 2, "tp": 4})',
        )
    layout = dims if isinstance(dims, Layout) else Layout(dims)
    return plan(pattern, layout, None if shape is None else _lengths(shape), partial, tuple(sizes.items()))


def _lengths(shape: Iterable[int]) -> Shape:
    """Return a shape as plain ints."""
    try:
        lengths = tuple(index(length) for length in shape)
    except TypeError:
        lengths = (-1,)
    if any(length < 0 for length in lengths):
        raise PatternError(
            "rearrange: not a shape",
            given=f"shape={shape!r}",
            expected="the lengths of the local tensor's axes, integers of 0 or more",
            hint="tuple(x.shape)",
        )
    return lengths


def plan(
    text: object, layout: Layout, shape: Shape | None, partial: object = None, sizes: Sizes = ()
) -> Recipe:
    """Return the recipe of a pattern on a mesh, for a local tensor of `shape` (None means any shape).

    Raises PatternError with the pattern, the shape and the mesh.
    """
    try:
        pattern = parse(text, None if shape is None else len(shape))
        check_apart(pattern, layout)
        return _plan(str(text), pattern, mesh_dims(layout), shape, partial, sizes)
    except PatternError as error:
        mesh = coords_text({name: layout.size(name) for name in layout.names})
        tensor = "" if shape is None else f"x of shape {tuple(shape)}, "
        shown = f'"{text}"' if isinstance(text, str) else f"{type(text).__name__} {text!r}"
        error.given = f"{shown}\n{tensor}mesh {mesh}"
        raise


def _plan(
    text: str, pattern: Pattern, mesh: MeshDims, shape: Shape | None, partial: object, sizes: Sizes
) -> Recipe:
    role_of = roles(pattern, mesh, partial, sizes)
    assert partial is None or isinstance(partial, str)
    known = None if shape is None else lengths(pattern, shape, mesh, sizes)
    # A dim of size 1 is an axis of length 1, with nothing to communicate or reorder. Reductions are
    # kept, so that an invalid reduction is rejected on every mesh.
    solo = {name for name, role in role_of.items() if mesh[name] == 1 and role != "reduce_scatter"}
    left, right = _without(pattern.left, solo), _without(pattern.right, solo)
    # Several reduce_scatters, or several all_gathers, send the same total amount in any order. This order sends the
    # largest part along the innermost dim, whose ranks are closest to each other.
    calls = [
        (call, name)
        for role, call in _CALLS.items()
        for name in (reversed(role_of) if role == "reduce_scatter" else role_of)
        if role_of[name] == role and name not in solo
    ]
    routes = [way(_Route(left, mesh, known, partial), right, calls) for way in (_in_place, _in_front)]
    best = min((r for r in routes if r is not None), key=lambda route: (route.copies, len(route.steps)))
    return Recipe(
        text=text,
        dims=tuple((name, mesh[name]) for name in role_of),
        roles=tuple(role_of.items()),
        partial=partial,
        # The axes in the steps may lack dims of size 1. The tensor is the same.
        before=pattern.left,
        shape=None if shape is None else tuple(shape),
        steps=tuple(best.steps),
        copies=best.copies,
    )


def _without(side: Side, names: set[str]) -> Side:
    return tuple(tuple(name for name in group if name not in names) for group in side)


class _Route:
    """Collects the steps of a recipe. axes: the local tensor's axes after the steps so far."""

    def __init__(
        self, axes: Side, mesh: MeshDims, known: Mapping[str, int] | None, partial: str | None
    ) -> None:
        self.axes = axes
        self.steps: list[RecipeStep] = []
        self.copies = 0
        # Whether the tensor is contiguous, provided that it was contiguous at the start.
        self._packed = True
        self._mesh = mesh
        self._known = known
        self._partial = partial

    def axis_of(self, name: str) -> int:
        """Return the axis that contains `name`."""
        return next(number for number, group in enumerate(self.axes) if name in group)

    def _step(self, kind: Kind, axes: Side, *args: Any, dim: str = "") -> None:
        known, size = self._known, self._mesh.get(dim, 1)
        whole = kind == "all_gather"
        if known is None:
            shape, names = None, [name for name in names_of(self.axes) if whole or name != dim]
            piece: int | str = "*".join(names) or "1"
        else:
            shape = tuple(math.prod(known[name] for name in group) for group in axes)
            piece = math.prod(known[name] for name in names_of(self.axes)) // (1 if whole else size)
        self.steps.append(RecipeStep(kind, axes, shape, dim, size, args, piece))
        self.axes = axes

    # -- local steps ----------------------------------------------------------------------------

    def arrange(self, target: Side) -> None:
        """Use einops to rearrange the axes to `target`, which has the same names."""
        if target == self.axes:
            return
        runs = {name: number for number, run in enumerate(_runs(self.axes, target)) for name in run}
        self._packed = self._packed and names_of(target) == names_of(self.axes)
        if not self._packed and any(len({runs[name] for name in group}) > 1 for group in target):
            self.copies += 1
            self._packed = True
        # Names that einops accepts, because it rejects the names of an ellipsis's axes.
        plain = {name: f"x{number}" for number, name in enumerate(names_of(self.axes))}
        sides = (
            tuple(tuple(plain[name] for name in group) for group in side) for side in (self.axes, target)
        )
        known = self._known or {}
        lengths = tuple((plain[name], known[name]) for name in plain if name in known)
        self._step("rearrange", target, " -> ".join(map(text_of, sides)), lengths)

    def lead(self, name: str) -> int:
        """Return the axis whose outermost part is `name`. If there is none, split an axis first."""
        axis = self.axis_of(name)
        group = self.axes[axis]
        place = group.index(name)
        if place:
            self.arrange((*self.axes[:axis], group[:place], group[place:], *self.axes[axis + 1 :]))
            axis += 1
        return axis

    # -- steps along a dim ----------------------------------------------------------------------

    def cut(self, kind: Kind, dim: str) -> None:
        """Add a slice or reduce_scatter, which keeps this rank's part of the axis that contains `dim`."""
        axis = self.lead(dim)
        axes = _replaced(self.axes, axis, self.axes[axis][1:])
        if kind == "slice":
            self._step("slice", axes, axis, dim=dim)
            self._packed = self._packed and not self._behind(axis)
        else:
            self._pack(axis)
            assert self._partial is not None
            self._step("reduce_scatter", axes, axis, self._partial, dim=dim)
            # A reduction along a second dim starts from the values prepared for the first.
            self._partial = REDUCTIONS[self._partial].wire.name

    def join(self, kind: Kind, dim: str, to: int) -> None:
        """Add an all_to_all or all_gather, which makes `dim` the outermost part of axis `to`.

        For all_to_all, `dim` is first moved to the outermost part of its own axis; `to` is counted after that.
        """
        axis = self.lead(dim) if kind == "all_to_all" else 0
        self._pack(axis)
        axes = _replaced(self.axes, axis, self.axes[axis][1:]) if kind == "all_to_all" else self.axes
        args = (axis, to) if kind == "all_to_all" else (to,)
        self._step(kind, _replaced(axes, to, (dim, *axes[to])), *args, dim=dim)
        self.copies += self._behind(to)

    def _pack(self, axis: int) -> None:
        """Count a copy if needed: communication reads contiguous memory with the split axis first."""
        if self._behind(axis) or not self._packed:
            self.copies += 1
        self._packed = True

    def _behind(self, axis: int) -> bool:
        """Return whether an axis that may be longer than 1 precedes `axis`."""
        return any(self.axes[:axis])


def _replaced(axes: Side, axis: int, group: Group) -> Side:
    return (*axes[:axis], group, *axes[axis + 1 :])


def _runs(axes: Side, other: Side) -> tuple[Group, ...]:
    """Return the longest runs of names, in order, that neither `axes` nor `other` separates."""
    neighbours = {pair for group in other for pair in pairwise(group)}
    runs: list[Group] = []
    for group in axes:
        for place, name in enumerate(group):
            if place and (group[place - 1], name) in neighbours:
                runs[-1] = (*runs[-1], name)
            else:
                runs.append((name,))
    return tuple(runs)


def _in_place(route: _Route, right: Side, calls: Sequence[tuple[Kind, str]]) -> _Route | None:
    """Run each collective directly on the dim's current and target axes, and reorder the remaining axes at the end.
    Return None if no axis follows a dim in its parentheses."""
    for call, dim in calls:
        if call in ("slice", "reduce_scatter"):
            route.cut(call, dim)
            continue
        if call == "all_to_all":
            route.lead(dim)
        # The axis that follows `dim` in its parentheses on the right.
        group = next(group for group in right if dim in group)
        behind = [name for name in group[group.index(dim) + 1 :] if name in names_of(route.axes)]
        if not behind:
            return None
        route.join(call, dim, route.axis_of(behind[0]))
    route.arrange(right)
    return route


def _in_front(route: _Route, right: Side, calls: Sequence[tuple[Kind, str]]) -> _Route:
    """Run every collective on axis 0, where it needs no copy. Pack once before the collectives, and unpack once after them."""
    for call, dim in calls:
        if call == "slice":
            route.cut(call, dim)
    packed = tuple(dim for call, dim in calls if call in ("reduce_scatter", "all_to_all"))
    if packed and (not route.axes or route.axes[0][: len(packed)] != packed):
        present = set(names_of(route.axes)) - set(packed)
        remaining = tuple(tuple(name for name in group if name in present) for group in right)
        route.arrange((packed, *_runs(remaining, route.axes)))
    for call, dim in calls:
        if call == "reduce_scatter":
            route.cut(call, dim)
        elif call != "slice":
            if not route.axes:
                route.arrange(((),))
            first = route.axes[0]
            if call == "all_to_all" and first[0] != dim:
                route.arrange(((dim, *(name for name in first if name != dim)), *route.axes[1:]))
            route.join(call, dim, 0)
    route.arrange(right)
    return route
