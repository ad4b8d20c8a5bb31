"""How a run saves its checkpoints, beside the training or between two steps, and what it begins with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from torch import Tensor

from meshcomm.config import TrainConfig
from meshcomm.errors import CommunicationError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.train.background import Background
from meshcomm.train.complete import (
    FOLDER,
    LATEST,
    commit,
    complete,
    keep_last,
    name_of,
    replace,
    saving,
    tidy,
)
from meshcomm.train.exchange import bytes_of_every_rank, is_first, together
from meshcomm.train.lock import Lock
from meshcomm.train.metrics import put_aside
from meshcomm.train.sharded import RETRY, WRITABLE, Division, Share, all_do, read

# After a broken connection: the others may have ended, and what they wrote with them.
_GRACE_S: Final = 5.0


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

    With `train.checkpoint_async`, `save` returns when what this rank writes has been copied, and the
    files are written while training goes on. Then, on every rank: `poll` before each step, and
    `finish` after the last one. As a context, leaving it waits for a save that is under way: with
    `finish`, or, where an error is on its way, alone and without an error of its own.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig) -> None:
        self._mesh = mesh
        self._train = train
        self.folder = Path(train.out) / FOLDER
        self._division = Division(mesh)
        self._under_way: Background | None = None

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

        Called by: every rank, with the state that each holds. Waits for a save that is under way.
        Returns:   the path that the complete checkpoint has, or will have where it is written beside
                   the training; `state` may change then.
        Raises:    TrainingError on every rank where one could not write. The checkpoints before
                   this one are as they were, whatever happens and whenever the job ends.
        """
        self.finish()
        path = self.folder / name_of(lock.step)
        try:
            if self._train.checkpoint_async:
                self._begin(lock, path, state)
            else:
                share = Share(self._mesh, state, self._division.divide(state), saving(path))
                all_do(self._mesh, share.folder, share.write)
                all_do(self._mesh, share.folder, lambda: self._complete(lock, share))
        except TrainingError:
            # Give the disk its space back: what was written is of no use.
            if is_first(self._mesh):
                shutil.rmtree(saving(path), ignore_errors=True)
            raise
        return path

    def poll(self) -> None:
        """Raise on every rank what made a save beside the training fail; before each step.

        Called by: every rank, at the same point of the program. While a save is under way it costs an
        all_reduce of one number per dim, else nothing.
        Raises: TrainingError, the same on every rank: which rank could not save, and why.
        """
        if self._under_way is not None:
            try:
                ended = self._under_way.poll()
            except BaseException:
                self._under_way = None
                raise
            if ended:
                self._under_way = None

    def finish(self) -> None:
        """Wait until a save that is under way is complete, for `mesh.timeout_s` at most.

        Called by: every rank, at the same point of the program. Raises as `poll`.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.finish(self._mesh.plan.defaults.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            broken = isinstance(error, CommunicationError)
            under_way.settle(_GRACE_S if broken else self._mesh.plan.defaults.timeout_s)

    def load(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `state` from the checkpoint `path`, saved on this or another mesh."""
        read(self._mesh, state, path)

    def complete(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return complete(self.folder)

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
            tidy(self.folder)
        if every:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Last: only what was put aside before it can be taken for the job's own.
            replace(marker, job)
        if found:
            replace(self.folder / LATEST, found[-1])
        return continues, found[-1] if found else None, restarts if restarted else 0

    def _begin(self, lock: Lock, path: Path, state: Mapping[str, Tensor]) -> None:
        mesh, draft = self._mesh, saving(path)
        items = self._division.divide(state)
        share = all_do(mesh, draft, lambda: Share(mesh, state, items, draft, copy=True))
        self._under_way = Background(
            mesh,
            f"save into {draft}",
            work=share.write,
            complete=lambda: self._complete(lock, share),
            give_up=lambda: shutil.rmtree(draft, ignore_errors=True),
            expected=WRITABLE,
            hint=RETRY,
        )

    def _complete(self, lock: Lock, share: Share) -> None:
        if is_first(self._mesh):
            share.finish()
            commit(lock, self.folder / name_of(lock.step))
            keep_last(self.folder, self._train.keep)
