"""What is to be shown: a configuration's file, or the folder of a run?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshcomm.config import Config, load
from meshcomm.errors import ViewError


class Target(NamedTuple):
    """settings: what is shown. folder: where the run writes, there or not yet; None without training."""

    settings: Config
    folder: Path | None


def find_target(target: Path, overrides: Sequence[str] = ()) -> Target:
    """A file is a configuration, whose run writes into train.out; a folder is a run with its config.json.

    Raises ViewError where it is neither, ConfigError where the configuration is wrong.
    """
    if target.is_dir():
        config = target / "config.json"
        if not config.is_file():
            raise ViewError(
                f"{target} is not the folder of a run",
                given=f"a folder without config.json: {_content(target)}",
                expected="the train.out of `meshcomm train`, which writes config.json, run.json and metrics.jsonl",
                hint="the configuration's file: meshcomm view CONFIG waits for its run",
            )
        return Target(load(config, overrides), target)
    if not target.exists() and target.suffix.lower() not in (".toml", ".json", ".yaml", ".yml"):
        raise ViewError(
            f"there is no {target}",
            given=str(target),
            expected="a configuration's file, or the folder of a run",
            hint="before a run has begun, meshcomm view CONFIG: it waits for train.out",
        )
    settings = load(target, overrides)
    return Target(settings, None if settings.train is None else Path(settings.train.out))


def _content(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "empty"
