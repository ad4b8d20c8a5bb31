"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshcomm.config.wording import key_path, whole_toml
from meshcomm.errors import ConfigError, MeshcommError


def write_whole(
    path: Path, text: str, *, given: str | None = None, kind: type[MeshcommError] = ConfigError
) -> None:
    """Write a file so that readers see the old one or the new one.

    Raises `kind` where that cannot be; then the file is as it was. given: what named it, for the error.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            # mkstemp lets nobody else read it; a new file has what the umask leaves.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise kind(
            f"{path}: cannot be written: {(error.strerror or str(error)).lower()}",
            given=given or str(path),
            expected="a file in a folder that exists and can be written",
            hint=f"mkdir -p {path.parent}" if not path.parent.exists() else "another path",
        ) from None


def toml_text(head: Sequence[str], sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A TOML file: `head` as comments, then the sections, without None, which TOML does not know.

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
