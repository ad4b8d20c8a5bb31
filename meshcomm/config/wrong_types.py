"""Conversion of pydantic's errors into problems, with what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from meshcomm.config.problems import RENAMED, Problem
from meshcomm.config.spelling import OFF, ON, SWITCHES, advice_on, choice_of, misspelt, setting_of
from meshcomm.config.write import key_path, toml

Path: TypeAlias = tuple[str | int, ...]
PydanticError: TypeAlias = Mapping[str, Any]
Data: TypeAlias = Mapping[str, Any]

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
_NUMBERS: Final = ("int_type", "float_type")
_TABLES: Final = ("dict_type", "model_type")
# Wrong types that a conversion may mend: "2" to 2, "yes" to true, 3 to "3", and "a" to ["a"].
_CONVERTED: Final = (*_NUMBERS, "bool_type", "string_type", "tuple_type")


def wrong_types(model: type[BaseModel], data: Data, refusal: ValidationError) -> list[Problem]:
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
        problem, near = _unknown_key(model, path, error["input"], data)
        problems.append(problem)
        # The setting is present under another name.
        meant.add((*path[:-1], near or path[-1]))
    for (path, is_there), found in settings.items():
        if path not in unknown and (is_there or path not in meant):
            problems.append(_refused(model, path, found if is_there else [], data))
    return problems


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's annotation: the annotation itself, an optional section, or a table's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(
        (section for inner in get_args(annotation) if (section := _section_of(inner)) is not None), None
    )


def _sections(model: type[BaseModel], above: Path = ()) -> Iterator[tuple[Path, type[BaseModel]]]:
    """Yield the path and the class of `model` and of each section within it, except those in tables."""
    yield above, model
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None and get_origin(field.annotation) is not Mapping:
            yield from _sections(inner, (*above, name))


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
    kind = "string_too_short" if error["input"] == "" else error["type"]
    return _EXPECTED.get(kind, message.replace("True or False", "true or false"))


def _refused(model: type[BaseModel], path: Path, errors: Sequence[PydanticError], data: Data) -> Problem:
    """Return the problem with a setting that pydantic rejects, with a likely correction, the default or an example.

    `errors` is empty if the setting is missing.
    """
    section, field, depth = _field_at(model, path)
    key, examples = key_path(path), list(field.examples or ()) if field is not None else []
    if path in (("mesh",), ("mesh", "dims")):
        dims = _dims(data, errors[0]["input"] if errors else None)
        examples = [dims if len(path) == 2 else {"dims": dims}]
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
    given = f"{key_path(path[-2:] if isinstance(path[-1], int) else path[-1:])} = {toml(value)}"
    if type(value) is int and _is_role(section, path[-1]):
        what, expected = (
            f"{value} is a size, not the name of a dim",
            "the name of a dim, whose size is in mesh.dims",
        )
        return Problem(key, what, expected, [_role_of_size(section, path, value, data)], given)
    if kind in ("missing", "string_too_short", "too_long", "too_short"):
        what = f"{len(value)} value{'s' * (len(value) != 1)}" if value else "empty"
    elif kind.startswith(("greater_", "less_")):
        what = f"{toml(value)} is out of range"
    else:
        what = f"{toml(value)} is not " + ("one of the choices" if kind == "literal_error" else expected)
    way = _correction(section, path, depth, errors, data)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if way is None and not field.is_required() and (value in (None, False) or str(value).lower() in OFF):
        # Without the setting, it is off.
        way = f"remove {key}" if default is None or kind in _TABLES else None
    if way is None and _says_nothing(value, {error["type"] for error in errors}, field.is_required()):
        near: list[tuple[Path, Any]] = [(path[:depth], each) for each in (default, *examples)]
        if len(path) > depth and kind == "int_type" and isinstance(path[-1], str):
            near.insert(0, (path, 1))
        suggested = (
            f"{key_path(parts)} = {toml(each)}"
            for parts, each in near
            if each not in (None, (), {}) and not isinstance(each, BaseModel)
        )
        way = next(suggested, f"remove {key}")
    return Problem(key, what, expected, [way] if way else [], given)


def _says_nothing(value: Any, kinds: set[str], required: bool) -> bool:
    """Return whether a refused value is no hint to the wanted one, so that the default or an example is as good as any other."""
    if "literal_error" in kinds and (len(kinds) == 1 or isinstance(value, str)):
        return False
    if kinds.intersection(_NUMBERS):
        # A switch, a share of something, or a number with a unit.
        unclear = (bool, float) if "int_type" in kinds else bool
        return not isinstance(value, unclear) and not (isinstance(value, str) and re.search(r"\d", value))
    return required or not kinds.intersection(_TABLES)


def _correction(
    section: type[BaseModel], path: Path, depth: int, errors: Sequence[PydanticError], data: Data
) -> str | None:
    """Return a setting with what the rejected value probably means, or None."""
    key, value = key_path(path), errors[0]["input"]
    if section.__name__ == "MeshConfig" and path[depth - 1] == "merge" and isinstance(value, str):
        named = re.split(r"[\s,+*]+", value)
        if len(named) < 2:
            return f'name two or more dims, as in {key} = ["dp", "tp"]'
        return f"{key} = {toml(named)}"
    if section.__name__ == "ElasticConfig" and path[-1] == "min" and type(value) is int:
        roles = data.get("parallel")
        dim = (
            next((roles[role] for role in ("data", "shard") if role in roles), "dp")
            if isinstance(roles, Mapping)
            else "dp"
        )
        return f"{key} = {toml({dim: value})}"
    if path == ("mesh", "dims") and isinstance(value, (list, tuple)) and {*map(type, value)} == {int}:
        return f"a name for each size, as in mesh.dims = {{ dp = {value[0]} }}"
    for error in errors:
        for meant in _meant(section, path[depth - 1 :], error):
            if meant is not None:
                return f"{key} = {toml(meant)}"
    return None


def _dims(data: Data, value: Any) -> dict[str, int]:
    """Return an example of mesh.dims: with the sizes or the names in a value of another type, otherwise with the roles' dims."""
    if isinstance(value, str) and (pairs := re.findall(r"([A-Za-z]\w*)\s*[=:]\s*(\d+)", value)):
        return {name: int(size) for name, size in pairs}
    roles = data.get("parallel")
    named = value if isinstance(value, (list, tuple)) and value else []
    if isinstance(roles, Mapping) and not named:
        named = [dim for role, dim in roles.items() if role not in ("expert", "options")]
    names = [name for name in named if isinstance(name, str) and name.isidentifier()] or ["dp"]
    return dict.fromkeys(names, 8 if len({*names}) == 1 else 2)


def _is_role(section: type[BaseModel], name: str | int) -> bool:
    return getattr(section, "place", "") == "parallel" and name in section.model_fields and name != "options"


def _mesh_dims(data: Data) -> Mapping[str, Any]:
    mesh = data.get("mesh")
    dims = mesh.get("dims") if isinstance(mesh, Mapping) else None
    return dims if isinstance(dims, Mapping) else {}


def _role_of_size(section: type[BaseModel], path: Path, size: int, data: Data) -> str:
    """Return the settings that give a role to a dim of this size: an existing dim without a role, or a new one."""
    role, dims, roles = str(path[-1]), _mesh_dims(data), data.get("parallel")
    if role == "expert":
        return "name a dim of one of mesh.views"
    used = roles.values() if isinstance(roles, Mapping) else ()
    free = [dim for dim in dims if dim not in used]
    usual = _other_names(_descriptions(section)[role])
    dim = next((dim for dim in free if dim in (role, *usual)), None)
    dim = dim or next((dim for dim in free if dims[dim] == size), min(usual, key=len))
    sized = f" and mesh.dims.{dim} = {max(1, size)}" if dims.get(dim) not in (size, -1) else ""
    return f"{key_path(path)} = {toml(dim)}{sized}"


def _unknown_key(model: type[BaseModel], path: Path, value: Any, data: Data) -> tuple[Problem, str | None]:
    """Return the problem, and the key in the same section that was probably intended."""
    *above, last = path
    section, key, word = _field_at(model, path)[0], key_path(path), str(last)
    place, keys = getattr(section, "place", ""), list(section.model_fields)
    expected = "one of " + ", ".join(keys)
    given = f"{key_path([last])} = {toml(value)}"
    renamed = RENAMED.get(f"{place}.{last}")
    if renamed is not None:
        new = key_path([*above, *renamed.split(".")])
        return Problem(key, "was renamed", new, [f"{new} = {toml(value)}"], given), renamed
    home, _, other = (setting_of(word) or "").rpartition(".")
    near = misspelt(word, keys) or (other if other and home == place else _described(word, section))
    way = _way_to((*above, near), section, value, data, path) if near is not None else None
    if way is None and (advice := advice_on(word)) is not None:
        way, near = advice, None
    elif way is None and value is True and word.lower() in SWITCHES:
        way = SWITCHES[word.lower()]
    if way is None:
        elsewhere = {
            (*home_path, name): found
            for home_path, inner in _sections(model)
            for name in (word, other if key_path(home_path) == home else word)
            if inner is not section
            and name in inner.model_fields
            and (found := _way_to((*home_path, name), inner, value, data, path)) is not None
        }
        within = {target: found for target, found in elsewhere.items() if above and target[0] == above[0]}
        elsewhere = within or elsewhere
        if elsewhere:
            way, near = next(iter(elsewhere.values())), None
        if len(elsewhere) > 1:
            way = f"move it to {' or '.join(map(key_path, elsewhere))}"
    if way is None and near is not None:
        errors = _errors(section, near, value)
        way = f'did you mean "{key_path([*above, near])}"? It takes {", or ".join(map(_expected, errors))}'
    return Problem(key, "unknown key", expected, [way or f"remove {key}"], given), near


def _way_to(target: Path, section: type[BaseModel], value: Any, data: Data, path: Path) -> str | None:
    """Return how to give `value` to the setting `target` of `section`; None if the setting does not take it.

    path: the unknown key that has the value.
    """
    *above, name = target
    new, errors, is_beside = key_path(target), _errors(section, str(name), value), list(path[:-1]) == above
    holder: Any = data
    for part in above:
        holder = holder.get(part) if isinstance(holder, Mapping) else None
    if isinstance(holder, Mapping) and name in holder:
        return (
            f"move its settings to {new}"
            if isinstance(value, Mapping)
            else f"remove {key_path(path)}: {new} is set"
        )
    if _is_role(section, name) and (type(value) is int or (not is_beside and value not in _mesh_dims(data))):
        return _role_of_size(section, target, value, data) if is_beside and value is not None else None
    if not errors:
        return f'did you mean "{new}"?' if is_beside else f"move it to {new}"
    if any(len(_located({name: value}, error)[0]) > 1 for error in errors):
        return None
    return _correction(section, target, len(target), errors, data)


def _errors(section: type[BaseModel], name: str, value: Any) -> list[Any]:
    """Return pydantic's errors about a setting with this value, except those within a section."""
    if _section_of(section.model_fields[name].annotation) is not None and isinstance(value, Mapping):
        return []
    try:
        section.model_validate({name: value})
    except ValidationError as refusal:
        return [error for error in refusal.errors(include_url=False) if error["loc"][0] == name]
    return []


def _described(word: str, section: type[BaseModel]) -> str | None:
    """Return the setting whose description has the word as another name, in parentheses: shard for fsdp, of "(FSDP, ZeRO)"."""
    for name, text in _descriptions(section).items():
        if word.lower() in _other_names(text):
            return name
    return None


def _other_names(description: str) -> list[str]:
    return ", ".join(re.findall(r"\((\w+(?:, \w+)*)\)", description)).lower().split(", ")


def _descriptions(section: Any) -> Mapping[str, str]:
    described: Mapping[str, str] = section.descriptions()
    return described


def _meant(section: type[BaseModel], setting: Path, error: PydanticError) -> Iterator[Any]:
    """Yield what a value of the wrong type, outside a choice or out of range may have been meant to be, if the section takes it.

    setting: the path of the value within the section.
    """
    kind, value = error["type"], error["input"]
    if kind == "literal_error":
        yield choice_of(value, re.findall(r"['\"]([^'\"]*)['\"]", error["msg"]))
        if "true or false" in error["msg"].lower():
            with suppress(ValidationError):
                yield TypeAdapter(bool).validate_python(value)
    elif kind in ("greater_than_equal", "less_than_equal"):
        yield error["ctx"].get("ge", error["ctx"].get("le"))
    elif kind == "model_type" and value is True:
        # `section` is the setting's own.
        yield None if any(field.is_required() for field in section.model_fields.values()) else {}
    elif kind in _CONVERTED:
        in_a_list = kind == "tuple_type"
        word = value.lower() if isinstance(value, str) else value
        if in_a_list:
            value = [value]
        elif isinstance(value, (list, tuple)) and len(value) == 1:
            (value,) = value
        elif kind == "bool_type" and (word in ON or word in OFF):
            value = word in ON
        elif kind in _NUMBERS and isinstance(word, (bool, str)) and (word is False or word in OFF):
            value = 0
        elif kind == "int_type" and isinstance(value, float) and 1 <= abs(value) < 2**53:
            value = round(value)
        # A switch is no number and no text.
        if not isinstance(value, bool) or kind in ("bool_type", "tuple_type"):
            yield from _taken(section, setting, value, strict=in_a_list)


def _taken(section: type[BaseModel], setting: Path, value: Any, strict: bool) -> Iterator[Any]:
    """Yield the value as the section takes it; nothing if the section refuses it. Where it is not strict, pydantic converts types."""
    for part in reversed(setting):
        value = {part: value} if isinstance(part, str) else [value]
    needed = {
        key: (field.examples or [None])[0]
        for key, field in section.model_fields.items()
        if field.is_required()
    }
    with suppress(ValidationError):
        name, *inside = setting
        taken = getattr(section.model_validate({**needed, **value}, strict=strict), str(name))
        for part in inside:
            taken = taken[part if isinstance(part, str) else 0]
        yield taken
