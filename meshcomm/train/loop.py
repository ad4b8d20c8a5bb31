"""The training loop: steps, what is told of them, and what ends a run early."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.config import Config, TrainConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.together import is_first, together
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.results import Done
from meshcomm.train.agree import Facts, agreed_corpus
from meshcomm.train.checkpoint import Attempt, Checkpoints
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.given_data import Data, Given
from meshcomm.train.lock import Lock, lock_of, samples_read
from meshcomm.train.report import Callback, Evaluation, Resumed, Start, Step, Summary, Told
from meshcomm.train.run_files import METRICS, TRACE, MetricsFile, check_folder, recorded
from meshcomm.train.schedule import learning_rate

_LOSSES = "run.losses"
# Steps that may be left out one after the other: more of them are no accident.
_IN_A_ROW = 10


def run(
    mesh: Mesh,
    config: Config,
    facts: Facts,
    make: Callable[[bool], tuple[Engine, LRScheduler | None]],
    callbacks: Sequence[Callback],
    *,
    data: Data | None,
    attempt: Attempt,
) -> Summary:
    """See Trainer.run. make: the engine, its weights filled or about to be read from a checkpoint."""
    train = facts.sections.train
    before = torch.get_num_threads()
    precise: str | None = None
    try:
        corpus = None
        if data is None:
            needs_data(config, facts)
            corpus = agreed_corpus(mesh, facts)
        together(
            mesh, "start the training", lambda: check_folder(Path(train.out)) if is_first(mesh) else None
        )
        if mesh.device.type == "cpu":
            # More threads than cores slow each other down; ranks on one host share its cores.
            torch.set_num_threads(max(1, _cores() // facts.ranks_here))
        checkpoints = Checkpoints(mesh, train)
        start = lock_of(mesh, config, b"" if corpus is None else corpus.digest)
        resumed, lock = checkpoints.begin(attempt, start)
        # What a checkpoint has is not read from elsewhere, nor drawn, before.
        engine, scheduler = make(not lock.step)
        losses = [0.0] * lock.step
        if resumed is not None and lock.step:
            state = _state(engine, losses)
            checkpoints.load(resumed.folder, state)
            losses = state[_LOSSES].tolist()
        if scheduler is not None:
            for _ in range(lock.step):
                _quietly(scheduler)
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
        )
        batches = batches_for(engine, corpus, data, lock)
        told = Told(callbacks)
        return _steps(engine, config, batches, corpus, told, checkpoints, lock, resumed, losses, scheduler)
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


def _quietly(scheduler: LRScheduler) -> None:
    """Count a step that was done before this process began."""
    with warnings.catch_warnings():
        # torch asks for a step of the optimiser before each of these.
        warnings.simplefilter("ignore", UserWarning)
        scheduler.step()


def _state(engine: Engine, losses: list[float]) -> dict[str, Tensor]:
    """All that a run must find again, beside what follows from the step and the configuration."""
    return {**engine.state(), _LOSSES: torch.tensor(losses, dtype=torch.float64)}


def _steps(
    engine: Engine,
    config: Config,
    batches: Batches | Given,
    corpus: Corpus | None,
    told: Told,
    checkpoints: Checkpoints,
    lock: Lock,
    resumed: Resumed | None,
    losses: list[float],
    scheduler: LRScheduler | None,
) -> Summary:
    """The steps that follow those of `losses`, after which the lock was `lock`."""
    _, _, data, train = engine.sections
    mesh = engine.mesh
    validation = None if corpus is None else corpus.validation
    held = None if validation is None else batches_of(engine, validation)
    whole_batches = 0 if validation is None else validation.samples // train.global_batch
    if train.eval_every and not whole_batches:
        raise _too_little(validation, train)
    evaluated: Evaluation | None = None
    start = Start(
        steps=train.steps,
        tokens_per_step=train.global_batch * (1 if data is None else data.sequence),
        parameters=engine.parameters_of_all_stages(),
        text_bytes=0 if corpus is None else corpus.size,
        unit="data of its own" if corpus is None else corpus.unit,
        text_files=0 if corpus is None else len(corpus.files),
        threads=torch.get_num_threads(),
        resumed=resumed,
        warm_up_s=mesh.warm_up_s,
    )
    out = Path(train.out)
    seconds, skipped, in_a_row = lock.seconds, lock.skipped, 0
    every = train.checkpoint_every

    def summary() -> Summary:
        done = len(losses)
        return Summary(
            done,
            tuple(losses),
            done * start.tokens_per_step,
            seconds,
            out / METRICS,
            skipped=skipped,
            unit="byte" if corpus is not None and corpus.unit == "bytes of text" else "token",
            evaluation=evaluated,
        )

    def evaluation(step: int) -> Evaluation:
        assert held is not None
        began = time.perf_counter()
        loss = engine.evaluate(held.in_order(train.eval_batches))
        count = min(whole_batches, train.eval_batches or whole_batches)
        return Evaluation(step, loss, count * start.tokens_per_step, seconds=time.perf_counter() - began)

    def logs(step: int) -> bool:
        return step % train.log_every == 0 or step in (1, train.steps)

    with contextlib.ExitStack() as stack:
        metrics = None
        ended: list[Summary] = []
        if is_first(mesh):
            # What another run left was put aside when this one began.
            metrics = stack.enter_context(MetricsFile(out, after=0 if resumed is None else resumed.step))
            ended = stack.enter_context(recorded(out, config, mesh.plan, start))
        stack.enter_context(checkpoints)
        traced = stack.enter_context(contextlib.ExitStack())
        first_traced, last_traced = train.trace_steps or (0, -1)
        told.on_start(start)
        logged = time.perf_counter()
        began = logged - lock.seconds
        logged_step = first = len(losses)
        before = mesh.stats()
        try:
            for step in range(len(losses) + 1, train.steps + 1):
                checkpoints.poll()
                lr = learning_rate(train, step) if scheduler is None else None
                # A run that was resumed may begin inside.
                if first_traced <= step <= last_traced and step in (first_traced, first + 1):
                    traced.enter_context(mesh.trace(out / TRACE))
                engine.step(*batches(step), lr, step)
                if scheduler is not None:
                    scheduler.step()
                mesh.step(step)
                if step == last_traced:
                    traced.close()
                seconds = time.perf_counter() - began
                saves = every and (step % every == 0 or step == train.steps)
                evaluates = train.eval_every and (step % train.eval_every == 0 or step == train.steps)
                # A look waits for the device where calls are queued on it.
                if mesh.asynchronous and not saves and not evaluates and not logs(step):
                    continue
                results = engine.look()
                now = time.perf_counter()
                seconds = now - began
                tokens_per_s = (step - logged_step) * start.tokens_per_step / (now - logged)
                for done in results:
                    losses.append(done.loss)
                    in_a_row = in_a_row + 1 if done.fault else 0
                    skipped += bool(done.fault)
                    if in_a_row > _IN_A_ROW:
                        raise _nothing_finite(done, train)
                    if done.fault or logs(done.number):
                        logged, logged_step = now, step
                        line = Step(
                            step=done.number,
                            loss=done.loss,
                            gradient_norm=done.gradient_norm,
                            lr=done.lr,
                            tokens=done.number * start.tokens_per_step,
                            tokens_per_s=tokens_per_s,
                            seconds=seconds,
                            skipped=skipped,
                            fault=done.fault,
                        )
                        if metrics is not None:
                            metrics.write(line)
                        told.on_step(line)
                if evaluates:
                    evaluated = evaluation(step)
                    if metrics is not None:
                        metrics.write(evaluated)
                    told.on_eval(evaluated)
                if saves:
                    if metrics is not None:
                        metrics.sync()
                    now_lock = dataclasses.replace(
                        lock, step=step, seconds=seconds, skipped=skipped, samples=batches.read(step)
                    )
                    told.on_save(step, checkpoints.save(now_lock, _state(engine, losses)))
                if told.stops:
                    break
            checkpoints.finish()
        except BaseException as error:
            ended.append(summary())
            told.on_end(ended[-1], error)
            raise
        traffic = mesh.stats().since(before)
        late = dict(mesh.stragglers().latest)
        whole = dataclasses.replace(summary(), late=late)
        if len(losses) > first:
            whole = dataclasses.replace(whole, traffic=traffic, traffic_steps=len(losses) - first)
        ended.append(whole)
    told.on_end(whole, None)
    return whole


def _too_little(held: Corpus | None, train: TrainConfig) -> TrainingError:
    return TrainingError(
        "there is too little to evaluate",
        given=f"{0 if held is None else held.samples} samples for validation, train.global_batch = {train.global_batch}",
        expected="one global batch or more",
        hint="a larger data.validation, more validation files, or a smaller train.global_batch",
    )


def _nothing_finite(done: Done, train: TrainConfig) -> TrainingError:
    return TrainingError(
        f"steps {done.number - _IN_A_ROW} to {done.number} give nothing finite, so leaving them out does not help",
        given=done.fault,
        expected=f'{_IN_A_ROW} such steps in a row at most, with train.nonfinite = "skip"',
        hint=f"a smaller train.lr than {train.lr:g}; or meshcomm parity, to look for a mistake",
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
