"""What is a section of a configuration, and how are its rules run? Frozen, strict, and with all that is wrong at once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from meshcomm.config.problems import Broken, Problem, report
from meshcomm.config.report import validated
from meshcomm.config.write import toml
from meshcomm.errors import ConfigError

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
S = TypeVar("S")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        "a configuration does not change",
        given=f"a change of {what}",
        expected="a new configuration",
        hint='meshcomm.config.load(config, ["mesh.dims.tp=4"])',
    )


class Table(dict[K, V]):
    """A dict that keeps its order and refuses changes. Two tables are equal where their order is equal too.

    >>> Table(dp=2, tp=4) == {"tp": 4, "dp": 2}, Table(dp=2, tp=4) == Table(tp=4, dp=2)
    (True, False)
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return list(self.items()) == list(other.items())
        return dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Table[K, V]:
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"the table {dict(self)}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _listed(value: object) -> object:
    # Files hold lists; strict validation wants the tuple that is kept.
    return tuple(value) if isinstance(value, list) else value


FrozenTable: TypeAlias = Annotated[Mapping[str, T], AfterValidator(Table)]
FrozenList: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_listed)]
Pair: TypeAlias = Annotated[tuple[T, T], BeforeValidator(_listed)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


def setting(default: Any, description: str, **bounds: Any) -> Any:
    """A setting that may be left out. Where its sentence does not say the default, that follows it."""
    said = (
        description
        if default is None or "Default" in description
        else f"{description} Default {toml(default)}."
    )
    return Field(default=default, description=said, **bounds)


class Rule(NamedTuple):
    """What must hold between settings.

    needs: the settings that it draws conclusions from; where one is wrong by itself, it is skipped.
    after: settings that no rule before it has refused; else it is skipped too.
    """

    needs: tuple[str, ...]
    after: tuple[str, ...]
    check: Callable[[Any], Iterable[Problem]]


_RULES: Final[dict[type, list[Rule]]] = defaultdict(list)


def rules_of(kind: type) -> list[Rule]:
    """The rules of a section, and of what it is a kind of."""
    return [rule for each in kind.__mro__ for rule in _RULES.get(each, ())]


def _written(section: Any, key: str) -> str:
    value = getattr(section, key)
    return f"no {key}" if value is None else f"{key} = {toml(value)}"


class Section(BaseModel):
    """A section of a configuration. Made directly or read from a file, it is checked the same way.

    Raises ConfigError with every problem found.
    """

    place: ClassVar[str]  # where it stands in a file
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError:
            problems = check(type(self), data)[1]
        else:
            problems = list(self.problems(Broken()))
        if problems:
            raise report(type(self).__name__, problems)

    # Validation from a file makes nested sections without calling __init__, so that problems of
    # all sections come together. pydantic decides by this mark (tried on 2.14).
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """What is wrong between settings that are right by themselves; keys relative to the section.

        Settings that `broken` names have been reported; nothing is concluded from them.
        """
        return run(rules_of(type(self)), self, broken, lambda key: _written(self, key))

    def given(self, field: str) -> bool:
        """Whether a setting was written down, rather than left to its default."""
        return field in self.model_fields_set and getattr(self, field) is not None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            _refuse(f"{type(self).__name__}.{name}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _refuse(f"{type(self).__name__}.{name}")


M = TypeVar("M", bound=Section)


def check(model: type[M], data: Mapping[str, Any]) -> tuple[M, list[Problem]]:
    """`data` as a section, and all that is wrong with it, in the order of its keys.

    Where something is wrong, the section holds stand-ins for it and is of use to nobody else.
    """
    found, broken, problems = validated(model, data)
    keys = list(model.model_fields)

    def place(problem: Problem) -> int:
        first = re.split(r"[^\w-]", problem.key, maxsplit=1)[0]
        return keys.index(first) if first in keys else -1

    return found, sorted([*problems, *found.problems(broken)], key=place)


def rule(
    section: type[S], *needs: str, after: tuple[str, ...] = ()
) -> Callable[[Callable[[S], Iterable[Problem]]], Callable[[S], Iterable[Problem]]]:
    """Make a function a rule of a section; rules are run in the order in which they are written.

    needs, after: as of Rule, keys relative to the section. A problem without a key has that of the first.
    """

    def added(check: Callable[[S], Iterable[Problem]]) -> Callable[[S], Iterable[Problem]]:
        _RULES[section].append(Rule(needs, after, check))
        return check

    return added


def no_effect(
    section: type[M],
    fields: str,
    needs: str,
    unless: Callable[[M], object],
    expected: str,
    *tries: str,
    why: str | None = None,
) -> None:
    """A rule for each of `fields` (names with spaces between them): without effect `unless` this holds.

    needs: the settings that decide it. tries: the ways out beside removing it. A setting that is false asks for
    nothing. why: what follows "no effect"; None: " with" and the first of `needs`.
    """
    for field in fields.split():

        def check(found: Any, field: str = field) -> Iterator[Problem]:
            if found.given(field) and getattr(found, field) is not False and not unless(found):
                said = f" with {_written(found, needs.split()[0])}" if why is None else why
                yield Problem(f"no effect{said}", expected, [*tries, f"remove {section.place}.{field}"])

        rule(section, field, *needs.split())(check)


def _is_unknown(found: Any, need: str) -> bool:
    """Whether a rule needs a number that a section may leave open, and it does."""
    section, _, key = need.rpartition(".")
    holder = getattr(found, section, None) if section else found
    field = type(holder).model_fields.get(key) if isinstance(holder, Section) else None
    return field is not None and field.annotation is int and getattr(holder, key) is None


def run(
    rules: Iterable[Rule], found: Any, broken: Broken, written: Callable[[str], str]
) -> Iterator[Problem]:
    """What the rules find, each problem with its key and what was given. written: a setting that a rule needs."""
    refused: set[str] = set()
    for needs, after, check in rules:
        if refused.intersection(after) or broken.touches(*needs):
            continue
        if len(needs) > 1 and any(_is_unknown(found, need) for need in needs):
            continue
        for problem in check(found):
            given = problem.given
            if given is None:
                given = ", ".join(filter(None, map(written, needs)))
            tries = list(problem.tries)
            problem = replace(problem, key=problem.key or needs[0], given=given, tries=tries)
            refused.add(problem.key.partition(".")[0])
            yield problem
