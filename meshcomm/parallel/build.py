"""The model interface of a trainer, and how a model is built: a rank's stages are created, split, sharded and filled."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load_config
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
from meshcomm.parallel.pipeline import Accumulate, Pipelined, TiedWeight
from meshcomm.parallel.tensor import TensorSplit, cross_entropy
from meshcomm.parallel.torch_private import unsaved_buffers
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import PartCosts, Stage, split_layers, stages_of_rank

_ALONE = threading.RLock()


@final
@dataclass(frozen=True)
class Splits:
    """The dims of the mesh along which weights, the sequence and the experts are split.

    tensor:         weights, and with sequence_parallel activations between layers.
    context:        the sequence.
    expert:         the dim of a view along which experts are distributed. If None, every rank has all.
    balance_weight: the factor by which the balance loss of a microbatch is multiplied.
    data:           the dims whose ranks have different samples.
    draws:          sets the default generators, if given.
    """

    tensor: TensorSplit
    context: ContextSplit
    expert: str | None = None
    balance_weight: float = 0.0
    data: tuple[str, ...] = ()
    draws: Draws | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh that all these dims belong to."""
        return self.tensor.mesh

    @classmethod
    def of(cls, tensor: TensorSplit) -> Splits:
        """Splits of weights only."""
        return cls(tensor, ContextSplit(tensor.mesh, None))


class Model(ABC):
    """A model that can be built stage by stage without memory, and filled once it has memory.

    num_layers: blocks that a pipeline divides; 1 if it cannot be divided.
    hidden_size: elements of a token's vector between stages.
    vocab_size: an upper bound of token ids, and the number of logits of the last stage.
    tied:       the name of the weight that embedding and head share, a stage's `tied_weight`; "" if none.
    draws:      whether its modules may draw from torch's default generators.
    packed:     whether samples are packed documents. Stages then receive document numbers, and attention stays within documents.
    saves_all:  whether a checkpoint has all parameters. If not, it has only trainable ones; the rest is filled at each start.
    drops:      whether its stages use dropout by sample number. They then receive these numbers and the attribute `step`.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: str = ""
    draws: bool = True
    drops: bool = False
    packed: bool = False
    saves_all: bool = True

    @abstractmethod
    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """Return a stage's module, split, with its parameters on the meta device: see `on_meta`.

        It maps int64 tokens or hidden states of one microbatch to hidden states, or on the last stage to this rank's
        slice of the logits, both in train.compute_dtype, or train.dtype if that is not set. Its `layers`, a ModuleDict or
        ModuleList, are the units that shard gathers one at a time. With dropout, it also receives `samples`, int64
        (microbatch,), the samples' numbers in the global batch. A parameter has one name in all stages of all meshes.
        """

    @abstractmethod
    def fill(self, module: nn.Module, stage: Stage) -> None:
        """Write the values of this rank's parts of all parameters of a stage. Does not communicate."""

    def check(self, splits: Splits, stages: int) -> None:  # noqa: B027
        """Called before any stage is built. Raises UnsupportedOp, with the reason, for unsupported settings."""

    def outputs(self, splits: Splits) -> int:
        """Return the number of logits per token that the last stage returns on a rank."""
        return self.vocab_size // splits.tensor.size

    def costs(self, seq_len: int) -> PartCosts:
        """Return the relative costs of the parts, used to divide layers among stages."""
        return PartCosts(0, (1,) * self.num_layers, 0)

    def loss(self, splits: Splits, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over the targets of a microbatch that are not -100."""
        return cross_entropy(splits.tensor, logits, targets, reduction="sum")

    def count(self, targets: Tensor, microbatches: int) -> Tensor:
        """Return this rank's share of the divisor of the sum of all losses: (), of any dtype."""
        return (targets != -100).sum()


class Sections(NamedTuple):
    """The sections of a configuration that training needs; model and data may come from code."""

    parallel: ParallelConfig
    model: ModelConfig | None
    data: DataConfig | None
    train: TrainConfig


def sections(mesh: Mesh, config: Config) -> Sections:
    """Return the training sections of `config`, checked against the sizes of the open mesh.

    Raises ConfigError if [parallel] and [train] are missing or do not fit the mesh, LayoutError if the
    mesh was opened with dims other than those of `config`.
    """
    given, live = config.mesh.dims, mesh.layout.dims
    if list(given) != list(live) or any(size not in (-1, live[name]) for name, size in given.items()):
        raise LayoutError(
            "the dims of the open mesh differ from those of this configuration",
            given=f"an open mesh of {toml_dims(live)}, mesh.dims = {toml_dims(given)}",
            expected="the configuration that the mesh was opened with",
            hint=f"meshcomm.config.load_config(config, ['mesh.dims={toml_dims(live)}'])",
        )
    known = load_config(config, [f"mesh.dims={toml_dims(live)}"])
    if known.parallel is None or known.train is None:
        raise ConfigError(
            "this configuration describes a mesh but no training",
            given=f"{config.source} without [parallel] and [train]",
            expected="both, and [model] and [data] unless they come from code",
            hint="meshcomm new writes a config that has all four",
        )
    return Sections(known.parallel, known.model, known.data, known.train)


def merged(mesh: Mesh, dims: tuple[str, ...]) -> str:
    """Return the name under which `dims` have one DeviceMesh. A group is created if the mesh was opened without it.

    Called by: every rank of the mesh, in the same program order.
    """
    if len(dims) == 1:
        return dims[0]
    if dims not in mesh.layout.merge.values():
        mesh.create_group(merged_name(dims, {*mesh.layout.names, *mesh.layout.views}), dims)
    return next(name for name, parts in mesh.layout.merge.items() if parts == dims)


def along(mesh: Mesh, dims: Iterable[str]) -> str | tuple[str, ...] | None:
    """Return the dims of size above 1, merged for one call along all of them. A group is created if none was declared.

    Called by: every rank of the mesh, in the same program order. Returns None if no such dim remains.
    """
    used = tuple(dim for dim in dims if mesh.size(dim) > 1)
    if len(used) < 2:
        return used[0] if used else None
    if mesh.plan.covering(used) is None:
        mesh.create_group(merged_name(used, {*mesh.layout.names, *mesh.layout.views}), used)
    return used


@final
class LocalModel:
    """This rank's stages of a model, split, sharded and filled, and the summation of their gradients over ranks.

    data_size: the number of ranks with different samples. data_coord: this rank's number among them. microbatches:
    per step on this rank.
    """

    def __init__(self, mesh: Mesh, known: Sections, model: Model, filled: bool) -> None:
        self.mesh, self.model = mesh, model
        self._parallel, _, self._data, self._train = known
        parallel, train = self._parallel, self._train
        self.data_size = parallel.copies(dict(mesh.dims))
        self.data_coord = mesh.coord(parallel.data_dims) if parallel.data_dims else 0
        self.microbatches = train.global_batch_size // (self.data_size * train.micro_batch_size)
        self._ranks = mesh.size(parallel.pipeline) if parallel.pipeline else 1
        self.splits = self._split(known.model)
        self.stages = self._divide()
        self.modules = nn.ModuleList([model.stage(self.splits, stage) for stage in self.stages])
        for name, parameter in self.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in train.frozen):
                parameter.requires_grad_(False)
        self.gradients: list[GradientSync | Sharded] = []
        if parallel.shard is not None:
            self.gradients = [self._sharded()]
        on_all_ranks(mesh, "fill the model", partial(self._fill, filled))
        if parallel.shard is None:
            self.gradients = self._synced()
        # Only now, because sharding replaces the parameters of the modules.
        self._tied: TiedWeight | None = None
        if model.tied and self._ranks > 1:
            self._tied = TiedWeight(mesh, parallel.pipeline or "", self._tied_weight())
            self._tied.copy()
        # Batch norms already have the statistics of all ranks. A buffer that is not saved is a table, for example of angles.
        self._buffers = [
            (part, key)
            for part in self.modules.modules()
            if not is_synchronised(part)
            for key in part._buffers
            if key not in unsaved_buffers(part)
        ]

    def runner(self, loss: Callable[[Any, Tensor], Tensor]) -> Accumulate | Pipelined:
        """Return the runner of a step's microbatches. Raises ConfigError for a pipeline of samples of unknown length."""
        mesh, parallel, train, draws = self.mesh, self._parallel, self._train, self.splits.draws
        if not parallel.pipeline or self._ranks == 1:
            before = next((each.microbatch for each in self.gradients if isinstance(each, Sharded)), None)
            return Accumulate(self.modules[0], loss, self.microbatches, before, mesh, draws)
        if self._data is None:
            raise ConfigError(
                "a pipeline needs the length of a sample",
                given=f"parallel.pipeline = {parallel.pipeline!r} without [data]",
                expected="data.seq_len, because stages receive into preallocated memory",
                hint="[data] seq_len = 128",
            )
        split = self.splits.tensor
        first = (train.micro_batch_size, self._data.seq_len // self.splits.context.size)
        tokens = first[1] // split.size if split.sequence_parallel else first[1]
        last = (*first, self.model.outputs(self.splits))
        return Pipelined(
            mesh,
            parallel.pipeline,
            list(self.modules),
            loss,
            microbatches=self.microbatches,
            schedule=parallel.options.schedule,
            shapes=(first, (first[0], tokens, self.model.hidden_size), last),
            dtype=self._compute_dtype,
            draws=draws,
        )

    def start_step(self, number: int) -> None:
        """Called before the first forward pass of a step."""
        for gradients in self.gradients:
            gradients.start()
        for module in self.modules if self.model.drops else ():
            module.step = number  # type: ignore[assignment]

    def finish_step(self) -> None:
        """Called after the last backward pass. Sums gradients, and broadcasts the buffers of the first rank, as DDP does."""
        for gradients in self.gradients:
            gradients.finish()
        for module in self.modules:
            self.splits.tensor.finish_gradients(module)
        dims = [dim for dim in self._parallel.gradient_dims if self.mesh.size(dim) > 1]
        if dims and self._buffers:
            buffers = [part._buffers[key] for part, key in self._buffers]
            broadcast_values(self.mesh, dims, [buffer for buffer in buffers if buffer is not None])
        weight = self._tied_weight()
        if self._tied is not None and (weight is None or weight.requires_grad):
            self._tied.sum_gradients()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters by global name, each once, stage by stage."""
        tied = self._tied_weight()
        return [
            (self.model.tied if parameter is tied else name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
        ]

    def copies(self) -> list[nn.Parameter]:
        """Return the parameters that another rank counts: if the first and the last stage share a weight, the one
        on the last.
        """
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
        split = TensorSplit(mesh, parallel.tensor, dtype, parallel.options.sequence_parallel)
        context = ContextSplit(mesh, parallel.context, parallel.options.attention)
        weight = settings.balance_loss if settings is not None and settings.experts else 0.0
        draws = None
        if self.model.draws:
            draws = Draws(mesh, train.seed, [parallel.context] if parallel.context else [])
        weight /= self.microbatches * self.data_size
        return Splits(split, context, parallel.expert, weight, parallel.data_dims, draws)

    def _divide(self) -> list[Stage]:
        """Return the stages of this rank."""
        parallel, model = self._parallel, self.model
        each = parallel.options.stages_per_rank if self._ranks > 1 else 1
        count = self._ranks * each
        model.check(self.splits, count)
        costs = model.costs(1 if self._data is None else self._data.seq_len)
        layers = split_layers(model.num_layers, count, costs.layers, first=costs.embedding, last=costs.head)
        coord = self.mesh.coord(parallel.pipeline) if parallel.pipeline else 0
        return [Stage(index, count, layers[index]) for index in stages_of_rank(coord, self._ranks, each)]

    def _sharded(self) -> Sharded:
        mesh, parallel = self.mesh, self._parallel
        dtype = getattr(torch, parallel.options.reduce_dtype or self._train.dtype)
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
        """Return the sums of gradients of dense parameters, and of experts, along different dims."""
        parallel, mesh = self._parallel, self.mesh
        hooks = schedule_properties(parallel.options.schedule).hooks_fire or self._ranks == 1
        kinds = [separate(module) for module in self.modules]
        expert_dims = parallel.gradient_dims
        if parallel.expert:
            expert_dims = parallel.expert_gradient_dims(mesh.layout.views)
        found: list[GradientSync | Sharded] = []
        for kind, dims in enumerate((parallel.gradient_dims, expert_dims)):
            if parameters := [pair for each in kinds for pair in each[kind].items()]:
                settings: dict[str, Any] = {"bucket_mb": parallel.options.bucket_mb, "hooks": hooks}
                settings |= {"op": "sum", "microbatches": self.microbatches, "broadcast": False}
                found.append(GradientSync(mesh, along(mesh, dims), parameters, **settings))
        return found

    def _tied_weight(self) -> nn.Parameter | None:
        """Return the weight that embedding and head share, if one of this rank's stages has it."""
        weights = (getattr(module, "tied_weight", None) for module in self.modules)
        return next((weight for weight in weights if weight is not None), None)


# -- memory: modules are built, split and sharded before any of their values exist -----------------


@contextmanager
def on_meta() -> Iterator[None]:
    """Parameters of modules created here go to the meta device as they are registered; buffers keep their values.

    A constructor's initial values are discarded. At most one parameter of this thread has memory at a time, and that
    memory is never touched. A parameter that the host refuses to allocate has none. One thread at a time.
    """
    register = nn.Module.register_parameter
    thread = threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            module._parameters[name] = _like(parameter, parameter.detach().to("meta"))

    with _ALONE, patch.object(nn.Module, "register_parameter", registered), _MetaWhereRefused():
        yield


class _MetaWhereRefused(TorchFunctionMode):
    """Creates a tensor without values on the meta device if the host has no memory for it, as for a layer's experts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        try:
            return func(*args, **named)
        except RuntimeError:
            if func is not torch.empty or named.get("device") is not None:
                raise
            return func(*args, **{**named, "device": "meta"})


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on `device`, not yet written, for the parameters of `module` that are on the meta device.

    A parameter that fully_shard has sharded gets memory for this rank's shard. Shared parameters stay shared.
    """
    made: dict[int, nn.Parameter] = {}
    plain: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if not isinstance(parameter, DTensor):
                if parameter is not None and parameter.is_meta and id(parameter) not in made:
                    made[id(parameter)] = _like(parameter, torch.empty_like(parameter, device=device))
                plain[part, name] = made.get(id(parameter), parameter)
    # Removed meanwhile, because torch would swap these too and fail for a parameter with other references.
    for part, name in plain:
        part._parameters[name] = None
    try:
        # torch swaps the contents of DTensors in place, and informs FSDP.
        module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    finally:
        for (part, name), parameter in plain.items():
            part._parameters[name] = parameter


def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Cast all floating-point parameters and buffers to `dtype`, in place.

    Complex ones, such as rotary tables, keep their dtype: `module.to(dtype)` would drop their imaginary parts.
    """
    module._apply(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype))


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    made = nn.Parameter(data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
