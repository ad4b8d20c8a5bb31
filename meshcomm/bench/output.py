"""May a file be written here, and is what stands there ours to replace? Asked before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from meshcomm.errors import ConfigError


def check_output(path: Path, option: str, suffix: str, mark: str) -> None:
    """Raise ConfigError unless `path` can become a file of this kind.

    A file that is there is replaced only where `mark`, which all that meshcomm writes begins with, is in
    its first lines: a config or a picture of somebody's own is not lost.
    """
    if path.suffix != suffix:
        raise ConfigError(
            f"{path} does not end in {suffix}",
            given=f"{option} {path}",
            expected=f"a name that ends in {suffix}",
            hint=f"{option} {path.with_suffix(suffix)}" if path.name else None,
        )
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(
            f"{path} cannot be written",
            given=f"{option} {path}",
            expected="a file in a folder that is there and may be written",
        )
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if mark not in file.read(4096):
                raise ConfigError(
                    f"{path} is there, and is not what meshcomm bench wrote",
                    given=f"{option} {path}",
                    expected="a new file, or one that an earlier meshcomm bench wrote",
                    hint=f"{option} {path.with_stem(path.stem + '_measured')}",
                )
