"""What does `--set mesh.dims.tp=4` change?"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from meshcomm.config.problems import Problem
from meshcomm.config.wording import key_path, toml

# One key of a path, also as TOML writes one that is not of ASCII letters.
_PART = r'(?:[\w-]+|"[^"\\]+")'
_WORD = r"[^\s\"'\[\]{}=#,]+"


def apply(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Set every `KEY.PATH=VALUE` in `data`, in order; what cannot be set comes back as problems.

    VALUE is TOML, or a bare word, which is text. An empty VALUE removes the key. A key that is there
    keeps its place; a new one comes last.

    >>> data = {"mesh": {"dims": {"pp": 2, "tp": 2}}}
    >>> apply(data, ["mesh.dims.pp=4", "mesh.backend=gloo"]), data
    ([], {'mesh': {'dims': {'pp': 4, 'tp': 2}, 'backend': 'gloo'}})
    """
    return [problem for text in overrides if (problem := _apply(data, text)) is not None]


def shown(override: str) -> str:
    """An override on one line, as it is given on a command line."""
    return "--set " + override.replace("\n", "\\n")


def _apply(data: dict[str, Any], text: str) -> Problem | None:
    match = re.fullmatch(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=(.*)", text, re.DOTALL)
    if match is None:
        key = text.strip()
        bare = re.fullmatch(r"[\w.-]+", key)
        return Problem(
            shown(text),
            "not KEY=VALUE",
            given=text or "nothing",
            expected="a path of keys, =, and a TOML value, as in mesh.dims.tp=4",
            hint=f"--set {key}=..." if bare else "--set mesh.dims.tp=4",
        )
    path = [part.strip('"') for part in re.findall(_PART, match.group(1))]
    written = match.group(2).strip()
    if not written:
        return _remove(data, path, text)
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):  # TOMLDecodeError is a ValueError
        parsed = {}
    if list(parsed) == ["value"]:
        return _set(data, path, parsed["value"], text)
    # A shell has taken the quotes off: train.out=runs/x.
    if re.fullmatch(_WORD, written):
        return _set(data, path, written, text)
    return _not_toml(path, written, text)


def _set(data: dict[str, Any], path: list[str], value: Any, text: str) -> Problem | None:
    holder = data
    for depth, part in enumerate(path[:-1], start=1):
        if holder.get(part) is None:
            holder[part] = {}
        inside = holder[part]
        if not isinstance(inside, dict):
            outer, inner = key_path(path[:depth]), key_path(path[depth:])
            return Problem(
                shown(text),
                f"{outer} is not a table",
                given=f"{outer} = {toml(inside)}",
                expected="a table that the rest of the path can lie in",
                hint=f"--set '{outer}={{ {inner} = {toml(value)} }}'",
            )
        holder = inside
    holder[path[-1]] = value
    return None


def _remove(data: dict[str, Any], path: list[str], text: str) -> Problem | None:
    holder: Any = data
    for part in path[:-1]:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or path[-1] not in holder:
        return Problem(
            shown(text),
            f"there is no {key_path(path)} to remove",
            given=text,
            expected="a value behind the =, or a key that the file has",
            hint=f"--set {key_path(path)}=...",
        )
    del holder[path[-1]]
    return None


def _not_toml(path: list[str], written: str, text: str) -> Problem:
    line = written.replace("\n", "\\n")
    quoted = f"--set '{key_path(path)}={json.dumps(written, ensure_ascii=False)}'"
    return Problem(
        shown(text),
        f"{line} is not a TOML value",
        given=line,
        expected='a number, true, false, "text" in quotes, [ ... ] or { key = value }',
        hint=quoted if written[0] not in "[{\"'" else "close every quote and bracket, and write key = value",
    )
