"""Determines the role of each mesh dim in a pattern and the length of each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations, product
from typing import NamedTuple, TypeAlias

from meshcomm.errors import PatternError
from meshcomm.layout import Layout
from meshcomm.layout.names import did_you_mean, nearest_name
from meshcomm.pattern.parse import Group, Pattern, Side, fault, names_of, text_of
from meshcomm.pattern.recipe import Role
from meshcomm.reductions import REDUCTIONS

MeshDims: TypeAlias = Mapping[str, int]
Sizes: TypeAlias = tuple[tuple[str, int], ...]
Shape: TypeAlias = tuple[int, ...]


def mesh_dims(layout: Layout) -> dict[str, int]:
    """Return every dim name of the mesh with its size. Dims whose ranks are farthest apart come first.

    >>> mesh_dims(Layout({"dp": 2, "tp": 4}, merge={"all": ("tp", "dp")}))
    {'dp': 2, 'all': 8, 'tp': 4}
    """

    def reach(name: str) -> int:
        return max((size * stride for size, stride in layout.digits(name) if size > 1), default=0)

    return {name: layout.size(name) for name in sorted(layout.names, key=reach, reverse=True)}


def check_apart(pattern: Pattern, layout: Layout) -> None:
    """Raise PatternError if two dims of a pattern overlap, such as "dp" and a merged dim that contains dp, or a view's
    dim and a base dim that split the same ranks."""
    used = [n for n in dict.fromkeys(names_of(pattern.left) + names_of(pattern.right)) if n in layout.names]
    for one, other in combinations(used, 2):
        digits = product(layout.digits(one).canonical(), layout.digits(other).canonical())
        if any(
            stride % (inner * width) and inner % (stride * size) for (size, stride), (width, inner) in digits
        ):
            raise fault(
                f'the dims "{one}" and "{other}" overlap: a rank\'s coords along them depend on each other',
                "dims that are independent, such as the dims of one factorization",
                f'one rearrange for "{one}" and another for "{other}"',
            )


def roles(pattern: Pattern, mesh: MeshDims, partial: object, sizes: Sizes) -> dict[str, Role]:
    """Return the role of every mesh dim that the pattern names, in the order of `mesh`. Raises PatternError.

    A dim that is only on the right is gathered. A dim that is only on the left is sliced or, if `partial` is given,
    reduced by reduce_scatter. A dim on both sides stays if its neighbors are the same on both sides; otherwise it moves.
    """
    left, right = names_of(pattern.left), names_of(pattern.right)
    _check_both_sides(left, right, mesh)
    _check_sizes(left + right, mesh, sizes)
    _check_partial(partial, any(name in mesh and name not in right for name in left))
    role_of: dict[str, Role] = {}
    for name in mesh:
        if name in left and name in right:
            role_of[name] = "stay" if _stays(pattern, name, mesh) else "move"
        elif name in left:
            role_of[name] = "slice" if partial is None else "reduce_scatter"
        elif name in right:
            role_of[name] = "gather"
    for one, other in combinations([name for name, role in role_of.items() if role == "stay"], 2):
        swapped = (left.index(one) < left.index(other)) != (right.index(one) < right.index(other))
        if swapped and _place(pattern.left, one, mesh) == _place(pattern.left, other, mesh):
            raise _unclear(f'"{one}" and "{other}" swap places')
    return role_of


class _Place(NamedTuple):
    """The tensor axes before and after a mesh dim: in the same parentheses or, without parentheses, on the whole side."""

    in_parentheses: bool
    before: str | None
    after: str | None


def _place(side: Side, name: str, mesh: MeshDims) -> _Place:
    group = next(group for group in side if name in group)
    in_parentheses = any(other not in mesh for other in group)
    names = group if in_parentheses else names_of(side)
    place = names.index(name)
    before = [other for other in names[:place] if other not in mesh]
    after = [other for other in names[place:] if other not in mesh]
    return _Place(in_parentheses, before[-1] if before else None, after[0] if after else None)


def _stays(pattern: Pattern, name: str, mesh: MeshDims) -> bool:
    left, right = _place(pattern.left, name, mesh), _place(pattern.right, name, mesh)
    if not left.in_parentheses and not right.in_parentheses:
        same = (left.before == right.before) + (left.after == right.after)
        if same == 1:
            raise _unclear(f'"{name}" keeps one neighbor and changes the other')
        return same == 2
    # In parentheses, a dim splits the axis after it or, if there is none, the axis before it.
    if left.in_parentheses and right.in_parentheses and (left.after is None or right.after is None):
        return left.after is right.after and left.before == right.before
    inside = left if left.in_parentheses else right
    return left.before == right.before if inside.after is None else left.after == right.after


def _unclear(why: str) -> PatternError:
    return fault(
        f"unclear whether to move data between ranks: {why}",
        "a dim with the same neighbors on both sides, which stays and sends nothing;\n"
        "or a dim whose neighbors both differ between the sides, which moves by all_to_all",
        "two patterns, one that moves the dim and one that reorders the axes",
    )


def _check_both_sides(left: Group, right: Group, mesh: MeshDims) -> None:
    for name in left + right:
        if name in mesh or (name in left and name in right):
            continue
        if name in left:
            side, others = "left", [n for n in right if n not in left]
            expected = "every tensor axis on both sides: a missing axis is never a reduction"
            hint = f'einops.reduce for a reduction over "{name}", or "{name}" on the right'
        else:
            side, others = "right", [n for n in left if n not in right]
            expected = f"every tensor axis on both sides, or a mesh dim: {', '.join(mesh)}"
            hint = f'einops.repeat for a new axis "{name}", or 1 for an axis of length 1'
        raise fault(
            f'axis "{name}" is on the {side} only, and the mesh has no dim of that name',
            expected,
            did_you_mean(name, [*mesh, *others]) or hint,
        )


def _check_sizes(names: Group, mesh: MeshDims, sizes: Sizes) -> None:
    for name, size in sizes:
        remove = f"remove {name}={size!r}"
        if name not in names:
            raise fault(
                f'a size for "{name}", which the pattern does not have',
                "sizes of axes in the pattern: " + (", ".join(dict.fromkeys(names)) or "it has none"),
                did_you_mean(name, names) or remove,
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            whole = isinstance(size, float) and size % 1 == 0
            hint = f"{name}={int(size)}" if whole else remove
            raise fault(f"{name}={size!r} is not a size", "an integer, 0 or more", hint)
        if mesh.get(name, size) != size:
            raise fault(
                f'{name}={size}, but "{name}" is a dim of the mesh and has size {mesh[name]}',
                f"{name}={mesh[name]}, or no size, because the mesh defines it",
                remove,
            )


def _check_partial(partial: object, reduces: bool) -> None:
    if partial is None:
        return
    known = [row.name for row in REDUCTIONS.values() if row.partial]
    if not isinstance(partial, str) or partial not in known:
        near = "avg" if partial == "mean" else nearest_name(str(partial), known)
        raise fault(
            f"partial={partial!r} is not a reduction",
            "one of " + ", ".join(known) + "; or None to keep this rank's slice",
            f'partial="{near or "sum"}"',
        )
    if not reduces:
        raise fault(
            f'partial="{partial}" has no effect: no mesh dim is on the left only',
            "a mesh dim on the left that is missing on the right, over which values are added",
            f'remove partial="{partial}", or put the dim on the left: "(tp h) ... -> h ..."',
        )


def lengths(pattern: Pattern, shape: Shape, mesh: MeshDims, sizes: Sizes) -> dict[str, int]:
    """Return the length of every name in the pattern. The length of a mesh dim is its size.

    pattern: a pattern parsed for the number of axes in `shape`.
    Raises PatternError if the shape does not fit the sizes, or does not determine the length of a name.
    """
    known = {**dict(sizes), **mesh}
    for number, (group, length) in enumerate(zip(pattern.left, shape, strict=True)):
        open_names = [name for name in group if name not in known]
        named = {name: known[name] for name in group if name in known}
        whole = math.prod(named.values())
        axis = f"axis {number} of x, {text_of((group,))},"
        text = " * ".join(f"{name}={size}" for name, size in named.items()) or "1 in the pattern"
        text = f"{text} = {whole}" if len(named) > 1 else text
        if len(open_names) > 1 or (open_names and whole == 0 == length):
            raise fault(
                f"{axis} does not determine {' and '.join(open_names)}",
                f"sizes for all but one of {', '.join(open_names)}; together they are {length}"
                if whole
                else "a size for each name in an axis of length 0",
                f"rearrange(x, pattern, {open_names[0]}=...)",
            )
        if open_names and whole and length % whole:
            raise fault(
                f"{axis} cannot be split: {text}, the length is {length}",
                f"a length divisible by {whole}, got {length}",
                f"pad the axis to {-(-length // whole) * whole}",
            )
        if open_names and whole:
            known[open_names[0]] = length // whole
        elif whole != length:
            raise fault(
                f"{axis} has a different length: {text}, the length is {length}",
                f"length {whole}, got {length}",
                _fitting(group, mesh, known, length),
            )
    return known


def _fitting(group: Group, mesh: MeshDims, known: Mapping[str, int], length: int) -> str:
    """Return the hint for an axis whose length differs from the product of the lengths of its names."""
    free = [name for name in group if name not in mesh and name in known]
    if not group:
        return "a name for the axis"
    if not free:
        return f"({' '.join(group)} n): each of the {math.prod(mesh[n] for n in group)} ranks has n of them"
    others = math.prod(known[name] for name in group if name != free[0] and name in known)
    if others and length % others == 0:
        return f"{free[0]}={length // others}"
    return "sizes that multiply to the length"
