"""What does each mesh dim of a pattern do: gather, slice, reduce-scatter, move, or nothing?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from meshcomm.errors import PatternError
from meshcomm.layout.names import did_you_mean, nearest_name
from meshcomm.pattern.dims import MeshDims
from meshcomm.pattern.parse import ELLIPSIS, Pattern, Side, fault, names_of

Role: TypeAlias = Literal["gather", "slice", "reduce_scatter", "move", "stay"]
Roles: TypeAlias = tuple[tuple[str, Role], ...]
Sizes: TypeAlias = tuple[tuple[str, int], ...]

# Reductions that `partial` may name.
PARTIALS: Final[tuple[str, ...]] = ("sum", "avg", "product", "min", "max")


def roles(pattern: Pattern, dims: MeshDims, partial: object, sizes: Sizes) -> Roles:
    """The role of every mesh dim that the pattern names, in the order of `dims`.

    right only: gather. left only: slice, or reduce_scatter where `partial` is given. Both: stay
    where its neighbours are the same on both sides, else move.
    Raises PatternError where a tensor axis is on one side only, where `partial` or a size is wrong
    or would have no effect, or where it is unclear whether a dim moves.
    """
    mesh = dict(dims)
    left, right = names_of(pattern.left), names_of(pattern.right)
    _check_both_sides(pattern, mesh)
    _check_sizes(pattern, mesh, sizes)
    _check_partial(pattern, partial, [name for name in left if name in mesh and name not in right])
    found: list[tuple[str, Role]] = []
    stays: dict[str, _Place] = {}
    for name in mesh:
        if name in left and name in right:
            before, after = _place(pattern.left, name, mesh), _place(pattern.right, name, mesh)
            if _stays(pattern, name, before, after):
                stays[name] = before
                found.append((name, "stay"))
            else:
                found.append((name, "move"))
        elif name in left:
            found.append((name, "slice" if partial is None else "reduce_scatter"))
        elif name in right:
            found.append((name, "gather"))
    for one, place in stays.items():
        for other, other_place in stays.items():
            swapped = (left.index(one) < left.index(other)) != (right.index(one) < right.index(other))
            if place == other_place and swapped:
                raise _unclear(pattern, f'"{one}" and "{other}" change places')
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Place:
    """Between which tensor axes a mesh dim lies: those in its parentheses, else those of the side."""

    in_parentheses: bool
    before: str | None
    after: str | None


def _place(side: Side, name: str, mesh: Mapping[str, int]) -> _Place:
    group = next(group for group in side if name in group)
    in_parentheses = any(other not in mesh for other in group)
    names = group if in_parentheses else names_of(side)
    at = names.index(name)
    before = [other for other in names[:at] if other not in mesh]
    after = [other for other in names[at:] if other not in mesh]
    return _Place(in_parentheses, before[-1] if before else None, after[0] if after else None)


def _stays(pattern: Pattern, name: str, left: _Place, right: _Place) -> bool:
    if not left.in_parentheses and not right.in_parentheses:
        same = (left.before == right.before) + (left.after == right.after)
        if same == 1:
            raise _unclear(pattern, f'"{name}" keeps one neighbour and changes the other')
        return same == 2
    # In parentheses a dim cuts the axis after it; where there is none, the axis before it.
    if left.in_parentheses and right.in_parentheses:
        if left.after is None or right.after is None:
            return left.after is right.after and left.before == right.before
        return left.after == right.after
    inside, outside = (left, right) if left.in_parentheses else (right, left)
    if inside.after is not None:
        return inside.after == outside.after
    return inside.before == outside.before


def _unclear(pattern: Pattern, why: str) -> PatternError:
    return fault(
        pattern.text,
        f"unclear whether to move data between ranks: {why}",
        "a dim whose neighbours are the same on both sides: it stays, nothing is sent;\n"
        "or both different: it moves, all_to_all",
        "two patterns, one that moves the dim and one that reorders the axes",
    )


def _check_both_sides(pattern: Pattern, mesh: Mapping[str, int]) -> None:
    left, right = names_of(pattern.left), names_of(pattern.right)
    for own, other, here in ((left, right, "left"), (right, left, "right")):
        for name in own:
            if name in other or name in mesh:
                continue
            known = [*mesh, *(n for n in other if n not in own)]
            if here == "left":
                hint = f'einops.reduce for a reduction over "{name}", or "{name}" on the right'
                expected = "every tensor axis on both sides: a missing axis is never a reduction"
            else:
                hint = f'einops.repeat for a new axis "{name}", or 1 for an axis of length 1'
                expected = f"every tensor axis on both sides, or a mesh dim: {', '.join(mesh)}"
            raise fault(
                pattern.text,
                f'axis "{name}" is on the {here} only, and the mesh has no dim of that name',
                expected,
                did_you_mean(name, [n for n in known if n != ELLIPSIS]) or hint,
            )


def _check_sizes(pattern: Pattern, mesh: Mapping[str, int], sizes: Sizes) -> None:
    names = names_of(pattern.left) + names_of(pattern.right)
    for name, size in sizes:
        if name not in names:
            raise fault(
                pattern.text,
                f'a size for "{name}", which the pattern does not have',
                "sizes of axes of the pattern: " + (", ".join(dict.fromkeys(names)) or "it has none"),
                did_you_mean(name, names) or f"remove {name}={size!r}",
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise fault(
                pattern.text,
                f"{name}={size!r} is not a size",
                "a whole number, 0 or more",
                f"{name}={int(size)}"
                if isinstance(size, float) and size % 1 == 0
                else f"remove {name}={size!r}",
            )
        if name in mesh and mesh[name] != size:
            raise fault(
                pattern.text,
                f'{name}={size}, but "{name}" is a dim of the mesh and has size {mesh[name]}',
                f"{name}={mesh[name]}, or no size: the mesh knows it",
                f"remove {name}={size}",
            )


def _check_partial(pattern: Pattern, partial: object, left_only: list[str]) -> None:
    if partial is None:
        return
    if not isinstance(partial, str) or partial not in PARTIALS:
        near = "avg" if partial == "mean" else nearest_name(str(partial), PARTIALS)
        raise fault(
            pattern.text,
            f"partial={partial!r} is not a reduction",
            "one of " + ", ".join(PARTIALS) + "; or None to keep this rank's slice",
            f'partial="{near or "sum"}"',
        )
    if not left_only:
        raise fault(
            pattern.text,
            f'partial="{partial}" has no effect: no mesh dim is on the left only',
            "a mesh dim on the left that is missing on the right, over which values are added",
            f'remove partial="{partial}", or put the dim on the left: "(tp h) ... -> h ..."',
        )
