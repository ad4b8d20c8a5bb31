"""What does a pattern say? Text -> two sides. Pure: no mesh, no shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from meshcomm.errors import PatternError

Group: TypeAlias = tuple[str, ...]
Side: TypeAlias = tuple[Group, ...]

ELLIPSIS: Final = "..."

_TOKEN: Final = re.compile(r"\s+|\.\.\.|\w+|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern as read. A side is the tensor's axes in order; an axis is the names it is made of.

    `b (h w) 1` is (("b",), ("h", "w"), ()). An ellipsis is the name "...".
    """

    text: str
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


def parse(text: object) -> Pattern:
    """Read a pattern.

    >>> parse("b s (tp h) -> b s h").left
    (('b',), ('s',), ('tp', 'h'))

    Raises PatternError: what is wrong with the text, whatever mesh and tensor it meets.
    """
    if not isinstance(text, str):
        raise PatternError(
            "rearrange: the pattern is not a text",
            given=f"{type(text).__name__} {text!r}",
            expected='two sides and an arrow, as in "b s h -> b s (tp h)"',
            hint="mesh.rearrange(x, pattern): the tensor comes first",
        )
    return _parse(text)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Pattern:
    sides = text.split("->")
    if len(sides) != 2:
        raise fault(
            text,
            'no "->"' if len(sides) == 1 else f'{len(sides) - 1} times "->"',
            'one "->" between the axes before and the axes after',
            f'"{text.strip()} -> {text.strip()}", and then change the right side'
            if len(sides) == 1
            else "one rearrange for each arrow",
        )
    left, right = (_side(side, text, where) for side, where in zip(sides, ("left", "right"), strict=True))
    if any(ELLIPSIS in group and group != (ELLIPSIS,) for group in left):
        raise fault(
            text,
            "an ellipsis in parentheses on the left",
            "an ellipsis that stands alone on the left: how many axes it is must follow from x",
            "... without the parentheses, or a name for each axis",
        )
    one_sided = (ELLIPSIS in names_of(left)) - (ELLIPSIS in names_of(right))
    if one_sided:
        here, there = ("left", "right") if one_sided > 0 else ("right", "left")
        raise fault(
            text,
            f"an ellipsis on the {here} only",
            f"... on the {there} as well: its axes stay",
            f"... on the {there}, or a name for each axis",
        )
    return Pattern(text, left, right)


def _side(side: str, text: str, where: str) -> Side:
    groups: list[Group] = []
    open_group: list[str] | None = None
    seen: set[str] = set()
    for token in _tokens(side, text):
        if token == "(":
            if open_group is not None:
                raise fault(
                    text,
                    f"parentheses inside parentheses on the {where}",
                    "parentheses of one level: (a b c) is row-major already",
                    "leave out the inner ones",
                )
            open_group = []
        elif token == ")":
            if open_group is None:
                raise fault(text, f'")" without "(" on the {where}', "balanced parentheses", 'add "("')
            groups.append(tuple(open_group))
            open_group = None
        elif token == "1":
            if open_group is None:
                groups.append(())
        else:
            _check_name(token, text)
            if token in seen:
                what = "two ellipses" if token == ELLIPSIS else f'axis "{token}" twice'
                raise fault(
                    text,
                    f"{what} on the {where}",
                    "each name once on a side",
                    "one ellipsis and names for the other axes"
                    if token == ELLIPSIS
                    else f'another name for one of them, as in "{token}2"',
                )
            seen.add(token)
            if open_group is None:
                groups.append((token,))
            else:
                open_group.append(token)
    if open_group is not None:
        raise fault(text, f'"(" without ")" on the {where}', "balanced parentheses", 'add ")"')
    return tuple(groups)


def _tokens(side: str, text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(side):
        token = match.group()
        if token.isspace():
            continue
        if token != ELLIPSIS and token not in "()" and not re.match(r"\w", token):
            raise fault(
                text,
                f"unknown character {token!r}",
                "names, parentheses, 1, an ellipsis of three dots, spaces",
                "spaces between names" if token in ",;" else f"remove {token!r}",
            )
        yield token


def _check_name(name: str, text: str) -> None:
    if name == ELLIPSIS:
        return
    if name.isdecimal():
        raise fault(
            text,
            f"the number {name} as an axis",
            "names, or 1 for an axis of length 1",
            f'a name and its size: rearrange(x, "... n ...", n={name})',
        )
    if not name.isidentifier() or name[0] == "_" or name[-1] == "_":
        raise fault(
            text,
            f'"{name}" cannot be the name of an axis',
            'letters, digits and inner underscores, not starting with a digit, as in "h2"',
            "rename the axis",
        )


def fault(text: str, what: str, expected: str, hint: str) -> PatternError:
    """The error for something wrong with a pattern; whoever knows shape and mesh adds them."""
    return PatternError(f"rearrange: {what}", given=f'"{text}"', expected=expected, hint=hint)
