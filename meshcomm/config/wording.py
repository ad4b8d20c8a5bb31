"""How settings, values and types are written for the person who reads a report."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshcomm.layout.names import nearest_name

_WIDEST = 72


def key_path(parts: Iterable[str | int]) -> str:
    """A path as it is written in TOML; positions in a list in brackets.

    >>> key_path(["mesh", "rank_order", 3])
    'mesh.rank_order[3]'
    """
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        plain = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        text += ("." if text else "") + (part if plain else json.dumps(part, ensure_ascii=False))
    return text


def toml(value: Any) -> str:
    """A value as it is written in TOML, cut where it is long.

    >>> toml({"dp": 2, "on": True, "name": "x"})
    '{ dp = 2, on = true, name = "x" }'
    """
    text = whole_toml(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 4] + " ..."


def whole_toml(value: Any) -> str:
    """As `toml`, however long it is: what a file may hold."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, BaseModel):
        return whole_toml(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key_path([str(key)])} = {whole_toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(whole_toml, value)) + "]"
    return str(value)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting may hold: its type without `None`, the bounds on it, and a value that is right.

    words: the values that it may hold beside those of its type.
    """

    type: Any
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    filled: bool = False
    example: Any = None
    words: tuple[Any, ...] = ()

    @classmethod
    def of(cls, annotation: Any, metadata: Iterable[Any] = ()) -> Kind:
        """The kind that an annotation and pydantic's metadata describe."""
        found = list(metadata)
        words: tuple[Any, ...] = ()
        while True:
            origin = get_origin(annotation)
            if origin is Annotated:
                annotation, *more = get_args(annotation)
                found.extend(more)
            elif origin is Union or origin is types.UnionType:
                annotation, *rest = (arg for arg in get_args(annotation) if arg is not type(None))
                words += tuple(word for arg in rest if get_origin(arg) is Literal for word in get_args(arg))
            else:
                break
        bounds: dict[str, Any] = {"words": words}
        while found:
            item = found.pop()
            if isinstance(item, FieldInfo):
                found.extend(item.metadata)
                if item.examples:
                    bounds["example"] = item.examples[0]
            for bound, name in (("ge", "low"), ("gt", "above"), ("le", "high"), ("lt", "below")):
                if getattr(item, bound, None) is not None:
                    bounds[name] = getattr(item, bound)
            if getattr(item, "min_length", None):
                bounds["filled"] = True
        return cls(annotation, **bounds)

    @property
    def model(self) -> type[BaseModel] | None:
        """The model, where the setting is a section of its own."""
        return self.type if isinstance(self.type, type) and issubclass(self.type, BaseModel) else None

    @property
    def element(self) -> Kind | None:
        """What a table's values or a list's entries may be; None for a plain value."""
        args = get_args(self.type)
        if self.is_table:
            return Kind.of(args[1])
        return Kind.of(args[0]) if get_origin(self.type) is tuple else None

    @property
    def is_table(self) -> bool:
        """Whether it is a table with free keys."""
        origin = get_origin(self.type)
        return isinstance(origin, type) and issubclass(origin, Mapping)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a choice, or nothing."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def noun(self, plural: bool = False) -> str:
        """In words, without the bounds.

        >>> Kind.of(int).noun(), Kind.of(tuple[str, ...]).noun()
        ('a whole number', 'a list of texts in quotes')
        """
        if self.choices:
            return "one of " + ", ".join(map(toml, self.choices))
        element = self.element
        if self.is_table and element is not None:
            return ("tables" if plural else "a table") + f" of {element.noun(plural=True)}"
        if element is not None:
            args = get_args(self.type)
            count = "" if Ellipsis in args else f"{len(args)} "
            return ("lists" if plural else "a list") + f" of {count}{element.noun(plural=True)}"
        if self.model is not None:
            return "tables" if plural else "a table with " + ", ".join(self.model.model_fields)
        singular, several = {
            int: ("a whole number", "whole numbers"),
            float: ("a number", "numbers"),
            str: ("text in quotes", "texts in quotes"),
            bool: ("true or false", "true or false"),
        }[self.type]
        return several if plural else singular

    def __str__(self) -> str:
        return ", or ".join([self._bounded(), *map(toml, self.words)])

    def _bounded(self) -> str:
        text = self.noun()
        if self.low is not None and self.high is not None:
            return f"{text} from {self.low:g} to {self.high:g}"
        if self.low is not None and self.below is not None:
            return f"{text} from {self.low:g} to below {self.below:g}"
        if self.low is not None:
            return f"{text} of {self.low:g} or more"
        if self.above is not None:
            return f"{text} above {self.above:g}"
        return f"{text}, not empty" if self.filled else text

    def nearest(self, value: Any) -> Any:
        """The valid value that was probably meant, or None."""
        if self.choices:
            words = {str(toml(choice)).strip('"').lower(): choice for choice in self.choices}
            near = nearest_name(str(toml(value)).strip('"').lower(), words)
            return None if near is None else words[near]
        if isinstance(value, str) and self.words:
            return nearest_name(value.lower(), self.words)
        if self.type is bool:
            said = str(value).strip().lower()
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(said)
        if self.type is str:
            plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            return str(value) if plain else None
        if self.type in (int, float):
            return self._nearest_number(value)
        element = self.element
        if element is not None and get_origin(self.type) is tuple and Ellipsis in get_args(self.type):
            right = type(value) is element.type or (element.type is float and type(value) is int)
            return [value] if right else None
        return None

    def _nearest_number(self, value: Any) -> int | float | None:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        if isinstance(value, bool) or not math.isfinite(number):
            return None
        if self.low is not None:
            number = max(number, self.low)
        if self.high is not None:
            number = min(number, self.high)
        outside = (self.above is not None and number <= self.above) or (
            self.below is not None and number >= self.below
        )
        if outside:
            return None
        return number if self.type is float else round(number)
