"""A file that is written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

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
