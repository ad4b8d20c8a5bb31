"""What a user wrote about how a module is split: read, and matched with the names of its parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from meshcomm.layout.names import did_you_mean

Entry: TypeAlias = str | Mapping[str, Any]

# What each style may be told beside "set".
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "column": ("parts", "output"),
    "row": (),
    "vocab": (),
    "attention": (),
    "enter": ("args",),
    "sequence": (),
    "replicate": ("input", "output", "axis", "args"),
}


@dataclass(frozen=True)
class Rule:
    """How one part of a module is treated. style "": only attributes are set."""

    style: str = ""
    parts: int | tuple[int, ...] = 1
    output: str = "split"
    input: str = "split"
    axis: int | None = None
    args: tuple[int | str, ...] = (0,)
    set: Mapping[str, Any] = field(default_factory=dict)


def read(plan: Mapping[str, Entry]) -> tuple[dict[str, Rule], list[str]]:
    """The rules by pattern, and what is wrong with the others."""
    rules, problems = {}, []
    for pattern, entry in plan.items():
        found = _rule(entry)
        if isinstance(found, Rule):
            rules[pattern] = found
        else:
            problems.append(f'"{pattern}": {found}')
    return rules, problems


def _rule(entry: object) -> Rule | str:
    if isinstance(entry, str):
        style, _, more = entry.partition(":")
        given: dict[str, Any] = {"style": style}
        if more:
            given |= {"parts": int(more)} if more.isdecimal() else {"output": more}
    elif isinstance(entry, Mapping):
        given = dict(entry)
    else:
        return f'{entry!r} is neither a style such as "column" nor a mapping such as {{"style": "column"}}'
    style = given.pop("style", "")
    known = _OPTIONS.get(style, ()) if style else ()
    if style not in _OPTIONS and (style or "set" not in given):
        named = ", ".join(f'"{name}"' for name in _OPTIONS)
        return _with_guess(f"style {style!r} is none of {named}", style, _OPTIONS)
    for name in given:
        if name not in (*known, "set"):
            allowed = ", ".join(("style", *known, "set"))
            what = f'style "{style}"' if style else "an entry without a style"
            return _with_guess(f"{what} has no {name!r}; it has {allowed}", name, (*known, "set"))
    for name in ("input", "output"):
        if given.get(name, "split") not in ("split", "whole"):
            return f'{name} is {given[name]!r}; it is "split" or "whole"'
    parts = given.get("parts", 1)
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        parts = given["parts"] = tuple(parts)
    numbers = parts if isinstance(parts, tuple) else (parts,)
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        return f"parts is {parts!r}; it is a number of equal parts such as 3, or their sizes"
    args = given.get("args", (0,))
    if not isinstance(args, (list, tuple)) or not all(isinstance(arg, (int, str)) for arg in args):
        return f"args is {args!r}; it lists arguments of forward, as in [0] or ['hidden_states']"
    given["args"] = tuple(args)
    if given.get("output") == "whole" and style == "column" and parts != 1:
        return 'output "whole" of a column with parts would mix them up; leave one of the two out'
    if not isinstance(given.get("set", {}), Mapping):
        return f'set is {given["set"]!r}; it maps attributes to values, as in {{"heads": "split"}}'
    return Rule(style=style, **given)


def match(rules: Mapping[str, Rule], names: Iterable[str]) -> tuple[dict[str, Rule], list[str]]:
    """The rule of each name that some pattern matches, and what is wrong.

    "*" stands for any text within one component of a dotted name, "**" for any components. "" is the
    module itself. A name may have one style, and attributes set by any number of patterns.
    """
    names = list(names)
    found: dict[str, Rule] = {}
    said: dict[str, str] = {}
    problems = []
    for pattern, rule in rules.items():
        hits = [name for name in names if _matches(pattern.split("."), name.split("."))]
        if not hits:
            shapes = {
                ".".join("*" if c.isdecimal() else c for c in name.split(".")) for name in names if name
            }
            known = sorted(shapes | set(names) - {""})
            problems.append(_with_guess(f'"{pattern}" matches no part of the module', pattern, known))
        for name in hits:
            before = found.get(name, Rule())
            if before.style and rule.style:
                problems.append(f'"{name}" is matched by "{said[name]}" and by "{pattern}"; one style each')
            else:
                styled = rule if rule.style else before
                found[name] = replace(styled, set={**before.set, **rule.set})
                said[name] = pattern if rule.style else said.get(name, pattern)
    return found, problems


def _matches(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(pattern[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(pattern[1:], name[1:])


def _with_guess(text: str, word: object, known: Iterable[str]) -> str:
    guess = did_you_mean(str(word), known)
    return text if guess is None else f"{text}; {guess}"
