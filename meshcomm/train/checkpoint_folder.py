"""The folder of a run's checkpoints: which of them are complete, and how a draft becomes a checkpoint at once.

    <train.out>/checkpoints/
        job                  the job that writes here, so that its restarts know their own
        latest               the name of the newest complete checkpoint, for people and scripts
        step-000040/         a complete checkpoint: tensors and .metadata, and lock.json with the digests of
                             .metadata and of itself
        step-000060.saving/  being written, or what a broken save left
        step-000020.removing/

A checkpoint is complete when it has its final name: it gets that by a single rename, after every
rank's files have been synced to the disk. What else lies here is removed at the next start.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
LOCK: Final = "lock.json"
METADATA: Final = ".metadata"
_SAVING, _REMOVING = ".saving", ".removing"


def name_of(step: int) -> str:
    """The name of a step's complete checkpoint."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint is named after, complete or being saved; -1 for another name.

    >>> step_of(Path("checkpoints/step-000040")), step_of(Path("step-000060.saving")), step_of(Path("x"))
    (40, 60, -1)
    """
    step = re.fullmatch(rf"step-(\d+)({_SAVING})?", path.name)
    return int(step[1]) if step else -1


def saving(path: Path) -> Path:
    """Where the checkpoint `path` is written until it is complete."""
    return path.with_name(path.name + _SAVING)


def is_complete(path: Path) -> bool:
    """Whether the folder `path` is a complete checkpoint, by what is in it."""
    return path.suffix != _SAVING and (path / METADATA).is_file() and (path / LOCK).is_file()


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if step_of(path) >= 0 and is_complete(path)), key=step_of
    )


def has(folder: Path, step: int) -> bool:
    """Whether there is a complete checkpoint of this step in `folder`."""
    return is_complete(folder / name_of(step))


def go_on_without(path: Path) -> str:
    """What to try where the checkpoint `path` is not written: the newest complete one before it, or a new run."""
    older = [each for each in complete(path.parent) if each != path and step_of(each) <= step_of(path)]
    return f"train.resume = true goes on from {older[-1]}" if older else "none is before it, so start afresh"


def instead_of(path: Path) -> str:
    """What to try where the checkpoint `path` is damaged, or is not there."""
    if not path.is_dir():
        return f"the path of a folder that was saved; {path} is none"
    return f"move {path} away; {go_on_without(path)}"


def commit(path: Path) -> None:
    """Make `saving(path)`, whose files are on the disk, the complete checkpoint `path`. Raises OSError."""
    draft = saving(path)
    sync(draft)
    draft.rename(path)
    sync(path.parent)
    replace(path.parent / LATEST, path.name)


def keep_last(folder: Path, count: int) -> None:
    """Remove the complete checkpoints before the last `count`. Raises OSError."""
    for old in complete(folder)[:-count]:
        removing = old.with_name(old.name + _REMOVING)
        old.rename(removing)
        shutil.rmtree(removing)


def tidy(folder: Path) -> None:
    """Remove what broken saves left. Raises OSError."""
    for path in folder.iterdir():
        if path.name.startswith("step-") and path.name.endswith((_SAVING, _REMOVING)):
            shutil.rmtree(path)
        elif path.name.endswith(".tmp"):
            path.unlink()


def replace(path: Path, text: str) -> None:
    """Write `text` and a newline into `path`, which holds the old or the new text at any moment."""
    draft = path.with_name(path.name + ".tmp")
    write(draft, (text + "\n").encode())
    draft.replace(path)
    sync(path.parent)


def write(path: Path, content: bytes) -> None:
    """Write the file `path` and have it on the disk. Raises OSError."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
