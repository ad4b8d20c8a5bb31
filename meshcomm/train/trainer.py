"""The Trainer, which trains a model on a mesh, optionally with the user's own model, optimizer, loss or data."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.config import Config
from meshcomm.errors import ConfigError, TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import is_first, on_all_ranks
from meshcomm.mesh.source import with_sizes
from meshcomm.models import ModelSpec
from meshcomm.parallel.batch import Batch
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.model import LossOf, Model
from meshcomm.parallel.optimizer import MakeOptimizer
from meshcomm.parallel.results import Done
from meshcomm.parallel.state import takes_metric
from meshcomm.train.agree import agree, agree_on_weights, agreed_corpus, corpus_of
from meshcomm.train.arguments import (
    MakeScheduler,
    check_callbacks,
    config_of_the_job,
    model_for,
    scheduler_for,
)
from meshcomm.train.callbacks import Callback, Summary
from meshcomm.train.checkpoint.checkpoints import Checkpoints, resume, state_of, write
from meshcomm.train.checkpoint.init_from import start_from
from meshcomm.train.checkpoint.lease import Attempt, Lease, find_attempt
from meshcomm.train.checkpoint.lock import Lock, check_batch_size, lock_of
from meshcomm.train.data import (
    Corpus,
    Data,
    Source,
    UserBatches,
    batches_of,
    check_data,
    check_lengths,
    user_batches,
)
from meshcomm.train.data.batch import UserBatch, placed
from meshcomm.train.data.batches import ReadAhead
from meshcomm.train.data.loader import evaluated
from meshcomm.train.elastic import Copies, Survivor, nobody_holds, other_parts, refuse_shards
from meshcomm.train.evaluation import Evaluator, evaluate_of
from meshcomm.train.program_check import ProgramCheck
from meshcomm.train.screen import TrainingReporter, not_compared
from meshcomm.train.steps import (
    Progress,
    Steps,
    check_outputs,
    progress_of,
    take_step,
    threads_and_precision,
)

T = TypeVar("T")
_LOG: Final = logging.getLogger("meshcomm.train")


class StepRecorder(ABC):
    """Intercepts the steps of a program's trainers, which then write no files.

    config: the configuration that replaces the trainers' own. If None, they keep their own.
    """

    config: Config | None = None

    def begins(self, engine: Engine, inputs: Any) -> None:  # noqa: B027
        """Called before each step."""

    @abstractmethod
    def stepped(self, engine: Engine) -> None:
        """Called after each step. Raises an exception to end the program when enough steps are recorded."""


class EnoughSteps(BaseException):
    """Ends a program whose requested steps have been recorded. It is not an Exception, so that no script catches it."""


# For the trainers of this context: `meshcomm parity` compares them, and `meshcomm dryrun` inspects them.
RECORDER: ContextVar[StepRecorder | None] = ContextVar("meshcomm_recorder", default=None)


@final
class Trainer:
    """Trains a model on a mesh, like `meshcomm train`, but with your own model, loss, optimizer or data.

        with meshcomm.init("train.toml") as mesh:
            Trainer(mesh, meshcomm.load_config("train.toml"), module, loss=loss).run(batches)

    Args:
        mesh: an open mesh that this rank is a member of.
        config: the mesh's configuration. If None, the CONFIG passed to `meshcomm run` is used. [parallel] and
            [train] are required. [model] is required if `model` is None. [data] is required for a pipeline, for a
            model from [model], and if `run` is called without data.
        model: if None, the model described in [model] is built. A ModelSpec or Model is built in parts and supports
            every kind of parallelism that it describes. An nn.Module is used unchanged. It supports data and shard
            parallelism, and tensor parallelism once `tensor_parallel` has split it. The first rank along data and
            shard broadcasts its weights to the other ranks along these dims.
        optimizer: a function that maps parameter groups to an optimizer. If None, the optimizer in [train] is used.
            Vectors are in a parameter group with weight_decay 0. The schedule scales the optimizer's lr instead of train.lr.
        loss: a function of whole outputs and targets of a microbatch. It returns the mean over the microbatch; or
            (sum, count), which are added over all microbatches and ranks before they are divided; or a dictionary with
            "loss" and further terms to log. If None, the model's own loss is used, or the cross-entropy over all
            targets of the global batch except -100.
        scheduler: a function that maps the optimizer to a torch LRScheduler, which replaces the schedule in [train]
            and advances after each step. On resume, it advances once per completed step and then loads the saved
            state. If its settings have changed, the new settings apply, and its state is computed only from the
            number of steps. A scheduler whose step takes a metric, such as ReduceLROnPlateau, advances after each evaluation of a
            `run`, by the validation loss, which is equal on all ranks; with `step`, call trainer.scheduler.step(metric) yourself.
        callbacks: called on every rank, in the given order.

    Called by: every rank of the mesh, with equal arguments.
    Raises:    ConfigError or LayoutError if config, model and mesh do not match; TrainingError if ranks have
               different settings; UnsupportedOp for a kind of parallelism that the model does not support.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: Config | None = None,
        model: nn.Module | ModelSpec | Model | None = None,
        *,
        optimizer: MakeOptimizer | None = None,
        loss: LossOf | None = None,
        scheduler: MakeScheduler | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._recorder = RECORDER.get()
        recorded = None if self._recorder is None else self._recorder.config
        self._mesh, self._asked = mesh, config_of_the_job(config) if recorded is None else recorded
        self._given, self._loss = model, loss
        self._optimizer, self._scheduler = optimizer, scheduler
        self._made: Engine | None = None
        # Whether the engine holds a state. When resuming, it holds none until the checkpoint is read.
        self._holds = False
        self._steps: Steps | None = None
        # The samples read from the program's data before ranks were lost.
        self._read: UserBatches | None = None
        # The number of `run` calls so far. Ranks that meet again must be in the same call.
        self._runs = 0
        # After ranks have met again: this rank's state, until it is in a new engine.
        self._survivor = Survivor() if mesh.elastic.generation.number else None
        self._copies = Copies()
        self.callbacks = check_callbacks(callbacks)
        self._recovering(lambda: None, begins=True)
        for callback in self.callbacks:
            callback.trainer = self

    def _begin(self) -> None:
        """Run the part of the constructor that communicates, which is repeated on each reopened mesh."""
        mesh, model = self._mesh, self._given
        # After a loss of ranks, the mesh may be smaller than the configuration asks for.
        self._config = config = with_sizes(self._asked, mesh.elastic.generation.dims)
        self._copies.every = config.elastic.copy_every if mesh.elastic.recovers else 0
        if self._survivor is not None:
            self._survivor.settle(mesh)
        self._facts = agree(mesh, config)
        sections = self._facts.sections
        self._model = model_for(config, sections, model, self._loss)
        self._check: ProgramCheck | None = None
        if sections.train.check and self._recorder is None and not mesh.is_fake:
            self._check = ProgramCheck(mesh, sections, self._model, self._optimizer)
        if isinstance(model, nn.Module):
            # Weights that a checkpoint may replace are not read yet.
            self._make(not sections.train.init_from)

    def _recovering(self, action: Callable[[], T], begins: bool = False) -> T:
        """Return the result of `action`, which is repeated if it fails because ranks were lost and replaced.

        begins: whether to begin first, as on each reopened mesh.
        """
        while True:
            try:
                if begins:
                    self._begin()
                return action()
            except Exception as error:
                if not self._mesh.elastic.recovers:
                    raise
                self._meet_again(error)
            # Do this outside the except block, in which the error keeps the step's tensors alive.
            begins = True

    def _meet_again(self, error: Exception) -> None:
        mesh = self._mesh
        if mesh.elastic.recovers and self._survivor is None:
            shared = isinstance(self._given, nn.Module)
            if shared and self._made is not None and mesh.elastic.lost(error) is not None:
                refuse_shards(self._made, error)
            facts = None if self._steps is None else self._steps.facts
            survivor = Survivor(self._made if self._holds else None, shared=shared, facts=facts)
        else:
            survivor = self._survivor or Survivor()
        tensor, coords = None if self._made is None else self._facts.sections.parallel.tensor, mesh.coords
        mesh.elastic.reopen(error)
        if tensor is not None and isinstance(self._given, nn.Module) and coords[tensor] != mesh.coord(tensor):
            raise other_parts(mesh, tensor, coords[tensor])
        self._survivor, self._made, self._steps, self._holds = survivor, None, None, False
        self._copies.begin_again()

    def reopen(self, error: Exception | None = None) -> int:
        """Reopen the mesh after ranks were lost and replaced, and bring every rank to the same step and state.

            trainer = Trainer(mesh, config, model)
            done = trainer.reopen() if mesh.elastic.generation.number else 0
            while done < 100:
                try:
                    trainer.step(*batch_of(done + 1))
                    done += 1
                except Exception as error:
                    done = trainer.reopen(error)       # raises `error` if no rank was lost and replaced

        Call this in custom training loops; `run` calls it automatically. If any rank has applied the interrupted step, all
        ranks complete it. Otherwise all ranks undo it. A new rank copies its parts of the
        state from ranks that hold them.

        error:     the exception that interrupted the step. A new rank passes None, right after it has constructed the Trainer.
        Called by: every rank of the mesh.
        Returns:   the last completed step, the same on every rank.
        Raises:    `error` if no rank was lost and replaced; TrainingError if no rank holds the parts of a lost rank.
        """
        if error is not None:
            self._meet_again(error)
        facts = self._recovering(self._restored, begins=error is not None)
        if facts is None and self._survivor is not None:
            raise nobody_holds(self._mesh)
        self._survivor = None
        return self.engine.done

    def _restored(self) -> Any:
        """Load the survivors' state into a new engine. Return their facts about the run; None if no rank holds the state."""
        restored = None
        if self._survivor is not None:
            restored = self._survivor.restore(self._make(False), self._copies.held)
        self._holds = self._holds or restored is not None
        return restored

    @property
    def mesh(self) -> Mesh:
        """The mesh to train on."""
        return self._mesh

    @property
    def engine(self) -> Engine:
        """This rank's stages, the reduction of their gradients, and the optimizer.

        A model that is built in parts is built when this property, or one that depends on it, is first accessed.
        Every rank must make this first access.
        """
        return self._make(True)

    @property
    def not_checked(self) -> str:
        """What of the program, or why all of it, is not compared with plain torch before the first step; "" if all is compared.
        See `train.check`. Trainers without a screen log it as a warning of the logger `meshcomm.train`.

        Known on the first rank, and, for a program that is compared on its first batch, after the first step.
        """
        return "" if self._check is None else self._check.why

    @property
    def scheduler(self) -> LRScheduler | None:
        """The torch scheduler, if one was given."""
        return self.engine.scheduler

    @property
    def modules(self) -> nn.ModuleList:
        """This rank's pipeline stages, one or more."""
        return self.engine.modules

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer for this rank's parameters."""
        return self.engine.optimizer

    def run(self, data: Data | None = None, attempt: Attempt | None = None) -> Summary:
        """Train until train.steps, from scratch or from the last complete checkpoint in train.out.

        data:      a function that returns this rank's share of the global batch of a step as (inputs, targets), or an
                   iterable of such pairs, for example a DataLoader. When an iterable ends, its sampler's `set_epoch`
                   is called, and the iterable is restarted. Dictionaries are accepted, as in `step`. On resume, an
                   iterable with `load_state_dict`, such as torchdata's StatefulDataLoader, loads its saved state. Any
                   other iterable is advanced past the completed steps. Ranks along tensor, pipeline and context must
                   receive the same data. If None, [data] is used.
        attempt:   the job and the number of its restarts. A job that the launcher restarts resumes from its own
                   last checkpoint.
        Called by: every rank of the mesh.
        Returns:   a summary, with the same losses on every rank. The first rank writes the files that `run_files`
                   describes into train.out.
        Raises:    ConfigError if the configuration does not match the checkpoint; TrainingError if ranks have different data,
                   a parameter gets no gradient, the loss or the gradient norm is not finite (see
                   train.on_nonfinite), a checkpoint cannot be written or read, or another job writes into train.out;
                   CallMismatchError if ranks make different calls in a step; UnsupportedOp under torch.no_grad and
                   torch.inference_mode.
        """
        self._check_gradients("run")
        if data is not None:
            check_data(data)
        self._runs, self._read = self._runs + 1, None
        self._copies.clear()
        if self._recorder is not None:
            source = self._source(self._corpus() if data is None else data)
            # The recorder ends the loop.
            for step in count(1):
                self.step(*source(step))
        out = Path(self._facts.sections.train.out)
        with Lease(out, attempt or find_attempt(os.environ)) as lease:
            try:
                return self._recovering(partial(self._run, data, attempt or Attempt(), lease))
            finally:
                self._end_reading()

    def _end_reading(self) -> None:
        if self._read is not None:
            self._read.close()

    def _run(self, data: Data | None, attempt: Attempt, lease: Lease) -> Summary:
        source = self._corpus() if data is None else data
        train = self._facts.sections.train
        writes = is_first(self.mesh)
        on_all_ranks(self.mesh, "start the training", lambda: check_outputs(train) if writes else None)
        lease.hold(self.mesh)
        with threads_and_precision(self.mesh, train, self._facts.ranks_here):
            summary = self._train(source, attempt, lease)
            if self.mesh.elastic.recovers:
                # A rank that has ended could not meet a new one. The program may still work on the result.
                self.mesh.elastic.finish(ends=False)
            return summary

    def _train(self, data: Data | Corpus, attempt: Attempt, lease: Lease) -> Summary:
        corpus = data if isinstance(data, Corpus) else None
        checkpoints = Checkpoints(self.mesh, self._facts.sections.train, lease)
        start = lock_of(self.mesh, self._config, b"" if corpus is None else corpus.digest)
        progress = self._go_on(checkpoints, start)
        if progress is None:
            progress = self._start(checkpoints, start, attempt, data)
        engine, lock = self.engine, progress.lock
        train, scheduler = engine.sections.train, engine.scheduler
        if scheduler is not None and takes_metric(scheduler) and not train.eval_every:
            kind = type(scheduler).__name__
            raise ConfigError(
                f"the {kind} needs a metric, and nothing is evaluated",
                given=f"a {kind} without train.eval_every",
                expected="evaluations, after each of which it is given the validation loss",
                hint="train.eval_every = 100",
            )
        evaluate = evaluate_of(engine.sections.train)
        evaluator = Evaluator(engine, corpus, None if evaluate is None else partial(evaluate, self))
        if self._read is None or progress.loader is not None:
            # After a loss of ranks, only the new ranks read from the start.
            if (
                isinstance(data, Iterable)
                and not self.mesh.is_fake
                and not self.mesh.elastic.generation.number
            ):
                check_lengths(data, self.mesh, engine.sections.train.steps)
            source = self._source(data, lock.step, lock.samples or 0, progress.loader)
        else:
            source = self._read
            self._read.goes_on(engine, lock.step)
        # Within a run, the loss of ranks does not restart an iterable.
        self._read = source if isinstance(source, UserBatches) else None
        self._steps = Steps(
            engine,
            self._config,
            self.callbacks,
            source=source,
            corpus=corpus,
            evaluator=evaluator,
            checkpoints=checkpoints,
            copies=self._copies,
            progress=progress,
            number=self._runs,
        )
        # Only the new steps now hold the survivor's state.
        self._survivor = None
        return self._steps.run()

    def _start(
        self, checkpoints: Checkpoints, start: Lock, attempt: Attempt, data: Data | Corpus
    ) -> Progress:
        """Start from the first step or from a checkpoint."""
        if self._survivor is not None:
            # No rank holds the lost parts: continue as after a restart.
            attempt, self._survivor, self._made = replace(attempt, restarts=attempt.restarts + 1), None, None
        resumed, lock = checkpoints.begin(attempt, start)
        if resumed is not None and isinstance(data, Iterable) and not isinstance(data, Corpus):
            check_batch_size(lock, start, type(data).__name__, resumed.folder)
        # Parameters of a checkpoint are not read from elsewhere or initialized before it is loaded.
        engine = self._make(not lock.step)
        losses: list[float] = []
        loader: Tensor | None = None
        if resumed is not None and lock.step:
            losses, loader = resume(self.mesh, engine, resumed.folder, run=True, begun=lock)
        self._holds = True
        return Progress(start.continuing(lock), losses, resumed, None if isinstance(data, Corpus) else loader)

    def _go_on(self, checkpoints: Checkpoints, start: Lock) -> Progress | None:
        """Continue from the survivors' state after ranks were lost and replaced. Return None if no rank holds the state."""
        facts = self._restored()
        if not facts:
            return None
        if facts["runs"] != self._runs:
            raise TrainingError(
                "a new rank is in a different Trainer.run call than the other ranks",
                given=f"run {self._runs} of this program on {self.mesh.label}, run {facts['runs']} on the others",
                expected="a single Trainer.run call in a program whose lost ranks are replaced",
                hint="start a job for each run",
            )
        checkpoints.tidy()
        return progress_of(self.engine, start, facts)

    def _source(
        self, data: Data | Corpus, step: int = 0, samples: int = 0, state: Tensor | None = None
    ) -> Source:
        """Return the data for each step after `step`. samples: the samples read so far. state: the loader's saved state."""
        if not isinstance(data, Corpus):
            return user_batches(data, self.engine, step, state)
        batches = batches_of(self.engine, data, (step, samples))
        facts = self._facts.sections
        if facts.data is None or not facts.data.workers or self._recorder is not None:
            return batches
        timeout_s = self.mesh.plan.defaults.timeout_s
        return ReadAhead(batches, facts.train.steps, facts.data.workers, timeout_s)

    def step(
        self,
        inputs: Any,
        targets: Any = None,
        documents: Tensor | None = None,
    ) -> None:
        """Run one step of a custom training loop. `results` returns the losses.

        inputs:    a tensor, or a tree of tensors: a tuple or list is the module's arguments, a dictionary its named arguments, and
                   a dataclass its only argument. As the only argument of step: inputs, for a loss of your own that needs no targets; or a dictionary with inputs and targets. The collators in transformers
                   return such dictionaries for causal language models, with input_ids and labels for the same tokens. An attention_mask that masks tokens
                   at the end, and position_ids that are 0 where a document starts, are optional. The first dictionary is compared with the
                   model's own loss. Other models need a loss of your own. A dictionary of other names is then the model's named arguments.
        Shape:     (global_batch_size / ranks along data and shard, ...): this rank's share of the global batch,
                   on any device. Floating-point tensors are converted to train.dtype.
        documents: an int64 tensor (samples, tokens) with the document number of each token, in ascending order. Used
                   with data.document_mask.
        Called by: every rank. Ranks along tensor, pipeline and context must pass equal inputs and targets.
        Raises:    ShapeError for a wrong number of samples; TrainingError if a parameter got no gradient, or if
                   inputs and targets are not two tensors; UnsupportedOp under torch.no_grad and
                   torch.inference_mode.
        """
        self._check_gradients("step")
        engine = self.engine
        number = engine.done + 1
        batch_parts: object = inputs
        # Without targets, a dictionary is inputs and targets, or the named arguments of a model whose loss needs no targets.
        if not isinstance(inputs, Mapping) or targets is not None:
            batch_parts = (inputs, targets) if documents is None else (inputs, targets, documents)
        batch = Batch(*placed(engine, batch_parts, f"step {number}"))
        if self._recorder is not None:
            self._recorder.begins(engine, batch.inputs)
        take_step(engine, number, *batch)
        self._copies.after_step(engine)
        if self._recorder is not None:
            self._recorder.stepped(engine)

    def _check_gradients(self, call: str) -> None:
        if not torch.is_grad_enabled():
            raise UnsupportedOp(
                f"a step needs gradients, on {self.mesh.label}",
                given=f"Trainer.{call} within torch.no_grad or torch.inference_mode",
                expected="gradients to be recorded",
                hint=f"move the {call} out of the block; Trainer.evaluate computes only a loss",
            )

    def results(self) -> list[Done]:
        """Return the results of the steps since the last call, in order. Waits for the device.

        Called by: every rank.
        Raises:    TrainingError on every rank if train.on_nonfinite is "stop" and the loss or the gradient norm
                   of a step is not finite. Neither that step nor any later step was applied.
        """
        return self.engine.results()

    def evaluate(self, batches: Iterable[UserBatch]) -> float:
        """Return the mean loss over the given global batches, computed in eval mode without backward passes.

        batches:   this rank's share of each global batch, shaped as in `step`, or with fewer samples: each counts once. If
                   the iterables have no length, their number of batches must be the same on every rank.
        Called by: every rank.
        Returns:   the same value on every rank. Waits for the device.
        Raises:    TrainingError if a rank has no batches, and the errors of `Engine.evaluate`.
        """
        return self.engine.evaluate(evaluated(batches, self.engine))

    def averaged(self) -> AbstractContextManager[None]:
        """In this context, the weights are their moving averages of `train.ema`, to evaluate or to export them.

            with trainer.averaged():
                loss = trainer.evaluate(batches)

        Called by: every rank.
        Raises:    ConfigError without `train.ema`; TrainingError for a step, a save or a load in the context.
        """
        return self.engine.averaged()

    def state(self) -> dict[str, Tensor]:
        """Return all state that a step changes, as tensors by name: what `save` writes. The state is not modified.

        Names do not depend on the mesh: `model.NAME` for this rank's weights and buffers, `optimizer.NAME.KEY` for the optimizer's
        tensors, `loss.NAME` for the buffers of a loss module, and uint8 tensors named `plain.` with encoded plain data. Shapes are
        those of the full tensors: a split one is a DTensor. The tensors share memory with the
        model. State that the first step creates is not there before it.

        Called by: every rank.
        Raises:    TrainingError that names the state that cannot be saved.
        """
        return self.engine.state()

    def save(self, folder: str | Path) -> None:
        """Write the training state into a new folder, which `load` can read on any mesh.

        Called by: every rank.
        Raises:    TrainingError on every rank if one rank cannot write, or holds state that cannot be saved, or if the folder
                   has files already, another job saves there, or it is named after another step, as step-000040. No other files
               are changed or removed.
        """
        write(self.mesh, state_of(self.mesh, self.engine), folder, self._lock())

    def _lock(self) -> Lock:
        """Return the lock for a checkpoint of the last completed step."""
        return replace(lock_of(self.mesh, self._config, b""), step=self.engine.done)

    def load(self, folder: str | Path) -> None:
        """Load the state from a folder that `save` or a run wrote on any mesh. The next `step` continues from that state.

        Call this first, so that the parameters in the folder are neither initialized nor read from elsewhere.

        Called by: every rank.
        Raises:    TrainingError on every rank if one rank cannot read the folder, if the state does not match, or if ranks would
                   load different checkpoints. The state has not changed, unless the error says that it is neither of the two.
        """
        resume(self.mesh, self._make(False), folder)
        self._holds = True
        self._copies.clear()

    def _corpus(self) -> Corpus:
        facts = self._facts
        if facts.sections.data is None:
            raise ConfigError(
                "no data are given, and the configuration has none",
                given=f"{facts.config.source} without [data]",
                expected="one of the two",
                hint="trainer.run(data) with (inputs, targets) of each step, or [data] seq_len = 128",
            )
        if self._recorder is not None:
            return corpus_of(facts.sections, self._model.vocab_size)
        return agreed_corpus(self.mesh, facts, self._model.vocab_size)

    def _make(self, asked: bool) -> Engine:
        """Return the engine. asked: whether its parameters are filled, if they are not."""
        init_from = self._facts.sections.train.init_from
        if self._made is None:
            holds = filled = asked and init_from is None
            # Parameters that a checkpoint does not have are read or initialized at each start.
            filled = filled or not self._model.saves_all
            if filled and self._given is None:
                agree_on_weights(self.mesh, self._facts.sections.model)
            # Parameters that are made in inference mode could not be trained.
            with torch.inference_mode(False):
                engine = Engine(self.mesh, self._config, self._model, self._optimizer, filled=filled)
            if self._scheduler is not None:
                engine.scheduler = scheduler_for(
                    self._scheduler, engine.optimizer, engine.sections.train.steps
                )
            self._made, self._holds = engine, holds
            if self._check is not None:
                self._check.follow(engine, self._say_what_is_not_checked)
        if asked and init_from is not None and not self._holds:
            start_from(self._mesh, self._made, Path(init_from))
            self._holds = True
        return self._made

    def _say_what_is_not_checked(self) -> None:
        """Log it, unless the run's screen says it."""
        shown = any(isinstance(callback, TrainingReporter) for callback in self.callbacks)
        if (why := self.not_checked) and not shown:
            _LOG.warning("%s", not_compared(why))


def run(mesh: Mesh, config: Config, callback: Callback, attempt: Attempt | None = None) -> Summary:
    """Train according to a configuration: `Trainer(mesh, config, callbacks=[callback]).run()`."""
    return Trainer(mesh, config, callbacks=[callback]).run(attempt=attempt)
