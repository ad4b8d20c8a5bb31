"""Composes all kinds of parallelism around a model: mesh + config -> a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load
from meshcomm.errors import ConfigError, LayoutError, ShapeError
from meshcomm.layout.names import merged_name
from meshcomm.layout.sizes import toml_dims
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, on_all_ranks
from meshcomm.parallel.batch_norm import is_synchronised
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.data import GradientSync, Sharded, broadcast_values
from meshcomm.parallel.expert import separate
from meshcomm.parallel.inputs import check_inputs
from meshcomm.parallel.meta import materialise
from meshcomm.parallel.model import Model
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.optimizer import (
    MakeOptimizer,
    check_patterns,
    decay_groups,
    made_of,
    optimizer_of,
    scale,
    takes_found_inf,
)
from meshcomm.parallel.pipeline import Accumulate, Pipelined, Runner
from meshcomm.parallel.random_numbers import Draws
from meshcomm.parallel.results import Done, Results
from meshcomm.parallel.splits import Splits
from meshcomm.parallel.state import Kinds, State
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.parallel.tied import TiedWeight
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import Stage, split_layers, stages_of_rank

# (outputs, targets) of a microbatch -> the mean of its losses.
LossOf: TypeAlias = Callable[[Any, Tensor], Tensor]


class Sections(NamedTuple):
    """The sections of a configuration that training needs; model and data may come from code."""

    parallel: ParallelConfig
    model: ModelConfig | None
    data: DataConfig | None
    train: TrainConfig


@final
class Engine:
    """One rank's share of a hybrid-parallel training step. Order of things, outermost first:

    the pipeline's dim says which layers this rank builds, as one stage or several; the tensor's dim
    splits their weights while they are built, the context's dim their sequence, the expert's dim
    their experts; the data's dims sum gradients, shard's keeps a part of everything on each rank. The
    optimiser then acts on this rank's parts.

    Args:
        mesh: an open mesh that this rank is a member of.
        config: what the mesh was opened with, with at least [parallel] and [train].
        model: how a stage is built and filled. No rank holds more of it than its own part.
        optimizer: makes one of this rank's parameter groups; None: the one that [train] says. Each group's lr is what
            a step's lr is to train.lr.
        filled: False: parameters get memory and no values, for a state that is put back before the first step.

    Raises as `sections`; ConfigError where a pipeline is not told the length of a sample; TrainingError on every rank
    where one of them could not fill its part.
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
        self.model = model
        part, settings, data, train = self.sections
        sequence = 1 if data is None else data.sequence
        dtype: torch.dtype = getattr(torch, train.dtype)
        between: torch.dtype = getattr(torch, train.compute_dtype or train.dtype)

        self.mesh = mesh
        # The first steps compare what ranks along tensor, pipeline and context were given.
        self.checked_steps = 2
        # The number of the last step.
        self.done = 0
        sizes = dict(mesh.dims)
        self.data_size = part.copies(sizes)
        self.data_coord = mesh.coord(part.data_dims) if part.data_dims else 0
        self.microbatches = train.global_batch // (self.data_size * train.microbatch)
        ranks, coord = (mesh.size(part.pipeline), mesh.coord(part.pipeline)) if part.pipeline else (1, 0)
        each = part.stages_per_rank if ranks > 1 else 1

        split = TensorSplit(mesh, part.tensor, dtype, part.sequence_parallel, overlap=part.overlap)
        context = ContextSplit(mesh, part.context, part.attention)
        weight = settings.balance_loss if settings is not None and settings.experts else 0.0
        self.split = split
        share = weight / (self.microbatches * self.data_size)
        self._draws = None
        if model.draws:
            self._draws = Draws(mesh, train.seed, [part.context] if part.context else [])
        self.splits = Splits(split, context, part.expert, share, part.data_dims, self._draws)
        model.check(self.splits, ranks * each)
        costs = model.costs(sequence)
        layers = split_layers(
            model.layers, ranks * each, costs.layers, first=costs.embedding, last=costs.head
        )
        indices = stages_of_rank(coord, ranks, each)
        self.stages = [Stage(index, ranks * each, layers[index]) for index in indices]
        self.modules = nn.ModuleList([model.stage(self.splits, stage) for stage in self.stages])
        schedule = schedule_properties(part.schedule)
        if part.shard is not None:
            sharded = Sharded(
                mesh,
                list(self.modules),
                merged(mesh, part.shard_dims(sizes)),
                part.data,
                experts=part.expert_gradient_dims(mesh.layout.views) if part.expert else None,
                reshard=part.reshards(ranks),
                gather_dtype=between,
                reduce_dtype=getattr(torch, part.reduce_dtype or train.dtype),
            )
            self.gradients: list[GradientSync | Sharded] = [sharded]

        def fill() -> None:
            for module, stage in zip(self.modules, self.stages, strict=True):
                materialise(module, mesh.device)
                if filled:
                    model.fill(module, stage)

        on_all_ranks(mesh, "fill the model", fill)
        if part.shard is None:
            self.gradients = self._synced(schedule.hooks_fire or ranks == 1)
        # Only now: sharding puts other parameters into the modules.
        self._tied = self._tied_across() if model.tied and ranks > 1 else None
        if self._tied is not None:
            self._tied.copy()
        # The first stage counts the weight that the last one has too.
        held = self._tied_weight()
        counts = self._tied is None or self._tied.is_owner
        self._copies = [] if counts or held is None else [held]

        self._tokens = torch.ones((), dtype=dtype, device=mesh.device)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return model.loss(self.splits, logits, targets) / self._tokens

        before = next((each.microbatch for each in self.gradients if isinstance(each, Sharded)), None)
        # Those of batch norms are of all ranks' samples already; what is not saved is a table, such as of angles.
        self._buffers = [
            (each, key)
            for each in self.modules.modules()
            if not is_synchronised(each)
            for key in each._buffers
            if key not in each._non_persistent_buffers_set
        ]
        self._run: Runner = Accumulate(self.modules[0], loss, self.microbatches, before, mesh, self._draws)
        if part.pipeline and ranks > 1:
            if data is None:
                raise ConfigError(
                    "a pipeline must be told how long a sample is",
                    given=f"parallel.pipeline = {part.pipeline!r} without [data]",
                    expected="data.sequence: stages receive into memory that is there before",
                    hint="[data] sequence = 128",
                )
            here = (train.microbatch, sequence // context.size)
            tokens = here[1] // split.size if split.sequence_parallel else here[1]
            self._run = Pipelined(
                mesh,
                part.pipeline,
                list(self.modules),
                loss,
                microbatches=self.microbatches,
                schedule=part.schedule,
                shapes=(here, (here[0], tokens, model.width), (*here, model.outputs(self.splits))),
                dtype=between,
                draws=self._draws,
            )
        if train.groups:
            mine = [name for name, _ in self.named_parameters()]
            check_patterns(train.groups, [name for names in of_every_rank(mesh, mine) for name in names])
        patterns = {pattern: dict(factors) for pattern, factors in train.groups.items()}
        make = optimizer_of(train, mesh.device) if optimizer is None else optimizer
        self.optimizer = made_of(make, decay_groups(self.modules, patterns))
        # What an optimizer of a user draws; ranks along the pipeline have other parameters.
        stage_dims = [part.pipeline] if part.pipeline else []
        self._noise = None if optimizer is None else Draws(mesh, train.seed, stage_dims)
        scale(self.optimizer)
        self._rates = [group["lr"] / train.lr for group in self.optimizer.param_groups]
        self._leaves_out = takes_found_inf(self.optimizer)
        self._scheduler: LRScheduler | None = None
        self._state = State(list(self.modules), self.optimizer, self.named_parameters, model.tied)
        named = self.named_parameters()
        self._norm = GradientNorm(mesh, named, pipeline=part.pipeline, skip=self._copies)
        place = {"stage": self.stages[-1].index, "vocabulary": model.vocabulary}
        self._results = Results(mesh, part, self._norm, named, train=train, **place)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name, each once, stage by stage.

        A weight that embedding and head share has one name, whichever of them a stage has.
        """
        tied = self._tied_weight()
        return [
            (self.model.tied if parameter is tied else name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
        ]

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that only this rank's stages have: of a weight on the first stage and the last, the first one's."""
        copies = {id(weight) for weight in self._copies}
        return [pair for pair in self.named_parameters() if id(pair[1]) not in copies]

    def step(
        self, inputs: Tensor, targets: Tensor, lr: float | None = None, number: int | None = None
    ) -> None:
        """One optimiser step on this rank's share of the global batch; `look` tells what it gave.

        Where calls are queued, as with NCCL, this queues them and waits for nothing; but for one look where the
        optimiser cannot leave out a step by itself, as only torch's fused ones can.

        Shape:     (microbatches * microbatch, ...). Of tokens: (.., sequence) int64 both; targets of -100 do not count.
        lr:        what train.lr has become; None: the optimiser's groups have it.
        number:    of the step, which random numbers are drawn for; None: the one after `done`.
        Called by: every rank; inputs and targets are equal along tensor, pipeline and context.
        Raises:    ShapeError for another number of samples; TrainingError where a parameter got no gradient, and in
                   the first `checked_steps` steps, 2, where ranks along these dims have different samples. Where the
                   loss or the gradient norm is not
                   finite the step is not applied, and with train.nonfinite = "stop" none after it is.
        """
        train = self.sections.train
        number = self.done + 1 if number is None else number
        if self.checked_steps and not self.mesh.pretended:
            self.checked_steps -= 1
            check_inputs(self.mesh, self.sections.parallel, inputs, targets)
        context = self.splits.context
        share = self.microbatches * train.microbatch
        if {len(inputs), len(targets)} != {share}:
            raise ShapeError(
                "a step does not get this rank's share of the global batch",
                given=f"{len(inputs)} inputs and {len(targets)} targets on {self.mesh.label}",
                expected=f"{share} of both: train.global_batch = {train.global_batch} / {self.data_size} ranks along "
                "data and shard",
                hint=_hint(len(inputs), share, self.data_size),
            )
        self._tokens = self._sum_over_data(self.model.count(targets, self.microbatches))
        for gradients in self.gradients:
            gradients.start()
        more: dict[str, Any] = {}
        if self.model.drops:
            for module in self.modules:
                module.step = number  # type: ignore[assignment]
            first = self.data_coord * len(inputs)
            more["samples"] = torch.arange(first, first + len(inputs), device=inputs.device)
        with self._drawing(f"{number}"):
            loss = self._run(context.split(inputs, 1), context.split(targets, 1), **more)
        for gradients in self.gradients:
            gradients.finish()
        for module in self.modules:
            self.split.finish_gradients(module)
        self._follow_first_rank()
        if self._tied is not None:
            self._tied.sum_gradients()
        norm = self._norm.norm() if train.clip_norm is None else self._norm.clip_(train.clip_norm)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if lr is not None:
                group["lr"] = lr * rate
        self._state.given_lr = lr is not None
        self.done = number
        now = float(self.optimizer.param_groups[0]["lr"]) if lr is None else lr
        # Only of tokens is it known which there are; elsewhere the layers look at them.
        looks = self.model.vocabulary and self.mesh.asynchronous
        ids = (inputs, targets.where(targets != -100, 0)) if looks else ()
        spoilt = self._results.add(number, now, loss, norm, self._tokens, *ids)
        with self._noise.step(f"optimizer {number}", 0) if self._noise is not None else nullcontext():
            if self._noise is not None:
                self._noise.seed((train.seed, "optimizer", number))
            if self._leaves_out:
                # Fused optimisers leave out a step by it, state and all.
                self.optimizer.found_inf = spoilt  # type: ignore[attr-defined]
                self.optimizer.step()
            elif not spoilt.item():
                self.optimizer.step()

    def look(self) -> list[Done]:
        """What the steps since the last look gave, in order. This waits for the device.

        Called by: every rank.
        Raises:    TrainingError on every rank, with train.nonfinite = "stop", where the loss or the gradient norm
                   of one of them is not finite. It was not applied then, nor were those after it.
        """
        return self._results.look()

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """The mean loss over the tokens of some global batches, by forward passes alone, with the modules in eval mode.

        batches:   this rank's shares, shaped as for `step`; as many on every rank.
        Called by: every rank.
        Returns:   the same on every rank; nan where there is no target that counts. This waits for the device.
        """
        parallel, context = self.sections.parallel, self.splits.context
        # Of each part: a user may have put some of them into eval mode for good.
        were = {part: part.training for part in self.modules.modules()}
        # loss divides by it
        before, self._tokens = self._tokens, torch.ones_like(self._tokens)
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        self.modules.eval()
        try:
            for number, (inputs, targets) in enumerate(batches):
                with self._drawing(f"evaluation {number}"):
                    loss = self._run.forward(context.split(inputs, 1), context.split(targets, 1))
                sums[0] += 0 if loss is None else loss.double()
                sums[1] += self.model.count(targets, self.microbatches)
        finally:
            self._tokens = before
            for part, was in were.items():
                part.training = was
            for gradients in self.gradients:
                if isinstance(gradients, Sharded):
                    gradients.reshard()
        # Ranks along context have other tokens, and each counts those of all of them.
        for dim in parallel.gradient_dims:
            self.mesh.all_reduce(dim, sums)
        if parallel.pipeline is not None:
            sums = self.mesh.broadcast(parallel.pipeline, sums, src=self.mesh.size(parallel.pipeline) - 1)
        return float((sums[0] / (sums[1] / context.size)).item())

    def state(self) -> dict[str, Tensor]:
        """All that a step changes: this rank's weights, and the state of optimizer, modules and scheduler, by global names.

        Whole tensors, as DTensors where they are split: `model.layers.3.attn.wq.weight`,
        `optimizer.layers.3.attn.wq.weight.exp_avg`. Names and whole tensors do not depend on the
        mesh; a weight that embedding and head share is `embed.weight`. Their memory is shared. Plain data is encoded in
        uint8 tensors under `plain.`: see `meshcomm.parallel.state`. Nothing is changed by a look: what the first step
        will make is not there before it. The learning rate is not among them where every
        step is given its own; nor are random numbers, which follow from the seed and the step.

        Raises: TrainingError that names what cannot be saved.
        """
        return self._state.tensors()

    def put_back(self, kinds: Kinds, fill: Callable[[dict[str, Tensor]], None], steps: int = 0) -> None:
        """Make the state that of a checkpoint, made on any mesh after so many steps.

        kinds:  dtype and shape of each tensor that the checkpoint has.
        fill:   writes its values into tensors, by their names.
        Raises: TrainingError that names what does not fit; what `fill` raises.
        """
        self._state.put_back(kinds, fill, steps)
        self.done = steps

    def names_of_all_stages(self) -> set[str]:
        """Of the tensors of a checkpoint that belong to the whole model's modules. Every rank calls this."""
        mine, pipeline = self._state.names(), self.sections.parallel.pipeline
        return mine if pipeline is None else set().union(*self.mesh.objects.all_gather(pipeline, mine))

    @property
    def scheduler(self) -> LRScheduler | None:
        """Steps the optimizer's learning rates; None: each step is given its own."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._state.follow(scheduler)

    def parameters_of_all_stages(self) -> int:
        """Number of elements of the whole model's parameters. Every rank calls this."""
        count = sum(p.numel() for _, p in self.own_parameters())
        if self.sections.parallel.pipeline is None:
            return count
        total = torch.tensor([count], dtype=torch.int64, device=self.mesh.device)
        return int(self.mesh.all_reduce(self.sections.parallel.pipeline, total).item())

    # -- inside ---------------------------------------------------------------------------------

    def _follow_first_rank(self) -> None:
        """Buffers that forward changes from a rank's own samples become those of the first rank, as with DDP."""
        dims = [dim for dim in self.sections.parallel.gradient_dims if self.mesh.size(dim) > 1]
        held = (part._buffers[key] for part, key in self._buffers)
        if dims and self._buffers:
            broadcast_values(self.mesh, dims, [each for each in held if each is not None])

    def _drawing(self, step: str) -> AbstractContextManager[None]:
        """Forward passes in here draw what follows from the seed and the step."""
        if self._draws is None:
            return nullcontext()
        return self._draws.step(step, self.data_coord * self.microbatches)

    def _tied_weight(self) -> nn.Parameter | None:
        """The weight that embedding and head share, where one of this rank's stages has it."""
        held = (getattr(module, "tied_weight", None) for module in self.modules)
        return next((weight for weight in held if weight is not None), None)

    def _tied_across(self) -> TiedWeight:
        return TiedWeight(self.mesh, self.sections.parallel.pipeline or "", self._tied_weight())

    def _synced(self, hooks: bool) -> list[GradientSync | Sharded]:
        """What sums the gradients of dense parameters, and of experts, which lie on other dims."""
        part, mesh = self.sections.parallel, self.mesh
        kinds = [separate(module) for module in self.modules]
        expert_dims = part.expert_gradient_dims(mesh.layout.views) if part.expert else part.gradient_dims
        settings: dict[str, Any] = {
            "microbatches": self.microbatches,
            "bucket_mb": part.bucket_mb,
            "hooks": hooks,
        }
        found: list[GradientSync | Sharded] = []
        for kind, dims in enumerate((part.gradient_dims, expert_dims)):
            parameters = [pair for each in kinds for pair in each[kind].items()]
            if parameters:
                over = along(mesh, dims)
                found.append(GradientSync(mesh, over, parameters, op="sum", broadcast=False, **settings))
        return found

    def _sum_over_data(self, count: Tensor) -> Tensor:
        """The sum of `count` over the ranks that have other samples, () in the dtype of losses."""
        total = count.to(torch.float64)
        for dim in self.sections.parallel.data_dims:
            self.mesh.all_reduce(dim, total)
        return total.to(self.split.dtype)


def _hint(given: int, share: int, ranks: int) -> str:
    size = f"train.global_batch = {given * ranks}"
    if given < share:
        return f"drop_last=True in the DataLoader if this is the short batch at its end; else {size}"
    return size


def merged(mesh: Mesh, dims: tuple[str, ...]) -> str:
    """The name under which `dims` have one DeviceMesh; a group is created where the mesh was opened without it.

    Called by: every rank of the mesh, in the same program order.
    """
    if len(dims) == 1:
        return dims[0]
    if dims not in mesh.layout.merge.values():
        mesh.create(merged_name(dims, {*mesh.layout.names, *mesh.layout.views}), dims)
    return next(name for name, parts in mesh.layout.merge.items() if parts == dims)


def along(mesh: Mesh, dims: Iterable[str]) -> str | tuple[str, ...] | None:
    """Dims of size above 1, for one call along all of them: a group is created where none was declared.

    Called by: every rank of the mesh, in the same program order. None where no such dim is left.
    """
    used = tuple(dim for dim in dims if mesh.size(dim) > 1)
    if len(used) < 2:
        return used[0] if used else None
    if mesh.plan.covering(used) is None:
        mesh.create(merged_name(used, {*mesh.layout.names, *mesh.layout.views}), used)
    return used


def sections(mesh: Mesh, config: Config) -> Sections:
    """The training sections of `config`, checked against the sizes of the open mesh.

    Raises ConfigError where there is no [parallel] and [train] or they do not fit the mesh, LayoutError where the
    mesh was opened with other dims than `config` has.
    """
    given, live = config.mesh.dims, mesh.layout.dims
    if list(given) != list(live) or any(size not in (-1, live[name]) for name, size in given.items()):
        raise LayoutError(
            "the mesh was opened with other dims than this configuration has",
            given=f"an open mesh of {toml_dims(live)}, mesh.dims = {toml_dims(given)}",
            expected="the configuration that the mesh was opened with",
            hint=f"meshcomm.config.load(config, ['mesh.dims={toml_dims(live)}'])",
        )
    known = load(config, [f"mesh.dims={toml_dims(live)}"])
    if known.parallel is None or known.train is None:
        raise ConfigError(
            "this configuration describes a mesh and no training",
            given=f"{config.source} without [parallel] and [train]",
            expected="both, and [model] and [data] where they do not come from code",
            hint="configs/quickstart.toml has all four",
        )
    return Sections(known.parallel, known.model, known.data, known.train)
