"""Which checkpoints of a run are there, and how one comes to be there: whole, or not at all.

    <train.out>/checkpoints/
        job                  the job that writes here, so that its restarts know their own
        latest               the name of the newest complete checkpoint, for people and scripts
        step-000040/         a complete checkpoint: tensors and .metadata (see sharded), lock.json
        step-000060.saving/  being written, or what a broken save left
        step-000020.removing/

A checkpoint is complete when it has its final name: it gets that by a single rename, after every
rank's files have been synced to the disk. What else lies here is removed at the next start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from meshcomm.config import TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.exchange import bytes_of_every_rank, is_first, together
from meshcomm.train.lock import NAME as LOCK
from meshcomm.train.lock import Lock
from meshcomm.train.metrics import put_aside
from meshcomm.train.sharded import METADATA, RETRY, WRITABLE, read, write

FOLDER = "checkpoints"
_SAVING, _REMOVING = ".saving", ".removing"


@dataclass(frozen=True)
class Attempt:
    """Which job this process is part of, and how often its launcher has restarted it.

    job: unique to the job and the same in all its attempts. "": nobody says.
    """

    job: str = ""
    restarts: int = 0


def find_attempt(env: Mapping[str, str]) -> Attempt:
    """What torchrun's agent says in `env`."""
    # "none" is the id of every torchrun that was not given one.
    job = env.get("TORCHELASTIC_RUN_ID", "none")
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Attempt("" if job == "none" else job, int(restarts) if restarts.isdecimal() else 0)


@dataclass(frozen=True)
class Beginning:
    """How a run starts.

    continues: it goes on where an earlier one stopped, be that before its first checkpoint.
    path: the checkpoint it goes on from; None: it starts with the first step.
    restarts: of the launcher, where it goes on because of one; else 0.
    """

    continues: bool = False
    path: Path | None = None
    restarts: int = 0


@final
class Checkpoints:
    """The checkpoints of one run, in `train.out`. Every rank of the mesh has one.

    `train.out` must be on a file system that the hosts of all ranks share.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig) -> None:
        self._mesh = mesh
        self._train = train
        self.folder = Path(train.out) / FOLDER

    def begin(self, attempt: Attempt) -> Beginning:
        """Decide how the run starts, and make the folder ready for it. Every rank calls this.

        It goes on with `train.resume`, or where the launcher has restarted the job that wrote
        here. Otherwise what an earlier run left, metrics and checkpoints, is put aside. What broken
        saves left is removed. Rank 0 decides and acts; any rank may be the one that was restarted.
        Raises TrainingError where the folder cannot be read or written.
        """
        mesh = self._mesh
        # Each host's agent counts the failures of its own processes.
        counts = bytes_of_every_rank(mesh, str(attempt.restarts).encode())
        restarts = max(int(count) for count in counts)

        def decide() -> bytes:
            return json.dumps(self._decide(attempt.job, restarts)).encode() if is_first(mesh) else b""

        said = bytes_of_every_rank(mesh, together(mesh, f"use {self.folder}", decide))
        continues, name, counted = json.loads(next(text for text in said if text))
        return Beginning(continues, None if name is None else self.folder / name, counted)

    def save(self, lock: Lock, state: Mapping[str, Tensor]) -> Path:
        """Save `state` as the checkpoint of `lock.step`; remove those before the last `train.keep`.

        Called by: every rank, with the state that each holds.
        Raises:    TrainingError on every rank where one could not write. The checkpoints before
                   this one are as they were, whatever happens and whenever the job ends.
        """
        path = self.folder / f"step-{lock.step:06d}"
        saving = path.with_name(path.name + _SAVING)
        try:
            write(self._mesh, state, saving)
            together(
                self._mesh,
                f"save into {path}",
                lambda: self._commit(lock, saving, path),
                expected=WRITABLE,
                hint=RETRY,
            )
        except TrainingError:
            # Give the disk its space back: what was written is of no use.
            if is_first(self._mesh):
                shutil.rmtree(saving, ignore_errors=True)
            raise
        return path

    def load(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `state` from the checkpoint `path`, saved on this or another mesh."""
        read(self._mesh, state, path)

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            step = re.fullmatch(r"step-(\d+)", path.name)
            if step and (path / METADATA).is_file() and (path / LOCK).is_file():
                found.append((int(step[1]), path))
        return [path for _, path in sorted(found)]

    def _decide(self, job: str, restarts: int) -> tuple[bool, str | None, int]:
        every = self._train.checkpoint_every
        marker = self.folder / "job"
        known = marker.read_text(encoding="utf-8").strip() if marker.is_file() else None
        restarted = bool(every and restarts and job and known == job)
        continues = self._train.resume or restarted
        found = [path.name for path in self.complete()]
        if not restarted and not (continues and found):
            put_aside(Path(self._train.out), with_checkpoints=bool(found))
            found = []
        if self.folder.is_dir():
            self._tidy()
        if every:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Last: only what was put aside before it can be taken for the job's own.
            _replace(marker, job)
        if found:
            _replace(self.folder / "latest", found[-1])
        return continues, found[-1] if found else None, restarts if restarted else 0

    def _tidy(self) -> None:
        for path in self.folder.iterdir():
            if path.name.startswith("step-") and path.name.endswith((_SAVING, _REMOVING)):
                shutil.rmtree(path)
            elif path.name.endswith(".tmp"):
                path.unlink()

    def _commit(self, lock: Lock, saving: Path, path: Path) -> None:
        if not is_first(self._mesh):
            return
        lock.write(saving)
        _sync(saving / LOCK)
        _sync(saving)
        saving.rename(path)
        _sync(self.folder)
        _replace(self.folder / "latest", path.name)
        for old in self.complete()[: -self._train.keep]:
            removing = old.with_name(old.name + _REMOVING)
            old.rename(removing)
            shutil.rmtree(removing)


def _replace(path: Path, text: str) -> None:
    """Write `text` and a newline into `path`, which holds the old or the new text at any moment."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text + "\n", encoding="utf-8")
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
