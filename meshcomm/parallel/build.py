"""Defines a trainer's model interface, and builds a model: creates, splits, shards and fills a rank's stages."""

from __future__ import annotations

import gc
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshcomm.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, load_config
from meshcomm.errors import ConfigError, LayoutError, TrainingError, UnsupportedOp
from meshcomm.layout.names import listed, merged_name
from meshcomm.layout.sizes import toml_dims
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import on_all_ranks
from meshcomm.parallel.batch_norm import is_synchronised
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.data import GradientSync, Sharded, broadcast_values
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.expert import separate
from meshcomm.parallel.loss import OwnLoss
from meshcomm.parallel.pipeline import Accumulate, Pipelined, TiedWeight
from meshcomm.parallel.tensor import TensorSplit, local
from meshcomm.parallel.torch_private import hooks_of, unsaved_buffers
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import PartCosts, Stage, split_layers, stages_of_rank

_ALONE = threading.RLock()


@final
@dataclass(frozen=True)
class Splits:
    """The dims of the mesh along which weights, the sequence and the experts are split.

    tensor:         splits weights and, with sequence_parallel, activations between layers.
    context:        splits the sequence.
    expert:         the dim of a view along which experts are distributed. If None, every rank holds all experts.
    balance_weight: the factor by which a microbatch's balance loss is multiplied.
    data:           the dims along which ranks have different samples.
    draws:          if given, seeds the default generators.
    """

    tensor: TensorSplit
    context: ContextSplit
    expert: str | None = None
    balance_weight: float = 0.0
    data: tuple[str, ...] = ()
    draws: Draws | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh to which all of the dims belong."""
        return self.tensor.mesh

    @classmethod
    def of(cls, tensor: TensorSplit) -> Splits:
        """Return splits of weights only."""
        return cls(tensor, ContextSplit(tensor.mesh, None))


class Model(ABC):
    """A model whose stages can be built without allocating memory, and filled after memory is allocated.

    num_layers: the number of blocks that a pipeline divides; 1 if the model cannot be divided.
    hidden_size: the number of elements in a token's vector between stages.
    vocab_size: the exclusive upper bound of token ids, and the number of logits per token.
    tied:       the name of the weight that the embedding and the head share, a stage's `tied_weight`; "" if there is none.
    draws:      whether its modules may draw from torch's default generators.
    packed:     whether samples are packed documents. If so, stages receive document numbers, and attention is per document.
    saves_all:  whether all parameters are saved. If not, only trainable ones are saved, and the rest are filled at each start.
    own_loss:   the loss; None for the cross-entropy of logits. See `meshcomm.parallel.loss`.
    counts_all_tokens: whether the loss depends on all tokens of a sample, also on those without targets, such as padding.
    any_length: whether samples of tokens may have another length than data.seq_len, without a pipeline.
    drops:      whether its stages use dropout by sample number. If so, stages receive sample numbers and an attribute `step`.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: str = ""
    draws: bool = True
    drops: bool = False
    any_length: bool = False
    packed: bool = False
    saves_all: bool = True
    own_loss: OwnLoss | None = None
    counts_all_tokens: bool = False

    @abstractmethod
    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """Return a stage's split module, with its parameters on the meta device: see `on_meta`.

        The module maps a microbatch's int64 tokens or hidden states to hidden states, or, on the last stage, to this rank's
        slice of the logits. Outputs are in train.compute_dtype, or in train.dtype if compute_dtype is not set. The module's
        `layers`, a ModuleDict or ModuleList, are gathered one at a time if they are sharded. With dropout, the module also
        receives `samples`, int64 (microbatch,), the samples' indices in the global batch. A parameter has the same name in
        every stage and on every mesh.
        """

    @abstractmethod
    def fill(self, module: nn.Module, stage: Stage) -> None:
        """Write the values of a stage's parameters, or of this rank's parts of them. Does not communicate."""

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """Return a function that calls the only stage with inputs, which may be a tree, and further named arguments."""
        return module

    def check(self, splits: Splits, stages: int) -> None:  # noqa: B027
        """Called before any stage is built. Raises UnsupportedOp, with the reason, for unsupported settings."""

    def outputs(self, splits: Splits) -> int:
        """Return the number of logits per token that the last stage returns on a rank."""
        return self.vocab_size // splits.tensor.size

    def costs(self, seq_len: int) -> PartCosts:
        """Return the relative costs of the parts, used to divide layers among stages."""
        return PartCosts(0, (1,) * self.num_layers, 0)


def check_loss(loss: object, model: nn.Module | None = None) -> None:
    """Raise UnsupportedOp for a loss module, or a method of one, with parameters that learn. Those of `model` are trained."""
    own = {id(each) for each in (() if model is None else model.parameters())}
    for part in (loss, getattr(loss, "__self__", None), getattr(loss, "func", None)):
        named = part.named_parameters() if isinstance(part, nn.Module) else ()
        if names := [name for name, each in named if each.requires_grad and id(each) not in own]:
            raise UnsupportedOp(
                "the parameters of this loss would never be trained",
                given=f"a {type(part).__name__} with {listed(names)}",
                expected="parameters in the model, or a loss whose parameters need no gradient",
                hint="compute the part that learns in the model's forward; or loss.requires_grad_(False)",
            )


class Sections(NamedTuple):
    """The configuration sections that training needs. The model and the data may be given in code instead."""

    parallel: ParallelConfig
    model: ModelConfig | None
    data: DataConfig | None
    train: TrainConfig


def sections(mesh: Mesh, config: Config) -> Sections:
    """Return the training sections of `config`, checked against the sizes of the open mesh.

    Raises ConfigError if [parallel] or [train] is missing or does not fit the mesh, and LayoutError if the
    open mesh and `config` have different dims.
    """
    given, live = config.mesh.dims, mesh.layout.dims
    if list(given) != list(live) or any(size not in (-1, live[name]) for name, size in given.items()):
        raise LayoutError(
            "the open mesh and this configuration have different dims",
            given=f"an open mesh of {toml_dims(live)}, mesh.dims = {toml_dims(given)}",
            expected="the configuration that the mesh was opened with",
            hint=f"meshcomm.config.load_config(config, ['mesh.dims={toml_dims(live)}'])",
        )
    known = load_config(config, [f"mesh.dims={toml_dims(live)}"])
    if known.parallel is None or known.train is None:
        raise ConfigError(
            "this configuration describes a mesh but no training",
            given=f"{config.source} without [parallel] and [train]",
            expected="both sections, and [model] and [data] unless they are given in code",
            hint="meshcomm new writes a configuration with all four sections",
        )
    return Sections(known.parallel, known.model, known.data, known.train)


def merged(mesh: Mesh, dims: tuple[str, ...]) -> str:
    """Return the name of the merged dim that covers `dims`. If the mesh was opened without this dim, its group is created.

    Called by: every rank of the mesh, in the same program order.
    """
    if len(dims) == 1:
        return dims[0]
    if dims not in mesh.layout.merge.values():
        mesh.create_group(merged_name(dims, {*mesh.layout.names, *mesh.layout.views}), dims)
    return next(name for name, parts in mesh.layout.merge.items() if parts == dims)


def along(mesh: Mesh, dims: Iterable[str]) -> str | tuple[str, ...] | None:
    """Return the dims whose size is above 1, in the form that a collective along all of them accepts. A group is created if
    none exists.

    Called by: every rank of the mesh, in the same program order. Returns None if no such dim remains.
    """
    used = tuple(dim for dim in dims if mesh.size(dim) > 1)
    if len(used) < 2:
        return used[0] if used else None
    if mesh.plan.covering(used) is None:
        mesh.create_group(merged_name(used, {*mesh.layout.names, *mesh.layout.views}), used)
    return used


def to_train_mode(module: nn.Module) -> None:
    """Put a module into train mode, as torch programs do before they train.

    Not from_pretrained's eval mode. A part that is in eval mode inside a module in train mode stays so. A train method of the
    module's own may keep parts in eval mode.
    """
    if not module.training or type(module).train is not nn.Module.train:
        module.train()


@final
class LocalModel:
    """This rank's stages of a model, split, sharded and filled. It also sums the stages' gradients over ranks.

    data_size: the number of ranks with different samples. data_coord: this rank's index among those ranks.
    microbatches: the number of microbatches per step on this rank.
    """

    def __init__(self, mesh: Mesh, known: Sections, model: Model, filled: bool) -> None:
        self.mesh, self.model = mesh, model
        self._parallel, _, self._data, self._train = known
        # The numbers of the hooks that are not a program's.
        self._hooks: set[int] = set()
        parallel, train = self._parallel, self._train
        self.data_size = parallel.copies(dict(mesh.dims))
        self.data_coord = mesh.coord(parallel.data_dims) if parallel.data_dims else 0
        self.microbatches = train.global_batch_size // (self.data_size * train.micro_batch_size)
        self._ranks = mesh.size(parallel.pipeline) if parallel.pipeline else 1
        self.splits = self._split(known.model)
        self.stages = self._divide()
        self.modules = nn.ModuleList([model.stage(self.splits, stage) for stage in self.stages])
        for module in self.modules:
            to_train_mode(module)
        self._check_parts()
        for name, parameter in self.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in train.frozen):
                parameter.requires_grad_(False)
        self.gradients: list[GradientSync | Sharded] = []
        if parallel.shard is not None:
            self.gradients = [self._sharded()]
        on_all_ranks(mesh, "fill the model", partial(self._fill, filled))
        if parallel.shard is None:
            self.gradients = self._synced()
        # Only after sharding, which replaces the modules' parameters.
        self._tied: TiedWeight | None = None
        if model.tied and self._ranks > 1:
            self._tied = TiedWeight(mesh, parallel.pipeline or "", self._tied_weight())
            self._tied.copy()
        self._learns = [(name, each, each.requires_grad) for name, each in self.named_parameters()]
        self._unchanged = self.named_parameters() if self._divided else []
        # Synchronized batch norms already have equal statistics on all ranks. A buffer that is not saved is a constant
        # table, for example of angles.
        self._buffers = [
            (part, key)
            for part in self.modules.modules()
            if not is_synchronised(part)
            for key in part._buffers
            if key not in unsaved_buffers(part)
        ]

    def runner(self, loss: Callable[[Any, Tensor], Tensor]) -> Accumulate | Pipelined:
        """Return the object that runs a step's microbatches. Raises ConfigError if a pipeline is used and the sample length is
        unknown."""
        mesh, parallel, train, draws = self.mesh, self._parallel, self._train, self.splits.draws
        if not parallel.pipeline or self._ranks == 1:
            before = next((each.microbatch for each in self.gradients if isinstance(each, Sharded)), None)
            run = self.model.call(self.modules[0])
            return Accumulate(run, loss, self.microbatches, before, mesh, draws)
        if self._data is None:
            raise ConfigError(
                "a pipeline needs the sample length",
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
        """Called before the first forward pass of a step. Raises TrainingError if parameters were frozen or unfrozen."""
        moved = [(name, learns) for name, each, learns in self._learns if each.requires_grad != learns]
        if moved:
            raise TrainingError(
                f"parameters were {'frozen' if moved[0][1] else 'unfrozen'} after the Trainer was made, and its optimizer would not follow",
                given=f"requires_grad of {listed([name for name, _ in moved])}, on {self.mesh.label}",
                expected="the same parameters that learn in each step",
                hint="trainer.save(folder), change train.frozen or requires_grad, and make a new Trainer of a new module, which loads the folder",
            )
        for gradients in self.gradients:
            gradients.start()
        for module in self.modules if self.model.drops else ():
            module.step = number  # type: ignore[assignment]
        self._versions = [each._version for _, each in self._unchanged]
        self.check_hooks((name, each) for name, each, _ in self._learns)

    def finish_step(self) -> None:
        """Called after the last backward pass. Sums gradients and, as DDP does, broadcasts the first rank's buffers.

        Raises UnsupportedOp if a forward pass has changed a parameter.
        """
        pairs = zip(self._unchanged, self._versions, strict=True)
        if written := [name for (name, each), version in pairs if each._version != version]:
            raise UnsupportedOp(
                "a forward pass of this model changes its parameters",
                given=listed(written),
                expected="changes that do not depend on how samples are divided among ranks",
                hint="register_buffer, of which all ranks take the first rank's values after each step",
            )
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
        """Return this rank's parameters with their global names, each once, stage by stage."""
        tied = self._tied_weight()
        return [
            (self.model.tied if parameter is tied else name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
        ]

    def copies(self) -> list[nn.Parameter]:
        """Return the parameters that another rank owns: the last stage's copy of a weight shared with the first stage."""
        weight = self._tied_weight()
        return [] if self._tied is None or self._tied.is_owner or weight is None else [weight]

    @property
    def _divided(self) -> bool:
        """Whether other ranks have other samples, or other tokens of the same samples."""
        return self.data_size * self.splits.context.size > 1

    def know_hooks(self) -> None:
        """Take the hooks that the parameters have now for those of meshcomm. Called once, before the first step."""
        self._hooks = {number for _, each in self.named_parameters() for number in hooks_of(each)}

    def check_hooks(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise UnsupportedOp if a program has registered a hook of a parameter, and gradients are summed afterwards."""
        if not (self._divided or self.microbatches > 1 or self._parallel.shard is not None):
            return
        hooked = [name for name, each in named if not hooks_of(each).keys() <= self._hooks]
        if hooked:
            raise UnsupportedOp(
                "a hook of a parameter would be called with other gradients than on one process",
                given=listed(hooked),
                expected="gradients that are changed only after they are summed over microbatches and ranks",
                hint="train.clip_norm; or change gradients in the step method of an optimizer",
            )

    def _check_free(self) -> None:
        """Raise UnsupportedOp if a module belongs to another Trainer or GradientSync, which would take its gradients too."""

        def taken() -> list[str]:
            parts = [pair for module in self.modules for pair in module.named_modules()]
            return [name or "the module" for name, part in parts if isinstance(part, FSDPModule)] + [
                name
                for name, each in self.named_parameters()
                for hook in hooks_of(each).values()
                if getattr(hook, "__module__", "").startswith("meshcomm.")
            ]

        if taken():
            # One that is no longer used may wait to be collected.
            gc.collect()
        if names := list(dict.fromkeys(taken())):
            raise UnsupportedOp(
                "this module already belongs to another Trainer or GradientSync",
                given=listed(names),
                expected="one Trainer for all steps of a module",
                hint="the other Trainer's step, with a loss that covers both uses; `del` of the other Trainer, and of its engine, "
                "before this one is made; or copy.deepcopy(module), before the other is made",
            )

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

    def _check_parts(self) -> None:
        """Raise UnsupportedOp for embeddings whose results depend on which samples a rank has."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        parts = [
            pair for module in self.modules for pair in module.named_modules() if isinstance(pair[1], kinds)
        ]
        several = self.mesh.layout.world_size > 1 or self._parallel.shard is not None
        for option, what, refused in (
            ("max_norm", "a forward pass that changes the weight", several),
            ("scale_grad_by_freq", "gradients divided by the counts of the global batch", self._divided),
        ):
            names = [name for name, part in parts if getattr(part, option)]
            if refused and names:
                raise UnsupportedOp(
                    f"an embedding with {option} cannot be trained on this mesh",
                    given=listed(names),
                    expected=f"no {option}: it is {what}, and a rank sees only its samples",
                    hint=f"{option} = {None if option == 'max_norm' else False}",
                )
        self._check_free()
        self.check_hooks(self.named_parameters())
        if self._parallel.shard is None:
            return
        held = [(name, local(each.detach())) for name, each in self.named_parameters()]
        sparse = [name for name, part in parts if getattr(part, "sparse", False) is True]
        for what, names, expected, hint in (
            ("parameters without elements", [name for name, each in held if not each.numel()],
              "at least one element", "remove them"),
             ("scalar parameters", [name for name, each in held if not each.ndim],
             "parameters with at least one axis", "torch.ones(1) in place of torch.ones(())"),
            ("parameters that are not contiguous", [name for name, each in held if not each.is_contiguous()],
             "contiguous parameters", "nn.Parameter(x.contiguous())"),
            ("complex parameters", [name for name, each in held if each.is_complex()],
             "real parameters", "a real parameter with a last axis of 2, and torch.view_as_complex in forward"),
            ("sparse gradients", sparse, "dense gradients", "sparse=False"),
        ):  # fmt: skip
            if names:
                raise UnsupportedOp(
                    f"a model with {what} cannot be sharded",
                    given=listed(names),
                    expected=expected,
                    hint=f"{hint}; or parallel.data in place of parallel.shard",
                )

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
        """Return a GradientSync for dense parameters and one for experts, because their gradients are summed along
        different dims.
        """
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
        """Return the weight that the embedding and the head share, if one of this rank's stages has it."""
        weights = (getattr(module, "tied_weight", None) for module in self.modules)
        return next((weight for weight in weights if weight is not None), None)


# -- memory: modules are built, split and sharded before any of their values exist -----------------


@contextmanager
def on_meta() -> Iterator[None]:
    """In this context, the parameters of new modules move to the meta device when they are registered. Buffers keep their
    values.

    A constructor's initial values are discarded. At most one of this thread's parameters has memory at a time, and that memory
    is never touched. A parameter for which the host has no memory is created on the meta device. Only one thread can be in
    this context at a time.
    """
    register = nn.Module.register_parameter
    thread = threading.get_ident()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            module._parameters[name] = _like(parameter, parameter.detach().to("meta"))

    with _ALONE, patch.object(nn.Module, "register_parameter", registered), _MetaWhereRefused():
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In this context, the CPU's default generator starts from `seed`. It is restored afterwards. Only one thread can be in
    this context at a time.
    """
    with _ALONE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def without_values(module: nn.Module) -> nn.Module:
    """Move the parameters of `module` to the meta device, in place, and return it. Shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _like(parameter, parameter.detach().to("meta"))
                part._parameters[name] = made[id(parameter)]
    return module


class _MetaWhereRefused(TorchFunctionMode):
    """Creates an uninitialized tensor on the meta device if the host has no memory for it, as can happen with a layer's
    experts."""

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
    """Allocate uninitialized memory on `device` for the parameters of `module` that are on the meta device.

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
    # Plain parameters are removed meanwhile: torch would swap them too, and fail for a parameter with other references.
    for part, name in plain:
        part._parameters[name] = None
    try:
        # torch swaps the contents of DTensors in place, and informs FSDP.
        module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    finally:
        for (part, name), parameter in plain.items():
            part._parameters[name] = parameter
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            # It keeps a second list of its parameters, which this renews.
            part._apply(lambda x: x)


def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Cast all floating-point parameters and buffers to `dtype`, in place. For float64, complex parameters become complex128.

    Other complex tensors, such as rotary tables, keep their dtype: `module.to(dtype)` would drop their imaginary parts.
    """
    learned = {id(each) for each in module.parameters() if each.is_complex() and dtype == torch.float64}

    def as_cast(x: Tensor) -> Tensor:
        own = torch.complex128 if id(x) in learned else x.dtype
        return x.to(device=device, dtype=dtype if x.is_floating_point() else own)

    module._apply(as_cast)


def check_cast(module: nn.Module, train: TrainConfig) -> None:
    """Raise UnsupportedOp if `cast` to train.dtype would change what the module computes without being asked for.

    A module in one shorter dtype is cast to train.dtype, as every master weight is.
    """
    held: dict[torch.dtype, list[str]] = {}
    for name, each in module.named_parameters():
        if each.is_floating_point():
            held.setdefault(each.dtype, []).append(name)
    kinds = "; ".join(f"{str(kind).removeprefix('torch.')}: {listed(names)}" for kind, names in held.items())
    way = {"float32": "module.float()", "float64": "module.double()"}[train.dtype]
    if len(held) > 1:
        raise UnsupportedOp(
            "the parameters of this module have different dtypes, and training would cast all to train.dtype",
            given=f"{kinds}; train.dtype = {train.dtype!r}",
            expected="parameters of one dtype. train.compute_dtype sets the dtype of matrix products",
            hint=f"{way} before the module is given to the Trainer, if all may be {train.dtype}",
        )
    if torch.float64 in held and train.dtype != "float64" and not train.given("dtype"):
        raise UnsupportedOp(
            "this module has float64 parameters, and training would round them to float32",
            given=f"{kinds}; train.dtype is not set, which is {train.dtype!r}",
            expected="train.dtype",
            hint=f'train.dtype = "float64", or train.dtype = {train.dtype!r} to round them',
        )


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    made = nn.Parameter(data, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
