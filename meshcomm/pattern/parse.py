"""What does a pattern say? Text -> two sides. Pure: no mesh, no shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from meshcomm.errors import PatternError

Group: TypeAlias = tuple[str, ...]
Side: TypeAlias = tuple[Group, ...]

ELLIPSIS: Final = "..."

_TOKEN: Final = re.compile(r"\.\.\.|\w+|\S")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern as read. A side is the tensor's axes in order; an axis is the names it is made of.

    `b (h w) 1` is (("b",), ("h", "w"), ()). An ellipsis is the name "...".
    """

    left: Side
    right: Side


def names_of(side: Side) -> tuple[str, ...]:
    """Every name of a side, in order.

    >>> names_of((("b",), ("h", "w"), ()))
    ('b', 'h', 'w')
    """
    return tuple(name for group in side for name in group)


def text_of(side: Side) -> str:
    """A side as it would be written.

    >>> text_of((("b",), ("h", "w"), ()))
    'b (h w) 1'
    """
    texts = (group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1" for group in side)
    return " ".join(texts)


def fault(what: str, expected: str, hint: str) -> PatternError:
    """The error for something wrong with a pattern; `parse` and `plan` add what was given."""
    return PatternError(f"rearrange: {what}", expected=expected, hint=hint)


def shown(text: object) -> str:
    """A pattern as errors show it."""
    return f'"{text}"' if isinstance(text, str) else f"{type(text).__name__} {text!r}"


def parse(text: object) -> Pattern:
    """Read a pattern.

    >>> parse("b s (tp h) -> b s h").left
    (('b',), ('s',), ('tp', 'h'))

    Raises PatternError: what is wrong with the text, whatever mesh and tensor it meets.
    """
    try:
        return _parse(text)
    except PatternError as error:
        error.given = shown(text)
        raise


def _parse(text: object) -> Pattern:
    if not isinstance(text, str):
        raise fault(
            "the pattern is not a text",
            'two sides and an arrow, as in "b s h -> b s (tp h)"',
            "mesh.rearrange(x, pattern): the tensor comes first",
        )
    sides = text.split("->")
    if len(sides) != 2:
        missing = len(sides) == 1
        raise fault(
            'no "->"' if missing else f'{len(sides) - 1} times "->"',
            'one "->" between the axes before and the axes after',
            f'"{text.strip()} -> {text.strip()}", and then change the right side'
            if missing
            else "one rearrange for each arrow",
        )
    left, right = _side(sides[0], "left"), _side(sides[1], "right")
    if any(ELLIPSIS in group and group != (ELLIPSIS,) for group in left):
        raise fault(
            "an ellipsis in parentheses on the left",
            "an ellipsis that stands alone on the left: how many axes it is must follow from x",
            "... without the parentheses, or a name for each axis",
        )
    one_sided = (ELLIPSIS in names_of(left)) - (ELLIPSIS in names_of(right))
    if one_sided:
        here, there = ("left", "right") if one_sided > 0 else ("right", "left")
        raise fault(
            f"an ellipsis on the {here} only",
            f"... on the {there} as well: its axes stay",
            f"... on the {there}, or a name for each axis",
        )
    return Pattern(left, right)


def _side(side: str, where: Literal["left", "right"]) -> Side:
    groups: list[Group] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(side):
        if token == "(":
            if inside is not None:
                raise fault(
                    f"parentheses inside parentheses on the {where}",
                    "parentheses of one level: (a b c) is row-major already",
                    "leave out the inner ones",
                )
            inside = []
        elif token == ")":
            if inside is None:
                raise fault(f'")" without "(" on the {where}', "balanced parentheses", 'add "("')
            groups.append(tuple(inside))
            inside = None
        else:
            names = () if token == "1" else (_name(token),)
            if inside is None:
                groups.append(names)
            else:
                inside.extend(names)
    if inside is not None:
        raise fault(f'"(" without ")" on the {where}', "balanced parentheses", 'add ")"')
    seen: set[str] = set()
    for name in names_of(tuple(groups)):
        if name in seen:
            what, hint = f'axis "{name}" twice', f'another name for one of them, as in "{name}2"'
            if name == ELLIPSIS:
                what, hint = "two ellipses", "one ellipsis and names for the other axes"
            raise fault(f"{what} on the {where}", "each name once on a side", hint)
        seen.add(name)
    return tuple(groups)


def _name(token: str) -> str:
    if token == ELLIPSIS or (token.isidentifier() and "_" not in (token[0], token[-1])):
        return token
    if token.isdecimal():
        raise fault(
            f"the number {token} as an axis",
            "names, or 1 for an axis of length 1",
            f'a name and its size: rearrange(x, "... n ...", n={token})',
        )
    if not re.match(r"\w", token):
        raise fault(
            f"unknown character {token!r}",
            "names, parentheses, 1, an ellipsis of three dots, spaces",
            "spaces between names" if token in ",;" else f"remove {token!r}",
        )
    raise fault(
        f'"{token}" cannot be the name of an axis',
        'letters, digits and inner underscores, not starting with a digit, as in "h2"',
        "rename the axis",
    )
