"""Composes all kinds of parallelism around a model: mesh + config -> a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.config import Config
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.parallel.build import LocalModel, Model, sections
from meshcomm.parallel.context.documents import check_documents
from meshcomm.parallel.data import Sharded
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.optimizer import MakeOptimizer, Update, check_patterns, check_some_learn
from meshcomm.parallel.results import Done, Results, check_inputs
from meshcomm.parallel.state import Kinds, State, as_before
from meshcomm.parallel.tensor.parameters import Kept, fused_parts
from meshcomm.parallel.torch_private import shared_casts

# (outputs, targets) of a microbatch -> the mean of its losses.
LossOf: TypeAlias = Callable[[Any, Tensor], Tensor]


class Batch(NamedTuple):
    """This rank's samples of a step. documents: int64 (samples, tokens), the document number of each token, ascending along
    the sequence. Attention stays within documents, and positions restart in each. If None, each sample is one document.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None


@dataclass
class Reached:
    """The progress of a rank, as step numbers. All are equal between two steps.

    summed: the gradients are summed over all ranks. scaled: they are clipped. decided: every rank has summed its
    gradients, and the outcome is known. applied: the weights are updated.
    """

    begun: int = 0
    summed: int = 0
    scaled: int = 0
    decided: int = 0
    applied: int = 0


@final
class Engine:
    """One rank's share of a hybrid-parallel training step.

    Along the pipeline dim, each rank builds a part of the layers. Along tensor, their weights are split; along context, the
    sequence; along expert, the experts. Along data, gradients are summed; along shard, each rank also keeps only a part of
    all tensors. The optimizer then updates this rank's parts.

    Args:
        mesh: an open mesh that this rank is a member of.
        config: the configuration of the mesh, with at least [parallel] and [train].
        model: how a stage is built and filled. No rank holds more than its own part.
        optimizer: creates an optimizer from this rank's parameter groups. If None, the one of [train]. A group's lr is scaled
            by the step's lr / train.lr.
        filled: if False, parameters get memory but no values, for a state that is loaded before the first step.

    Raises as `sections`; ConfigError if a pipeline lacks the length of a sample; TrainingError on every rank
    if one rank cannot fill its part.
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
        self.sections = sections(mesh, config)
        parallel, _, _, train = self.sections
        data = self.sections.data
        if data is not None and data.document_mask and not model.packed:
            raise UnsupportedOp(
                "this model cannot be trained with data.document_mask",
                given=f"a {type(model).__name__}, whose attention crosses documents",
                expected="a model of [model], or a ModelSpec that names its attention modules",
                hint="ModelSpec(attention=...), or remove data.document_mask",
            )
        self.mesh, self.model = mesh, model
        # The first steps compare the samples of ranks along tensor, pipeline and context.
        self.checked_steps = 2
        # The number of the most recent step.
        self.done = 0
        self.reached = Reached()
        self._lr: float | None = None
        # A step is only undone where lost ranks are replaced.
        self._recovers = mesh.recovers
        self._before: dict[str, Any] = {}
        self._local = local = LocalModel(mesh, self.sections, model, filled)
        self.data_size, self.data_coord = local.data_size, local.data_coord
        self.microbatches = local.microbatches
        self.splits, self.split, self.stages = local.splits, local.splits.tensor, local.stages
        self.modules, self.gradients = local.modules, local.gradients
        self._tokens = torch.ones((), dtype=self.split.dtype, device=mesh.device)
        self._run = local.runner(self._loss)
        named, copies = self.named_parameters(), local.copies()
        if train.groups or train.frozen:
            mine = [(name, parameter.requires_grad) for name, parameter in named]
            every = [pair for pairs in of_every_rank(mesh, mine) for pair in pairs]
            for setting in ("groups", "frozen"):
                check_patterns(f"train.{setting}", getattr(train, setting), [name for name, _ in every])
            check_some_learn(train.frozen, [name for name, learns in every if learns])
        # Ranks along the pipeline have different parameters.
        apart = [parallel.pipeline] if parallel.pipeline else []
        self._update = Update(mesh, train, self.modules, optimizer, apart)
        self.optimizer = self._update.optimizer
        self._state = State(list(self.modules), self.optimizer, self._saved_parameters, model.tied)
        self._norm = GradientNorm(mesh, named, pipeline=parallel.pipeline, skip=copies)
        stage = self.stages[-1].index
        self._results = Results(mesh, (parallel, train), self._norm, named, stage, model.vocab_size)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters by global name, each once, stage by stage.

        A weight that embedding and head share has one name, whether a stage has the embedding or the head.
        """
        return self._local.named_parameters()

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank's stages only.

        If the first and the last stage share a weight, the first counts it.
        """
        copies = {id(weight) for weight in self._local.copies()}
        return [pair for pair in self.named_parameters() if id(pair[1]) not in copies]

    def own_weights(self) -> dict[str, Tensor | Kept]:
        """Return the weights of `own_parameters` in the layout of a checkpoint, and the buffers that are saved with
        them.
        """
        fused = {name: each for module in self.modules for name, each in fused_parts(module).items()}
        found: dict[str, Tensor | Kept] = dict(self._state.buffers())
        saved = {id(each) for _, each in self._saved_parameters()}
        for name, each in self.own_parameters():
            if id(each) in saved:
                found[f"model.{name}"] = as_before(each.detach(), fused.get(name))
        return found

    def _saved_parameters(self) -> list[tuple[str, nn.Parameter]]:
        every = self.named_parameters()
        return every if self.model.saves_all else [pair for pair in every if pair[1].requires_grad]

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        lr: float | None = None,
        number: int | None = None,
        documents: Tensor | None = None,
    ) -> None:
        """Make one optimizer step on this rank's share of the global batch. `results` returns the step's outcome.

        Where calls are queued, as with NCCL, this queues them without waiting. The exception is one wait per step if the
        optimizer cannot skip a step itself; only torch's fused optimizers can.

        Shape:     (microbatches * microbatch, ...). For tokens: (.., sequence), both int64; targets of -100 do not count.
        lr:        the value of train.lr for this step. If None, the optimizer's groups have it.
        number:    the step's number, which determines its random numbers. If None, the one after `done`.
        documents: see Batch.
        Called by: every rank. inputs and targets are equal along tensor, pipeline and context; the first
                   `checked_steps` steps compare them.
        Raises:    ShapeError for a wrong number of samples; TrainingError if a parameter got no gradient, or if these
                   ranks have different samples. A step whose loss or gradient norm is not finite is not applied.
                   With train.on_nonfinite = "stop", no later one is either.
        """
        number = self.done + 1 if number is None else number
        batch = Batch(inputs, targets, documents)
        self._check(batch)
        self._tokens = self._sum_over_data(self.model.count(targets, self.microbatches))
        reached, self._lr = self.reached, lr
        self._begin(number)
        self._local.start_step(number)
        context, more = self.splits.context, self._packed(batch)
        if self.model.drops:
            first = self.data_coord * len(inputs)
            more["samples"] = torch.arange(first, first + len(inputs), device=inputs.device)
        with self._drawing(f"{number}"), shared_casts():
            loss = self._run(context.split(inputs, 1), context.split(targets, 1), **more)
        self._local.finish_step()
        reached.summed = number
        norm = self._norm.norm()
        lr = self._update.set_rate(lr)
        # Only for tokens is the range of ids known; for other data, the layers check.
        looks = self.model.vocab_size and self.mesh.is_async
        ids = (inputs, targets.where(targets != -100, 0)) if looks else ()
        spoilt = self._results.add(number, lr, loss, norm, self._tokens, *ids)
        if self._recovers and self.mesh.is_async:
            # Queued calls may still be given up, so this is decided when they are done.
            self._value(spoilt)
        reached.decided = number
        # Not earlier: a norm of abandoned calls would spoil gradients that may still complete the step.
        clip = self.sections.train.clip_norm
        if clip is not None:
            self._norm.scale_(clip, norm)
        reached.scaled = number
        self._update.step(number, spoilt)
        reached.applied = self.done = number

    def _value(self, x: Tensor) -> float:
        """Return the number, after waiting for it.

        Raises RankLost, because calls abandoned for a lost rank end normally and leave arbitrary values.
        """
        found = float(x.item())
        if self._recovers and self.mesh.is_async and (lost := self.mesh.lost()) is not None:
            raise lost
        return found

    def _begin(self, number: int) -> None:
        self._state.given_lr = self._lr is not None
        self.reached.begun = number
        if self._recovers:
            self._before = self._state.of_forward()

    # -- after a loss of ranks ------------------------------------------------------------------------

    def outcome(self) -> tuple[list[float], float]:
        """Return the outcome of the step `reached.decided`, for `complete` on a rank that does not know it."""
        return self._results.outcome()

    def complete(self, number: int, outcome: tuple[Sequence[float], float]) -> None:
        """Apply the step whose gradients are summed, as other ranks have done. Does not communicate."""
        reached, clip = self.reached, self.sections.train.clip_norm
        if clip is not None and reached.scaled < number:
            self._norm.scale_(clip, torch.tensor(outcome[0][2], dtype=torch.float64, device=self.mesh.device))
        lr = self._update.set_rate(self._lr)
        reached.scaled = reached.decided = number
        self._abandon()
        self._update.step(number, self._results.take(number, lr, self._tokens, outcome))
        reached.applied = self.done = number

    def undo(self) -> None:
        """Return to the state after the last applied step: changes made by forward passes are undone."""
        self._abandon()
        if self.reached.begun > self.reached.applied:
            self._state.put_back_forward(self._before)

    def _abandon(self) -> None:
        for gradients in self.gradients:
            if isinstance(gradients, Sharded):
                gradients.abandon()

    def pending(self) -> list[Done]:
        """Return the steps that `results` has not returned yet. Does not communicate."""
        return self._results.pending()

    def _packed(self, batch: Batch) -> dict[str, Tensor]:
        """Return the document arguments of stages.

        Raises ShapeError; UnsupportedOp if the model was not built for documents.
        """
        if batch.documents is None:
            return {}
        if not self.model.packed:
            raise UnsupportedOp(
                "document numbers are given to a model whose attention crosses documents",
                given=f"documents {tuple(batch.documents.shape)}, data.document_mask = false",
                expected="only inputs and targets; or data.document_mask = true",
                hint="data.document_mask = true",
            )
        check_documents(batch.documents, batch.inputs)
        return {"documents": batch.documents}

    def _check(self, batch: Batch) -> None:
        train, inputs, targets = self.sections.train, batch.inputs, batch.targets
        if self.checked_steps and not self.mesh.is_fake:
            self.checked_steps -= 1
            check_inputs(self.mesh, self.sections.parallel, *(each for each in batch if each is not None))
        share = self.microbatches * train.micro_batch_size
        if {len(inputs), len(targets)} != {share}:
            hint = f"train.global_batch_size = {len(inputs) * self.data_size}"
            if len(inputs) < share:
                hint = f"drop_last=True in the DataLoader if this is the short batch at its end; else {hint}"
            raise ShapeError(
                "the step has a wrong number of samples for this rank",
                given=f"{len(inputs)} inputs and {len(targets)} targets on {self.mesh.label}",
                expected=f"{share} of both: train.global_batch_size = {train.global_batch_size} / {self.data_size} ranks along "
                "data and shard",
                hint=hint,
            )

    def results(self) -> list[Done]:
        """Return the results of the steps since the previous call, in order. Waits for the device.

        Called by: every rank.
        Raises:    TrainingError on every rank, with train.on_nonfinite = "stop", if the loss or the gradient norm
                   of a step is not finite. That step and the later ones were not applied.
        """
        return self._results.collect()

    def evaluate(self, batches: Iterable[tuple[Tensor, ...]]) -> float:
        """Return the mean loss over the tokens of some global batches, by forward passes only, with the modules in
        eval mode.

        batches:   this rank's shares, shaped as for `step`; the same number on every rank.
        Called by: every rank.
        Returns:   the same on every rank; nan if no target counts. Waits for the device.
        """
        parallel, context = self.sections.parallel, self.splits.context
        # Per part, because a user may have put some of them into eval mode permanently.
        were = {part: part.training for part in self.modules.modules()}
        # loss divides by it
        before, self._tokens = self._tokens, torch.ones_like(self._tokens)
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        self.modules.eval()
        try:
            for number, batch in enumerate(Batch(*each) for each in batches):
                more = self._packed(batch)
                with self._drawing(f"evaluation {number}"):
                    split = (context.split(each, 1) for each in batch[:2])
                    loss = self._run.forward(*split, **more)
                sums[0] += 0 if loss is None else loss.double()
                sums[1] += self.model.count(batch.targets, self.microbatches)
        finally:
            self._tokens = before
            for part, was in were.items():
                part.training = was
            for gradients in self.gradients:
                if isinstance(gradients, Sharded):
                    gradients.reshard()
        # Ranks along context have different tokens, and each counts the tokens of all of them.
        for dim in parallel.gradient_dims:
            self.mesh.all_reduce(dim, sums)
        if parallel.pipeline is not None:
            sums = self.mesh.broadcast(parallel.pipeline, sums, src=self.mesh.size(parallel.pipeline) - 1)
        return self._value(sums[0] / (sums[1] / context.size))

    def state(self) -> dict[str, Tensor]:
        """Return all state that a step changes: this rank's weights, and the state of optimizer, modules and
        scheduler, by global names.

        Full tensors, as DTensors if they are split: `model.layers.3.attn.wq.weight`,
        `optimizer.layers.3.attn.wq.weight.exp_avg`. Names and full tensors do not depend on the mesh. A weight that
        embedding and head share is `embed.weight`. The tensors share memory with the model. Plain data is encoded in uint8
        tensors under `plain.`: see `meshcomm.parallel.state`. Reading changes nothing: state that the first step creates does
        not exist before it. The learning rate is not included if every step is given its own. Random numbers are not
        included, because the seed and the step determine them.

        Raises: TrainingError that names the state that cannot be saved.
        """
        return {
            name: each.tensor if isinstance(each, Kept) else each for name, each in self.saved_state().items()
        }

    def saved_state(self) -> dict[str, Tensor | Kept]:
        """Return `state`, with weights of several parts in the layout of a checkpoint."""
        return self._state.tensors()

    def put_back(
        self, kinds: Kinds, fill: Callable[[dict[str, Tensor | Kept]], None], steps: int = 0
    ) -> None:
        """Load the state of a checkpoint, saved on any mesh after this number of steps.

        kinds:  dtype and shape of each tensor in the checkpoint.
        fill:   writes its values into tensors, by their names.
        Raises: TrainingError that names the mismatch; the exceptions of `fill`.
        """
        self._state.put_back(kinds, fill, steps)
        self.done = steps
        self.reached = Reached(*[steps] * len(fields(Reached)))

    def names_of_all_stages(self) -> set[str]:
        """Return the names of the checkpoint's tensors that belong to the modules of the full model.

        Every rank calls this.
        """
        mine, pipeline = self._state.names(), self.sections.parallel.pipeline
        return mine if pipeline is None else set().union(*self.mesh.objects.all_gather(pipeline, mine))

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that steps the optimizer's learning rates. If None, each step is given a learning rate."""
        return self._state.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler) -> None:
        self._state.follow(scheduler)

    def parameters_of_all_stages(self) -> int:
        """Return the number of elements of the full model's parameters. Every rank calls this."""
        count = sum(p.numel() for _, p in self.own_parameters())
        if self.sections.parallel.pipeline is None:
            return count
        total = torch.tensor([count], dtype=torch.int64, device=self.mesh.device)
        return int(self.mesh.all_reduce(self.sections.parallel.pipeline, total).item())

    # -- inside ---------------------------------------------------------------------------------

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a microbatch's share of the mean loss."""
        return self.model.loss(self.splits, outputs, targets) / self._tokens

    def _drawing(self, step: str) -> AbstractContextManager[None]:
        """In this context, the seed and the step determine the random numbers of forward passes."""
        draws = self.splits.draws
        if draws is None:
            return nullcontext()
        return draws.step(step, self.data_coord * self.microbatches)

    def _sum_over_data(self, count: Tensor) -> Tensor:
        """Return the sum of `count` over the ranks with different samples, () in the dtype of losses."""
        total = count.to(torch.float64)
        for dim in self.sections.parallel.data_dims:
            self.mesh.all_reduce(dim, total)
        return total.to(self.split.dtype)
