"""The base of every section: frozen, strict, and a report of all that is wrong instead of the first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from meshcomm.config.faults import Fault
from meshcomm.config.problems import Broken, Problem, report
from meshcomm.config.wording import key_path, toml
from meshcomm.errors import ConfigError

M = TypeVar("M", bound="Model")


class Model(BaseModel):
    """A section of a configuration. Made directly or read from a file, it is checked the same way.

    Raises ConfigError with every problem found.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        _, problems = check(type(self), data)
        if problems:
            raise report(type(self).__name__, problems)
        super().__init__(**data)

    # Validation from a file makes nested sections without calling __init__, so that problems of
    # all sections come together. pydantic decides by this mark (tried on 2.14).
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """What is wrong between settings that are right by themselves; keys relative to the section.

        Settings that `broken` names have been reported; nothing is concluded from them.
        """
        return iter(())

    def given(self, field: str) -> bool:
        """Whether a setting was written down, rather than left to its default."""
        return field in self.model_fields_set and getattr(self, field) is not None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._refuse(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigError(
            "a configuration does not change",
            given=f"a change of {type(self).__name__}.{name}",
            expected="a new configuration",
            hint='meshcomm.config.load(config, ["mesh.dims.tp=4"])',
        )


def check(model: type[M], data: Mapping[str, Any]) -> tuple[M, list[Problem]]:
    """`data` as a model, and all that is wrong with it.

    Where something is wrong, the model holds stand-ins for it and is of use to nobody else.
    """
    problems: list[Problem] = []
    draft = _named(data, (), problems)
    broken = Broken()
    while True:
        try:
            found = model.model_validate(draft)
            break
        except ValidationError as error:
            faults = [Fault(model, item) for item in error.errors(include_url=False)]
            # Unknown keys first: they tell which missing ones are only misspelt.
            faults.sort(key=lambda fault: fault.type != "extra_forbidden")
            for fault in faults:
                problem = fault.problem(broken, draft)
                if problem is not None:
                    problems.append(problem)
            if not sum(fault.mend(draft) for fault in faults):
                raise
    problems.extend(found.problems(broken))
    sections = list(model.model_fields)

    def place(problem: Problem) -> int:
        first = re.split(r"[^\w-]", problem.key, maxsplit=1)[0]
        return sections.index(first) if first in sections else -1

    return found, sorted(problems, key=place)


def plain(data: Any) -> Any:
    """A deep copy of tables and lists, as dicts and lists."""
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list):
        return [plain(value) for value in data]
    return data


def _named(data: Any, path: tuple[str, ...], problems: list[Problem]) -> Any:
    """A deep copy as dicts and lists, without keys that are no text (YAML has them)."""
    if isinstance(data, list):
        return [_named(value, path, problems) for value in data]
    if not isinstance(data, Mapping):
        return data
    copy: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(key, str):
            copy[key] = _named(value, (*path, key), problems)
        else:
            problems.append(
                Problem(
                    key_path([*path, str(key)]),
                    "the key is not text",
                    given=f"{toml(key)} = {toml(value)}",
                    expected="a name",
                    hint=f"write it in quotes: {toml(str(key))}",
                )
            )
    return copy
