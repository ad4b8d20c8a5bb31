"""The records that a training run reports, the callbacks that receive them, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from meshcomm.config import TrainConfig
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.mesh.stats import Stats
from meshcomm.rendezvous.generation import Generation
from meshcomm.train.cost import Memory, Rates


@dataclass(frozen=True)
class Resumed:
    """A run that continues where an earlier one stopped."""

    step: int
    """The last completed step; 0 if there was no checkpoint."""
    folder: Path
    """The checkpoint, or the folder that was searched if there was none."""
    differences: tuple[str, ...]
    """Settings that have changed, one line each: `mesh.dims: {...} -> {...}`."""
    restarts: int = 0
    """The number of times the launcher has restarted the job, if the run resumes because of a restart."""
    generation: Generation | None = None
    """The mesh's generation if the run continues after a loss of ranks; None if it resumes from a checkpoint."""


@dataclass(frozen=True)
class Start:
    """The facts known before the first step."""

    steps: int
    tokens_per_step: int
    """Tokens of the global batch."""
    parameters: int
    """Number of elements of the full model."""
    text_bytes: int
    text_files: int
    threads: int
    """CPU threads per rank."""
    unit: str = "bytes of text"
    """The unit of text_bytes."""
    note: str = ""
    """What a user should know of the data, such as conversations that are cut off."""
    resumed: Resumed | None = None
    """None if the run starts from the beginning and was not asked to resume."""


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl."""

    step: int
    """The number of the step, starting at 1."""
    loss: float
    """The mean loss over the global batch, in nats per byte or token, before this step updated the weights."""
    gradient_norm: float
    """The norm of all gradients of the model, before clipping."""
    lr: float
    tokens: int
    """Tokens since the start, summed over all ranks. Padding counts: each step has global_batch_size x seq_len."""
    tokens_per_s: float
    """Tokens per second since the previous line."""
    seconds: float
    """Seconds since the start of the first step."""
    skipped: int = 0
    """Number of steps skipped so far with `train.on_nonfinite = "skip"`, or because float16 overflowed."""
    fault: str = ""
    """In a skipped step, the rank and the parameter whose gradient is not finite."""
    model_flops_per_s: float | None = None
    """FLOP/s per rank since the previous line, averaged over ranks; None if FLOPs were not counted."""
    mfu: float | None = None
    """Model FLOPs utilization: model_flops_per_s divided by the device's peak. None if either number is unknown."""
    peak_memory_bytes: int | None = None
    """The highest peak memory on any rank when ranks were last compared; see `Cost.memory`."""
    peak_memory_rank: int | None = None
    """The rank with that peak."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Further terms that the loss function returned, by name, added up like the loss."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """With experts: `expert_max_over_mean`, the largest load of an expert divided by the mean load of its layer;
    `experts_dropped`, the fraction of the choices that a capacity dropped; and `expert_load`, by layer, the fraction of the
    choices that each expert got. All are those of this step's global batch. Empty in a skipped step that is not logged."""
    loss_scale: float | None = None
    """With float16, the factor of this step's loss in the backward pass. If the step was skipped, the next step's is half of it."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields by name, as in metrics.jsonl. Entries of `terms` are named `loss_NAME`, those of `experts` as they are."""
        facts = {name: value for name, value in vars(self).items() if name not in ("terms", "experts")}
        return facts | {f"loss_{name}": value for name, value in self.terms.items()} | {**self.experts}


@dataclass(frozen=True)
class Evaluation:
    """A line in metrics.jsonl that records an evaluation."""

    step: int
    """The step after which the weights were evaluated."""
    validation_loss: float
    """The mean loss over all tokens in the batches."""
    validation_tokens: int
    """Number of tokens in the evaluated batches, summed over all ranks."""
    seconds: float
    """Duration of the evaluation in seconds."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Other results that the train.evaluate function returned, by name."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields by name, as in metrics.jsonl. Entries of `more` are named `validation_NAME`."""
        facts = {name: value for name, value in vars(self).items() if name != "more"}
        return facts | {f"validation_{name}": value for name, value in self.more.items()}


@dataclass(frozen=True)
class Summary:
    """The result of a run, or of the completed part of a run."""

    steps: int
    losses: tuple[float, ...]
    """The loss of every completed step, the same on every rank."""
    tokens: int
    seconds: float
    metrics: Path
    late: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """The rank that arrived last at each dim's most recent collectives, and its mean delay in seconds after the first."""
    traffic: Stats | None = None
    """This rank's calls during the steps of this attempt; None if the attempt ran no steps."""
    traffic_steps: int = 0
    """Number of these steps."""
    skipped: int = 0
    """Number of steps skipped because their gradients were not finite."""
    unit: str = "byte"
    """The unit over which a loss is averaged: a byte or a token."""
    evaluation: Evaluation | None = None
    """The last evaluation; None if there was none."""
    stopped: str = ""
    """The reason why the run ended before train.steps without an error; "" if there is none."""
    asked_to_stop: bool = False
    """Whether SIGTERM or SIGUSR1 ended the run after it saved a checkpoint, so that it can resume."""
    rates: Rates | None = None
    """The average rates over the full run; None if no FLOPs were counted."""
    memory: Memory | None = None
    """The highest peak memory on any rank; None if ranks were never compared."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the full run."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Callback:
    """Base class for callbacks, which a run calls on every rank.

    The methods do nothing by default, so a plain Callback can be used on ranks that print nothing.

    trainer: the Trainer that the callback belongs to.
    stop:    set this to True on every rank, for example in `on_step` or `on_eval`, to end the run after the
             current step.
    reason:  the reason for stopping, shown on the screen and in run.json. If "", the name of the class is shown.
    """

    trainer: Any = None
    stop: bool = False
    reason: str = ""

    def on_start(self, start: Start) -> None:
        """Called before the first step."""

    def on_step(self, step: Step) -> None:
        """Called after the first step, every `log_every`-th step, the last step, and each skipped step."""

    def on_eval(self, evaluation: Evaluation) -> None:
        """Called after every `eval_every`-th step and after the last step."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete. With train.checkpoint_async, called when writing has started."""

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        """Called after the last step, or, if Ctrl-C or an error ends the run, before the exception is raised."""


class Best(NamedTuple):
    """The lowest finite validation loss so far, its step, and the number of evaluations since then."""

    loss: float | None = None
    step: int = 0
    since: int = 0


@final
class EarlyStop(Callback):
    """Ends a run early, according to `train.patience`, `train.min_delta` and `train.target_loss`.

    best: the best result before the run was resumed.

    If a run that ended early is resumed with the same settings, it ends again immediately.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig, best: Best) -> None:
        self._mesh, self._train = mesh, train
        self.best = best
        self._judge()

    def on_eval(self, evaluation: Evaluation) -> None:
        """Decide whether to stop. Called by: every rank. Gathers one number per dim, if needed."""
        train, best = self._train, self.best
        if train.patience is None and train.target_loss is None:
            return
        # Devices of different kinds may round differently, so all ranks use the number of one rank.
        loss = float(of_every_rank(self._mesh, evaluation.validation_loss)[0])
        falls = math.isfinite(loss) and (best.loss is None or loss < best.loss - train.min_delta)
        self.best = Best(loss, evaluation.step) if falls else best._replace(since=best.since + 1)
        self._judge(loss)

    def _judge(self, last: float | None = None) -> None:
        train, (loss, step, since) = self._train, self.best
        last = loss if last is None else last
        if train.target_loss is not None and last is not None and last <= train.target_loss:
            self.reason = f"the validation loss is {last:.4f}, train.target_loss = {train.target_loss:g}"
        elif train.patience is not None and since >= train.patience:
            margin = f" by more than {train.min_delta:g}" if train.min_delta else ""
            lowest = "" if loss is None else f": it was {loss:.4f} after step {step}"
            self.reason = f"the validation loss has not fallen{margin} in {since} evaluations{lowest}"
        self.stop = bool(self.reason)
