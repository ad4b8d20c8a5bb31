"""How is a model built on a mesh? This rank's stages are made, split, sharded and filled, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load
from meshcomm.errors import ConfigError, LayoutError
from meshcomm.layout.names import merged_name
from meshcomm.layout.sizes import toml_dims
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import on_all_ranks
from meshcomm.parallel.batch_norm import is_synchronised
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.data import GradientSync, Sharded, broadcast_values
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.expert import separate
from meshcomm.parallel.model import Model, Splits, materialise
from meshcomm.parallel.pipeline import Accumulate, Pipelined, Runner, TiedWeight
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.parallel.torch_private import unsaved_buffers
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import Stage, split_layers, stages_of_rank


class Sections(NamedTuple):
    """The sections of a configuration that training needs; model and data may come from code."""

    parallel: ParallelConfig
    model: ModelConfig | None
    data: DataConfig | None
    train: TrainConfig


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


@final
class LocalModel:
    """This rank's stages of a model, split, sharded and filled, and the sums of their gradients over ranks.

    data_size, data_coord: of the ranks with other samples. microbatches: of a step on this rank.
    """

    def __init__(self, mesh: Mesh, known: Sections, model: Model, filled: bool) -> None:
        self.mesh, self.model = mesh, model
        self._parallel, _, self._data, self._train = known
        parallel, train = self._parallel, self._train
        self.data_size = parallel.copies(dict(mesh.dims))
        self.data_coord = mesh.coord(parallel.data_dims) if parallel.data_dims else 0
        self.microbatches = train.global_batch // (self.data_size * train.microbatch)
        self._ranks = mesh.size(parallel.pipeline) if parallel.pipeline else 1
        self.splits = self._split(known.model)
        self.stages = self._divide()
        self.modules = nn.ModuleList([model.stage(self.splits, stage) for stage in self.stages])
        self.gradients: list[GradientSync | Sharded] = []
        if parallel.shard is not None:
            self.gradients = [self._sharded()]
        on_all_ranks(mesh, "fill the model", lambda: self._fill(filled))
        if parallel.shard is None:
            self.gradients = self._synced()
        # Only now: sharding puts other parameters into the modules.
        self._tied: TiedWeight | None = None
        if model.tied and self._ranks > 1:
            self._tied = TiedWeight(mesh, parallel.pipeline or "", self._tied_weight())
            self._tied.copy()
        # Batch norms have the statistics of all ranks already; a buffer that is not saved is a table, such as of angles.
        self._buffers = [
            (part, key)
            for part in self.modules.modules()
            if not is_synchronised(part)
            for key in part._buffers
            if key not in unsaved_buffers(part)
        ]

    def runner(self, loss: Callable[[Any, Tensor], Tensor]) -> Runner:
        """Forward and backward of a step's microbatches. Raises ConfigError for a pipeline of samples of unknown length."""
        mesh, parallel, train, draws = self.mesh, self._parallel, self._train, self.splits.draws
        if not parallel.pipeline or self._ranks == 1:
            before = next((each.microbatch for each in self.gradients if isinstance(each, Sharded)), None)
            return Accumulate(self.modules[0], loss, self.microbatches, before, mesh, draws)
        if self._data is None:
            raise ConfigError(
                "a pipeline must be told how long a sample is",
                given=f"parallel.pipeline = {parallel.pipeline!r} without [data]",
                expected="data.sequence: stages receive into memory that is there before",
                hint="[data] sequence = 128",
            )
        split = self.splits.tensor
        first = (train.microbatch, self._data.sequence // self.splits.context.size)
        tokens = first[1] // split.size if split.sequence_parallel else first[1]
        last = (*first, self.model.outputs(self.splits))
        return Pipelined(
            mesh,
            parallel.pipeline,
            list(self.modules),
            loss,
            microbatches=self.microbatches,
            schedule=parallel.schedule,
            shapes=(first, (first[0], tokens, self.model.width), last),
            dtype=self._compute_dtype,
            draws=draws,
        )

    def start_step(self, number: int) -> None:
        """Before the first forward pass of a step."""
        for gradients in self.gradients:
            gradients.start()
        for module in self.modules if self.model.drops else ():
            module.step = number  # type: ignore[assignment]

    def finish_step(self) -> None:
        """After the last backward pass: gradients are summed, and buffers are those of the first rank, as with DDP."""
        for gradients in self.gradients:
            gradients.finish()
        for module in self.modules:
            self.splits.tensor.finish_gradients(module)
        dims = [dim for dim in self._parallel.gradient_dims if self.mesh.size(dim) > 1]
        if dims and self._buffers:
            buffers = [part._buffers[key] for part, key in self._buffers]
            broadcast_values(self.mesh, dims, [buffer for buffer in buffers if buffer is not None])
        if self._tied is not None:
            self._tied.sum_gradients()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters by global name, each once, stage by stage."""
        tied = self._tied_weight()
        return [
            (self.model.tied if parameter is tied else name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
        ]

    def copies(self) -> list[nn.Parameter]:
        """The parameters that another rank counts: of a weight on the first stage and the last, the last one's."""
        weight = self._tied_weight()
        return [] if self._tied is None or self._tied.is_owner or weight is None else [weight]

    # -- how it is built ----------------------------------------------------------------------------

    @property
    def _compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._train.compute_dtype or self._train.dtype)
        return dtype

    def _split(self, settings: ModelConfig | None) -> Splits:
        mesh, parallel, train = self.mesh, self._parallel, self._train
        dtype = getattr(torch, train.dtype)
        split = TensorSplit(mesh, parallel.tensor, dtype, parallel.sequence_parallel)
        context = ContextSplit(mesh, parallel.context, parallel.attention)
        weight = settings.balance_loss if settings is not None and settings.experts else 0.0
        draws = None
        if self.model.draws:
            draws = Draws(mesh, train.seed, [parallel.context] if parallel.context else [])
        weight /= self.microbatches * self.data_size
        return Splits(split, context, parallel.expert, weight, parallel.data_dims, draws)

    def _divide(self) -> list[Stage]:
        """The stages of this rank."""
        parallel, model = self._parallel, self.model
        each = parallel.stages_per_rank if self._ranks > 1 else 1
        count = self._ranks * each
        model.check(self.splits, count)
        costs = model.costs(1 if self._data is None else self._data.sequence)
        layers = split_layers(model.layers, count, costs.layers, first=costs.embedding, last=costs.head)
        coord = self.mesh.coord(parallel.pipeline) if parallel.pipeline else 0
        return [Stage(index, count, layers[index]) for index in stages_of_rank(coord, self._ranks, each)]

    def _sharded(self) -> Sharded:
        mesh, parallel = self.mesh, self._parallel
        dtype = getattr(torch, parallel.reduce_dtype or self._train.dtype)
        shard, copies = merged(mesh, parallel.shard_dims(dict(mesh.dims))), parallel.data
        return Sharded(
            mesh,
            list(self.modules),
            (shard,) if copies is None or mesh.size(copies) == 1 else (copies, shard),
            MixedPrecisionPolicy(self._compute_dtype, dtype, cast_forward_inputs=False),
            experts=parallel.expert_gradient_dims(mesh.layout.views) if parallel.expert else None,
            reshard=parallel.reshards(self._ranks),
        )

    def _fill(self, filled: bool) -> None:
        for module, stage in zip(self.modules, self.stages, strict=True):
            materialise(module, self.mesh.device)
            if filled:
                self.model.fill(module, stage)

    def _synced(self) -> list[GradientSync | Sharded]:
        """The sums of gradients of dense parameters, and of experts, along other dims."""
        parallel, mesh = self._parallel, self.mesh
        hooks = schedule_properties(parallel.schedule).hooks_fire or self._ranks == 1
        kinds = [separate(module) for module in self.modules]
        expert_dims = parallel.gradient_dims
        if parallel.expert:
            expert_dims = parallel.expert_gradient_dims(mesh.layout.views)
        found: list[GradientSync | Sharded] = []
        for kind, dims in enumerate((parallel.gradient_dims, expert_dims)):
            if parameters := [pair for each in kinds for pair in each[kind].items()]:
                settings: dict[str, Any] = {"bucket_mb": parallel.bucket_mb, "hooks": hooks}
                settings |= {"op": "sum", "microbatches": self.microbatches, "broadcast": False}
                found.append(GradientSync(mesh, along(mesh, dims), parameters, **settings))
        return found

    def _tied_weight(self) -> nn.Parameter | None:
        """The weight that embedding and head share, where one of this rank's stages has it."""
        weights = (getattr(module, "tied_weight", None) for module in self.modules)
        return next((weight for weight in weights if weight is not None), None)
