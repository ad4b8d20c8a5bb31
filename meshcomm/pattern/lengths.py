"""How long is each axis? A pattern, a shape and the mesh's sizes -> a length for every name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshcomm.pattern.dims import MeshDims
from meshcomm.pattern.parse import ELLIPSIS, Group, Pattern, Side, fault, text_of
from meshcomm.pattern.roles import Sizes

Shape = tuple[int, ...]


def spread(pattern: Pattern, ndim: int | None) -> Pattern:
    """The pattern with a name for each axis of the ellipsis: "...0", "...1".

    Raises PatternError where a tensor of `ndim` axes does not fit the left side. ndim None, no
    tensor known, is for patterns without an ellipsis.
    """
    fixed = sum(group != (ELLIPSIS,) for group in pattern.left)
    elastic = fixed != len(pattern.left)
    if ndim is None:
        if elastic:
            raise fault(
                pattern.text,
                "how many axes an ellipsis stands for is not known without a shape",
                "a shape, or a name for each axis",
                "explain_pattern(pattern, dims, shape=...)",
            )
        return pattern
    if ndim < fixed or (ndim > fixed and not elastic):
        wanted = f"{fixed} or more axes" if elastic else f"{fixed} axes" if fixed != 1 else "1 axis"
        raise fault(
            pattern.text,
            f"the left side has {wanted}, x has {ndim}",
            f"a tensor with {wanted}: {text_of(pattern.left) or 'a 0-dim tensor'}",
            "... for axes that stay as they are" if ndim > fixed else "a name for each axis of x",
        )
    stand_in = tuple(f"{ELLIPSIS}{number}" for number in range(ndim - fixed))

    def filled(side: Side) -> Side:
        groups: list[Group] = []
        for group in side:
            if group == (ELLIPSIS,):
                groups.extend((name,) for name in stand_in)
            else:
                groups.append(sum((stand_in if name == ELLIPSIS else (name,) for name in group), ()))
        return tuple(groups)

    return Pattern(pattern.text, filled(pattern.left), filled(pattern.right))


def lengths(pattern: Pattern, shape: Shape, dims: MeshDims, sizes: Sizes) -> dict[str, int]:
    """The length of every name of both sides; a mesh dim's is its size.

    pattern: spread to as many axes as `shape` has.
    Raises PatternError where the shape does not fit the sizes, or does not determine a name.
    """
    mesh = dict(dims)
    known = {**dict(sizes), **mesh}
    for number, (group, length) in enumerate(zip(pattern.left, shape, strict=True)):
        open_names = [name for name in group if name not in known]
        product = math.prod(known[name] for name in group if name in known)
        axis = f"axis {number} of x, {text_of((group,))},"
        if len(open_names) > 1 or (open_names and product == 0 == length):
            raise fault(
                pattern.text,
                f"{axis} does not determine {' and '.join(open_names)}",
                f"sizes for all but one of {', '.join(open_names)}; together they are {length}"
                if product
                else "a size for each name of an axis of length 0",
                f"rearrange(x, pattern, {open_names[0]}=...)",
            )
        if open_names and product:
            if length % product:
                raise fault(
                    pattern.text,
                    f"{axis} cannot be split: {_product(group, known)}, the length is {length}",
                    f"a length divisible by {product}, got {length}",
                    f"pad the axis to {-(-length // product) * product}",
                )
            known[open_names[0]] = length // product
        elif product != length:
            raise fault(
                pattern.text,
                f"{axis} has another length: {_product(group, known)}, the length is {length}",
                f"length {product}, got {length}",
                _mend(group, mesh, known, length),
            )
    known.update((name, mesh[name]) for group in pattern.right for name in group if name in mesh)
    return known


def _product(group: Group, known: Mapping[str, int]) -> str:
    named = [f"{name}={known[name]}" for name in group if name in known]
    if not named:
        return "1 in the pattern"
    text = " * ".join(named)
    return text if len(named) == 1 else f"{text} = {math.prod(known[n] for n in group if n in known)}"


def _mend(group: Group, mesh: Mapping[str, int], known: Mapping[str, int], length: int) -> str:
    given = [name for name in group if name not in mesh and name in known]
    if not group:
        return "a name for the axis"
    if not given:
        return f"({' '.join(group)} n): each of the {math.prod(mesh[n] for n in group)} ranks has n of them"
    others = math.prod(known[name] for name in group if name != given[0] and name in known)
    if others and length % others == 0:
        return f"{given[0]}={length // others}"
    return "sizes that multiply to the length"
