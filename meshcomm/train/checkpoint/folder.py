"""A run's checkpoint folder: finds the complete checkpoints, and atomically turns a draft into a checkpoint.

    <train.out>/checkpoints/
        job                  the job that writes here, so that its restarts recognize their own
        latest               the name of the newest complete checkpoint, for people and scripts
        step-000040/         a complete checkpoint: tensors and .metadata, and lock.json with the digests of
                             .metadata and of lock.json itself
        step-000060.saving/  in progress, or left over from an interrupted save; .saving in it: which save writes there
        step-000020.removing/

A checkpoint is complete when it has its final name. A single rename gives it that name, after the files
of all ranks have been synced to disk. A folder with such a name that lacks one of its files was damaged later.
It is never used, passed over or removed: who needs its place gets an error. Everything else in this folder is
removed at the next start.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path
from typing import BinaryIO, Final

from meshcomm.errors import TrainingError

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
LOCK: Final = "lock.json"
METADATA: Final = ".metadata"
CLAIM: Final = ".saving"
"""A file in a folder that a save is writing, with the token of the save."""
_SAVING, _REMOVING = ".saving", ".removing"


def path_of(folder: object) -> Path:
    """Return the path of a folder that a program has given. Raises TrainingError if it is not one."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise TrainingError(
            "the folder of a checkpoint is not a path",
            given=f"{folder!r}",
            expected="a str or a Path that is not empty",
            hint='trainer.save("runs/mine"), trainer.load("runs/mine")',
        )
    return Path(path)


def name_of(step: int) -> str:
    """Return the folder name of the complete checkpoint of a step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's folder name, complete or in progress; -1 for any other name.

    >>> step_of(Path("checkpoints/step-000040")), step_of(Path("step-000060.saving")), step_of(Path("x"))
    (40, 60, -1)
    """
    step = re.fullmatch(rf"step-(\d+)({_SAVING})?", path.name)
    return int(step[1]) if step else -1


def saving(path: Path) -> Path:
    """Return the path to which the checkpoint `path` is written until it is complete."""
    return path.with_name(path.name + _SAVING)


def is_complete(path: Path) -> bool:
    """Return whether the folder `path` is a complete checkpoint, judged by its content."""
    return path.suffix != _SAVING and (path / METADATA).is_file() and (path / LOCK).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, complete or damaged, oldest first. An empty folder is none."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if step_of(path) >= 0 and path.suffix != _SAVING)
    return sorted((path for path in named if is_taken(path)), key=step_of)


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the last checkpoint of the run in `path`. Raises TrainingError if there is none.

    The checkpoint may be damaged, in which case `Lock.read` raises.
    """
    saved = checkpoints_in(path / FOLDER) or checkpoints_in(path)
    if is_complete(path) or (not saved and path in checkpoints_in(path.parent)):
        return path
    if not saved:
        raise TrainingError(
            f"there is no complete checkpoint in {path}",
            given=f"{path}" if path.is_dir() else f"{path}, which is not a folder",
            expected=f"a run's train.out, or one of its {FOLDER}/{name_of(100)}",
            hint="to save checkpoints, set train.checkpoint_every = 100",
        )
    return saved[-1]


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first."""
    return [path for path in checkpoints_in(folder) if is_complete(path)]


def is_taken(path: Path) -> bool:
    """Return whether something other than an empty folder has the path."""
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def check_free(path: Path) -> None:
    """Raise TrainingError if a checkpoint cannot get the path, because something is there."""
    if is_taken(path):
        raise _taken(path)


def _taken(path: Path) -> TrainingError:
    entries = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
    under_way = CLAIM in entries
    way_out = f"move {path} away{' if no job saves there' * under_way}, or save into another folder"
    return TrainingError(
        f"a checkpoint cannot be saved as {path}, which is there already",
        given=f"{path}, "
        + (f"with {', '.join(entries[:3])}{more}" if entries else "which is not a folder")
        + "; another save is writing there, or was interrupted" * under_way,
        expected="a new folder, or an empty one",
        hint=f"move {path} away; {go_on_without(path)}" if step_of(path) >= 0 and not under_way else way_out,
    )


def claim(folder: Path, token: str) -> bool:
    """Take a new or empty folder for one save. Of several saves at the same time, the file system lets only one have it.

    Returns whether the folder was created here. Raises TrainingError if something is there, and OSError.
    """
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
        made = True
    except FileExistsError:
        made = False
    mark = folder / CLAIM
    try:
        file = mark.open("x", encoding="utf-8")
    except FileExistsError:
        raise _taken(folder) from None
    try:
        with file:
            file.write(token)
        # Another save may have ended since the check.
        if any(entry != mark for entry in folder.iterdir()):
            mark.unlink()
            raise _taken(folder)
    except OSError:
        mark.unlink(missing_ok=True)
        raise
    return made


def is_claimed(folder: Path, token: str) -> bool:
    """Return whether this process sees the folder that `claim` has taken with this token."""
    try:
        # A network file system may remember that the folder was not there. To create it asks the server.
        folder.mkdir()
        folder.rmdir()
    except OSError:
        pass
    try:
        return read(folder / CLAIM) == token.encode()
    except OSError:
        return False


def check_step(path: Path, step: int) -> None:
    """Raise TrainingError if the folder of the checkpoint of `step` is named after another step."""
    if step_of(path) not in (-1, step):
        way_out = f"; or move it away; {go_on_without(path)}" if path.is_dir() else ""
        raise TrainingError(
            f"a folder named after step {step_of(path)} for the checkpoint of step {step}",
            given=f"{path}, and step {step}",
            expected=f"the checkpoint of step {step_of(path)}",
            hint=f"name it {name_of(step)}, or not after a step{way_out}",
        )


def go_on_without(path: Path) -> str:
    """Return advice for when the checkpoint `path` was not written: use the newest earlier checkpoint, or start a new run."""
    older = [
        checkpoint
        for checkpoint in complete(path.parent)
        if checkpoint != path and step_of(checkpoint) <= step_of(path)
    ]
    return (
        f"train.resume = true continues from {older[-1]}"
        if older
        else "there is no earlier checkpoint; start a new run"
    )


def instead_of(path: Path) -> str:
    """Return advice for when the checkpoint `path` is damaged or missing."""
    if not path.is_dir():
        return f"give the path of a saved folder; {path} is not one"
    return f"move {path} away; {go_on_without(path)}"


def commit(path: Path) -> None:
    """Rename `saving(path)`, whose files have been synced, to the complete checkpoint `path`. Raises OSError, or
    TrainingError if `path` is taken.
    """
    check_free(path)
    draft = saving(path)
    sync(draft)
    draft.rename(path)
    sync(path.parent)
    replace(path.parent / LATEST, path.name)


def keep_last(folder: Path, count: int) -> None:
    """Remove all complete checkpoints but the most recent `count`. Raises OSError."""
    for old in complete(folder)[:-count]:
        removing = old.with_name(old.name + _REMOVING)
        old.rename(removing)
        shutil.rmtree(removing)


def tidy(folder: Path) -> None:
    """Remove the remains of interrupted saves. Raises OSError."""
    for path in folder.iterdir():
        if path.name.startswith("step-") and path.name.endswith((_SAVING, _REMOVING)):
            shutil.rmtree(path)
        elif path.name.endswith(".tmp"):
            path.unlink()


def replace(path: Path, text: str) -> None:
    """Write `text` and a newline into `path`, which contains either the old or the new text at all times."""
    draft = path.with_name(path.name + ".tmp")
    write(draft, (text + "\n").encode())
    draft.replace(path)
    sync(path.parent)


def size_of(path: Path) -> int:
    """Return the size of a regular file. Raises OSError for anything else."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return facts.st_size


def opened(path: Path) -> BinaryIO:
    """Open a file of a checkpoint or a run to read it. Raises OSError, also for a pipe or a device, which could block forever."""
    size_of(path)
    return path.open("rb")


def read(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError."""
    with opened(path) as file:
        return file.read()


def write(path: Path, content: bytes) -> None:
    """Write the file `path` and sync it to disk. Raises OSError."""
    path.write_bytes(content)
    sync(path)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
