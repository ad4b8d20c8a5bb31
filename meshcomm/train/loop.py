"""The training loop: steps, the learning rate, and what ends a run early."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

import torch
from torch import nn

from meshcomm.config import Config, TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Trainer, sections
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.train.agree import agree, is_first
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.metrics import MetricsFile
from meshcomm.train.model import Transformer, initialise
from meshcomm.train.report import Reporter, Start, Step, Summary


def run(mesh: Mesh, config: Config, reporter: Reporter) -> Summary:
    """Train as `config` says.

    Called by: every rank of an open mesh, with equal configs.
    Returns:   the same losses on every rank. Rank 0 has written metrics.jsonl into `train.out`.
    Raises:    ConfigError or LayoutError where config and mesh do not fit; TrainingError where
               ranks have different settings or data, a parameter gets no gradient, or the loss is
               not finite.
    """
    before = torch.get_num_threads()
    try:
        facts = agree(mesh, config)
        if mesh.device.type == "cpu":
            # More threads than cores slow each other down; ranks on one host share its cores.
            torch.set_num_threads(max(1, _cores() // facts.ranks_here))
        return _steps(trainer_for(mesh, config), facts.corpus, reporter)
    finally:
        torch.set_num_threads(before)


def trainer_for(mesh: Mesh, config: Config) -> Trainer:
    """The trainer of the transformer that `config` describes, its weights drawn from the seed."""

    def build(split: TensorSplit, stage: Stage) -> nn.Module:
        _, model, data, train = sections(mesh, config)
        module = Transformer(split, model, stage, data.sequence)
        initialise(module, model.layers, train.seed)
        return module

    return Trainer(mesh, config, build)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Of step 1, 2, ...: linear up to `lr` at `warmup_steps`, then a cosine down to a tenth at the last."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return train.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _steps(trainer: Trainer, corpus: Corpus, reporter: Reporter) -> Summary:
    _, _, data, train = trainer.sections
    mesh = trainer.mesh
    batches = Batches(
        corpus,
        sequence=data.sequence,
        global_batch=train.global_batch,
        seed=train.seed,
        coord=trainer.data_coord,
        size=trainer.data_size,
        device=mesh.device,
    )
    start = Start(
        steps=train.steps,
        tokens_per_step=train.global_batch * data.sequence,
        parameters=trainer.parameters_of_all_stages(),
        text_bytes=len(corpus.text),
        text_files=len(corpus.files),
        threads=torch.get_num_threads(),
    )
    losses: list[float] = []
    out = Path(train.out)
    seconds = 0.0

    def summary() -> Summary:
        done = len(losses)
        return Summary(done, tuple(losses), done * start.tokens_per_step, seconds, out / "metrics.jsonl")

    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(out)) if is_first(mesh) else None
        reporter.start(start)
        began = logged = time.perf_counter()
        logged_step = 0
        try:
            for step in range(1, train.steps + 1):
                lr = learning_rate(train, step)
                loss = trainer.step(*batches(step), lr)
                if not math.isfinite(loss):
                    raise TrainingError(
                        f"the loss of step {step} is {loss}",
                        given=f"lr {lr:.3g}; losses before it: "
                        + (", ".join(f"{value:.4g}" for value in losses[-3:]) or "none"),
                        expected="a finite number",
                        hint=f"a smaller train.lr than {train.lr:g}, or more train.warmup_steps",
                    )
                losses.append(loss)
                now = time.perf_counter()
                seconds = now - began
                if step % train.log_every == 0 or step in (1, train.steps):
                    line = Step(
                        step=step,
                        loss=loss,
                        lr=lr,
                        tokens=step * start.tokens_per_step,
                        tokens_per_s=(step - logged_step) * start.tokens_per_step / (now - logged),
                        seconds=seconds,
                    )
                    logged, logged_step = now, step
                    if metrics is not None:
                        metrics.write(line)
                    reporter.step(line)
        except BaseException:
            reporter.interrupted(summary())
            raise
    reporter.finish(summary())
    return summary()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
