"""Which steps carry a pattern out with the fewest bytes sent, then the fewest copies? Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from meshcomm.errors import PatternError
from meshcomm.layout import Layout
from meshcomm.pattern.dims import MeshDims, check_apart, mesh_dims
from meshcomm.pattern.lengths import Shape, lengths, spread
from meshcomm.pattern.parse import Group, Pattern, Side, names_of, parse
from meshcomm.pattern.recipe import (
    AllGather,
    AllToAll,
    AnyStep,
    Permute,
    Recipe,
    ReduceScatter,
    Reshape,
    Slice,
)
from meshcomm.pattern.roles import Role, Sizes, roles


def plan(
    text: object, layout: Layout, shape: Shape | None, partial: object = None, sizes: Sizes = ()
) -> Recipe:
    """The recipe of a pattern on a mesh, for a local tensor of `shape` (None: of any shape).

    Raises PatternError with the pattern, the shape and the mesh.
    """
    dims = mesh_dims(layout)
    try:
        pattern = parse(text)
        check_apart(pattern, layout)
        return _plan(pattern, dims, shape, partial, sizes)
    except PatternError as error:
        mesh = " ".join(f"{name}={layout.size(name)}" for name in layout.names)
        tensor = "" if shape is None else f"x of shape {tuple(shape)}, "
        error.given = f"{error.given}\n{tensor}mesh {mesh}"
        raise


def _plan(pattern: Pattern, dims: MeshDims, shape: Shape | None, partial: object, sizes: Sizes) -> Recipe:
    """Order of the steps, and why it sends least:

    Slices first: they cost nothing, and all that follows is smaller for them. Then what shrinks
    (reduce_scatter), then what keeps the size (all_to_all), then what grows (all_gather).
    Several reduce_scatters, or several all_gathers, send the same in any order in sum; the larger
    share goes along the innermost dim, whose ranks are nearest to each other.
    """
    found = roles(pattern, dims, partial, sizes)
    pattern = spread(pattern, None if shape is None else len(shape))
    known = None if shape is None else lengths(pattern, shape, dims, sizes)
    mesh = dict(dims)
    used = tuple((name, mesh[name]) for name, _ in found)
    # A dim of size 1 is an axis of length 1: nothing to communicate, nothing to reorder. Reductions
    # stay, so that what the reduction refuses is refused on every mesh.
    solo = {name for name, role in found if mesh[name] == 1 and role != "reduce_scatter"}
    left, right = _without(pattern.left, solo), _without(pattern.right, solo)
    by_role: dict[Role, list[str]] = {}
    for name, role in found:
        if name not in solo:
            by_role.setdefault(role, []).append(name)
    calls = [("slice", name) for name in by_role.get("slice", ())]
    calls += [("reduce_scatter", name) for name in reversed(by_role.get("reduce_scatter", ()))]
    calls += [("move", name) for name in by_role.get("move", ())]
    calls += [("gather", name) for name in by_role.get("gather", ())]
    assert partial is None or isinstance(partial, str)
    routes = [way(_Route(left, mesh, known, partial or ""), right, calls) for way in (_straight, _in_front)]
    best = min((r for r in routes if r is not None), key=lambda route: (route.copies, len(route.steps)))
    shape = None if shape is None else tuple(shape)
    # The sides may differ from the pattern's by dims of size 1; the tensor is the same.
    return Recipe(pattern.text, used, found, partial, pattern.left, shape, tuple(best.steps), best.copies)


def _without(side: Side, names: set[str]) -> Side:
    return tuple(tuple(name for name in group if name not in names) for group in side)


class _Route:
    """Steps as they are put together. `axes` is what the local tensor's axes are by now.

    `packed`: whether its memory holds its values one after the other, if it did at the start.
    """

    def __init__(self, axes: Side, mesh: Mapping[str, int], known: Mapping[str, int] | None, op: str) -> None:
        self.axes = axes
        self.steps: list[AnyStep] = []
        self.copies = 0
        self._packed = True
        self._mesh = mesh
        self._known = known
        self._op = op

    def axis_of(self, name: str) -> int:
        """The axis that has `name` in it."""
        return next(number for number, group in enumerate(self.axes) if name in group)

    # -- local steps ----------------------------------------------------------------------------

    def reshape(self, axes: Side) -> None:
        """Split and join axes without reordering names."""
        if axes == self.axes:
            return
        home = {name: number for number, group in enumerate(self.axes) for name in group}
        joins = any(len({home[name] for name in group}) > 1 for group in axes)
        if joins and not self._packed:
            self.copies += 1
            self._packed = True
        self.steps.append(Reshape(axes, self._shape(axes)))
        self.axes = axes

    def permute(self, order: Sequence[int]) -> None:
        """Reorder axes."""
        if list(order) == list(range(len(self.axes))):
            return
        axes = tuple(self.axes[number] for number in order)
        self.steps.append(Permute(axes, self._shape(axes), tuple(order)))
        self.axes = axes
        self._packed = False

    def arrange(self, target: Side) -> None:
        """Bring the axes into the form `target`, which has the same names."""
        if names_of(self.axes) == names_of(target):
            self.reshape(target)
            return
        atoms = _runs(self.axes, target)
        self.reshape(atoms)
        places = {atom: number for number, atom in enumerate(atoms)}
        self.permute([places[atom] for atom in _runs(target, self.axes)])
        self.reshape(target)

    def lead(self, name: str) -> int:
        """The axis that `name` is the outermost part of, after splitting one where need be."""
        axis = self.axis_of(name)
        group = self.axes[axis]
        at = group.index(name)
        if at:
            self.reshape((*self.axes[:axis], group[:at], group[at:], *self.axes[axis + 1 :]))
            axis += 1
        return axis

    # -- steps along a dim ----------------------------------------------------------------------

    def slice(self, dim: str) -> None:
        axis = self.lead(dim)
        self.axes = self._cut(axis)
        self.steps.append(Slice(self.axes, self._shape(self.axes), dim, self._mesh[dim], axis))
        self._packed = self._packed and not self._behind(axis)

    def reduce_scatter(self, dim: str) -> None:
        axis = self.lead(dim)
        self._pack(axis)
        self.axes = self._cut(axis)
        self.steps.append(
            ReduceScatter(self.axes, self._shape(self.axes), dim, self._mesh[dim], axis, self._op)
        )

    def all_to_all(self, dim: str, concat_axis: int) -> None:
        """`concat_axis` counts axes as they are once `dim` leads its own."""
        axis = self.lead(dim)
        self._pack(axis)
        self.axes = self._grown(self._cut(axis), concat_axis, dim)
        shape = self._shape(self.axes)
        self.steps.append(AllToAll(self.axes, shape, dim, self._mesh[dim], axis, concat_axis))
        self.copies += self._behind(concat_axis)

    def gather(self, dim: str, axis: int) -> None:
        self._pack(0)
        self.axes = self._grown(self.axes, axis, dim)
        self.steps.append(AllGather(self.axes, self._shape(self.axes), dim, self._mesh[dim], axis))
        self.copies += self._behind(axis)

    def _pack(self, axis: int) -> None:
        """Communication reads contiguous memory with the axis that it cuts in front."""
        if self._behind(axis) or not self._packed:
            self.copies += 1
        self._packed = True

    def _behind(self, axis: int) -> bool:
        """Whether an axis of more than one element lies before `axis`."""
        return any(self.axes[:axis])

    def _cut(self, axis: int) -> Side:
        return (*self.axes[:axis], self.axes[axis][1:], *self.axes[axis + 1 :])

    def _grown(self, axes: Side, axis: int, dim: str) -> Side:
        return (*axes[:axis], (dim, *axes[axis]), *axes[axis + 1 :])

    def _shape(self, axes: Side) -> Shape | None:
        if self._known is None:
            return None
        known = self._known
        return tuple(math.prod(known[name] for name in group) for group in axes)


def _runs(axes: Side, other: Side) -> tuple[Group, ...]:
    """The pieces of `axes`, in order, that neither they nor `other` ever take apart."""
    neighbours = {pair for group in other for pair in pairwise(group)}
    runs: list[list[str]] = []
    for group in axes:
        for at, name in enumerate(group):
            if at and (group[at - 1], name) in neighbours:
                runs[-1].append(name)
            else:
                runs.append([name])
    return tuple(tuple(run) for run in runs)


def _straight(route: _Route, right: Side, calls: Sequence[tuple[str, str]]) -> _Route | None:
    """Every collective on the axis where the dim is and where it goes, as far as there is one; what
    is still out of order is put in order at the end. None where a dim goes before nothing."""
    for call, dim in calls:
        if call == "slice":
            route.slice(dim)
        elif call == "reduce_scatter":
            route.reduce_scatter(dim)
        else:
            if call == "move":
                route.lead(dim)
            axis = _before(route, right, dim)
            if axis is None:
                return None
            if call == "move":
                route.all_to_all(dim, axis)
            else:
                route.gather(dim, axis)
    route.arrange(right)
    return route


def _before(route: _Route, right: Side, dim: str) -> int | None:
    """The axis of what comes after `dim` in its parentheses on the right; None where nothing does."""
    group = next(group for group in right if dim in group)
    there = [name for name in group[group.index(dim) + 1 :] if name in names_of(route.axes)]
    return route.axis_of(there[0]) if there else None


def _in_front(route: _Route, right: Side, calls: Sequence[tuple[str, str]]) -> _Route:
    """Every collective on axis 0, where it copies nothing: pack once before, unpack once after."""
    for call, dim in calls:
        if call == "slice":
            route.slice(dim)
    packed = tuple(dim for call, dim in calls if call in ("reduce_scatter", "move"))
    if packed and (not route.axes or route.axes[0][: len(packed)] != packed):
        rest = tuple(tuple(name for name in group if name not in packed) for group in right)
        present = set(names_of(route.axes))
        rest = tuple(tuple(name for name in group if name in present) for group in rest)
        route.arrange((packed, *_runs(rest, route.axes)))
    for call, dim in calls:
        if call == "reduce_scatter":
            route.reduce_scatter(dim)
        elif call == "move":
            first = route.axes[0]
            if first[0] != dim:
                route.arrange(((dim, *(name for name in first if name != dim)), *route.axes[1:]))
            route.all_to_all(dim, 0)
        elif call == "gather":
            if not route.axes:
                route.reshape(((),))
            route.gather(dim, 0)
    route.arrange(right)
    return route
