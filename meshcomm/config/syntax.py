"""Reading TOML and JSON, and what is said about a file that cannot be parsed."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from meshcomm.config.problems import Problem, report
from meshcomm.config.wording import key_path, toml
from meshcomm.errors import ConfigError


def parse_toml(text: str, label: str) -> Any:
    """The tables that a TOML text holds. Raises ConfigError with the line that is wrong."""
    try:
        return tomllib.loads(text)
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
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise syntax_error(label, "JSON", text, error.lineno, error.colno, error.msg) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(label, "JSON", error) from None


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
