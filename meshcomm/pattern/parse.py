"""Parses the text of a pattern into two sides, by the rules of einops. Requires neither a mesh nor torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from einops import EinopsError
from einops.parsing import AnonymousAxis, ParsedExpression

from meshcomm.errors import PatternError

Group: TypeAlias = tuple[str, ...]
Side: TypeAlias = tuple[Group, ...]

# The internal form of an ellipsis in einops.
_ELLIPSIS: Final = str(ParsedExpression("...").composition[0])
# Hints by the text of einops's error about a side.
_TRY: Final = {
    "only inside ellipsis": "one ... and names for the other axes",
    'duplicate dimension "(.*)"': 'another name for one of them, as in "{0}2"',
    "axis identifier": 'letters, digits and inner underscores, not starting with a digit, as in "h2"',
    "one-level": "leave out the inner parentheses: (a b c) is row-major already",
    "not balanced": 'add "("',
    "Imbalanced": 'add ")"',
    "character '(.)'": "spaces between names, without {0!r}",
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. A side lists the tensor's axes in order. Each axis is a tuple of names.

    `b (h w) 1` is (("b",), ("h", "w"), ()). The axes of an ellipsis are named "...0", "...1".
    """

    left: Side
    right: Side


def names_of(side: Side) -> tuple[str, ...]:
    """Return all names in a side, in order.

    >>> names_of((("b",), ("h", "w"), ()))
    ('b', 'h', 'w')
    """
    return tuple(name for group in side for name in group)


def text_of(side: Side) -> str:
    """Return a side as text.

    >>> text_of((("b",), ("h", "w"), ()))
    'b (h w) 1'
    """
    texts = (group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1" for group in side)
    return " ".join(texts)


def fault(what: str, expected: str, hint: str) -> PatternError:
    """Return the error for an invalid pattern. `plan` adds the pattern, the shape and the mesh."""
    return PatternError(f"rearrange: {what}", expected=expected, hint=hint)


def parse(text: object, ndim: int | None) -> Pattern:
    """Parse a pattern for a tensor with `ndim` axes. None means any number; an ellipsis is then not allowed.

    >>> parse("b s (tp h) -> b s h", None).left
    (('b',), ('s',), ('tp', 'h'))
    >>> parse("b ... -> (...) b", 3).right
    (('...0', '...1'), ('b',))

    Raises PatternError for errors in the text that do not depend on the mesh.
    """
    sides = text.split("->") if isinstance(text, str) else []
    if len(sides) != 2:
        what = (
            f'{len(sides) - 1} times "->"'
            if sides[1:]
            else 'no "->"'
            if sides
            else "the pattern is not a string"
        )
        hint = f'"{sides[0].strip()} -> {sides[0].strip()}", and then change the right side' if sides else ""
        raise fault(
            what,
            'two sides and one arrow, as in "b s h -> b s (tp h)"',
            "one rearrange for each arrow"
            if sides[1:]
            else hint or "mesh.rearrange(x, pattern): the tensor comes first",
        )
    left, right = _read(sides[0], "left"), _read(sides[1], "right")
    if left.has_ellipsis_parenthesized:
        raise fault(
            "an ellipsis in parentheses on the left",
            "an ellipsis outside parentheses on the left: x must determine its number of axes",
            "... without the parentheses, or a name for each axis",
        )
    if left.has_ellipsis != right.has_ellipsis:
        has, lacks = ("left", "right") if left.has_ellipsis else ("right", "left")
        raise fault(
            f"an ellipsis on the {has} only",
            f"... on the {lacks} as well: its axes stay",
            f"... on the {lacks}, or a name for each axis",
        )
    axes = _ellipsis_axes(left, ndim)
    return Pattern(_side(left, axes), _side(right, axes))


def _read(side: str, where: str) -> ParsedExpression:
    """Return a side as parsed by einops."""
    try:
        read = ParsedExpression(side)
    except EinopsError as error:
        reason = str(error).splitlines()[0].partition(" in expression")[0].strip()
        hints = (
            hint.format(*sign_found.groups())
            for sign, hint in _TRY.items()
            if (sign_found := re.search(sign, reason))
        )
        raise fault(
            f"{reason[0].lower()}{reason[1:]}, on the {where}",
            "names, parentheses, 1, an ellipsis of three dots, and spaces between them",
            next(hints, "a pattern that einops.rearrange accepts"),
        ) from None
    for number in (name for group in read.composition for name in group if isinstance(name, AnonymousAxis)):
        raise fault(
            f"the number {number.value} as an axis, on the {where}",
            "names, or 1 for an axis of length 1",
            f'a name and its size: rearrange(x, "... n ...", n={number.value})',
        )
    return read


def _ellipsis_axes(left: ParsedExpression, ndim: int | None) -> Group:
    """Return a name for each axis of the ellipsis."""
    fixed, elastic = len(left.composition) - left.has_ellipsis, left.has_ellipsis
    if ndim is None:
        if not elastic:
            return ()
        raise fault(
            "the number of axes of an ellipsis is not known without a shape",
            "a shape, or a name for each axis",
            "explain_pattern(pattern, dims, shape=...)",
        )
    if ndim < fixed or (ndim > fixed and not elastic):
        needed = f"{fixed} or more axes" if elastic else f"{fixed} axes" if fixed != 1 else "1 axis"
        raise fault(
            f"the left side has {needed}, x has {ndim}",
            f"a tensor with {needed}: {text_of(_side(left, ('...',))) or 'a 0-dim tensor'}",
            "... for axes that do not change" if ndim > fixed else "a name for each axis of x",
        )
    return tuple(f"...{number}" for number in range(ndim - fixed))


def _side(read: ParsedExpression, axes: Group) -> Side:
    """Return a side in which `axes` replace the ellipsis."""
    groups: list[Group] = []
    for group in read.composition:
        names = tuple(axis for name in group for axis in (axes if name == _ELLIPSIS else (str(name),)))
        groups += [(name,) for name in names] if group == _ELLIPSIS else [names]
    return tuple(groups)
