"""Problems in a configuration: a class for one problem, one error for all of them, and conversion of pydantic's errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from meshcomm.config.write import key_path, toml
from meshcomm.errors import ConfigError, LayoutError, MeshcommError
from meshcomm.layout.names import nearest_name

Path: TypeAlias = tuple[str | int, ...]
PydanticError: TypeAlias = Mapping[str, Any]

# How many problems of one kind an error lists.
_LISTED: Final = 8
_OPTIONS: Final = "attention bucket_mb reduce_dtype reshard schedule sequence_parallel stages_per_rank"
# Old key -> new key in the same section. The error for an old key names the new key.
RENAMED: Final[dict[str, str]] = {
    "data.sequence": "seq_len",
    "mesh.options.lane": "comm_id",
    "model.ff": "intermediate_size",
    "model.head": "head_dim",
    "model.heads": "num_heads",
    "model.kv_heads": "num_kv_heads",
    "model.layers": "num_layers",
    "model.vocabulary": "vocab_size",
    "model.width": "hidden_size",
    "train.global_batch": "global_batch_size",
    "train.microbatch": "micro_batch_size",
    "train.nonfinite": "on_nonfinite",
    "train.recompute": "activation_checkpointing",
    **{f"parallel.{key}": f"options.{key}" for key in _OPTIONS.split()},
}


class Fit(NamedTuple):
    """A computed fix: up to `most` sizes of the dim with this role that satisfy all rules, nearest first."""

    part: str
    most: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a configuration.

    key: the path of the setting, such as `mesh.dims.tp`. what: what is wrong, with the arithmetic. expected, given: as
         in MeshcommError. tries: possible fixes.
    """

    key: str
    what: str
    expected: str | None = None
    tries: Sequence[str | Fit] = ()
    given: str | None = None

    @property
    def hint(self) -> str | None:
        """The possible fixes as one string, or None if there are none."""
        return ", or\n".join(way for way in self.tries if isinstance(way, str)) or None

    def under(self, section: str) -> Problem:
        """Return the same problem with its key one level deeper."""
        return replace(self, key=f"{section}.{self.key}")

    def __str__(self) -> str:
        what = f"{self.key}: {self.what}"
        return str(MeshcommError(what, given=self.given, expected=self.expected, hint=self.hint))


def report(source: str, problems: Iterable[Problem]) -> ConfigError:
    """Return one error that lists all problems in `source` (the file name as given).

    Of the problems of one section with the same expectation, the first ones are listed in full, and the others are counted.
    """
    kinds: dict[tuple[str, str | None], list[str]] = {}
    lines = []
    for problem in problems:
        alike = kinds.setdefault((problem.key.rpartition(".")[0], problem.expected), [])
        alike.append(problem.key)
        if len(alike) <= _LISTED:
            lines.append(indent(str(problem), "  "))
    for keys in kinds.values():
        if more := keys[_LISTED:]:
            lines.append(f"  {more[0]} .. {more[-1]}: {len(more)} more problems like those of {keys[0]}")
    count = sum(map(len, kinds.values()))
    return ConfigError("\n".join([f"{source}: {count} problem{'s' * (count > 1)}", *lines]))


def refused(key: str, make: Callable[..., object], *args: Any, **options: Any) -> list[Problem]:
    """Call `make`. If it raises a LayoutError, return the error as a problem with the setting `key`."""
    try:
        make(*args, **options)
    except LayoutError as error:
        ways = [error.hint] if error.hint else []
        return [Problem(key, error.what, error.expected, ways, error.given)]
    return []


def nearest(value: int, fitting: Iterable[int], most: int = 2) -> list[int]:
    """Return the `most` numbers in `fitting` that are nearest to `value`, excluding `value` itself. In a tie, the
    larger number comes first.

    >>> nearest(8, range(3, 100, 3))
    [9, 6]
    """
    by_distance = sorted((abs(number - value), -number) for number in fitting if number != value)
    return [-negative for _, negative in by_distance[:most]]


def multiples(number: int, by: int, most: int = 2) -> list[int]:
    """Return the multiples of `by` nearest to `number`, nearest first, excluding `number` itself.

    >>> multiples(34, 16), multiples(5, 8)
    ([32, 48], [8])
    """
    below = number // by * by
    return nearest(number, {below, below + by} - {0}, most)


def remainder(number: int, by: int) -> str:
    """Return a remainder as text: `8 % 3 = 2`."""
    return f"{number} % {by} = {number % by}"


def quotient(number: int, by: int) -> str:
    """Return a division as a text prefix, such as `32/2 = 16, `, or "" for a division by 1."""
    return "" if by == 1 else f"{number}/{by} = {number // by}, "


# -- pydantic's errors ------------------------------------------------------------------------------

# The expected value for each type of pydantic error. For all other types, pydantic's own message is used.
_EXPECTED: Final = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "missing": "a longer list",
    "model_type": "a table",
    "string_too_short": "text that is not empty",
    "string_type": "text in quotes",
    "too_long": "a shorter list",
    "too_short": "a longer list",
    "tuple_type": "a list",
}
# Wrong types that a conversion may mend: "2" to 2, "yes" to true, 3 to "3", and "a" to ["a"].
_CONVERTED: Final = ("int_type", "float_type", "bool_type", "string_type", "tuple_type")


def wrong_types(model: type[BaseModel], data: Mapping[str, Any], refusal: ValidationError) -> list[Problem]:
    """Return pydantic's errors about `data` as problems. The errors for all types in a union become one problem."""
    settings: dict[tuple[Path, bool], list[PydanticError]] = {}
    errors: list[Any] = refusal.errors(include_url=False)
    for error in errors:
        settings.setdefault(_located(data, error), []).append(error)
    unknown = {
        path: errors[0] for (path, _), errors in settings.items() if errors[0]["type"] == "extra_forbidden"
    }
    problems, meant = [], set[Path]()
    for path, error in unknown.items():
        problem, near = _unknown_key(model, path, error["input"])
        problems.append(problem)
        # The setting is present under another name.
        meant.add((*path[:-1], near or path[-1]))
    for (path, is_there), found in settings.items():
        if path not in unknown and (is_there or path not in meant):
            problems.append(_refused(model, path, found if is_there else []))
    return problems


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's annotation: the annotation itself, an optional section, or a table's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(
        (section for inner in get_args(annotation) if (section := _section_of(inner)) is not None), None
    )


def _located(data: Any, error: PydanticError) -> tuple[Path, bool]:
    """Return the setting's path and whether the setting is present. For a union, pydantic appends a type to the path."""
    path: list[str | int] = []
    for part in error["loc"]:
        if isinstance(data, Mapping) and part in data:
            path.append(str(part))
            data = data[part]
        elif isinstance(data, Sequence) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
        elif isinstance(data, Mapping) and error["type"] == "missing":
            return (*path, part), False
        else:
            break
    return tuple(path), True


def _field_at(model: type[BaseModel], path: Path) -> tuple[type[BaseModel], FieldInfo | None, int]:
    """Return the section and the field at a path, and the number of path components that lead to the field. The remaining
    components are inside the field.
    """
    section, field, depth, is_name = model, None, 0, False
    for index, part in enumerate(path):
        if is_name or part not in section.model_fields:
            # A key of a table, or a position in a list.
            is_name = False
            continue
        field, depth = section.model_fields[str(part)], index + 1
        section = _section_of(field.annotation) or section
        is_name = get_origin(field.annotation) is Mapping
    return section, field, depth


def _expected(error: PydanticError) -> str:
    message = str(error["msg"]).removeprefix("Input should be ").replace("'", '"')
    return _EXPECTED.get(error["type"], message.replace("True or False", "true or false"))


def _refused(model: type[BaseModel], path: Path, errors: Sequence[PydanticError]) -> Problem:
    """Return the problem with a setting that pydantic rejects, with a likely correction, the default or an example.

    `errors` is empty if the setting is missing.
    """
    section, field, depth = _field_at(model, path)
    key, examples = key_path(path), list(field.examples or ()) if field is not None else []
    if not errors or field is None:
        home = _field_at(model, path[: depth - 1])[0]
        description = _descriptions(home).get(str(path[depth - 1]), "a value")
        ways = [f"{key} = {toml(*examples[:1])}"] if examples else []
        return Problem(
            key, "missing", " ".join(description.split()).removesuffix("."), ways, f"no {path[-1]}"
        )
    value, kind, expected = errors[0]["input"], errors[0]["type"], ", or ".join(map(_expected, errors))
    if kind == "invalid_key" or errors[0]["loc"][-1] == "[key]":
        tries = [f"write it in quotes: {toml(str(path[-1]))}"]
        return Problem(key, "the key is not text", "a name", tries, f"the key {path[-1]}")
    if kind in ("missing", "string_too_short", "too_long", "too_short"):
        what = f"{len(value)} value{'s' * (len(value) != 1)}" if value else "empty"
    elif kind.startswith(("greater_", "less_")):
        what = f"{toml(value)} is out of range"
    else:
        what = f"{toml(value)} is not " + ("one of the choices" if kind == "literal_error" else expected)
    near = [(path, meant) for error in errors for meant in _meant(section, path[depth - 1 :], error)]
    if len(path) > depth and kind == "int_type" and isinstance(path[-1], str):
        near.append((path, 1))
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    near += [(path[:depth], value) for value in (default, *examples)]
    suggested = (
        f"{key_path(key_parts)} = {toml(value)}"
        for key_parts, value in near
        if value not in (None, (), {}) and not isinstance(value, BaseModel)
    )
    shown = path[-2:] if isinstance(path[-1], int) else path[-1:]
    way = next(suggested, f"remove {key}")
    return Problem(key, what, expected, [way], f"{key_path(shown)} = {toml(value)}")


def _unknown_key(model: type[BaseModel], path: Path, value: Any) -> tuple[Problem, str | None]:
    """Return the problem, and the key in the same section that was probably intended."""
    *above, last = path
    section, key = _field_at(model, path)[0], key_path(path)
    keys = list(section.model_fields)
    near = nearest_name(str(last), keys) or _described(str(last), section)
    expected = "one of " + ", ".join(keys)
    inner = {name: _section_of(field.annotation) for name, field in model.model_fields.items()}
    homes = [name for name, home in inner.items() if home is not None and last in home.model_fields]
    given = f"{key_path([last])} = {toml(value)}"
    renamed = RENAMED.get(f"{getattr(section, 'place', '')}.{last}")
    if renamed is not None:
        new = key_path([*above, *renamed.split(".")])
        return Problem(key, "was renamed", new, [f"{new} = {toml(value)}"], given), renamed
    if len(homes) == 1:
        way = f"move it to {homes[0]}.{last}"
    else:
        way = f"remove {key}" if near is None else f'did you mean "{key_path([*above, near])}"?'
    return Problem(key, "unknown key", expected, [way], given), near


def _described(word: str, section: type[BaseModel]) -> str | None:
    """Return the setting whose description has the word as another name, in parentheses: shard for fsdp, of "(FSDP, ZeRO)"."""
    for name, text in _descriptions(section).items():
        names = ", ".join(re.findall(r"\((\w+(?:, \w+)*)\)", text))
        if word.lower() in names.lower().split(", "):
            return name
    return None


def _descriptions(section: Any) -> Mapping[str, str]:
    described: Mapping[str, str] = section.descriptions()
    return described


def _meant(section: type[BaseModel], setting: Path, error: PydanticError) -> Iterator[Any]:
    """Yield what a value of the wrong type, outside a choice or out of range may have been meant to be, if the section takes it.

    setting: the path of the value within the section.
    """
    kind, value = error["type"], error["input"]
    if kind in _CONVERTED:
        in_a_list = kind == "tuple_type"
        value = [value] if in_a_list else value
        for part in reversed(setting):
            value = {part: value} if isinstance(part, str) else [value]
        needed = {
            key: (field.examples or [None])[0]
            for key, field in section.model_fields.items()
            if field.is_required()
        }
        with suppress(ValidationError):
            # Where it is not strict, pydantic converts types.
            name, *inside = setting
            taken = getattr(section.model_validate({**needed, **value}, strict=in_a_list), str(name))
            for part in inside:
                taken = taken[part if isinstance(part, str) else 0]
            yield taken
    elif kind == "literal_error":
        choices = {word.lower(): word for word in re.findall(r"['\"]([^'\"]*)['\"]", error["msg"])}
        yield choices.get(nearest_name(str(value).lower(), choices) or "")
    elif kind in ("greater_than_equal", "less_than_equal"):
        yield error["ctx"].get("ge", error["ctx"].get("le"))
