"""What pydantic found, in our words, and what stands in for it while the rest is checked."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshcomm.config.problems import Broken, Problem
from meshcomm.config.wording import Kind, key_path, toml
from meshcomm.layout.names import nearest_name


class Fault:
    """One of pydantic's findings, read with our models beside it."""

    def __init__(self, model: type[BaseModel], item: Any) -> None:
        self.root = model
        self.type: str = item["type"]
        self.value: Any = item["input"]
        self.path: tuple[str | int, ...] = tuple(part for part in item["loc"] if part != "[key]")
        # owner: the model whose field is at fault; kind: what is expected at the path's end;
        # depth: how many parts of the path lead to the innermost field of a model.
        self.owner: type[BaseModel] = model
        self.field: FieldInfo | None = None
        self.depth = 0
        kind: Kind | None = Kind(model)
        for index, part in enumerate(self.path):
            inner = kind.model if kind is not None else None
            if inner is not None:
                self.owner = inner
                self.depth = index + 1
                self.field = inner.model_fields.get(str(part))
                kind = None if self.field is None else Kind.of(self.field.annotation, self.field.metadata)
            elif kind is not None and kind.words:
                # A number or a word: pydantic tells of each by itself.
                self.path = self.path[:index]
                break
            elif kind is not None:
                kind = kind.element
        # A list of the wrong length is the fault of the whole list, not of the entry that is not there.
        if self.type == "missing" and isinstance(self.path[-1], int) and self.field is not None:
            self.path = self.path[:-1]
            self.type = "too_short"
            kind = Kind.of(self.field.annotation, self.field.metadata)
        self.kind = kind

    @property
    def key(self) -> str:
        """The path of the setting, as it is reported."""
        return key_path(self.path)

    def mend(self, draft: dict[str, Any]) -> bool:
        """Put something valid in the place of what is wrong, so that the rest can be checked."""
        holder: Any = draft
        for depth, part in enumerate(self.path, start=1):
            if not isinstance(holder, dict):
                return False
            inside = holder.get(part)
            if depth < len(self.path) and isinstance(inside, dict):
                holder = inside
                continue
            needed = depth == self.depth and self.field is not None and self.field.is_required()
            if needed and self.field is not None and self.field.examples:
                holder[part] = deepcopy(self.field.examples[0])
                return True
            if part in holder:
                del holder[part]
                return True
            return False
        return False

    def problem(self, broken: Broken, draft: dict[str, Any]) -> Problem | None:
        """In our words; None where it only follows from what was reported before."""
        names = tuple(str(part) for part in self.path)
        if self.type == "extra_forbidden":
            return self._unknown_key(broken, draft, names)
        if self.type == "missing":
            return self._missing(broken, names)
        if self.kind is not None and self.kind.words and names in list(broken):
            return None
        broken.add(names)
        shown = self.path[-2:] if isinstance(self.path[-1], int) else self.path[-1:]
        kind = self.kind
        if kind is None:
            raise AssertionError(f"pydantic found {self.type} at {self.path}, where no setting is")
        return Problem(
            self.key,
            self._what(kind),
            given=f"{key_path(shown)} = {toml(self.value)}",
            expected=str(kind),
            hint=self._hint(kind),
        )

    def _what(self, kind: Kind) -> str:
        value = toml(self.value)
        if kind.choices:
            return f"{value} is not one of the choices"
        if self.type == "finite_number":
            return f"{value} is not finite"
        if self.type in ("too_short", "too_long", "string_too_short"):
            return "empty" if not self.value else f"{len(self.value)} value{'s' * (len(self.value) > 1)}"
        if self.type in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            return f"{value} is out of range"
        if kind.model is not None:
            return f"{value} is not a table"
        return f"{value} is not " + " or ".join([kind.noun(), *map(toml, kind.words)])

    def _hint(self, kind: Kind) -> str | None:
        near = kind.nearest(self.value)
        if near is not None:
            return f"{self.key} = {toml(near)}"
        field = self.field
        if kind.example is not None:
            return f"{self.key} = {toml(kind.example)}"
        whole = key_path(self.path[: self.depth])
        if field is not None and field.examples and len(self.path) == self.depth:
            return f"{whole} = {toml(field.examples[0])}"
        default = None if field is None else field.get_default(call_default_factory=True)
        if default is None or isinstance(default, BaseModel) or default in ({}, ()):
            return f"remove {self.key}"
        return f"{whole} = {toml(default)}"

    def _missing(self, broken: Broken, names: tuple[str, ...]) -> Problem | None:
        if broken.touches(".".join(names)):
            return None
        broken.add(names)
        example = self.field.examples[0] if self.field is not None and self.field.examples else None
        return Problem(
            self.key,
            "missing",
            given=f"no {names[-1]}",
            expected=str(self.kind),
            hint=f"{self.key} = {toml(example)}",
        )

    def _unknown_key(self, broken: Broken, draft: dict[str, Any], names: tuple[str, ...]) -> Problem:
        *above, last = names
        beside: Any = draft
        for part in above:
            beside = beside[part]
        known = list(self.owner.model_fields)
        near = nearest_name(last, known)
        home = self._home(last)
        if home is not None:
            hint = f"move it to {home}"
        elif near is not None:
            if near not in beside:
                # It is there under another name: no follow-up report that it is missing.
                broken.add((*above, near))
            hint = f'did you mean "{key_path([*above, near])}"?'
        else:
            hint = f"remove {self.key}"
        given = f"{key_path([last])} = {toml(self.value)}"
        return Problem(self.key, "unknown key", given, "one of " + ", ".join(known), hint)

    def _home(self, name: str) -> str | None:
        """Where a key of exactly this name belongs, if it is in one section only."""
        homes = []
        for section, field in self.root.model_fields.items():
            model = Kind.of(field.annotation).model
            if model is not None and name in model.model_fields:
                homes.append(f"{section}.{name}")
        return homes[0] if len(homes) == 1 else None
