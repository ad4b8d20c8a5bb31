"""What do TOML, JSON and YAML texts hold, and where is one that cannot be parsed wrong?"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from meshcomm.config.problems import Problem, report
from meshcomm.config.write import key_path, toml
from meshcomm.errors import ConfigError

# Far more than any configuration has: a rank_order may list every rank of a host's mesh.
_MOST_VALUES: Final = 500_000
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


def parse_toml(text: str, label: str) -> Any:
    """The tables that a TOML text holds. Raises ConfigError with the line that is wrong."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        # The position is only in the message before Python 3.14.
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        said = message if at is None else message[: at.start()]
        lines = text.splitlines() or [""]
        line, column = len(lines), len(lines[-1]) + 1
        if at is not None and at.group(1) is not None:
            line, column = int(at.group(1)), int(at.group(2))
        raise _syntax_error(label, "TOML", text, line, column, said) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(label, "TOML", error) from None
    _check_size(data, _within, label, "TOML")
    return data


def parse_json(text: str, label: str) -> Any:
    """The value that a JSON text holds; a repeated key is refused. Raises ConfigError."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
            given = ", ".join(f"{name} = {toml(value)}" for name, value in pairs if name == key)
            what, way = "the key is there twice in one object", ["remove one of them"]
            raise report(label, [Problem(key_path([key]), what, "each key once", way, given)])
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise _syntax_error(label, "JSON", text, error.lineno, error.colno, error.msg) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(label, "JSON", error) from None
    _check_size(data, _within, label, "JSON")
    return data


def parse_yaml(text: str, label: str) -> Any:
    """The value that a YAML text holds. Numbers and words as in YAML 1.2: 1e-5 is a number, 1:20 and on are text.
    A repeated key is refused, and so are aliases that make a small file large.

    Raises ConfigError: PyYAML missing, or the text is no YAML.
    """
    try:
        yaml = import_module("yaml")
    except ImportError:
        raise ConfigError(
            f"{label}: YAML files need PyYAML, which is not installed",
            given=label,
            expected="PyYAML beside meshcomm; TOML and JSON need nothing",
            hint="pip install 'meshcomm[yaml]'",
        ) from None
    try:
        loader = _yaml_loader(yaml)(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            # An alias stands for all that it names: nine lines of nine aliases each for 9^9 values.
            _check_size(node, _nodes_within, label, "YAML")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise _syntax_error(label, "YAML", text, line, column, said) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(label, "YAML", error) from None


def _yaml_loader(yaml: Any) -> Any:
    loader_class: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in _CORE:
        loader_class.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), [*first, ""])

    def table(loader: Any, node: Any) -> Any:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if key in seen:
                said = f"the key {key} is there twice"
                raise yaml.constructor.ConstructorError(None, None, said, key_node.start_mark)
            seen.append(key)
        return loader.construct_mapping(node, deep=True)

    def whole(_: Any, node: Any) -> int:
        # int(text, 0) refuses 010, which is 10.
        return int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)

    def opened(loader: Any, kind: Any) -> None:
        # Before the scanner looks ahead of each of them, which takes the square of their number.
        if loader.flow_level >= _DEEPEST:
            said = f"brackets more than {_DEEPEST} deep"
            raise yaml.scanner.ScannerError(None, None, said, loader.get_mark())
        yaml.SafeLoader.fetch_flow_collection_start(loader, kind)

    loader_class.fetch_flow_collection_start = opened
    loader_class.add_constructor("tag:yaml.org,2002:map", table)
    loader_class.add_constructor("tag:yaml.org,2002:int", whole)
    return loader_class


_EXAMPLES: Final = {
    "TOML": "mesh.dims = { dp = 8 }",
    "JSON": '{ "mesh": { "dims": { "dp": 8 } } }',
    "YAML": "mesh: { dims: { dp: 8 } }",
}

PARSERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    ".toml": parse_toml,
    ".json": parse_json,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}


def _check_size(data: Any, inside: Callable[[Any], Iterable[Any]], label: str, language: str) -> None:
    """Refuse what is deeper or has more values than any configuration, in bounded time and memory.

    inside: the values right inside a value. What stands at two places counts twice.
    Raises ConfigError.
    """
    left = _MOST_VALUES
    open_: list[Iterator[Any]] = [iter([data])]
    while open_:
        value = next(open_[-1], open_)
        if value is open_:
            open_.pop()
            continue
        left -= 1
        if left < 0:
            said, expected = f"more than {_MOST_VALUES:,} values, aliases followed", "the settings alone"
        elif len(open_) > _DEEPEST:
            said = f"tables or lists more than {_DEEPEST} deep"
            expected = "settings, which lie 4 deep at most"
        else:
            open_.append(iter(inside(value)))
            continue
        what = f"no configuration in {language}: {said}"
        raise report(label, [Problem("the file", what, expected)])


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _nodes_within(node: Any) -> Iterable[Any]:
    """The nodes right inside a node of a YAML document."""
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return node.value if node.id == "sequence" else ()


def _syntax_error(label: str, language: str, text: str, line: int, column: int, said: str) -> ConfigError:
    """A file that cannot be parsed: where, the line itself, and what the parser says."""
    lines = text.splitlines()
    # Tabs are one character for the parser and several on the screen.
    shown = lines[line - 1].replace("\t", " ") if 0 < line <= len(lines) else ""
    start = max(0, column - 60)
    given = f"{shown[start : start + 90]}\n{' ' * (column - 1 - start)}^"
    place = f"line {line}, column {column}"
    before = "\n".join([*lines[: line - 1], shown[: column - 1]]).rstrip()
    if "twice" in said or "overwrite" in said:
        way = "write the key once"
    elif language == "YAML" and "\\t" in said:
        way = "spaces in place of the tab"
    elif language == "JSON" and (before.endswith(",") or "trailing comma" in said):
        way = "remove the comma that nothing follows"
    else:
        way = f"mend it, as in  {_EXAMPLES[language]}"
    return report(label, [Problem(place, f"not {language}: {said}", f"a file in {language}", [way], given)])


def _unreadable(label: str, language: str, error: Exception) -> ConfigError:
    """A file that its parser gives up on without saying where: endless digits, or too deep."""
    what = f"not {language}: {str(error).split(';')[0]}"
    return report(label, [Problem("the file", what, f"a file in {language}")])
