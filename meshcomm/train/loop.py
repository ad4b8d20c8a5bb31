"""The start of a run: data, weights, and the progress of an earlier run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.parallel.compose import Engine
from meshcomm.train.agree import Facts
from meshcomm.train.callbacks import Callback, Summary
from meshcomm.train.checkpoint import Attempt, Checkpoints, resume
from meshcomm.train.data import Batches, Corpus, Data, GivenBatches
from meshcomm.train.lock import Lock, best_of, lock_of, samples_read
from meshcomm.train.run_files import check_folder
from meshcomm.train.sinks import check_sinks
from meshcomm.train.steps import Progress, Reading, Steps


def run(
    mesh: Mesh,
    facts: Facts,
    make: Callable[[bool], Engine],
    callbacks: Sequence[Callback],
    data: Data | Corpus,
    attempt: Attempt,
) -> Summary:
    """See Trainer.run. make: the engine, its weights filled or about to be read from a checkpoint."""
    train = facts.sections.train

    def writable() -> None:
        if is_first(mesh):
            check_sinks(train)
            check_folder(Path(train.out))

    on_all_ranks(mesh, "start the training", writable)
    corpus = data if isinstance(data, Corpus) else None
    with _threads_and_precision(mesh, facts):
        checkpoints = Checkpoints(mesh, train)
        start = lock_of(mesh, facts.config, b"" if corpus is None else corpus.digest)
        resumed, lock = checkpoints.begin(attempt, start)
        # What a checkpoint has is not read from elsewhere, nor drawn, before.
        engine = make(not lock.step)
        losses: list[float] = []
        if resumed is not None and lock.step:
            resume(mesh, engine, resumed.folder, losses)
        # What it is from now on, and how far it has come.
        lock = dataclasses.replace(
            start,
            step=lock.step,
            seconds=lock.seconds,
            skipped=lock.skipped,
            samples=samples_read(lock, start),
            best=best_of(lock, start),
        )
        validation = None if corpus is None else corpus.validation
        held = None if validation is None else batches_of(engine, validation)
        reading = Reading(batches_for(engine, data, lock), corpus, held)
        progress = Progress(lock, losses, resumed)
        return Steps(engine, facts.config, reading, callbacks, checkpoints, progress).run()


@contextlib.contextmanager
def _threads_and_precision(mesh: Mesh, facts: Facts) -> Iterator[None]:
    """Set torch's threads and `train.float32_matmul_precision`, until the run has ended."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if mesh.device.type == "cpu":
            # More threads than cores slow each other down; ranks on one host share its cores.
            torch.set_num_threads(max(1, _cores() // facts.ranks_here))
        torch.set_float32_matmul_precision(facts.sections.train.float32_matmul_precision or precision)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def batches_for(engine: Engine, data: Data | Corpus, after: Lock | None = None) -> Batches | GivenBatches:
    """What each step is made of. after: how far the run has come."""
    step, samples = (0, 0) if after is None else (after.step, after.samples or 0)
    if isinstance(data, Corpus):
        return batches_of(engine, data, (step, samples))
    return GivenBatches(data, engine, step)


def batches_of(engine: Engine, corpus: Corpus, after: tuple[int, int] = (0, 0)) -> Batches:
    """The samples of this rank, step by step. after: a step, and the samples that were read when it was done."""
    _, _, data, train = engine.sections
    assert data is not None
    if data.build is None:
        # `Batches` reads by the roles; what a user's function gives is compared.
        engine.checked_steps = 0
    return Batches(
        corpus,
        order=data.order,
        after=after,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        coord=engine.data_coord,
        size=engine.data_size,
        device=engine.mesh.device,
        dtype=engine.split.dtype,
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
