"""The steps of a run: made, told, evaluated and saved one after the other, and what ends them early."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import torch

from meshcomm.config import Config, TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.mesh.all_ranks import is_first
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.results import Done
from meshcomm.train.checkpoint import Checkpoints, state_of
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.early_stop import Best, EarlyStop
from meshcomm.train.given_data import Given
from meshcomm.train.lock import Lock
from meshcomm.train.metrics.cost import Cost
from meshcomm.train.metrics.sinks import SINKS
from meshcomm.train.report import Callback, Callbacks, Evaluation, Resumed, Start, Step, Summary
from meshcomm.train.run_files import METRICS, MetricsFile, recorded, settings_of
from meshcomm.train.schedule import learning_rate
from meshcomm.train.windows import Windows

# Steps that may be left out one after the other: more of them are no accident.
_IN_A_ROW = 10


class Reading(NamedTuple):
    """What steps are made of. corpus: of [data], None of data that come from code; held: its validation part."""

    batches: Batches | Given
    corpus: Corpus | None
    held: Batches | None

    def evaluated(self, train: TrainConfig) -> int:
        """Global batches of an evaluation. Raises TrainingError where there are none and one is asked for."""
        validation = None if self.corpus is None else self.corpus.validation
        samples = 0 if validation is None else validation.samples
        whole = samples // train.global_batch
        if train.eval_every and not whole:
            raise TrainingError(
                "there is too little to evaluate",
                given=f"{samples} samples for validation, train.global_batch = {train.global_batch}",
                expected="one global batch or more",
                hint="a larger data.validation, more validation files, or a smaller train.global_batch",
            )
        return min(whole, train.eval_batches or whole)


@final
class Steps:
    """The steps that follow those of `losses`, after which the lock was `lock`. Every rank of the mesh has them.

    resumed: None where the run begins at its first step.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        reading: Reading,
        callbacks: Sequence[Callback],
        checkpoints: Checkpoints,
        lock: Lock,
        resumed: Resumed | None,
        losses: list[float],
    ) -> None:
        _, _, data, train = engine.sections
        mesh, corpus = engine.mesh, reading.corpus
        self._engine, self._mesh, self._train, self._config = engine, mesh, train, config
        self._reading, self._eval_batches = reading, reading.evaluated(train)
        self._checkpoints, self._lock = checkpoints, lock
        self._out = Path(train.out)
        self._first = len(losses)
        self._losses, self._seconds, self._skipped, self._in_a_row = losses, lock.seconds, lock.skipped, 0
        self._evaluation: Evaluation | None = None
        self._cost = Cost(mesh, train)
        self._early = EarlyStop(mesh, train, Best(*lock.best))
        self._metrics: MetricsFile | None = None
        sinks = []
        if is_first(mesh):
            settings = settings_of(config, mesh.plan)
            sinks = [SINKS[name](self._out, settings, self._first) for name in train.log_to]
        self._callbacks = Callbacks([self._early, *callbacks, *sinks])
        self._start = Start(
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

    def run(self) -> Summary:
        """Make them. Called by: every rank. Returns and raises as Trainer.run."""
        mesh, train, resumed = self._mesh, self._train, self._start.resumed
        with contextlib.ExitStack() as stack:
            ended: list[Summary] = []
            if is_first(mesh):
                # What another run left was put aside when this one began.
                self._metrics = stack.enter_context(
                    MetricsFile(self._out, after=0 if resumed is None else resumed.step)
                )
                ended = stack.enter_context(recorded(self._out, self._config, mesh.plan, self._start))
            stack.enter_context(self._checkpoints)
            windows = stack.enter_context(Windows(mesh, train, self._first))
            self._callbacks.call("on_start", self._start)
            before = mesh.stats()
            try:
                self._make(windows)
                self._checkpoints.finish()
            except BaseException as error:
                ended.append(self._summary())
                self._callbacks.call("on_end", ended[-1], error)
                raise
            traffic = mesh.stats().since(before)
            late = dict(mesh.stragglers().latest)
            self._cost.compare()
            whole = dataclasses.replace(self._summary(), late=late, stopped=self._stopped())
            if len(self._losses) > self._first:
                steps = len(self._losses) - self._first
                whole = dataclasses.replace(whole, traffic=traffic, traffic_steps=steps)
            ended.append(whole)
        self._callbacks.call("on_end", whole, None)
        return whole

    # -- inside -----------------------------------------------------------------------------------

    def _make(self, windows: Windows) -> None:
        engine, mesh, train, scheduler = self._engine, self._mesh, self._train, self._engine.scheduler
        logged = time.perf_counter()
        began = logged - self._lock.seconds
        logged_step = self._first
        for step in range(self._first + 1, train.steps + 1):
            if self._callbacks.stopped:
                break
            self._checkpoints.poll()
            lr = learning_rate(train, step) if scheduler is None else None
            windows.before(step)
            batch = self._reading.batches(step)
            with self._cost.counting():
                engine.step(*batch, lr, step)
            if scheduler is not None:
                scheduler.step()
            mesh.step(step)
            windows.after(step)
            self._seconds = time.perf_counter() - began
            saves, evaluates = self._due(train.checkpoint_every, step), self._due(train.eval_every, step)
            logs = self._logs(step)
            # A look waits for the device where calls are queued on it.
            if mesh.asynchronous and not saves and not evaluates and not logs:
                continue
            results = engine.look()
            now = time.perf_counter()
            self._seconds = now - began
            if logs:
                self._cost.looked()
            if self._tell(results, (step - logged_step) / (now - logged)):
                logged, logged_step = now, step
            if evaluates:
                self._evaluate(step)
            # The last one, where something ends the run.
            if saves or (train.checkpoint_every and self._callbacks.stopped):
                self._save(step)

    def _due(self, every: int, step: int) -> bool:
        return bool(every) and (step % every == 0 or step == self._train.steps)

    def _logs(self, step: int) -> bool:
        return step % self._train.log_every == 0 or step in (1, self._train.steps)

    def _tell(self, results: list[Done], steps_per_s: float) -> bool:
        """Note what steps gave, and tell of those that are logged; whether there was one."""
        told = False
        tokens = self._start.tokens_per_step
        rates, memory = self._cost.rates(steps_per_s), self._cost.memory
        for done in results:
            self._losses.append(done.loss)
            self._in_a_row = self._in_a_row + 1 if done.fault else 0
            self._skipped += bool(done.fault)
            if self._in_a_row > _IN_A_ROW:
                raise _nothing_finite(done, self._train)
            if not done.fault and not self._logs(done.number):
                continue
            told = True
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
                **({} if rates is None else rates._asdict()),
                peak_memory_bytes=None if memory is None else memory.nbytes,
                peak_memory_rank=None if memory is None else memory.rank,
            )
            if self._metrics is not None:
                self._metrics.write(line)
            self._callbacks.call("on_step", line)
        return told

    def _evaluate(self, step: int) -> None:
        held = self._reading.held
        assert held is not None
        began = time.perf_counter()
        loss = self._engine.evaluate(held.in_order(self._train.eval_batches))
        tokens = self._eval_batches * self._start.tokens_per_step
        self._evaluation = Evaluation(step, loss, tokens, seconds=time.perf_counter() - began)
        self._cost.compare()
        if self._metrics is not None:
            self._metrics.write(self._evaluation)
        self._callbacks.call("on_eval", self._evaluation)

    def _save(self, step: int) -> None:
        if self._metrics is not None:
            self._metrics.sync()
        lock = dataclasses.replace(
            self._lock,
            step=step,
            seconds=self._seconds,
            skipped=self._skipped,
            samples=self._reading.batches.read(step),
            best=self._early.best,
        )
        folder = self._checkpoints.save(lock, state_of(self._mesh, self._engine, self._losses))
        self._callbacks.call("on_save", step, folder)

    def _stopped(self) -> str:
        return self._callbacks.stopped if len(self._losses) < self._train.steps else ""

    def _summary(self) -> Summary:
        """Of what is done so far."""
        done, corpus = len(self._losses), self._reading.corpus
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
        f"steps {done.number - _IN_A_ROW} to {done.number} give nothing finite, so leaving them out does not help",
        given=done.fault,
        expected=f'{_IN_A_ROW} such steps in a row at most, with train.nonfinite = "skip"',
        hint=f"a smaller train.lr than {train.lr:g}; or meshcomm parity, to look for a mistake",
    )
