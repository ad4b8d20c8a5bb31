"""What comes before the first step of a run: data, weights, and where an earlier run had come."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from meshcomm.config import Config
from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.parallel.compose import Engine
from meshcomm.train.agree import Facts, agreed_corpus
from meshcomm.train.checkpoint import Attempt, Checkpoints, resume
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.given_data import Data, Given
from meshcomm.train.lock import Lock, best_of, lock_of, samples_read
from meshcomm.train.metrics.sinks import check_sinks
from meshcomm.train.report import Callback, Summary
from meshcomm.train.run_files import check_folder
from meshcomm.train.steps import Reading, Steps


def run(
    mesh: Mesh,
    config: Config,
    facts: Facts,
    make: Callable[[bool], Engine],
    callbacks: Sequence[Callback],
    *,
    vocabulary: int,
    data: Data | None,
    attempt: Attempt,
) -> Summary:
    """See Trainer.run. make: the engine, its weights filled or about to be read from a checkpoint.

    vocabulary: of the model; 0: not known.
    """
    train = facts.sections.train
    before = torch.get_num_threads()
    precise: str | None = None
    try:
        corpus = None
        if data is None:
            needs_data(config, facts)
            corpus = agreed_corpus(mesh, facts, vocabulary)

        def writable() -> None:
            if is_first(mesh):
                check_sinks(train)
                check_folder(Path(train.out))

        on_all_ranks(mesh, "start the training", writable)
        if mesh.device.type == "cpu":
            # More threads than cores slow each other down; ranks on one host share its cores.
            torch.set_num_threads(max(1, _cores() // facts.ranks_here))
        checkpoints = Checkpoints(mesh, train)
        start = lock_of(mesh, config, b"" if corpus is None else corpus.digest)
        resumed, lock = checkpoints.begin(attempt, start)
        # What a checkpoint has is not read from elsewhere, nor drawn, before.
        engine = make(not lock.step)
        losses: list[float] = []
        if resumed is not None and lock.step:
            resume(mesh, engine, resumed.folder, losses)
        if (wanted := train.float32_matmul_precision) is not None:
            precise = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(wanted)
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
        reading = Reading(batches_for(engine, corpus, data, lock), corpus, held)
        steps = Steps(engine, config, reading, callbacks, checkpoints, lock, resumed, losses)
        return steps.run()
    finally:
        if precise is not None:
            torch.set_float32_matmul_precision(precise)
        torch.set_num_threads(before)


def batches_for(
    engine: Engine, corpus: Corpus | None, data: Data | None, after: Lock | None = None
) -> Batches | Given:
    """What each step is made of. after: how far the run has come."""
    step, samples = (0, 0) if after is None else (after.step, after.samples or 0)
    if data is not None:
        return Given(data, engine, step)
    assert corpus is not None
    return batches_of(engine, corpus, (step, samples))


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
        global_batch=train.global_batch,
        seed=train.seed,
        coord=engine.data_coord,
        size=engine.data_size,
        device=engine.mesh.device,
        dtype=engine.split.dtype,
    )


def needs_data(config: Config, facts: Facts) -> None:
    """Raise ConfigError where the configuration has none."""
    if facts.sections.data is None:
        raise ConfigError(
            "no data are given, and the configuration names none",
            given=f"{config.source} without [data]",
            expected="one of both",
            hint="trainer.run(data) with (inputs, targets) of each step, or [data] sequence = 128",
        )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
