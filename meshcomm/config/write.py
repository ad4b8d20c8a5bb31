"""Formats paths and values in TOML syntax, and writes files atomically."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from pydantic import BaseModel

from meshcomm.errors import ConfigError, MeshcommError

_WIDEST = 72
_BARE = re.compile("[A-Za-z0-9_-]+")


def plain(data: Any) -> Any:
    """Return a deep copy in which every table is a dict and every sequence is a list."""
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    return {key: plain(value) for key, value in data.items()} if isinstance(data, Mapping) else data


def key_path(parts: Iterable[str | int]) -> str:
    """Return a path in TOML syntax, with list indices in brackets.

    >>> key_path(["mesh", "rank_order", 3])
    'mesh.rank_order[3]'
    """
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = _BARE.fullmatch(part)
            text += "." * bool(text) + (part if bare else json.dumps(part, ensure_ascii=False))
    return text


def toml(value: Any) -> str:
    """Return a value in TOML syntax, truncated if it is long.

    >>> toml({"dp": 2, "on": True, "name": "x"})
    '{ dp = 2, on = true, name = "x" }'
    """
    text = whole_toml(value)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 4] + " ..."


def whole_toml(value: Any) -> str:
    """Like `toml`, but never truncated, for files."""
    if isinstance(value, (str, bool, NoneType)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, BaseModel):
        return whole_toml(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key_path([str(key)])} = {whole_toml(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(whole_toml, value)) + "]"
    return str(value)


def check_ending(path: Path, option: str, *endings: str, kind: type[MeshcommError] = ConfigError) -> None:
    """Raise `kind` if files with this extension are not supported. option: the command-line option that names the file."""
    if path.suffix.lower() not in endings:
        raise kind(
            f"{path}: not a file type that {option} writes",
            given=f"the extension {path.suffix}" if path.suffix else "no extension",
            expected="one of " + ", ".join(endings) if len(endings) > 1 else f"the extension {endings[0]}",
            hint=f"{option} {path.with_suffix(endings[0])}" if path.name else None,
        )


def write_whole(
    path: Path, text: str, *, given: str | None = None, kind: type[MeshcommError] = ConfigError
) -> None:
    """Write a file atomically: readers see either the old content or the new content.

    Raises `kind` if writing fails; the file is then unchanged. given: the setting that names the file, for the error.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        new.write_text(text, encoding="utf-8", newline="\n")
        new.replace(path)
    except OSError as error:
        raise kind(
            f"{path}: cannot be written: {(error.strerror or str(error)).lower()}",
            given=given or str(path),
            expected="a file in an existing, writable folder",
            hint=f"mkdir -p {path.parent}" if not path.parent.exists() else "another path",
        ) from None
    finally:
        with suppress(OSError):
            new.unlink()


def toml_text(head: Sequence[str], sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a TOML file: `head` as comments, then the sections. None values are left out, because TOML has no null.

    >>> print(toml_text(["by hand"], {"mesh": {"dims": {"dp": 2}, "device": None}}), end="")
    # by hand
    <BLANKLINE>
    [mesh]
    dims = { dp = 2 }
    """
    lines = [f"# {line}" for line in head]
    for section, table in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key_path([key])} = {whole_toml(value)}" for key, value in _without_none(table).items()]
    return "\n".join(lines) + "\n"


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
