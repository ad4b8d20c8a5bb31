"""A run's checkpoints, which are saved in the background or between two steps and loaded when a run resumes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Self, final

import torch
from torch import Tensor

from meshcomm.comm.codec import decode
from meshcomm.config import TrainConfig
from meshcomm.errors import CommunicationError, MeshcommError, RankLost, TrainingError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, of_every_rank, on_all_ranks, ranks_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.state import EXTRA, OF_MODULE, OF_PARAMETER, OF_TRAINING, unfit
from meshcomm.train.callbacks import Resumed
from meshcomm.train.checkpoint.folder import (
    FOLDER,
    LATEST,
    check_free,
    check_step,
    checkpoints_in,
    commit,
    is_complete,
    keep_last,
    name_of,
    path_of,
    replace,
    saving,
    tidy,
)
from meshcomm.train.checkpoint.lease import Attempt, Lease, find_attempt
from meshcomm.train.checkpoint.lock import Lock, resume_differences
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.checkpoint.writer import Save, divide
from meshcomm.train.data import STATE
from meshcomm.train.run_files import put_aside
from meshcomm.transfer.fused import Kept
from meshcomm.watching.verdict import alike

# The losses of all steps, in a run's checkpoint.
LOSSES: Final = "run.losses"
# How long to wait after a broken connection: the other ranks may have ended without completing their writes.
_GRACE_S: Final = 5.0


def read(mesh: Mesh, state: Mapping[str, Tensor | Kept], folder: Path) -> None:
    """Fill the tensors of `state` in place from a folder that `write` or a run has saved on any mesh.

    Called by: every rank. Each rank reads only the data that its parts need.
    Raises:    TrainingError on every rank if one rank cannot read, if a name, shape or dtype differs, or if the ranks' folders
               hold different checkpoints.
    """
    what = f"resume from {folder}"

    def look() -> tuple[Lock, Saved]:
        lock, saved = Lock.read(folder), Saved(folder)
        saved.check(state)
        return lock, saved

    lock, saved = on_all_ranks(mesh, what, look)
    _check_same(mesh, folder, lock)
    on_all_ranks(mesh, what, lambda: saved.fill(state))


def _check_same(mesh: Mesh, folder: Path, lock: Lock) -> None:
    """Raise TrainingError on every rank if the ranks have read the locks of different checkpoints. Paths may differ."""
    if len(set(of_every_rank(mesh, lock.digest))) > 1:
        # Every rank sees the same digests, so all ranks raise.
        texts = [f"step {step} in {path}" for step, path in of_every_rank(mesh, [lock.step, str(folder)])]
        there = dict(zip(ranks_of(mesh), texts, strict=True))
        lines = [f"{ranks_text(sorted(ranks))}: {there[ranks[0]]}" for ranks in alike(ranks_of(mesh), there)]
        raise TrainingError(
            "ranks would load different checkpoints",
            given="\n".join(lines[:8]),
            expected="the same checkpoint on every rank, with equal lock.json and .metadata",
            hint="give every rank the same folder, into which no other job saves",
        )


def resume(
    mesh: Mesh, engine: Engine, folder: str | Path, *, run: bool = False, begun: Lock | None = None
) -> tuple[list[float], Tensor | None]:
    """Load a checkpoint, saved on any mesh, into the engine.

    run:       whether to read also what only a run saves.
    begun:     the checkpoint's lock as the run has read it before.
    Called by: every rank. Each rank reads only the data that its parts need.
    Returns:   the loss of each step, and the state of this rank's data loader. [] and None if they are not saved, the latter
               also if none was saved for this rank's share of the data.
    Raises:    TrainingError on every rank if one rank cannot read, if a name, shape or dtype differs, if the ranks' folders hold
               different checkpoints, or if the optimizer is another one. The engine has not changed, unless the error says so.
    """
    known_names = engine.names_of_all_stages()
    what = f"resume from {folder}"

    def look() -> tuple[Path, Lock, Saved]:
        path = path_of(folder)
        lock, saved = Lock.read(path), Saved(path)
        if begun is not None and lock.digest != begun.digest:
            raise TrainingError(
                "the checkpoint has changed since the run began to read it",
                given=f"{path}: step {begun.step} before, step {lock.step} now",
                expected="a checkpoint that no other job replaces",
                hint="start the run again once no other job writes there",
            )
        parts = [name for name in saved.kinds if name.startswith(("model.", OF_MODULE))]
        if more_there := [name for name in parts if name not in known_names]:
            raise TrainingError(
                f"the checkpoint does not fit: {', '.join(more_there[:4])}",
                given=f"{len(more_there)} of {len(parts)} tensors in {path} that the model does not have",
                expected="a model that has all of the checkpoint's parameters and buffers",
                hint="resume with the checkpoint's model; to use its weights in another model, run meshcomm export",
            )
        if run:
            saved.check({LOSSES: torch.empty(lock.step, dtype=torch.float64)})
        try:
            engine.put_back(saved.kinds, partial(_check_fits, engine, saved, known_names), lock.step)
        except _Fits:
            return path, lock, saved
        raise AssertionError("put_back has not filled the state")

    path, lock, saved = on_all_ranks(mesh, what, look)
    _check_same(mesh, path, lock)

    def put_back() -> tuple[list[float], Tensor | None]:
        losses = {LOSSES: torch.zeros(lock.step, dtype=torch.float64)} if run else {}
        data = STATE.format(engine.data_coord, engine.data_size)
        # What a run alone has can fail before the engine changes.
        saved.fill(losses)
        loader = saved.load(data) if run and data in saved.kinds else None
        try:
            engine.put_back(saved.kinds, saved.fill, lock.step)
        except Exception as error:
            if run:
                raise
            raise _between(error, path) from error
        return [loss for tensor in losses.values() for loss in tensor.tolist()], loader

    return on_all_ranks(mesh, what, put_back)


class _Fits(Exception):
    """The checkpoint fits the engine, whose state has not been touched."""


def _check_fits(engine: Engine, saved: Saved, known_names: set[str], room: dict[str, Tensor | Kept]) -> None:
    """Raise TrainingError if the engine would refuse the checkpoint after its tensors have been filled, otherwise _Fits.

    room: the tensors to fill, of which only those for plain data are filled here.
    """
    saved.check(room)
    texts = {
        name: value
        for name, value in room.items()
        if isinstance(value, Tensor) and name.startswith((OF_PARAMETER, OF_TRAINING))
    }
    saved.fill(texts)
    facts = {
        name.removeprefix(OF_PARAMETER): decode(text, torch.device("cpu")) for name, text in texts.items()
    }
    made_by = facts.pop(OF_TRAINING)["optimizer"]
    engine.check_optimizer(made_by, facts, any(name.startswith("optimizer.") for name in room))
    for name in known_names:
        module = name.removeprefix(OF_MODULE)
        tensor = ".".join(("model", *([module] if module else []), EXTRA))
        if name.startswith(OF_MODULE) and saved.kinds.keys().isdisjoint((name, tensor)):
            what = f"the extra state of {module or 'the model'}"
            raise unfit(what, "none in the checkpoint", "the value of get_extra_state")
    raise _Fits


def _between(error: Exception, folder: Path) -> TrainingError:
    """Return the error of an engine that was partly filled."""
    told = error if isinstance(error, MeshcommError) else None
    hint = f"{told.hint}; " if told and told.hint else ""
    return TrainingError(
        told.what if told else "the checkpoint's state could not be loaded",
        given=told.given if told else f"{type(error).__name__}: {error}",
        expected=told.expected if told else None,
        hint=f"{hint}do not train on: the state is now neither the earlier one nor that of {folder}, until a load succeeds",
    )


def state_of(
    mesh: Mesh,
    engine: Engine,
    losses: list[float] | None = None,
    data: Callable[[], Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor | Kept]:
    """Return all the state that `resume` needs. data: a function that returns the data loader's state.

    Raises TrainingError on every rank if one rank holds state that cannot be saved.
    """

    def gather() -> dict[str, Tensor | Kept]:
        return {**engine.saved_state(), **({} if data is None else data())}

    state = on_all_ranks(mesh, "save the state", gather)
    return state if losses is None else {**state, LOSSES: torch.tensor(losses, dtype=torch.float64)}


def write(mesh: Mesh, state: Mapping[str, Tensor | Kept], folder: str | Path, lock: Lock) -> None:
    """Write `state` into a new folder. The tensors are DTensors, or plain tensors that are equal on all ranks that hold them.

    lock:      the lock that `resume` requires; `read` does not use it.
    Called by: every rank of the mesh. Returns when all files are on disk. Metadata and lock are written last.
    Raises:    TrainingError on every rank if one rank cannot write, or if the folder has files already or is named after another step.
    """
    path = _check_free(mesh, folder, lock.step)
    Save(mesh, divide(mesh, state), path, complete=partial(lock.write, path)).now()


def _check_free(mesh: Mesh, folder: str | Path, step: int) -> Path:
    def check() -> Path:
        path = path_of(folder)
        check_step(path, step)
        if is_first(mesh):
            check_free(path)
        return path

    return on_all_ranks(mesh, f"save into {folder}", check)


@final
class Checkpoints:
    """The checkpoints of one run, in `train.out`. Every rank of the mesh has a Checkpoints object.

    `train.out` must be on a file system that the hosts of all ranks share. Only one job at a time may save there.

    With `train.checkpoint_async`, `save` returns when this rank's data have been copied, and the files
    are written while training continues. Every rank must then call `poll` before each step, and
    `finish` after the last step. As a context manager, it calls `finish` on exit. If an exception is
    propagating, it waits on this rank only and does not raise.

    lease: the run's right to write into `train.out`. If None, the checkpoints take their own, until they are closed.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig, lease: Lease | None = None) -> None:
        self._mesh = mesh
        self._train = train
        self.lease = lease or Lease(Path(train.out), find_attempt(os.environ))
        self._holds_own = lease is None
        self.folder = Path(train.out) / FOLDER
        self._under_way: Save | None = None

    def begin(self, attempt: Attempt, now: Lock) -> tuple[Resumed | None, Lock]:
        """Decide how the run starts, and prepare the folder. Every rank calls this.

        The run continues from a checkpoint if `train.resume` is set, or if the launcher has restarted the job
        that wrote to this folder. Otherwise, the metrics and checkpoints of an earlier run are renamed. Remains
        of interrupted saves are removed. Rank 0 decides, because the launcher may have restarted any rank.

        now:     the lock of this run before its first step. The checkpoint's lock must match it, see
                 `lock.resume_differences`.
        Returns: the checkpoint to continue from, or None if the run starts from scratch; and the checkpoint's lock,
                 or `now` if there is no checkpoint.
        Raises:  TrainingError if the folder cannot be read or written, or if another job writes there; ConfigError if the
                 checkpoint does not match.
        """
        mesh = self._mesh
        self.lease.hold(mesh)
        # The agent of each host counts only the failures of its own processes.
        restarts = max(of_every_rank(mesh, attempt.restarts))

        def decide() -> tuple[bool, str, int] | None:
            return self._decide(attempt.job, restarts) if is_first(mesh) else None

        decisions = of_every_rank(mesh, on_all_ranks(mesh, f"use {self.folder}", decide))
        continues, name, counted = next(decision for decision in decisions if decision)
        path = self.folder / name
        if not name:
            return Resumed(0, path, (), counted) if continues else None, now

        def look() -> tuple[Resumed, Lock]:
            saved = Lock.read(path)
            return Resumed(saved.step, path, resume_differences(saved, now, path), counted), saved

        resumed, saved = on_all_ranks(mesh, f"resume from {path}", look)
        _check_same(mesh, path, saved)
        return resumed, saved

    def tidy(self) -> None:
        """Remove the remains of a save that was interrupted by the loss of ranks. Called by: every rank."""

        def remove() -> None:
            if is_first(self._mesh) and self.folder.is_dir():
                tidy(self.folder)

        on_all_ranks(self._mesh, f"use {self.folder}", remove)

    def save(self, lock: Lock, state: Mapping[str, Tensor | Kept]) -> Path:
        """Save `state` as the checkpoint of `lock.step`. Remove all but the most recent `train.keep` checkpoints.

        Called by: every rank, with the state that it holds. Waits for an earlier save to complete.
        Returns:   the path of the complete checkpoint. If the checkpoint is written in the background, the path
                   appears later, but `state` may already be modified.
        Raises:    TrainingError on every rank if one rank cannot write, if another job writes into `train.out`, or if the
                   path is taken. Earlier checkpoints stay intact in any case, even if the job ends during the save.
        """
        self.finish()
        self.lease.hold(self._mesh)
        path = self.folder / name_of(lock.step)
        _check_free(self._mesh, path, lock.step)
        draft, beside = saving(path), self._train.checkpoint_async
        if is_first(self._mesh):
            # Only the holder of the lease writes drafts, so this one is left over from an interrupted save.
            shutil.rmtree(draft, ignore_errors=True)

        def complete() -> None:
            self.lease.check()
            lock.write(draft)
            commit(path)
            keep_last(self.folder, self._train.keep)

        save = Save(self._mesh, divide(self._mesh, state), draft, copy=beside, complete=complete)
        if beside:
            save.start()
            self._under_way = save
        else:
            save.now()
        return path

    def poll(self) -> None:
        """Raise the error of a background save on every rank. Call this method before each step.

        Called by: every rank, at the same point of the program. While a save is in progress, the call costs an
                   all_reduce of two numbers per dim; otherwise it costs nothing.
        Raises: the same TrainingError on every rank. The error names the rank that could not save and the reason.
        """
        save, self._under_way = self._under_way, None
        if save is not None and not save.poll():
            self._under_way = save

    def finish(self) -> None:
        """Wait at most `mesh.timeout_s` for a save in progress to complete.

        Called by: every rank, at the same point of the program. Raises the same errors as `poll`.
        """
        save, self._under_way = self._under_way, None
        if save is not None:
            save.wait(self._mesh.plan.defaults.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        elif self._under_way is not None:
            broken = isinstance(error, CommunicationError)
            grace_s = 0.0 if isinstance(error, RankLost) else _GRACE_S
            self._under_way.settle(_GRACE_S if broken else self._mesh.plan.defaults.timeout_s, grace_s)
            self._under_way = None
        if self._holds_own:
            self.lease.release()

    def _decide(self, job: str, restarts: int) -> tuple[bool, str, int]:
        every = self._train.checkpoint_every
        marker = self.folder / "job"
        marked_job = marker.read_text(encoding="utf-8").strip() if marker.is_file() else None
        restarted = bool(every and restarts and job and marked_job == job)
        continues = self._train.resume or restarted
        # If the last one is damaged, the run must not continue from an earlier one, whose later steps it would save again.
        names = [path.name for path in checkpoints_in(self.folder)]
        if not restarted and not (continues and names):
            put_aside(Path(self._train.out), with_checkpoints=bool(names))
            names = []
        if self.folder.is_dir():
            tidy(self.folder)
        if every:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Write the name last: until an earlier run's files are renamed, they could be mistaken for this job's files.
            replace(marker, job)
        if names and is_complete(self.folder / names[-1]):
            replace(self.folder / LATEST, names[-1])
        return continues, names[-1] if names else "", restarts if restarted else 0
