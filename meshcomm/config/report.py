"""What pydantic finds wrong, in our words, and what stands in for it while the rest is checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from meshcomm.config.problems import Broken, Problem
from meshcomm.config.write import key_path, toml
from meshcomm.layout.names import nearest_name

M = TypeVar("M", bound=BaseModel)
# A setting as the JSON schema of its model has it: type, bounds, choices, examples.
Kind: TypeAlias = Mapping[str, Any]

_NOUNS: Final = {
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "string": ("text in quotes", "texts in quotes"),
    "boolean": ("true or false", "true or false"),
}
_SAID: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def validated(model: type[M], data: Mapping[str, Any]) -> tuple[M, Broken, list[Problem]]:
    """`data` as a model, which of its settings are wrong by themselves, and the problems with them.

    Where something is wrong, the model holds stand-ins for it.
    """
    problems: list[Problem] = []
    draft = plain(data, problems)
    broken = Broken()
    while True:
        try:
            return model.model_validate(draft), broken, problems
        except ValidationError as error:
            # Unknown keys first: they tell which missing ones are only misspelt.
            items = sorted(
                error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden"
            )
            findings = [_Finding(model, item) for item in items]
            problems += (problem for each in findings if (problem := each.problem(broken, draft)) is not None)
            if not sum(each.mend(draft) for each in findings):
                raise


def plain(data: Any, problems: list[Problem] | None = None, path: tuple[str, ...] = ()) -> Any:
    """A deep copy of tables and lists, as dicts and lists.

    problems: where keys that are not text (YAML has them) are reported and left out; None: they stay.
    """
    if isinstance(data, list):
        return [plain(value, problems, path) for value in data]
    if not isinstance(data, Mapping):
        return data
    copy: dict[Any, Any] = {}
    for key, value in data.items():
        if problems is None or isinstance(key, str):
            copy[key] = plain(value, problems, (*path, str(key)))
        else:
            problems.append(
                Problem(
                    "the key is not text",
                    "a name",
                    [f"write it in quotes: {toml(str(key))}"],
                    f"{toml(key)} = {toml(value)}",
                    key_path([*path, str(key)]),
                )
            )
    return copy


@cache
def _schema(model: type[BaseModel]) -> Kind:
    return model.model_json_schema()


def _words(kind: Kind) -> list[Any]:
    """The values that a setting may hold beside those of its type."""
    return [part["const"] for part in kind.get("anyOf", [])[1:] if "const" in part]


class _Finding:
    """One of pydantic's findings, with the setting that it is about.

    path: the setting. depth: how many parts of it lead to the innermost key that a model knows; kind: that setting
    as its model has it. value_kind: what is expected at the path's end. siblings: the keys beside its end.
    """

    def __init__(self, model: type[BaseModel], item: Any) -> None:
        self.root = _schema(model)
        self.type: str = item["type"]
        self.value: Any = item["input"]
        self.path: tuple[str | int, ...] = tuple(part for part in item["loc"] if part != "[key]")
        self.field: Kind = {}
        self.needed = False
        self.depth = 0
        self.siblings: list[str] = []
        kind = self.root
        for index, part in enumerate(self.path):
            if "properties" in kind:
                self.siblings, self.depth = list(kind["properties"]), index + 1
                self.needed = part in kind.get("required", ())
                self.field = kind["properties"].get(part, {})
                kind = self._of(self.field)
            elif _words(kind):
                # A number or a word: pydantic tells of each by itself.
                self.path = self.path[:index]
                break
            else:
                kind = self._inside(kind)
        # A list of the wrong length is the fault of the whole list, not of the entry that is not there.
        if self.type == "missing" and isinstance(self.path[-1], int):
            self.path, self.type, kind = self.path[:-1], "too_short", self._of(self.field)
        self.kind = kind
        self.key = key_path(self.path)

    def _of(self, field: Kind) -> Kind:
        """The kind of a setting that is given: of a model its schema, without null."""
        parts = [part for part in field.get("anyOf", ()) if part.get("type") != "null"]
        if len(parts) == 1:
            field = {**{key: field[key] for key in field if key != "anyOf"}, **parts[0]}
        elif parts:
            field = {**field, **parts[0], "anyOf": parts}
        return self.root["$defs"][field["$ref"].rsplit("/", 1)[1]] if "$ref" in field else field

    def _inside(self, kind: Kind) -> Kind:
        """What a table's values or a list's entries may be; nothing for a plain value."""
        inner = kind.get("additionalProperties") or kind.get("items") or kind.get("prefixItems", [{}])[0]
        return self._of(inner if isinstance(inner, Mapping) else {})

    def mend(self, draft: dict[str, Any]) -> bool:
        """Put something valid in the place of what is wrong, so that the rest can be checked."""
        holder: Any = draft
        for depth, part in enumerate(self.path, start=1):
            inside = holder.get(part)
            if depth < len(self.path) and isinstance(inside, dict):
                holder = inside
                continue
            if depth == self.depth and self.needed and "examples" in self.field:
                holder[part] = deepcopy(self.field["examples"][0])
                return True
            return holder.pop(part, self) is not self
        return False

    def problem(self, broken: Broken, draft: dict[str, Any]) -> Problem | None:
        """In our words; None where it only follows from what was reported before."""
        names = tuple(str(part) for part in self.path)
        if self.type == "extra_forbidden":
            return self._unknown_key(broken, draft, names)
        if self.type == "missing":
            if broken.touches(".".join(names)):
                return None
            broken.add(names)
            example = toml(self.field["examples"][0]) if "examples" in self.field else "..."
            return Problem(
                "missing", self._expected(), [f"{self.key} = {example}"], f"no {names[-1]}", self.key
            )
        if _words(self.kind) and names in broken:
            return None
        broken.add(names)
        shown = self.path[-2:] if isinstance(self.path[-1], int) else self.path[-1:]
        given = f"{key_path(shown)} = {toml(self.value)}"
        return Problem(self._what(), self._expected(), [self._hint()], given, self.key)

    def _what(self) -> str:
        value = toml(self.value)
        if "enum" in self.kind or "const" in self.kind:
            return f"{value} is not one of the choices"
        if self.type == "finite_number":
            return f"{value} is not finite"
        if self.type in ("too_short", "too_long", "string_too_short"):
            return "empty" if not self.value else f"{len(self.value)} value{'s' * (len(self.value) > 1)}"
        if self.type in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            return f"{value} is out of range"
        if "properties" in self.kind:
            return f"{value} is not a table"
        return f"{value} is not " + " or ".join([self._noun(self.kind), *map(toml, _words(self.kind))])

    def _expected(self) -> str:
        kind, words = self.kind, _words(self.kind)
        others = [part for part in kind.get("anyOf", [])[1:] if words and "const" not in part]
        return ", or ".join([self._bounded(kind), *map(toml, words), *map(self._bounded, others)])

    def _bounded(self, kind: Kind) -> str:
        """What a setting holds, in words, with its bounds."""
        low, high = kind.get("minimum"), kind.get("maximum")
        text = self._noun(kind)
        if low is not None and high is not None:
            text += f" from {low:g} to {high:g}"
        elif low is not None and "exclusiveMaximum" in kind:
            text += f" from {low:g} to below {kind['exclusiveMaximum']:g}"
        elif low is not None:
            text += f" of {low:g} or more"
        elif "exclusiveMinimum" in kind:
            text += f" above {kind['exclusiveMinimum']:g}"
        elif "minLength" in kind:
            text += ", not empty"
        return text

    def _noun(self, kind: Kind, plural: bool = False) -> str:
        """What a setting holds, in words and without its bounds."""
        if "enum" in kind or "const" in kind:
            return "one of " + ", ".join(map(toml, kind.get("enum") or [kind["const"]]))
        if "properties" in kind:
            return "tables" if plural else "a table with " + ", ".join(kind["properties"])
        if kind["type"] in _NOUNS:
            return _NOUNS[kind["type"]][plural]
        several = self._noun(self._inside(kind), plural=True)
        if kind["type"] == "object":
            return f"{'tables' if plural else 'a table'} of {several}"
        number = f"{kind['minItems']} " if "prefixItems" in kind else ""
        return f"{'lists' if plural else 'a list'} of {number}{several}"

    def _hint(self) -> str:
        near = self._nearest()
        if near is not None:
            return f"{self.key} = {toml(near)}"
        whole = key_path(self.path[: self.depth])
        if "examples" in self.kind and len(self.path) > self.depth:
            return f"{self.key} = {toml(self.kind['examples'][0])}"
        if "examples" in self.field and len(self.path) == self.depth:
            return f"{whole} = {toml(self.field['examples'][0])}"
        default = self.field.get("default")
        if default is None or isinstance(default, dict) or default == []:
            return f"remove {self.key}"
        return f"{whole} = {toml(default)}"

    def _nearest(self) -> Any:
        """The valid value that was probably meant, or None."""
        kind, value = self.kind, self.value
        choices = kind.get("enum") or ([kind["const"]] if "const" in kind else [])
        if choices:
            by_word = {toml(choice).strip('"').lower(): choice for choice in choices}
            near = nearest_name(toml(value).strip('"').lower(), by_word)
            return None if near is None else by_word[near]
        if isinstance(value, str) and _words(kind):
            return nearest_name(value.lower(), _words(kind))
        if kind.get("type") == "boolean":
            return _SAID.get(str(value).strip().lower())
        if kind.get("type") == "string":
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return str(value) if is_number else None
        if kind.get("type") in ("integer", "number"):
            return _nearest_number(kind, value)
        if "items" in kind:
            python = {"string": str, "integer": int}.get(self._inside(kind).get("type", ""))
            return [value] if type(value) is python else None
        return None

    def _unknown_key(self, broken: Broken, draft: dict[str, Any], names: tuple[str, ...]) -> Problem:
        *above, last = names
        beside: Any = draft
        for part in above:
            beside = beside[part]
        near = nearest_name(last, self.siblings)
        homes = [f"{section}.{last}" for section in self._sections_with(last)]
        if len(homes) == 1:
            way = f"move it to {homes[0]}"
        elif near is not None:
            if near not in beside:
                # It is there under another name: no follow-up report that it is missing.
                broken.add((*above, near))
            way = f'did you mean "{key_path([*above, near])}"?'
        else:
            way = f"remove {self.key}"
        given = f"{key_path([last])} = {toml(self.value)}"
        return Problem("unknown key", "one of " + ", ".join(self.siblings), [way], given, self.key)

    def _sections_with(self, key: str) -> Iterator[str]:
        for section, field in self.root["properties"].items():
            if key in self._of(field).get("properties", {}):
                yield section


def _nearest_number(kind: Kind, value: Any) -> int | float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if isinstance(value, bool) or not math.isfinite(number):
        return None
    number = min(max(number, kind.get("minimum", -math.inf)), kind.get("maximum", math.inf))
    if not kind.get("exclusiveMinimum", -math.inf) < number < kind.get("exclusiveMaximum", math.inf):
        return None
    whole: bool = kind["type"] == "integer"
    return round(number) if whole else float(number)
