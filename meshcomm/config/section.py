"""Base class of configuration sections. Sections are frozen and strict. Where every type is right, rules are checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from meshcomm.config.problems import Problem, report
from meshcomm.config.write import toml
from meshcomm.config.wrong_types import wrong_types
from meshcomm.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        "a configuration cannot be changed",
        given=f"a change to {what}",
        expected="a new configuration",
        hint='meshcomm.config.load_config(config, ["mesh.dims.tp=4"])',
    )


class Table(dict[K, V]):
    """An immutable dict. Two tables are equal only if their items are in the same order.

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

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"the table {dict(self)}")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def _as_tuple(value: object) -> object:
    # Files contain lists, but strict validation expects a tuple.
    return tuple(value) if isinstance(value, list) else value


def _without_nul(text: str) -> str:
    # No path and no variable can contain it.
    if "\0" in text:
        raise PydanticCustomError("nul", "text without the character U+0000")
    return text


def _function(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        raise PydanticCustomError("function", "a function as module:function")
    return text


FrozenTable: TypeAlias = Annotated[Mapping[str, T], AfterValidator(Table)]
FrozenList: TypeAlias = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
Pair: TypeAlias = Annotated[tuple[T, T], BeforeValidator(_as_tuple)]
TextOrEmpty: TypeAlias = Annotated[str, AfterValidator(_without_nul)]
Text: TypeAlias = Annotated[TextOrEmpty, Field(min_length=1)]
Function: TypeAlias = Annotated[Text, AfterValidator(_function)]
Arguments: TypeAlias = FrozenTable[str | int | float | bool]
# Backends count milliseconds in 32 bits.
Seconds: TypeAlias = Annotated[float, Field(le=1_000_000)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


Rule: TypeAlias = Callable[[Any], Iterable[Problem]]


@dataclass(frozen=True)
class NoEffect:
    """A rule: settings that have no effect unless another setting of the section has a suitable value.

    fields: names of the settings, separated by spaces. False and empty values count as unset.
    needs: names of the other settings, or of a property that returns a setting's name. If `values` is empty, at least one of
    them must be set; otherwise at least one must have a value in `values`, or be a tuple with one. way: a setting that gives
    `fields` an effect, or advice. why: replaces the reason in the report.
    """

    fields: str
    needs: str
    values: tuple[object, ...] = ()
    way: str | None = None
    why: str | None = None

    def __call__(self, section: Section) -> Iterator[Problem]:
        """Yield a problem for each listed setting that has no effect."""
        place, names = section.place, self.needs.split()
        for field in self.fields.split():
            value = section.at(field)
            asked = any(dict(value).values()) if isinstance(value, Section) else value
            if not section.given(field) or asked is False or asked in ((), {}):
                continue
            held = [section.at(name) for name in names]
            each_held = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in held)
            if any(each in self.values if self.values else each for each in each_held):
                continue
            need = f"{place}.{names[0]}"
            if not section.has(names[0]):
                why, expected = "", " or ".join(f"{place}.{value}" for value in self.values)
            elif self.values == (None,):
                why, expected = f" with {need}", f"no {need}"
            elif self.values:
                why = f" with {names[0]} = {toml(held[0])}"
                expected = f"{names[0]} = {' or '.join(map(toml, self.values))}"
            else:
                why, expected = f" without {need}", " or ".join(f"{place}.{name}" for name in names)
            ways = [] if self.way is None else [f"{place}.{self.way}" if " = " in self.way else self.way]
            tries = [*ways, f"remove {place}.{field}"]
            what = f"no effect{why if self.why is None else self.why}"
            known = " ".join(name for name in names if section.has(name))
            yield Problem(field, what, expected, tries, section.written(f"{field} {known}"))


class _Checked(ModelMetaclass):
    """Checks the sections that Python code creates. For the sections within a section, pydantic does not call the class."""

    if not TYPE_CHECKING:

        def __call__(cls, **data: Any) -> Any:
            section, problems = check(cls, data)
            if problems:
                raise report(cls.__name__, problems)
            return section


class Section(BaseModel, metaclass=_Checked):
    """A section of a configuration. Sections created in Python and sections read from a file are checked in the same
    way.

    Raises ConfigError, which lists every wrong type, choice and range or, if there is none, every problem that the rules find.
    """

    place: ClassVar[str] = ""  # its path in a file
    rules: ClassVar[tuple[Rule, ...]] = ()  # rules between its settings
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        # Only where `problems` suggests a value: strict sections take text alone.
        coerce_numbers_to_str=True,
    )

    @classmethod
    @cache
    def descriptions(cls) -> Mapping[str, str]:
        """Return the docstring of each setting, by name. They are read when they are needed, because reading the docstrings of
        all sections takes as long as importing them.
        """
        import ast
        import inspect
        import textwrap

        found: dict[str, str] = {}
        for part in reversed(cls.__mro__):
            if issubclass(part, Section):
                (defined,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
                assert isinstance(defined, ast.ClassDef)
                for setting, text in pairwise(defined.body):
                    match setting, text:
                        case (
                            ast.AnnAssign(target=ast.Name(name)),
                            ast.Expr(ast.Constant(str(words))),
                        ):
                            found[name] = inspect.cleandoc(words)
        return {name: found[name] for name in cls.model_fields if name in found}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(core)
        settings = handler.resolve_ref_schema(found)["properties"]
        for name, text in cls.descriptions().items():
            settings[name]["description"] = text
        return found

    def problems(self) -> Iterator[Problem]:
        """Yield problems with combinations of settings that are valid individually. Keys are relative to the section."""
        for rule in self.rules:
            yield from rule(self)

    def given(self, field: str) -> bool:
        """Return whether a setting was set explicitly instead of left at its default."""
        inner, _, last = field.rpartition(".")
        section = self.at(inner) if inner else self
        return last in section.model_fields_set and getattr(section, last) is not None

    def has(self, field: str) -> bool:
        """Return whether `field` is a setting of this section, or the path of a setting in one of its tables, such as
        `options.schedule`.
        """
        return field.partition(".")[0] in type(self).model_fields

    def at(self, field: str) -> Any:
        """Return the value of a setting, by its name or path."""
        value: Any = self
        for name in field.split("."):
            value = getattr(value, name)
        return value

    def written(self, fields: str) -> str:
        """Format settings for a report. fields: names or paths, separated by spaces."""
        values = {field.rpartition(".")[2]: self.at(field) for field in fields.split()}
        return ", ".join(
            f"no {name}" if value is None else f"{name} = {toml(value)}" for name, value in values.items()
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            _refuse(f"{type(self).__name__}.{name}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _refuse(f"{type(self).__name__}.{name}")


M = TypeVar("M", bound=Section)


def too_large(section: Section, field: str, limit: str, why: str) -> Iterator[Problem]:
    """Yield a problem if `field` exceeds the first setting in `limit`. The report shows all settings in `limit`."""
    most = limit.partition(" ")[0]
    value, largest = section.at(field), section.at(most)
    if value > largest:
        ways = [f"{section.place}.{field} = {largest}", f"{section.place}.{most} = {value}"]
        given = section.written(f"{field} {limit}")
        yield Problem(field, f"{why}: {value} > {largest}", f"at most {largest}", ways, given)


def one_of(section: Section, fields: str, what: str) -> Iterator[Problem]:
    """Yield a problem for the last set field if more than one of `fields` is set. what: a plural noun for the fields."""
    named = [field for field in fields.split() if section.at(field)]
    if len(named) > 1:
        ways, given = [f"remove {section.place}.{field}" for field in named], section.written(" ".join(named))
        yield Problem(named[-1], f"{len(named)} {what}: {', '.join(named)}", "one of them", ways, given)


def check(model: type[M], data: Mapping[str, Any]) -> tuple[M | None, list[Problem]]:
    """Return a section created from `data`, and its problems, in the order of the section's fields.

    If a setting has a wrong type, the section is None and the problems are those of types. Otherwise, they are those that the
    rules find.
    """
    section = None
    try:
        section = model.model_validate(data)
    except ValidationError as error:
        problems = wrong_types(model, data, error)
    else:
        problems = list(section.problems())
    places = {key: place for place, key in enumerate(model.model_fields)}
    problems.sort(key=lambda problem: places.get(re.split(r"[^\w-]", problem.key, maxsplit=1)[0], -1))
    return section, problems
