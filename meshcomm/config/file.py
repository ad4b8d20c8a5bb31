"""From a file, or a mapping, and overrides to a Config: or to one report of all that is wrong."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from meshcomm.config.model import check, plain
from meshcomm.config.overrides import apply, shown
from meshcomm.config.problems import Problem, report
from meshcomm.config.root import Config
from meshcomm.config.syntax import parse_json, parse_toml
from meshcomm.config.wording import toml
from meshcomm.config.yaml_file import parse_yaml
from meshcomm.errors import ConfigError
from meshcomm.layout.names import nearest_name


def _changes(overrides: object) -> list[str]:
    changes = [overrides] if isinstance(overrides, str) else overrides
    if not isinstance(changes, (list, tuple)) or not all(isinstance(each, str) for each in changes):
        raise ConfigError(
            "overrides are texts",
            given=f"overrides={overrides!r}",
            expected="a sequence of KEY.PATH=VALUE texts, as --set takes them",
            hint='overrides=["mesh.dims.tp=4"]',
        )
    return list(changes)


def load(
    source: str | PathLike[str] | Mapping[str, Any] | Config, overrides: Sequence[str] | str = ()
) -> Config:
    """Read a configuration and check all of it. Reads no environment variable.

    source: a TOML, JSON or YAML file (by its ending); or the same as a mapping; or a Config, to
        change it by overrides. Entries of `data.files` are relative to the file's folder. A JSON
        file's "$schema" is for editors, and not read.
    overrides: `KEY.PATH=VALUE` texts, applied in order; VALUE is TOML, and nothing at all removes
        the key.

    Raises ConfigError, whose text has every problem with its key, what was given, what is expected,
    and the nearest settings that are right.
    """
    changes = _changes(overrides)
    if isinstance(source, Config):
        label, data = source.source, plain(source.model_dump(exclude_unset=True))
    elif isinstance(source, Mapping):
        label, data = "config", plain(source)
    elif isinstance(source, (str, PathLike)):
        label = fspath(source)
        data = _read(Path(label), label)
    else:
        raise ConfigError(
            f"no configuration can be read from {type(source).__name__}",
            given=repr(source),
            expected="a file's path, a mapping, or a Config",
            hint='meshcomm.config.load("configs/mesh.toml")',
        )
    label += "".join(f" {shown(change)}" for change in changes)
    problems = apply(data, changes)
    if isinstance(source, (str, PathLike)):
        _anchor(data, Path(source).absolute().parent)
    config, found = check(Config, data)
    problems += found
    if problems:
        raise report(label, problems)
    config._source = label
    return config


def _read(path: Path, label: str) -> dict[str, Any]:
    parsers: dict[str, Callable[[str, str], Any]] = {
        ".toml": parse_toml,
        ".json": parse_json,
        ".yaml": parse_yaml,
        ".yml": parse_yaml,
    }
    parser = parsers.get(path.suffix.lower())
    if parser is None:
        raise ConfigError(
            f"{label}: not a kind of file that a configuration is read from",
            given=f"the ending {path.suffix}" if path.suffix else "no ending",
            expected="one of " + ", ".join(parsers),
            hint=str(path.with_suffix(".toml")) if path.suffix else f"{label}.toml",
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise report(
            label,
            [
                Problem(
                    f"line {line}",
                    "not UTF-8",
                    given=f"the byte 0x{error.object[error.start]:02x} at offset {error.start}",
                    expected="text in UTF-8",
                    hint="save the file as UTF-8",
                )
            ],
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{label}: cannot be read: {(error.strerror or str(error)).lower()}",
            given=label,
            expected="a TOML, JSON or YAML file",
            hint=_near(path),
        ) from None
    data = parser(text, label)
    if data is None:
        data = {}
    if parser is parse_json and isinstance(data, dict) and isinstance(data.get("$schema"), str):
        # For editors; TOML and YAML have comments for it.
        del data["$schema"]
    if not isinstance(data, dict):
        raise ConfigError(
            f"{label}: holds no table",
            given=toml(data),
            expected="sections at the top: mesh, process, ...",
            hint='{ "mesh": { "dims": { "dp": 8 } } }'
            if path.suffix == ".json"
            else "mesh: { dims: { dp: 8 } }",
        )
    return data


def _near(path: Path) -> str:
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f"the folder {path.parent} cannot be read either"
    near = nearest_name(path.name, beside)
    return "a path to a file" if near is None else f"did you mean {path.parent / near}?"


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the entries of data.files start at `folder`, where they are texts at all."""
    section = data.get("data")
    files = section.get("files") if isinstance(section, dict) else None
    if isinstance(files, list):
        for index, name in enumerate(files):
            if isinstance(name, str) and name and not Path(name).is_absolute():
                is_glob = glob.escape(name) != name
                files[index] = str(Path(glob.escape(str(folder)) if is_glob else folder) / name)
