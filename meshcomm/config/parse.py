"""Parses TOML, JSON and YAML, and locates syntax errors."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

from meshcomm.config.problems import Problem, report
from meshcomm.config.write import key_path, toml
from meshcomm.errors import ConfigError

# Much deeper than any configuration, but shallow enough for recursion.
_DEEPEST: Final = 32

# The core schema of YAML 1.2. PyYAML follows YAML 1.1, in which 1:20 is 80, 010 is 8, on is true and 1e-5 is text.
_CORE: Final = (
    ("null", r"^(~|null|Null|NULL|)$", "~nN"),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)
_EXAMPLES: Final = {
    "TOML": "mesh.dims = { dp = 8 }",
    "JSON": '{ "mesh": { "dims": { "dp": 8 } } }',
    "YAML": "mesh: { dims: { dp: 8 } }",
}


def _parse(language: str, text: str, label: str) -> Any:
    """Return the parsed content of `text`.

    Raises ConfigError if the text has a syntax error or a repeated key, or if PyYAML is missing.
    """
    try:
        data = _LOADERS[language](text, label)
        inner = [data]
        for _ in range(_DEEPEST):
            inner = [value for container in inner for value in _within(container)]
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and JSONDecodeError are ValueErrors
        raise report(label, [_syntax_error(language, text, error)]) from None
    if inner:
        what = f"not a configuration in {language}: tables or lists more than {_DEEPEST} deep"
        ways = [f"short, flat settings, as in  {_EXAMPLES[language]}"]
        raise report(
            label, [Problem("the file", what, "settings, which are at most 4 deep", ways, _start(text))]
        )
    return data


def _start(text: str) -> str:
    line = " ".join(text[:60].split())
    return line + ("..." if len(text) > 60 else "")


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _json(text: str, label: str) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            given = ", ".join(f"{key} = {toml(value)}" for key, value in pairs if key == twice)
            what, ways = "the key occurs twice in one object", ["remove one of them"]
            raise report(label, [Problem(key_path([twice]), what, "each key once", ways, given)])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table)


def _yaml(text: str, label: str) -> Any:
    """Parse YAML 1.2 without aliases, because a small file with aliases can expand to a large value."""
    try:
        yaml = import_module("yaml")
    except ImportError:
        what = f"{label}: YAML files need PyYAML, which is not installed"
        hint = "pip install 'meshcomm[yaml]'"
        expected = "PyYAML; TOML and JSON files need no additional package"
        raise ConfigError(what, given=label, expected=expected, hint=hint) from None
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in _CORE:
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), [*first, ""])
    loader.add_constructor("tag:yaml.org,2002:map", _yaml_table)
    loader.add_constructor("tag:yaml.org,2002:int", _yaml_int)
    try:
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                # PyYAML's time grows with the square of the depth.
                raise ValueError(f"tables or lists more than {_DEEPEST} deep")
            if isinstance(event, yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=event.start_mark)
        return yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise json.JSONDecodeError(message, text, error.problem_mark.index) from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _yaml_table(loader: Any, node: Any) -> Any:
    keys = [loader.construct_object(key_node, deep=True) for key_node, _ in node.value]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            message, mark = f"the key {key} occurs twice", node.value[place][0].start_mark
            raise import_module("yaml").MarkedYAMLError(problem=message, problem_mark=mark)
    return loader.construct_mapping(node, deep=True)


def _yaml_int(_: Any, node: Any) -> int:
    # int(text, 0) rejects 010, which is 10 in YAML 1.2.
    return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)


def _syntax_error(language: str, text: str, error: Exception) -> Problem:
    """Return the problem with a text that cannot be parsed: the position, the line there, and the parser's message."""
    lines, expected = text.splitlines() or [""], f"a file in {language}"
    if isinstance(error, json.JSONDecodeError):
        message, line, column = error.msg, error.lineno, error.colno
    elif isinstance(error, tomllib.TOMLDecodeError):
        # Before Python 3.14, only the message contains the position.
        message, _, place = str(error).rpartition(" (at ")
        numbers = [int(number) for number in re.findall(r"\d+", place)]
        line, column = numbers or (len(lines), len(lines[-1]) + 1)
    else:  # too many digits, or nested too deep: the parser gives no position
        ways = [f"short, flat settings, as in  {_EXAMPLES[language]}"]
        return Problem(
            "the file", f"not {language}: {str(error).split(';')[0]}", expected, ways, _start(text)
        )
    # Tabs are one character for the parser and several on the screen.
    shown = lines[line - 1].replace("\t", " ") if 0 < line <= len(lines) else ""
    start = max(0, column - 60)
    before = "\n".join([*lines[: line - 1], shown[: column - 1]]).rstrip()
    way = f"correct it, as in  {_EXAMPLES[language]}"
    if "twice" in message or "overwrite" in message:
        way = "write the key once"
    elif language == "YAML" and "\\t" in message:
        way = "use spaces instead of the tab"
    elif language == "JSON" and (before.endswith(",") or "trailing comma" in message):
        way = "remove the trailing comma"
    given = f"{shown[start : start + 90]}\n{' ' * (column - 1 - start)}^"
    return Problem(f"line {line}, column {column}", f"not {language}: {message}", expected, [way], given)


_LOADERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "TOML": lambda text, _: tomllib.loads(text),
    "JSON": _json,
    "YAML": _yaml,
}
parse_toml, parse_json, parse_yaml = (partial(_parse, language) for language in _LOADERS)
PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    ".toml": parse_toml,
    ".json": parse_json,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}
