"""Run the training steps of a run, report and evaluate them, and save checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshcomm.config import Config, TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, of_every_rank, on_all_ranks
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.results import Done, ends, stopped
from meshcomm.parallel.state import takes_metric
from meshcomm.train.callbacks import Best, Callback, EarlyStop, Evaluation, Resumed, Start, Step, Summary
from meshcomm.train.checkpoint.checkpoints import Checkpoints, state_of
from meshcomm.train.checkpoint.folder import FOLDER, is_complete, name_of
from meshcomm.train.checkpoint.lock import Lock
from meshcomm.train.cost import Cost
from meshcomm.train.data import Corpus, Source
from meshcomm.train.elastic import Copies
from meshcomm.train.evaluation import Evaluator
from meshcomm.train.run_files import (
    METRICS,
    MetricsFile,
    TraceWindow,
    check_folder,
    last_step,
    recorded,
    settings_of,
)
from meshcomm.train.signals import Signals
from meshcomm.train.sinks import Sink, check_sinks

# The maximum number of consecutive steps that may be skipped.
_IN_A_ROW = 10
# The number of steps whose metrics are kept, for a new first rank.
_RECENT = 100


def check_outputs(train: TrainConfig) -> None:
    """Create `train.out`. Raises TrainingError if this fails, or ConfigError if a package in train.log_to is missing."""
    check_sinks(train)
    check_folder(Path(train.out))


@contextlib.contextmanager
def threads_and_precision(mesh: Mesh, train: TrainConfig, ranks_here: int) -> Iterator[None]:
    """Set torch's thread count and `train.float32_matmul_precision` until the run has ended."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if mesh.device.type == "cpu":
            # Ranks on one host share its cores, and more threads than cores would slow each other down.
            bound = hasattr(os, "sched_getaffinity")
            cores = len(os.sched_getaffinity(0)) if bound else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // ranks_here))
        torch.set_float32_matmul_precision(train.float32_matmul_precision or precision)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, from 1 to train.steps. It depends only on the configuration, so there is no
    state to save.

    The rate rises linearly to `lr` at `warmup_steps`. Then, depending on `schedule`, it follows half a cosine wave or a
    straight line down to `lr * min_lr_ratio` at the last step, or stays at `lr`. With wsd (warmup, stable, decay: Hu et
    al. 2024), the straight line begins after step `steps - decay_steps`.

    >>> train = TrainConfig(steps=12, warmup_steps=4, global_batch_size=1, micro_batch_size=1, lr=1.0, min_lr_ratio=0.2)
    >>> [round(learning_rate(train, step), 3) for step in range(1, 13)]
    [0.25, 0.5, 0.75, 1.0, 0.97, 0.883, 0.753, 0.6, 0.447, 0.317, 0.23, 0.2]
    >>> linear, constant = (train.model_copy(update={"schedule": name}) for name in ("linear", "constant"))
    >>> [(round(learning_rate(linear, step), 3), learning_rate(constant, step)) for step in (8, 12)]
    [(0.6, 1.0), (0.2, 1.0)]
    >>> wsd = train.model_copy(update={"schedule": "wsd", "decay_steps": 4})
    >>> [round(learning_rate(wsd, step), 3) for step in range(7, 13)]
    [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    first = train.warmup_steps
    if train.schedule == "wsd":
        first = max(first, train.steps - (train.decay_steps or max(1, train.steps // 10)))
    done = max(0.0, (step - first) / max(1, train.steps - first))
    falls = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    least = 1.0 if train.schedule == "constant" else train.min_lr_ratio
    return train.lr * (least + (1 - least) * falls.get(train.schedule, 1 - done))


def take_step(engine: Engine, number: int, inputs: Any, targets: Any, documents: Any = None) -> None:
    """Run a step of an engine, with the learning rate of its schedule. A scheduler of a metric is advanced by evaluations.

    Called by: every rank.
    """
    scheduler = engine.scheduler
    lr = learning_rate(engine.sections.train, number) if scheduler is None else None
    engine.step(inputs, targets, lr, number, documents)
    if scheduler is not None and not takes_metric(scheduler):
        scheduler.step()


class Progress(NamedTuple):
    """The progress of a run: the lock and the losses of its last checkpoint. resumed: None if the run starts from scratch.

    loader: the saved state of the program's data loader, if any.
    pending: completed steps that are not yet in `losses` and not yet reported. evaluates, saves: whether the last step must
    still be evaluated or saved.
    """

    lock: Lock
    losses: list[float]
    resumed: Resumed | None
    loader: Tensor | None = None
    pending: Sequence[Done] = ()
    evaluates: bool = False
    saves: bool = False


def progress_of(engine: Engine, start: Lock, facts: Mapping[str, Any]) -> Progress:
    """Return the progress of a run whose survivors continue. facts: the facts from one survivor, see `Steps.facts`.
    Called by: every rank.

    The first rank may be new, so lines that are missing from the metrics file are reported again.
    """
    mesh, train, step = engine.mesh, engine.sections.train, engine.done
    losses: list[float] = list(facts["losses"])
    reported_steps = len(losses)
    out = Path(train.out)

    def look() -> tuple[int, bool] | None:
        # A background save may have been in progress.
        return (last_step(out), is_complete(out / FOLDER / name_of(step))) if is_first(mesh) else None

    of_ranks = of_every_rank(mesh, on_all_ranks(mesh, "read the metrics", look))
    reported, saved = next(of_rank for of_rank in of_ranks if of_rank is not None)
    recent = [*(Done(*row) for row in facts["recent"]), *(Done(*row) for row in facts["pending"])]
    pending = [done for done in recent if done.number > reported]
    losses = [*losses, *(row[1] for row in facts["pending"])][: step - len(pending)]
    counted = facts["lock"]["skipped"] - sum(
        bool(done.fault) for done in pending if done.number <= reported_steps
    )
    lock = dataclasses.replace(start, **{**facts["lock"], "step": step, "skipped": counted})
    resumed = Resumed(step, out, (), generation=mesh.elastic.generation)
    is_done = {"evaluates": facts["evaluates"] == step, "saves": saved}
    due = {"evaluates": train.eval_every, "saves": train.checkpoint_every}
    rest_of_progress: dict[str, Any] = {
        name: bool(every) and bool(step) and (step % every == 0 or step == train.steps) and not is_done[name]
        for name, every in due.items()
    }
    return Progress(lock, losses, resumed, pending=pending, **rest_of_progress)


@final
class Steps:
    """The remaining steps of a run after `progress`. Every rank of the mesh has a Steps object.

    source:  the data for the steps. corpus: the data in [data]; None if the program provides the data.
    number:  the number of this `Trainer.run` call in the program, starting at 1.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        callbacks: Sequence[Callback],
        *,
        source: Source,
        corpus: Corpus | None,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
        copies: Copies,
        progress: Progress,
        number: int,
    ) -> None:
        _, _, data, train = engine.sections
        mesh = engine.mesh
        lock, losses, resumed, _, pending, evaluates, saves = progress
        self._engine, self._mesh, self._train, self._config = engine, mesh, train, config
        self._source, self._corpus, self._evaluator = source, corpus, evaluator
        self._checkpoints, self._copies, self._number = checkpoints, copies, number
        self._lock = lock
        self._out = Path(train.out)
        self._first = len(losses) + len(pending)
        self._results, self._left = [*pending], (evaluates, saves)
        self._recent: deque[Done] = deque(maxlen=_RECENT)
        # The last step after which weights were evaluated.
        self._evaluated = 0 if evaluates else self._first
        self._losses, self._seconds, self._skipped, self._in_a_row = losses, lock.seconds, lock.skipped, 0
        self._evaluation: Evaluation | None = None
        self._cost = Cost(mesh, train)
        self._early = EarlyStop(mesh, train, Best(*lock.best))
        self._metrics: MetricsFile | None = None
        self._signals = Signals(mesh)
        self._callbacks = (self._early, self._signals, *callbacks)
        if is_first(mesh):
            settings = settings_of(config, mesh.plan)
            self._callbacks += tuple(Sink(name, self._out, settings, self._first) for name in train.log_to)
        self._start = Start(
            steps=train.steps,
            tokens_per_step=train.global_batch_size * (1 if data is None else data.seq_len),
            parameters=engine.parameters_of_all_stages(),
            text_bytes=0 if corpus is None else corpus.size,
            unit="data of its own" if corpus is None else corpus.unit,
            text_files=0 if corpus is None else len(corpus.files),
            note="" if corpus is None else corpus.note,
            threads=torch.get_num_threads(),
            resumed=resumed,
        )

    def run(self) -> Summary:
        """Run the steps. Called by: every rank. The return value and the errors are those of Trainer.run."""
        mesh, train, resumed = self._mesh, self._train, self._start.resumed
        with contextlib.ExitStack() as stack:

            def record() -> list[Summary]:
                if not is_first(mesh):
                    return []
                # Files of another run were renamed when this one started.
                after, check = 0 if resumed is None else resumed.step, self._checkpoints.lease.check
                self._metrics = stack.enter_context(MetricsFile(self._out, after, check))
                return stack.enter_context(recorded(self._out, self._config, mesh.plan, self._start, check))

            ended = on_all_ranks(mesh, f"write into {self._out}", record)
            stack.enter_context(self._checkpoints)
            stack.enter_context(self._signals)
            stack.enter_context(self._source)
            window = stack.enter_context(TraceWindow(mesh, train, self._first))
            for callback in self._callbacks:
                callback.on_start(self._start)
            before = mesh.stats()
            try:
                self._make(window)
                self._checkpoints.finish()
            except BaseException as error:
                ended.append(self._summary())
                lost = mesh.elastic.lost(error)
                for callback in self._callbacks:
                    callback.on_end(ended[-1], lost or error)
                if lost is None or lost is error:
                    raise
                raise lost from error
            traffic = mesh.stats().since(before)
            late = dict(mesh.debug.stragglers().latest)
            self._cost.compare_counts()
            done = len(self._losses)
            whole = dataclasses.replace(
                self._summary(),
                late=late,
                stopped=self._stopped() if done < train.steps else "",
                asked_to_stop=self._signals.stop and done < train.steps,
            )
            if done > self._first:
                whole = dataclasses.replace(whole, traffic=traffic, traffic_steps=done - self._first)
            ended.append(whole)
        for callback in self._callbacks:
            callback.on_end(whole, None)
        return whole

    def facts(self) -> dict[str, Any]:
        """Return the facts that a new rank needs about the run, as plain data; see `progress_of`. Does not communicate."""
        pending = [*self._results, *self._engine.pending()]
        step = len(self._losses) + len(pending)
        lock = {
            "seconds": self._seconds,
            "skipped": self._skipped,
            "samples": self._source.read(step),
            "best": tuple(self._early.best),
        }
        return {
            "runs": self._number,
            "losses": [*self._losses],
            "recent": [tuple(done) for done in self._recent],
            "pending": [tuple(done) for done in pending],
            "lock": lock,
            "evaluates": self._evaluated,
        }

    # -- inside -----------------------------------------------------------------------------------

    def _make(self, window: TraceWindow) -> None:
        engine, mesh, train = self._engine, self._mesh, self._train
        logged = time.perf_counter()
        began = logged - self._lock.seconds
        logged_step = self._first
        self._report(0.0)
        evaluates, saves = self._left
        if evaluates:
            self._evaluate(self._first)
        # A loader may already have read the next step. Its state would then belong to that step.
        if saves and not self._source.has_state:
            self._save(self._first)
        for step in range(self._first + 1, train.steps + 1):
            if self._stopped():
                break
            self._checkpoints.poll()
            window.before(step)
            batch = self._source(step)
            with self._cost.counting():
                take_step(engine, step, *batch)
            mesh.step(step)
            window.after(step)
            self._seconds = time.perf_counter() - began
            saves, evaluates = self._due(train.checkpoint_every, step), self._due(train.eval_every, step)
            # Also copy at each checkpoint, so that copies are never older than the last checkpoint.
            self._copies.after_step(engine, self.facts, saves)
            logs = self._logs(step)
            # Reading results waits for the device if calls are queued on it.
            if mesh.is_async and not saves and not evaluates and not logs:
                continue
            # Keep the results, because a loss of ranks may interrupt the code below.
            self._results += engine.results()
            self._signals.look(step)
            now = time.perf_counter()
            self._seconds = now - began
            if logs:
                self._cost.looked()
            loads = self._engine.expert_loads() if logs else {}
            if self._report((step - logged_step) / (now - logged), loads):
                logged, logged_step = now, step
            if evaluates:
                self._evaluate(step)
            # Also save the last step if a callback or a signal ends the run.
            if saves or self._signals.stop or (train.checkpoint_every and self._stopped()):
                self._save(step)

    def _due(self, every: int, step: int) -> bool:
        return bool(every) and (step % every == 0 or step == self._train.steps)

    def _logs(self, step: int) -> bool:
        return step % self._train.log_every == 0 or step in (1, self._train.steps)

    def _report(self, steps_per_s: float, loads: Mapping[str, Any] | None = None) -> bool:
        """Keep the losses of all steps, and report the logged steps. Return whether a step was logged. loads: the experts' loads
        in the last step."""
        logged = False
        tokens = self._start.tokens_per_step
        rates, memory = self._cost.rates(steps_per_s), self._cost.memory
        while self._results:
            done = self._results.pop(0)
            self._losses.append(done.loss)
            self._recent.append(done)
            self._in_a_row = self._in_a_row + 1 if done.fault else 0
            self._skipped += bool(done.fault)
            # A loss of ranks may have come before the engine raised this error.
            if ends(done, self._train):
                raise stopped(done, self._train)
            if self._in_a_row > _IN_A_ROW:
                raise _nothing_finite(done, self._train)
            if not done.fault and not self._logs(done.number):
                continue
            logged = True
            line = Step(
                step=done.number,
                loss=done.loss,
                gradient_norm=done.gradient_norm,
                lr=done.lr,
                tokens=done.number * tokens,
                tokens_per_s=steps_per_s * tokens,
                seconds=self._seconds,
                skipped=self._skipped,
                fault=done.fault,
                terms=done.terms,
                experts=(loads or {}) if not self._results else {},
                loss_scale=done.loss_scale,
                **({} if rates is None else rates._asdict()),
                peak_memory_bytes=None if memory is None else memory.nbytes,
                peak_memory_rank=None if memory is None else memory.rank,
            )
            if self._metrics is not None:
                self._metrics.write(line)
            for callback in self._callbacks:
                callback.on_step(line)
        return logged

    def _evaluate(self, step: int) -> None:
        self._evaluation = self._evaluator.after(step, self._start.tokens_per_step)
        scheduler: Any = self._engine.scheduler
        if scheduler is not None and takes_metric(scheduler):
            scheduler.step(self._evaluation.validation_loss)
        self._cost.compare_counts()
        if self._metrics is not None:
            self._metrics.write(self._evaluation)
        for callback in self._callbacks:
            callback.on_eval(self._evaluation)
        self._evaluated = step

    def _save(self, step: int) -> None:
        if self._metrics is not None:
            self._metrics.sync()
        lock = dataclasses.replace(
            self._lock,
            step=step,
            seconds=self._seconds,
            skipped=self._skipped,
            samples=self._source.read(step),
            best=self._early.best,
        )
        state = state_of(self._mesh, self._engine, self._losses, self._source.saved)
        folder = self._checkpoints.save(lock, state)
        for callback in self._callbacks:
            callback.on_save(step, folder)

    def _stopped(self) -> str:
        """Return why a callback ends the run; "" if none does."""
        return next(
            (
                callback.reason or f"{type(callback).__name__}.stop"
                for callback in self._callbacks
                if callback.stop
            ),
            "",
        )

    def _summary(self) -> Summary:
        """Return the summary so far."""
        done, corpus = len(self._losses), self._corpus
        return Summary(
            done,
            tuple(self._losses),
            done * self._start.tokens_per_step,
            self._seconds,
            self._out / METRICS,
            skipped=self._skipped,
            unit="byte" if corpus is not None and corpus.unit == "bytes of text" else "token",
            evaluation=self._evaluation,
            rates=self._cost.rates(done / self._seconds if self._seconds else 0.0),
            memory=self._cost.memory,
        )


def _nothing_finite(done: Done, train: TrainConfig) -> TrainingError:
    return TrainingError(
        f"steps {done.number - _IN_A_ROW} to {done.number} have no finite result, so skipping them does not help",
        given=done.fault,
        expected=f"{_IN_A_ROW} such steps in a row at most",
        hint=(
            ""
            if done.loss_scale is None
            else f"train.loss_scale = {done.loss_scale / 2:g}, if larger gradients overflow in float16; "
        )
        + f"a smaller train.lr than {train.lr:g}; or run meshcomm parity to look for an error in the model",
    )
