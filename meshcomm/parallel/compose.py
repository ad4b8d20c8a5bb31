"""Combines all kinds of parallelism: turns a model, a mesh and a config into a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.config import Config
from meshcomm.errors import ConfigError, TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.parallel.average import Average
from meshcomm.parallel.batch import Batch, Batches
from meshcomm.parallel.build import LocalModel
from meshcomm.parallel.expert import Experts
from meshcomm.parallel.expert.load import Loads
from meshcomm.parallel.loss import StepLoss, module_of
from meshcomm.parallel.memory import eval_mode
from meshcomm.parallel.model import Model
from meshcomm.parallel.muon import Muon
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.optimizer import MakeOptimizer, Update, check_patterns, check_some_learn
from meshcomm.parallel.results import Done, Results
from meshcomm.parallel.shard import Sharded
from meshcomm.parallel.sparse import optimizers_in
from meshcomm.parallel.splits import along, sections
from meshcomm.parallel.state import Kinds, State
from meshcomm.parallel.torch_private import shared_casts
from meshcomm.parallel.tree import samples_of
from meshcomm.transfer.fused import Kept


@dataclass
class Reached:
    """A rank's progress: for each phase, the number of the last step that reached it. Between steps, all fields are equal.

    summed: the gradients are summed over all ranks. decided: every rank has summed its gradients, and the outcome is known.
    scaled: the gradients are clipped. restored: the changes of a spoilt step's forward passes are undone. applied: the weights
    are updated.
    """

    begun: int = 0
    summed: int = 0
    decided: int = 0
    scaled: int = 0
    restored: int = 0
    applied: int = 0


class Decided(NamedTuple):
    """The outcome of a step, the same on every rank: what its phases need. norm: of all gradients, before clipping. spoilt:
    nonzero if the step must not be applied.
    """

    number: int
    norm: Tensor
    spoilt: Tensor


@final
class Engine:
    """One rank's share of a hybrid-parallel training step.

    Along the pipeline dim, each rank builds some of the layers. Weights are split along tensor, the sequence along context,
    and the experts along expert. Gradients are summed along data and shard. Along shard, each rank also keeps only a shard
    of every tensor. The optimizer then updates this rank's part of the model.

    Args:
        mesh: an open mesh that contains this rank.
        config: the mesh's configuration, with at least [parallel] and [train].
        model: builds and fills each stage. No rank holds more than its own part of the model.
        optimizer: creates an optimizer from this rank's parameter groups. If None, the optimizer of [train] is used. The lr of
            each group is scaled by the step's lr / train.lr.
        filled: whether to initialize the parameters. If False, parameters are allocated but not initialized; a saved state
            must then be loaded before the first step.

    Raises the errors that `sections` raises, ConfigError if a pipeline is used and the sample length is unknown, and
    TrainingError on every rank if one rank cannot fill its part.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        model: Model,
        optimizer: MakeOptimizer | None = None,
        *,
        filled: bool = True,
    ) -> None:
        self.sections = known = sections(mesh, config)
        parallel, train = known.parallel, known.train
        if known.data is not None and known.data.document_mask and not model.packed:
            raise UnsupportedOp(
                "this model cannot be trained with data.document_mask",
                given=f"a {type(model).__name__}, whose attention crosses documents",
                expected="a model of [model], or a ModelSpec that names its attention modules",
                hint="ModelSpec(attention=...), or remove data.document_mask",
            )
        self.mesh, self.model = mesh, model
        # The first steps compare the samples of all ranks.
        self.checked_steps = 2
        # Called with the first batch, on every rank.
        self.look: Callable[[Batch], None] | None = None
        # The same for the first dictionary of transformers' names, with the function that reads it.
        self.look_named: Callable[[Mapping[str, Tensor], Callable[..., Any]], None] | None = None
        # Called before each update of the weights, whose gradients an optimizer may change.
        self.before_update: Callable[[], None] | None = None
        # How often this rank's data have been restarted.
        self.epoch = 0
        # The number of the most recent step.
        self.done = 0
        self.reached = Reached()
        self._lr: float | None = None
        # A step is undone only if lost ranks are replaced.
        self._recovers = mesh.elastic.recovers
        self._skips = train.on_nonfinite == "skip" or train.compute_dtype == "float16"
        self._before: dict[str, Any] = {}
        self._local = local = LocalModel(mesh, known, model, filled)
        self.data_size, self.data_coord = local.data_size, local.data_coord
        self.microbatches = local.microbatches
        self.splits, self.split, self.stages = local.splits, local.splits.tensor, local.stages
        self.modules, self.gradients = local.modules, local.gradients
        self._batches = Batches(local.splits, known, model, local.microbatches, local.data_size)
        speed = 0.0 if known.model is None else known.model.bias_update_speed
        self._loads = Loads(local.splits, self.modules, speed)
        self._loss = StepLoss(local.splits, train, model, local.microbatches, local.data_size)
        # The divisor of the step's loss.
        self._count = torch.ones((), dtype=torch.float64, device=mesh.device)
        self._run = local.runner(self._loss)
        # A dry run has one rank, and does not know the names of other stages.
        if (train.groups or train.frozen) and not (mesh.is_fake and local.splits.pipeline is not None):
            mine = [(name, parameter.requires_grad) for name, parameter in local.named]
            every = list(dict.fromkeys(pair for pairs in of_every_rank(mesh, mine) for pair in pairs))
            check_some_learn(train.frozen, [name for name, learns in every if learns])
            check_patterns(train, dict(every))
        self._update = Update(
            mesh,
            train,
            self.modules,
            local.named,
            optimizer,
            local.splits.pipeline,
            along(mesh, parallel.gradient_dims),
            reuses=parallel.shard is None,
        )
        self.optimizer = self._update.optimizer
        loss = module_of(None if model.own_loss is None else model.own_loss.function)
        calls = any(stage.is_last for stage in self.stages)
        saved = [pair for pair in local.named if model.saves_all or pair[1].requires_grad]
        self.average = None if train.ema is None else Average(saved, train.ema, mesh.device)
        self._state = State(
            list(self.modules), self.optimizer, saved, model.tied, loss if calls else None, self.average
        )
        self.check_optimizer = self._state.check_optimizer
        self._scale = self._state.loss_scale = self._loss.scale
        if self._scale is not None:
            for part in self.modules.modules():
                if isinstance(part, Experts):
                    part.loss_scale = self._scale.value
        if self._recovers:
            self._check_recovers()
        self._norm = GradientNorm(
            mesh,
            local.named,
            pipeline=parallel.pipeline,
            skip=[] if local.copy is None else [local.copy],
        )
        self._results = Results(
            local.splits,
            (parallel, train),
            self._norm,
            local.named,
            self.stages[-1].index,
            model.vocab_size,
            self._loss.names,
        )
        local.know_hooks()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters with their global names, each once, stage by stage.

        A weight that the embedding and the head share has one name, on the embedding's stage and on the head's.
        """
        return list(self._local.named)

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that this rank owns, with their global names.

        If the first and the last stage share a weight, the first stage owns it.
        """
        return [pair for pair in self._local.named if pair[1] is not self._local.copy]

    def all_weights(self) -> dict[str, Tensor | Kept]:
        """Return this rank's weights and saved buffers by name, in a checkpoint's layout, also a copy that another rank owns."""
        return {name.removeprefix("model."): each for name, each in self._state.weights().items()}

    def further_names(self) -> dict[str, str]:
        """Return the further names of weights that modules share on this rank, each with the name of `own_parameters`."""
        names = {id(parameter): name for name, parameter in self._local.named}
        return {
            name: names[id(parameter)]
            for module in self.modules
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if names[id(parameter)] != name
        }

    def own_weights(self) -> dict[str, Tensor | Kept]:
        """Return the weights of `own_parameters` in a checkpoint's layout, and the buffers that are saved with the weights."""
        return self._state.weights(without=self._local.copy)

    def averaged(self) -> AbstractContextManager[None]:
        """In this context, the weights are their moving averages. Raises ConfigError without train.ema."""
        if self.average is None:
            raise ConfigError(
                "there is no moving average of the weights",
                given="no train.ema",
                expected="a decay",
                hint="train.ema = 0.999",
            )
        return self.average.swapped()

    def step(
        self,
        inputs: Any,
        targets: Any,
        lr: float | None = None,
        number: int | None = None,
        documents: Tensor | None = None,
    ) -> None:
        """Run one optimizer step on this rank's share of the global batch. `results` returns the step's outcome.

        If calls are queued, as with NCCL, this method queues them without waiting. It waits once per step if the optimizer
        cannot skip a step itself; only torch's fused optimizers can.

        Shape:     (microbatches * microbatch, ...), for each tensor of a tree that is not a scalar. Tokens, and the targets of the built-in loss, are any integers. Targets of -100 do
                   not count.
        lr:        the value of train.lr for this step. If None, the current lr of each optimizer group is used.
        number:    the step's number, which determines its random numbers. If None, `done` + 1.
        documents: see Batch.
        Called by: every rank. inputs and targets must be equal along tensor, pipeline and context, and differ along
                   data and shard; the first `checked_steps` steps check this.
        Raises:    ShapeError for a wrong number of samples; TrainingError if a parameter got no gradient, or if samples differ
                   between ranks that must have the same samples, or are equal between ranks that must not. A step whose
                   loss or gradient norm is not finite is not applied. With train.on_nonfinite = "stop", later steps are not applied either.
        """
        if self.average is not None:
            self.average.check()
        number = self.done + 1 if number is None else number
        batch = self._batches.prepared(Batch(inputs, targets, documents))
        inputs, targets = batch.inputs, batch.targets
        compares = self.checked_steps > 0 and not self.mesh.is_fake
        self.checked_steps -= compares
        self._batches.check(batch, compares=compares)
        self._look(batch)
        self._loss.start(targets)
        reached, self._lr = self.reached, lr
        self._state.given_lr = lr is not None
        reached.begun = number
        if self._recovers or self._skips:
            self._before = self._state.of_forward()
        self._local.start_step(number)
        self._loads.start()
        rows = self._update.rows
        if rows is not None:
            rows.start()
        more = self._batches.documents(batch)
        if self.model.drops:
            first = self.data_coord * samples_of(inputs)
            more["samples"] = torch.arange(first, first + samples_of(inputs), device=self.mesh.device)
        with self._drawing(f"{number}"), shared_casts(), self._explained():
            loss = self._run(*self._loss.split(inputs, targets), **more)
        missing = self._local.finish_step()
        self._loads.finish()
        if rows is not None:
            rows.finish()
        step_sum = self._loss.finish(loss)
        if step_sum.factor is not None:
            self._norm.multiply_(step_sum.factor)
        self._count = step_sum.divisor
        reached.summed = number
        norm = self._norm.norm()
        if missing:
            # Not finite on any rank, so that no rank applies the step.
            norm = torch.full_like(norm, torch.nan)
        lr = self._update.set_rate(lr)
        # The range of ids is known only for tokens; other data is checked by the layers.
        are_ids = all(isinstance(x, Tensor) and not x.is_floating_point() for x in (inputs, targets))
        looks = self.model.vocab_size and self.mesh.is_async and are_ids
        ids = (inputs, targets.where(targets != -100, 0)) if looks else ()
        spoilt = self._results.add(number, lr, step_sum, norm, *ids, epoch=self.epoch, missing=missing)
        if not (self.mesh.is_async or self.mesh.is_fake) and spoilt.item():
            self._results.check_used(number, missing)
        if self._recovers and self.mesh.is_async:
            # Queued calls may still be abandoned, so the step is decided only after they have finished.
            self._value(spoilt)
        # The phases come after the decision: a norm from abandoned calls would corrupt gradients that may still complete the step.
        reached.decided = number
        self._run_phases(Decided(number, norm, spoilt))

    def _run_phases(self, step: Decided) -> None:
        """Run the phases of a decided step that this rank has not run. What changes gradients or weights is a phase, so that a
        step that other ranks have applied is completed as they applied it.
        """
        for phase, run in (("scaled", self._clip), ("restored", self._restore), ("applied", self._apply)):
            if getattr(self.reached, phase) < step.number:
                run(step)
                setattr(self.reached, phase, step.number)
        self.done = step.number

    def _clip(self, step: Decided) -> None:
        """Scale the gradients to a norm of at most train.clip_norm."""
        if (most := self.sections.train.clip_norm) is not None:
            self._norm.scale_(most, step.norm)

    def _restore(self, step: Decided) -> None:
        """If the step is spoilt, restore what its forward passes have changed."""
        if self._skips:
            self._state.put_back_forward(self._before, step.spoilt)

    def _apply(self, step: Decided) -> None:
        """Update the weights, unless the step is spoilt."""
        if self.before_update is not None:
            self.before_update()
        self._update.step(step.number, step.spoilt)
        if self._scale is not None:
            self._scale.update(step.spoilt)
        self._loads.apply(step.spoilt)
        if self.average is not None:
            self.average.update(step.spoilt)

    def _value(self, x: Tensor) -> float:
        """Wait for a scalar on the device and return its value.

        Raises RankLost if a rank was lost, because calls that are abandoned for a lost rank return normally with arbitrary
        values.
        """
        value = float(x.item())
        if self._recovers and self.mesh.is_async and (lost := self.mesh.elastic.lost()) is not None:
            raise lost
        return value

    # -- after a loss of ranks ------------------------------------------------------------------------

    def outcome(self) -> tuple[list[float], float]:
        """Return the outcome of step `reached.decided`, for `complete` on a rank that does not know this outcome."""
        return self._results.outcome()

    def _check_recovers(self) -> None:
        """Raise UnsupportedOp if a step that was interrupted by the loss of a rank could not be completed."""
        if any(isinstance(part, Muon) and part.communicates for part in optimizers_in(self.optimizer)):
            # `complete` would need the ranks that are lost.
            raise UnsupportedOp(
                "Muon on split matrices cannot continue after a rank is lost",
                given="Muon on split matrices in a job that replaces lost ranks",
                expected="a job that ends with its first lost rank, and is resumed from a checkpoint",
                hint='run without --replace; or optimizer = "adamw"',
            )

    def complete(self, number: int, outcome: tuple[Sequence[float], float]) -> None:
        """Apply the step whose gradients are already summed, as other ranks have done. Does not communicate."""
        self._abandon()
        lr = self._update.set_rate(self._lr)
        norm = torch.tensor(outcome[0][2], dtype=torch.float64, device=self.mesh.device)
        self.reached.decided = number
        self._run_phases(Decided(number, norm, self._results.take(number, lr, self._count, outcome)))

    def undo(self) -> None:
        """Restore the state after the last applied step: undo the changes that forward passes made."""
        self._abandon()
        if self.reached.begun > self.reached.applied:
            self._state.put_back_forward(self._before)

    def _abandon(self) -> None:
        # A rank may have been lost between a step's results and its decision.
        self._results.drop(self.reached.applied)
        for gradients in self._sharded():
            gradients.abandon()

    def pending(self) -> list[Done]:
        """Return the steps that `results` has not returned yet. Does not communicate."""
        return self._results.pending()

    def _look(self, batch: Batch) -> None:
        if self.look is not None:
            look, self.look = self.look, None
            look(batch)

    def results(self) -> list[Done]:
        """Return the results of the steps since the previous call, in order. Waits for the device.

        Called by: every rank.
        Raises:    TrainingError on every rank if a step's loss or gradient norm is not finite and train.on_nonfinite is
                   "stop". Neither that step nor any later step was applied.
        """
        return self._results.collect()

    # Tensors that are made in inference mode could not be used in training.
    @torch.inference_mode(False)
    def evaluate(self, batches: Iterable[tuple[Tensor, ...]]) -> float:
        """Return the mean loss over the tokens of several global batches, from forward passes with the modules in eval mode.

        batches:   this rank's share of each global batch, shaped as for `step`, or with fewer samples, or none. Every rank
                   passes the same number of batches.
        Called by: every rank.
        Returns:   the mean, equal on every rank, or nan if no target counts. Waits for the device.
        Raises:    TrainingError for no batches; ShapeError for more samples than in a step; UnsupportedOp for fewer samples through a pipeline with a loss
                   that does not ignore targets of -100.
        """
        self._loss.start(None, evaluates=True)
        mine: Tensor | None = None
        number = -1
        try:
            with eval_mode(self.modules):
                for number, whole_batch in enumerate(Batch(*batch) for batch in batches):
                    batch, short = self._batches.filled(self._batches.prepared(whole_batch))
                    self._look(batch)
                    more: dict[str, Any] = {**self._batches.documents(batch), **short}
                    with self._drawing(f"evaluation {number}"):
                        loss = self._run.forward(*self._loss.split(batch.inputs, batch.targets), **more)
                    if loss is not None:
                        mine = loss.double() if mine is None else mine + loss
        finally:
            for gradients in self._sharded():
                gradients.reshard()
        if number < 0:
            raise TrainingError(
                f"there is nothing to evaluate, on {self.mesh.label}",
                given="no batch",
                expected="at least one batch on every rank",
                hint="a list or a DataLoader, which can be read again, instead of a generator; or more data, where drop_last=True "
                "leaves none",
            )
        mean = self._loss.finish(mine).loss
        if mean is None:
            mean = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        else:
            mean = self.splits.summed(mean, self.splits.gradients)
        return self._value(self.splits.of_last_stage(mean))

    def expert_loads(self) -> dict[str, Any]:
        """Return the loads of the experts in the last step: see `Loads.facts`. Called by: every rank. Waits for the device."""
        return self._loads.facts()

    def state(self) -> dict[str, Tensor]:
        """Return all state that a step changes, by global name: this rank's weights, and the state of the optimizer,
        the modules and the scheduler.

        Tensors have their full shape, and a split tensor is a DTensor. Names are, for example, `model.layers.3.attn.wq.weight`
        and `optimizer.layers.3.attn.wq.weight.exp_avg`. Names and full tensors do not depend on the mesh. A weight that the
        embedding and the head share is named `embed.weight`. The tensors share memory with the model. Plain data is encoded in
        uint8 tensors whose names begin with `plain.`: see `meshcomm.parallel.state`. This method does not create the state
        that the first step creates. The learning rate is not included if it is passed to each step. Random numbers are not
        included, because the seed and the step determine them.

        Raises: TrainingError that names the state that cannot be saved.
        """
        return {
            name: value.tensor if isinstance(value, Kept) else value
            for name, value in self.saved_state().items()
        }

    def saved_state(self) -> dict[str, Tensor | Kept]:
        """Return the same as `state`, but with multi-part weights in a checkpoint's layout."""
        return self._state.tensors()

    def put_back(
        self, kinds: Kinds, fill: Callable[[dict[str, Tensor | Kept]], None], steps: int = 0
    ) -> None:
        """Load the state of a checkpoint that was saved on any mesh after `steps` steps.

        kinds:  the dtype and shape of each tensor in the checkpoint.
        fill:   writes the checkpoint's values into tensors, by name.
        Raises: TrainingError that names the mismatch; any exception that `fill` raises.
        """
        self._state.put_back(kinds, fill, steps)
        self.done = steps
        self.reached = Reached(*[steps] * len(fields(Reached)))

    def names_of_all_stages(self) -> set[str]:
        """Return the names of the checkpoint's tensors that belong to the modules of the full model.

        Every rank calls this.
        """
        mine, pipeline = self._state.names(), self.splits.pipeline
        return mine if pipeline is None else set().union(*self.mesh.objects.all_gather(pipeline, mine))

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that steps the optimizer's learning rates. If None, a learning rate is passed to each step."""
        return self._state.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler) -> None:
        self._state.follow(scheduler)

    def parameters_of_all_stages(self) -> int:
        """Return the number of elements in the full model's parameters. Every rank calls this."""
        count = sum(p.numel() for _, p in self.own_parameters())
        if self.splits.pipeline is None:
            return count
        total = torch.tensor([count], dtype=torch.int64, device=self.mesh.device)
        return int(self.mesh.all_reduce(self.splits.pipeline, total).item())

    def around_forward(self, run: Callable[..., Any]) -> None:
        """From now on, call `run(module, forward, *inputs)` in place of each forward pass of a module over a microbatch."""
        self._run.around_forward(run, list(self.modules))

    # -- inside ---------------------------------------------------------------------------------

    def _sharded(self) -> list[Sharded]:
        return [gradient for gradient in self.gradients if isinstance(gradient, Sharded)]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise UnsupportedOp for torch's error about weights that FSDP2 has freed in the middle of a pass."""
        try:
            yield
        except RuntimeError as error:
            freed = "setStorage" in str(error) and str(error).endswith("storage of size 0")
            if not freed or not self._sharded():
                raise
            raise UnsupportedOp(
                "gradients within a loss cannot be computed through a sharded module",
                given="torch.autograd.grad or backward through the module in the model or the loss, after which FSDP2 has freed its "
                "weights",
                expected="one backward pass for each microbatch, which the step runs",
                hint="parallel.data in place of parallel.shard, with which every rank keeps whole weights",
            ) from error

    def _drawing(self, step: str) -> AbstractContextManager[None]:
        """In this context, the seed and the step determine the random numbers that forward passes draw."""
        draws = self.splits.draws
        if draws is None:
            return nullcontext()
        return draws.step(step, self.data_coord * self.microbatches)
