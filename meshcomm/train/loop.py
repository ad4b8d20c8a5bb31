"""The training loop: steps, the learning rate, and what ends a run early."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from meshcomm.config import Config, TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.together import is_first
from meshcomm.models import model_of
from meshcomm.parallel.compose import Trainer, sections
from meshcomm.parallel.results import Done
from meshcomm.train.agree import agree
from meshcomm.train.checkpoint import Attempt, Checkpoints
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.lock import Lock, lock_of, samples_read
from meshcomm.train.report import Evaluation, Reporter, Resumed, Start, Step, Summary
from meshcomm.train.run_files import METRICS, TRACE, MetricsFile, recorded

_LOSSES = "run.losses"
# Steps that may be left out one after the other: more of them are no accident.
_IN_A_ROW = 10


def run(mesh: Mesh, config: Config, reporter: Reporter, attempt: Attempt | None = None) -> Summary:
    """Train as `config` says, from the start or from the last complete checkpoint in `train.out`.

    attempt:   as the launcher says. A job that it restarts goes on from its own last checkpoint.
    Called by: every rank of an open mesh, with equal configs.
    Returns:   the same losses on every rank. Rank 0 has written metrics.jsonl, and beside it config.json
               and run.json, into `train.out`; see meshcomm.train.run_files.
    Raises:    ConfigError or LayoutError where config and mesh, or config and checkpoint do not
               fit; TrainingError where ranks have different settings or data, a parameter gets no
               gradient, the loss or the gradient norm is not finite (see train.nonfinite), or a
               checkpoint cannot be written or read;
               CallMismatchError where ranks called differently in a step.
    """
    before = torch.get_num_threads()
    precise: str | None = None
    try:
        facts = agree(mesh, config)
        if mesh.device.type == "cpu":
            # More threads than cores slow each other down; ranks on one host share its cores.
            torch.set_num_threads(max(1, _cores() // facts.ranks_here))
        checkpoints = Checkpoints(mesh, facts.sections.train)
        start = lock_of(mesh, config, facts.corpus.digest)
        resumed, lock = checkpoints.begin(attempt or Attempt(), start)
        # What a checkpoint has is not read from elsewhere, nor drawn, before.
        trainer = trainer_for(mesh, config, filled=not lock.step)
        losses = [0.0] * lock.step
        if resumed is not None and lock.step:
            state = _state(trainer, losses)
            checkpoints.load(resumed.folder, state)
            losses = state[_LOSSES].tolist()
        if (wanted := facts.sections.train.float32_matmul_precision) is not None:
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
        return _steps(trainer, config, facts.corpus, reporter, checkpoints, lock, resumed, losses)
    finally:
        if precise is not None:
            torch.set_float32_matmul_precision(precise)
        torch.set_num_threads(before)


def trainer_for(mesh: Mesh, config: Config, *, filled: bool = True) -> Trainer:
    """The trainer of the model that `config` describes. filled: its weights are read or drawn; see Trainer."""
    _, model, data, train = sections(mesh, config)
    trainer = Trainer(mesh, config, model_of(model, data, train), filled=filled)
    if data.build is None:
        # `Batches` reads by the roles; what a user's function gives is compared.
        trainer.checked_steps = 0
    return trainer


def batches_of(trainer: Trainer, corpus: Corpus, after: tuple[int, int] = (0, 0)) -> Batches:
    """The samples of this rank, step by step. after: a step, and the samples that were read when it was done."""
    _, _, data, train = trainer.sections
    return Batches(
        corpus,
        order=data.order,
        after=after,
        global_batch=train.global_batch,
        seed=train.seed,
        coord=trainer.data_coord,
        size=trainer.data_size,
        device=trainer.mesh.device,
    )


def _state(trainer: Trainer, losses: list[float]) -> dict[str, Tensor]:
    """All that a run must find again, beside what follows from the step and the configuration."""
    return {**trainer.state(), _LOSSES: torch.tensor(losses, dtype=torch.float64)}


def _steps(
    trainer: Trainer,
    config: Config,
    corpus: Corpus,
    reporter: Reporter,
    checkpoints: Checkpoints,
    lock: Lock,
    resumed: Resumed | None,
    losses: list[float],
) -> Summary:
    """The steps that follow those of `losses`, after which the lock was `lock`."""
    _, _, data, train = trainer.sections
    mesh = trainer.mesh
    batches = batches_of(trainer, corpus, (lock.step, lock.samples or 0))
    held = None if corpus.validation is None else batches_of(trainer, corpus.validation)
    whole_batches = 0 if corpus.validation is None else corpus.validation.samples // train.global_batch
    if train.eval_every and not whole_batches:
        raise _too_little(corpus, train)
    evaluated: Evaluation | None = None
    start = Start(
        steps=train.steps,
        tokens_per_step=train.global_batch * data.sequence,
        parameters=trainer.parameters_of_all_stages(),
        text_bytes=corpus.size,
        unit=corpus.unit,
        text_files=len(corpus.files),
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
            unit="byte" if corpus.unit == "bytes of text" else "token",
            evaluation=evaluated,
        )

    def evaluation(step: int) -> Evaluation:
        assert held is not None
        began = time.perf_counter()
        loss = trainer.evaluate(held.in_order(train.eval_batches))
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
        reporter.start(start)
        logged = time.perf_counter()
        began = logged - lock.seconds
        logged_step = first = len(losses)
        before = mesh.stats()
        try:
            for step in range(len(losses) + 1, train.steps + 1):
                checkpoints.poll()
                lr = learning_rate(train, step)
                # A run that was resumed may begin inside.
                if first_traced <= step <= last_traced and step in (first_traced, first + 1):
                    traced.enter_context(mesh.trace(out / TRACE))
                trainer.step(*batches(step), lr, step)
                mesh.step(step)
                if step == last_traced:
                    traced.close()
                seconds = time.perf_counter() - began
                saves = every and (step % every == 0 or step == train.steps)
                evaluates = train.eval_every and (step % train.eval_every == 0 or step == train.steps)
                # A look waits for the device where calls are queued on it.
                if mesh.asynchronous and not saves and not evaluates and not logs(step):
                    continue
                results = trainer.look()
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
                            lr=learning_rate(train, done.number),
                            tokens=done.number * start.tokens_per_step,
                            tokens_per_s=tokens_per_s,
                            seconds=seconds,
                            skipped=skipped,
                            fault=done.fault,
                        )
                        if metrics is not None:
                            metrics.write(line)
                        reporter.step(line)
                if evaluates:
                    evaluated = evaluation(step)
                    if metrics is not None:
                        metrics.write(evaluated)
                    reporter.evaluation(evaluated)
                if saves:
                    if metrics is not None:
                        metrics.sync()
                    read = batches.read(step)
                    now_lock = dataclasses.replace(
                        lock, step=step, seconds=seconds, skipped=skipped, samples=read
                    )
                    checkpoints.save(now_lock, _state(trainer, losses))
            checkpoints.finish()
        except BaseException:
            ended.append(summary())
            reporter.interrupted(ended[-1])
            raise
        traffic = mesh.stats().since(before)
        late = dict(mesh.stragglers().latest)
        whole = dataclasses.replace(summary(), late=late)
        if len(losses) > first:
            whole = dataclasses.replace(whole, traffic=traffic, traffic_steps=len(losses) - first)
        ended.append(whole)
    reporter.finish(whole)
    return whole


def _too_little(corpus: Corpus, train: TrainConfig) -> TrainingError:
    held = corpus.validation
    assert held is not None
    return TrainingError(
        "there is too little to evaluate",
        given=f"{held.samples} samples for validation, train.global_batch = {train.global_batch}",
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


def learning_rate(train: TrainConfig, step: int) -> float:
    """Of step 1, 2, ..., train.steps: a pure function of the configuration, so no state to save.

    Linear up to `lr` at `warmup_steps`. Then, by `schedule`, half a cosine wave or a straight line down
    to `lr * min_lr_ratio` at the last step, or `lr` to the end.

    >>> train = TrainConfig(steps=12, warmup_steps=4, global_batch=1, microbatch=1, lr=1.0, min_lr_ratio=0.2)
    >>> [round(learning_rate(train, step), 3) for step in range(1, 13)]
    [0.25, 0.5, 0.75, 1.0, 0.97, 0.883, 0.753, 0.6, 0.447, 0.317, 0.23, 0.2]
    >>> linear, constant = (train.model_copy(update={"schedule": name}) for name in ("linear", "constant"))
    >>> [(round(learning_rate(linear, step), 3), learning_rate(constant, step)) for step in (8, 12)]
    [(0.6, 1.0), (0.2, 1.0)]
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    shares = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    least = 1.0 if train.schedule == "constant" else train.min_lr_ratio
    return train.lr * (least + (1 - least) * shares[train.schedule])
