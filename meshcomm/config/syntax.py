"""Reading TOML and JSON, and what is said about a file that cannot be parsed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from meshcomm.config.problems import Problem, report
from meshcomm.config.wording import key_path, toml
from meshcomm.errors import ConfigError

# Far more than any configuration has: a rank_order may list every rank of a host's mesh.
_MOST_VALUES: Final = 500_000
_DEEPEST: Final = 32


def parse_toml(text: str, label: str) -> Any:
    """The tables that a TOML text holds. Raises ConfigError with the line that is wrong."""
    try:
        data = tomllib.loads(text)
        check_size(data, _within, label, "TOML")
        return data
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        # The position is only in the message before Python 3.14.
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        said = message if at is None else message[: at.start()]
        lines = text.splitlines() or [""]
        line, column = len(lines), len(lines[-1]) + 1
        if at is not None and at.group(1) is not None:
            line, column = int(at.group(1)), int(at.group(2))
        raise syntax_error(label, "TOML", text, line, column, said) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(label, "TOML", error) from None


def parse_json(text: str, label: str) -> Any:
    """The value that a JSON text holds; a repeated key is refused. Raises ConfigError."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = [key for key in keys if keys.count(key) > 1]
        if repeated:
            raise report(
                label,
                [
                    Problem(
                        key_path([repeated[0]]),
                        "the key is there twice in one object",
                        given=", ".join(
                            f"{key} = {toml(value)}" for key, value in pairs if key == repeated[0]
                        ),
                        expected="each key once",
                        hint="remove one of them",
                    )
                ],
            )
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=table)
        check_size(data, _within, label, "JSON")
        return data
    except json.JSONDecodeError as error:
        raise syntax_error(label, "JSON", text, error.lineno, error.colno, error.msg) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(label, "JSON", error) from None


def check_size(data: Any, inside: Callable[[Any], Iterable[Any]], label: str, language: str) -> None:
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
            said, expected = (
                f"tables or lists more than {_DEEPEST} deep",
                "settings, which lie 4 deep at most",
            )
        else:
            open_.append(iter(inside(value)))
            continue
        raise report(
            label, [Problem("the file", f"no configuration in {language}: {said}", expected=expected)]
        )


def _within(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def syntax_error(label: str, language: str, text: str, line: int, column: int, said: str) -> ConfigError:
    """A file that cannot be parsed: where, the line itself, and what the parser says."""
    lines = text.splitlines()
    # Tabs are one character for the parser and several on the screen.
    shown = lines[line - 1].replace("\t", " ") if 0 < line <= len(lines) else ""
    start = max(0, column - 60)
    mark = " " * (column - 1 - start) + "^"
    return report(
        label,
        [
            Problem(
                f"line {line}, column {column}",
                f"not {language}: {said}",
                given=f"{shown[start : start + 90]}\n{mark}",
                expected=f"a file in {language}",
            )
        ],
    )


def unreadable(label: str, language: str, error: Exception) -> ConfigError:
    """A file that its parser gives up on without saying where: endless digits, or too deep."""
    said = str(error).split(";")[0]
    return report(label, [Problem("the file", f"not {language}: {said}", expected=f"a file in {language}")])
