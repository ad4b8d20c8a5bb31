"""The training loop: steps, the learning rate, and what ends a run early."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from meshcomm.config import Config
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Trainer, sections
from meshcomm.parallel.splits import Splits
from meshcomm.predict.stages import Stage
from meshcomm.train.agree import agree
from meshcomm.train.checkpoint import Attempt, Beginning, Checkpoints
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.exchange import is_first, together
from meshcomm.train.lock import Lock, compare, lock_of
from meshcomm.train.metrics import MetricsFile
from meshcomm.train.model import Transformer, initialise
from meshcomm.train.rates import learning_rate
from meshcomm.train.record import recorded
from meshcomm.train.report import Reporter, Resumed, Start, Step, Summary
from meshcomm.train.tracing import TracedSteps

_LOSSES = "run.losses"
# Steps that may be left out one after the other: more of them are no accident.
_IN_A_ROW = 10


def run(mesh: Mesh, config: Config, reporter: Reporter, attempt: Attempt | None = None) -> Summary:
    """Train as `config` says, from the start or from the last complete checkpoint in `train.out`.

    attempt:   as the launcher says. A job that it restarts goes on from its own last checkpoint.
    Called by: every rank of an open mesh, with equal configs.
    Returns:   the same losses on every rank. Rank 0 has written metrics.jsonl, and beside it config.json
               and run.json, into `train.out`; see meshcomm.train.record.
    Raises:    ConfigError or LayoutError where config and mesh, or config and checkpoint do not
               fit; TrainingError where ranks have different settings or data, a parameter gets no
               gradient, the loss or the gradient norm is not finite (see train.nonfinite), or a
               checkpoint cannot be written or read;
               CallMismatchError where ranks called differently in a step.
    """
    before = torch.get_num_threads()
    try:
        facts = agree(mesh, config)
        if mesh.device.type == "cpu":
            # More threads than cores slow each other down; ranks on one host share its cores.
            torch.set_num_threads(max(1, _cores() // facts.ranks_here))
        checkpoints = Checkpoints(mesh, facts.sections.train)
        beginning = checkpoints.begin(attempt or Attempt())

        def lock(step: int, seconds: float, skipped: int) -> Lock:
            return lock_of(mesh, config, facts.corpus.digest, step, seconds, skipped)

        resumed, saved = _resumed(mesh, beginning, checkpoints, lock, facts.sections.train.steps)
        trainer = trainer_for(mesh, config)
        losses: list[float] = []
        if resumed is not None and resumed.step:
            losses = _load(trainer, checkpoints, resumed)
        return _steps(trainer, config, facts.corpus, reporter, checkpoints, lock, resumed, saved, losses)
    finally:
        torch.set_num_threads(before)


def trainer_for(mesh: Mesh, config: Config) -> Trainer:
    """The trainer of the transformer that `config` describes, its weights drawn from the seed."""

    def build(splits: Splits, stage: Stage) -> nn.Module:
        _, model, data, train = sections(mesh, config)
        compute = None if train.compute_dtype is None else getattr(torch, train.compute_dtype)
        module = Transformer(
            splits,
            model,
            stage,
            data.sequence,
            seed=train.seed,
            compute=compute,
            recompute=train.recompute,
        )
        initialise(module, model.layers, train.seed)
        if train.compile:
            for block in module.layers.values():
                block.compile()
        return module

    return Trainer(mesh, config, build)


def batches_of(trainer: Trainer, corpus: Corpus) -> Batches:
    """The samples of this rank, step by step."""
    _, _, data, train = trainer.sections
    return Batches(
        corpus,
        sequence=data.sequence,
        global_batch=train.global_batch,
        seed=train.seed,
        coord=trainer.data_coord,
        size=trainer.data_size,
        device=trainer.mesh.device,
    )


def _resumed(
    mesh: Mesh,
    beginning: Beginning,
    checkpoints: Checkpoints,
    lock: Callable[[int, float, int], Lock],
    steps: int,
) -> tuple[Resumed | None, Lock]:
    """What a run goes on from, checked against its configuration, and the lock of that moment."""
    path = beginning.path
    if not beginning.continues:
        return None, lock(0, 0.0, 0)
    if path is None:
        return Resumed(0, checkpoints.folder, (), beginning.restarts), lock(0, 0.0, 0)

    def look() -> tuple[Lock, tuple[str, ...]]:
        saved = Lock.read(path)
        return saved, compare(saved, lock(saved.step, saved.seconds, saved.skipped), path, steps)

    saved, differences = together(mesh, f"resume from {path}", look)
    return Resumed(saved.step, path, differences, beginning.restarts), saved


def _state(trainer: Trainer, losses: list[float]) -> dict[str, Tensor]:
    """All that a run must find again, beside what follows from the step and the configuration."""
    return {**trainer.state(), _LOSSES: torch.tensor(losses, dtype=torch.float64)}


def _load(trainer: Trainer, checkpoints: Checkpoints, resumed: Resumed) -> list[float]:
    """Put the checkpoint's state into `trainer`; return the losses of the steps before."""
    state = _state(trainer, [0.0] * resumed.step)
    checkpoints.load(resumed.folder, state)
    found: list[float] = state[_LOSSES].tolist()
    return found


def _steps(
    trainer: Trainer,
    config: Config,
    corpus: Corpus,
    reporter: Reporter,
    checkpoints: Checkpoints,
    lock: Callable[[int, float, int], Lock],
    resumed: Resumed | None,
    saved: Lock,
    losses: list[float],
) -> Summary:
    """The steps that follow those of `losses`, after which the lock was `saved`."""
    _, _, data, train = trainer.sections
    mesh = trainer.mesh
    batches = batches_of(trainer, corpus)
    start = Start(
        steps=train.steps,
        tokens_per_step=train.global_batch * data.sequence,
        parameters=trainer.parameters_of_all_stages(),
        text_bytes=len(corpus.text),
        text_files=len(corpus.files),
        threads=torch.get_num_threads(),
        resumed=resumed,
        warm_up_s=mesh.warm_up_s,
    )
    out = Path(train.out)
    seconds, skipped, in_a_row = saved.seconds, saved.skipped, 0
    every = train.checkpoint_every

    def summary() -> Summary:
        done = len(losses)
        return Summary(
            done,
            tuple(losses),
            done * start.tokens_per_step,
            seconds,
            out / "metrics.jsonl",
            skipped=skipped,
        )

    with contextlib.ExitStack() as stack:
        metrics = None
        ended: list[Summary] = []
        if is_first(mesh):
            # What another run left was put aside when this one began.
            metrics = stack.enter_context(MetricsFile(out, after=0 if resumed is None else resumed.step))
            ended = stack.enter_context(recorded(out, config, mesh.plan, start))
        stack.enter_context(checkpoints)
        traced = stack.enter_context(TracedSteps(mesh, train.trace_steps, out))
        reporter.start(start)
        logged = time.perf_counter()
        began = logged - saved.seconds
        logged_step = first = len(losses)
        before = mesh.stats()
        try:
            for step in range(len(losses) + 1, train.steps + 1):
                checkpoints.poll()
                lr = learning_rate(train, step)
                traced.before(step)
                loss, norm, fault = trainer.step(*batches(step), lr, step)
                mesh.step(step)
                traced.after(step)
                in_a_row = in_a_row + 1 if fault else 0
                skipped += bool(fault)
                if in_a_row > _IN_A_ROW:
                    raise TrainingError(
                        f"steps {step - _IN_A_ROW} to {step} give nothing finite, so leaving them out does not help",
                        given=fault,
                        expected=f'{_IN_A_ROW} such steps in a row at most, with train.nonfinite = "skip"',
                        hint=f"a smaller train.lr than {train.lr:g}; or meshcomm parity, to look for a mistake",
                    )
                losses.append(loss)
                now = time.perf_counter()
                seconds = now - began
                if fault or step % train.log_every == 0 or step in (1, train.steps):
                    line = Step(
                        step=step,
                        loss=loss,
                        gradient_norm=norm,
                        lr=lr,
                        tokens=step * start.tokens_per_step,
                        tokens_per_s=(step - logged_step) * start.tokens_per_step / (now - logged),
                        seconds=seconds,
                        skipped=skipped,
                        fault=fault,
                    )
                    logged, logged_step = now, step
                    if metrics is not None:
                        metrics.write(line)
                    reporter.step(line)
                if every and (step % every == 0 or step == train.steps):
                    if metrics is not None:
                        metrics.sync()
                    checkpoints.save(lock(step, seconds, skipped), _state(trainer, losses))
            checkpoints.finish()
        except BaseException:
            ended.append(summary())
            reporter.interrupted(ended[-1])
            raise
        traffic = mesh.stats().since(before)
        late = dict(mesh.stragglers().latest)
        done = dataclasses.replace(summary(), late=late)
        if len(losses) > first:
            done = dataclasses.replace(done, traffic=traffic, traffic_steps=len(losses) - first)
        ended.append(done)
    reporter.finish(done)
    return done


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
