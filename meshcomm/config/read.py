"""Reads a Config from a file or a mapping, with overrides."""

from __future__ import annotations

import glob
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from meshcomm.config.mesh import MeshConfig
from meshcomm.config.parse import PARSERS
from meshcomm.config.problems import Problem, report
from meshcomm.config.root import Config
from meshcomm.config.section import check
from meshcomm.config.train import BYTES, GroupConfig
from meshcomm.config.write import key_path, plain, toml
from meshcomm.errors import ConfigError
from meshcomm.layout import Plan
from meshcomm.layout.names import nearest_name

# One key in a path. In TOML, keys with characters other than letters, digits, - and _ are quoted.
_PART = r'(?:[\w-]+|"[^"\\]+")'
# A line that occurs in a file with a mesh, or in a model's config.json.
_OF_MESH = re.compile(rb'(?m)(?:^|[{[,])\s*"?mesh"?\s*[].:=]|"model_type"')
_WORD = r"[^\s\"'\[\]{}=#,]+"


def load_config(
    source: str | PathLike[str] | Mapping[str, Any] | Config,
    overrides: Sequence[str] | str = (),
    kind: type[Config] | None = None,
) -> Config:
    """Read a configuration and check all of it. Environment variables are not read.

    source: a TOML, JSON or YAML file (by its extension), the same content as a mapping, or a Config to
        modify with overrides. Entries of `data.files` are relative to the file's folder. The
        key "$schema" of a JSON file is for editors and is ignored.
    overrides: `KEY.PATH=VALUE` strings, applied in order. VALUE is TOML; an empty VALUE removes the key.
    kind: a subclass of Config with additional sections or rules; the result is an instance of this class. If
        omitted, the class of `source` is used if it is a Config, otherwise Config.

    Raises ConfigError, which lists every wrong type, choice and range or, if there is none, every problem that the
    rules find, with its key, the given value, the expected value, and valid settings.
    """
    if isinstance(source, Config) and source._checked and not overrides and kind in (None, type(source)):
        return source
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
            hint='meshcomm.config.load_config("configs/mesh.toml")',
        )
    label += "".join(f" {shown(change)}" for change in changes)
    problems = apply(data, changes)
    if isinstance(source, (str, PathLike)):
        _anchor(data, Path(source).absolute().parent)
    config, found = check(kind or (type(source) if isinstance(source, Config) else Config), data)
    problems += found
    if config is None or problems:
        raise report(label, problems)
    config._source, config._checked = label, True
    return config


def plan(
    config: str | PathLike[str] | Mapping[str, Any] | Config | MeshConfig,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Return every group of a mesh on `world_size` processes, in creation order.

    Does not require running processes, a GPU or torch. `Plan.for_rank` returns the groups of one rank.
    world_size: may be None if every size is given.
    Raises ConfigError if the config is invalid or does not fit the world size.
    """
    if isinstance(config, MeshConfig):
        config = Config(mesh=config)
    return load_config(config, overrides).plan(world_size)


# -- files ------------------------------------------------------------------------------------------


def _read(path: Path, label: str) -> dict[str, Any]:
    parser = PARSERS.get(path.suffix.lower())
    if parser is None:
        raise ConfigError(
            f"{label}: not a configuration file type",
            given=f"the extension {path.suffix}" if path.suffix else "no extension",
            expected="one of " + ", ".join(PARSERS),
            hint=str(path.with_suffix(".toml")) if path.suffix and path.exists() else near_file(path),
        )
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(
            f"{label}: cannot be read: not a file",
            given=f"{label}, a pipe, a socket or a device",
            expected="a TOML, JSON or YAML file",
            hint="save the configuration as a file",
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = f"the byte 0x{error.object[error.start]:02x} at offset {error.start}"
        wrong = Problem(f"line {line}", "not UTF-8", "text in UTF-8", ["save the file as UTF-8"], byte)
        raise report(label, [wrong]) from None
    except OSError as error:
        raise ConfigError(
            f"{label}: cannot be read: {(error.strerror or str(error)).lower()}",
            given=label,
            expected="a TOML, JSON or YAML file",
            hint=near_file(path),
        ) from None
    data = parser(text, label)
    if path.suffix.lower() == ".json" and isinstance(data, dict) and isinstance(data.get("$schema"), str):
        # This key is for editors. TOML and YAML files use comments instead.
        del data["$schema"]
    if not isinstance(data, (dict, type(None))):
        raise ConfigError(
            f"{label}: contains no table",
            given=toml(data),
            expected="top-level sections: mesh, process, ...",
            hint='{ "mesh": { "dims": { "dp": 8 } } }'
            if path.suffix == ".json"
            else "mesh: { dims: { dp: 8 } }",
        )
    return data or {}


def near_file(path: Path, script: bool = False) -> str:
    """Return the hint for a missing file: the file in its folder with the most similar name, ignoring extensions.

    script: if True, only Python files are considered, otherwise only files that configure a mesh or describe a model.
    """
    endings = [".py"] if script else [*PARSERS]
    try:
        present = [
            entry.name
            for entry in path.parent.iterdir()
            if entry.suffix.lower() in endings and entry.is_file()
        ]
    except OSError:
        return f"the folder {path.parent} cannot be read either"
    # If two file names differ only in the extension, the one with the extension of `path` comes last and is kept.
    by_stem = {Path(name).stem: name for name in sorted(present, key=lambda n: n.endswith(path.suffix))}
    while (near := nearest_name(path.stem, by_stem)) is not None:
        found = path.parent / by_stem.pop(near)
        with suppress(OSError):
            if script or _OF_MESH.search(found.read_bytes()):
                return f"did you mean {found}?"
    return "a path to a file"


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make model.pretrained, train.init_from and the paths in `[data]` relative to `folder`, if they are strings."""
    sections = ("model", "data", "train")
    model, texts, train = (data[name] if isinstance(data.get(name), dict) else {} for name in sections)
    for section, key, word in (
        (model, "pretrained", ""),
        (texts, "tokenizer", BYTES),
        (train, "init_from", ""),
    ):
        if isinstance(named := section.get(key), str) and named not in ("", word):
            section[key] = str(folder / named)
    for key in ("files", "tokens", "chat", "validation_files"):
        if isinstance(files := texts.get(key), list):
            texts[key] = [_anchored(name, folder) for name in files]


def _anchored(name: Any, folder: Path) -> Any:
    if not isinstance(name, str) or not name or Path(name).is_absolute():
        return name
    is_glob = glob.escape(name) != name
    return str(Path(glob.escape(str(folder)) if is_glob else folder) / name)


# -- overrides --------------------------------------------------------------------------------------


def _changes(overrides: object) -> list[str]:
    changes = [overrides] if isinstance(overrides, str) else overrides
    if not isinstance(changes, (list, tuple)) or not all(isinstance(change, str) for change in changes):
        raise ConfigError(
            "overrides must be strings",
            given=f"overrides={overrides!r}",
            expected="a sequence of KEY.PATH=VALUE strings, as for --set",
            hint='overrides=["mesh.dims.tp=4"]',
        )
    return list(changes)


def apply(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Set every `KEY.PATH=VALUE` in `data`, in order. Return a problem for each override that cannot be set.

    VALUE is TOML or a bare word, which is read as a string. An empty VALUE removes the key. An existing key
    keeps its position. A new key is added at the end.

    >>> data = {"mesh": {"dims": {"pp": 2, "tp": 2}}}
    >>> apply(data, ["mesh.dims.pp=4", "mesh.backend=gloo"]), data
    ([], {'mesh': {'dims': {'pp': 4, 'tp': 2}, 'backend': 'gloo'}})
    """
    return [problem for text in overrides if (problem := _apply(data, text)) is not None]


def shown(override: str) -> str:
    """Return an override on one line, as on a command line."""
    return "--set " + override.replace("\n", "\\n")


def _apply(data: dict[str, Any], text: str) -> Problem | None:
    match = re.fullmatch(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=(.*)", text, re.DOTALL)
    if match is None:
        key = text.strip()
        bare = re.fullmatch(r"[\w.-]+", key)
        expected = "a path of keys, =, and a TOML value, as in mesh.dims.tp=4"
        ways = [f"--set {key}=..." if bare else "--set mesh.dims.tp=4"]
        name, equals, value = key.partition("=")
        if equals and (quoted := _quoted_path(name.strip())) is not None:
            ways = [f"--set '{quoted}={value}'"]
        elif equals and "[" in name:
            ways = [f"--set '{name.partition('[')[0]}=[...]', with the whole list"]
        return Problem(shown(text), "not KEY=VALUE", expected, ways, text or "nothing")
    path = [part.strip('"') for part in re.findall(_PART, match.group(1))]
    written = match.group(2).strip()
    if not written:
        return _remove(data, path, text)
    try:
        parsed = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):  # TOMLDecodeError is a ValueError
        parsed = {}
    if list(parsed) == ["value"]:
        return _set(data, path, parsed["value"], text)
    # The shell has removed the quotes, as in train.out=runs/x.
    if re.fullmatch(_WORD, written):
        return _set(data, path, written, text)
    line = written.replace("\n", "\\n")
    expected = 'a number, true, false, "text" in quotes, [ ... ] or { key = value }'
    way = "close every quote and bracket, and write key = value"
    if (quoted := _quoted(written)) is not None:
        way = f"--set '{key_path(path)}={quoted}'"
    elif written[0] not in "[{\"'":
        way = f"--set '{key_path(path)}={json.dumps(written, ensure_ascii=False)}'"
    return Problem(shown(text), f"{line} is not a TOML value", expected, [way], line)


def _quoted(written: str) -> str | None:
    """Return a list or a table with quotes around its bare words and = after its keys, as TOML wants them; None if it is neither.

    >>> _quoted("[a, b.txt]"), _quoted("{ dp: 8, out: runs/x }"), _quoted("[a")
    ('["a", "b.txt"]', '{ dp = 8, out = "runs/x" }', None)
    """
    if written[0] not in "[{":
        return None
    written = re.sub(r"([{,]\s*[\w-]+)\s*:(?!:)", r"\1 =", written)
    words = re.compile(rf"\"[^\"]*\"|'[^']*'|[\w-]+\s*=|{_WORD}")
    text = words.sub(lambda word: word[0] if _is_toml(word[0]) else json.dumps(word[0]), written)
    return text if _is_toml(text) else None


def _is_toml(value: str) -> bool:
    if value.endswith("="):
        return True
    try:
        return list(tomllib.loads(f"value = {value}")) == ["value"]
    except (ValueError, RecursionError):
        return False


def _quoted_path(name: str) -> str | None:
    """Return the path of a setting of train.groups with quotes around the pattern, which may have dots; None for another path.

    >>> _quoted_path("train.groups.model.embed*.lr"), _quoted_path("train.lr")
    ('train.groups."model.embed*".lr', None)
    """
    pattern = name.removeprefix("train.groups.")
    if pattern == name or '"' in name or "'" in name:
        return None
    before, _, last = pattern.rpartition(".")
    inner = before and last in GroupConfig.model_fields
    return key_path(["train", "groups", *([before, last] if inner else [pattern])])


def _set(data: dict[str, Any], path: list[str], value: Any, text: str) -> Problem | None:
    holder = data
    for depth, part in enumerate(path[:-1], start=1):
        if holder.get(part) is None:
            holder[part] = {}
        inside = holder[part]
        if not isinstance(inside, dict):
            outer, inner = key_path(path[:depth]), key_path(path[depth:])
            what, expected = f"{outer} is not a table", "a table, for the rest of the path"
            ways = [f"--set '{outer}={{ {inner} = {toml(value)} }}'"]
            return Problem(shown(text), what, expected, ways, f"{outer} = {toml(inside)}")
        holder = inside
    holder[path[-1]] = value
    return None


def _remove(data: dict[str, Any], path: list[str], text: str) -> Problem | None:
    holder: Any = data
    for part in path[:-1]:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or path[-1] not in holder:
        what = f"there is no {key_path(path)} to remove"
        expected = "a value after the =, or a key that the file has"
        return Problem(shown(text), what, expected, [f"--set {key_path(path)}=..."], text)
    del holder[path[-1]]
    return None
