"""A checkpoint as one safetensors file, and back: by one process, one tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.train.complete import FOLDER, commit, complete, is_complete, name_of, saving
from meshcomm.train.lock import Lock
from meshcomm.train.safetensors import SafetensorsFile, write_file
from meshcomm.train.saved import Saved
from meshcomm.train.sharded import write_alone

_LOCK: Final = "meshcomm.lock"
_WEIGHTS: Final = "model."

T = TypeVar("T")


class Moved(NamedTuple):
    """What went from where to where."""

    source: Path
    target: Path
    step: int
    tensors: int
    bytes: int


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint `path`, or the last one of the run `path`. Raises TrainingError."""
    if is_complete(path):
        return path
    for folder in (path / FOLDER, path):
        found = complete(folder)
        if found:
            return found[-1]
    raise TrainingError(
        f"there is no complete checkpoint in {path}",
        given=f"{path}" if path.is_dir() else f"{path}, which is no folder",
        expected=f"a run's train.out, or one of its {FOLDER}/{name_of(100)}",
        hint="train.checkpoint_every = 100 saves some",
    )


def export_checkpoint(source: Path, target: Path, *, weights: bool = False) -> Moved:
    """Write the tensors of a checkpoint into the safetensors file `target`, whole, by their global names.

    source:  a complete checkpoint, or a run, whose last one it is then.
    weights: only the model's, by the names of its modules: `layers.0.attn.wq.weight`. Without, the
             file has everything that `import_checkpoint` needs.
    Needs no process group, whatever mesh the checkpoint was saved on. Raises TrainingError.
    """
    folder = find_checkpoint(source)
    lock = Lock.read(folder)
    saved = Saved(folder)
    prefix = _WEIGHTS if weights else ""
    kinds = {name[len(prefix) :]: kind for name, kind in saved.kinds.items() if name.startswith(prefix)}
    metadata = {"format": "pt"} if weights else {"format": "pt", _LOCK: replace(lock, metadata="").text()}

    def load(name: str) -> Tensor:
        tensor = torch.empty(kinds[name].shape, dtype=kinds[name].dtype)
        saved.fill({prefix + name: tensor})
        return tensor

    size = _done(f"export {folder} to {target}", lambda: write_file(target, kinds, metadata, load))
    return Moved(folder, target, lock.step, len(kinds), size)


def import_checkpoint(source: Path, out: Path) -> Moved:
    """Make a checkpoint of the run `out` from a file that `export_checkpoint` wrote; `resume` starts there.

    Raises TrainingError where the file is not one, or the run has a checkpoint of that step or a
    later one, with which a run that resumes would go on.
    """
    with SafetensorsFile(source) as file:
        lock = _lock_of(file, source)
        folder = out / FOLDER
        path = folder / name_of(lock.step)
        later = [found for found in complete(folder) if Lock.read(found).step >= lock.step]
        if later:
            raise TrainingError(
                f"the run has a checkpoint of step {lock.step} or later already",
                given=f"{later[-1]}, and step {lock.step} in {source}",
                expected="a run that the imported one is the last of",
                hint="import into another folder, and train.out = that one",
            )
        kinds = {
            name: torch.empty(kind.shape, dtype=kind.dtype, device="meta")
            for name, kind in file.kinds.items()
        }

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            draft = saving(path)
            shutil.rmtree(draft, ignore_errors=True)
            try:
                write_alone(kinds, draft, file.load)
                commit(lock, path)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise

        _done(f"import {source} into {path}", write)
        return Moved(source, path, lock.step, len(kinds), sum(part.stat().st_size for part in path.iterdir()))


def _lock_of(file: SafetensorsFile, source: Path) -> Lock:
    text = file.metadata.get(_LOCK)
    try:
        if text is None:
            raise ValueError("weights of something, without what a run goes on from")
        return Lock.parse(text)
    except ValueError as error:
        raise TrainingError(
            f"{source} is not an exported checkpoint",
            given=f"{_LOCK} in its metadata: {error}",
            expected="the lock of a checkpoint, as this version of meshcomm writes it",
            hint="meshcomm export RUN FILE, without --weights",
        ) from error


def _done(what: str, action: Callable[[], T]) -> T:
    """What `action` gives. Whatever it raises becomes a TrainingError."""
    try:
        return action()
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            f"could not {what}",
            given=f"{type(error).__name__}: {error}",
            expected="files that are whole, and a folder with space that can be written to",
        ) from error
