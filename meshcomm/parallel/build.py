"""Builds a rank's stages of a model: created, split, sharded and filled, with what sums their gradients over ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from meshcomm.config import ModelConfig
from meshcomm.errors import ConfigError, TrainingError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import on_all_ranks
from meshcomm.mesh.groups import merged
from meshcomm.parallel.batch_norm import is_synchronised
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.data import GradientSync, broadcast_values
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.expert import separate
from meshcomm.parallel.float8 import check_tokens, to_float8
from meshcomm.parallel.memory import materialise, to_train_mode
from meshcomm.parallel.model import Model
from meshcomm.parallel.pipeline import Accumulate, Pipelined, TiedWeight
from meshcomm.parallel.shard import Sharded
from meshcomm.parallel.splits import Sections, Splits, along, several
from meshcomm.parallel.tensor import TensorSplit, local
from meshcomm.parallel.torch_private import hooks_of, unsaved_buffers
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import Stage, split_layers, stages_of_rank


@final
class LocalModel:
    """This rank's stages of a model, split, sharded and filled. It also sums the stages' gradients over ranks.

    data_size: the number of ranks with different samples. data_coord: this rank's index among those ranks.
    microbatches: the number of microbatches per step on this rank.
    named: this rank's parameters with their global names, each once, stage by stage.
    copy: the parameter that another rank owns, if there is one: the last stage's copy of a weight shared with the first stage.
    """

    def __init__(self, mesh: Mesh, sections: Sections, model: Model, filled: bool) -> None:
        self.mesh, self.model = mesh, model
        self._parallel, _, self._data, self._train = sections
        # The numbers of the hooks that are not a program's.
        self._hooks: set[int] = set()
        parallel, train = self._parallel, self._train
        self.data_size = parallel.copies(dict(mesh.dims))
        self.data_coord = mesh.coord(parallel.data_dims) if parallel.data_dims else 0
        self.microbatches = train.global_batch_size // (self.data_size * train.micro_batch_size)
        self._ranks = mesh.size(parallel.pipeline) if parallel.pipeline else 1
        self.splits = splits = self._split(sections.model)
        self.stages = self._divide()
        self.modules = nn.ModuleList([model.stage(self.splits, stage) for stage in self.stages])
        if train.float8 is not None and not mesh.is_fake:
            on_all_ranks(mesh, "multiply in float8", self._in_float8)
        for module in self.modules:
            to_train_mode(module)
        self._check_parts()
        for name, parameter in self._named():
            if any(fnmatchcase(name, pattern) for pattern in train.frozen):
                parameter.requires_grad_(False)
        # Sharding replaces the modules' parameters.
        sharded = None if parallel.shard is None else self._sharded()
        on_all_ranks(mesh, "fill the model", partial(self._fill, filled))
        self.gradients: list[GradientSync | Sharded] = self._synced() if sharded is None else [sharded]
        self.named = self._named()
        self.copy: nn.Parameter | None = None
        self._tied: TiedWeight | None = None
        if model.tied and splits.pipeline is not None:
            weight = self._tied_weight()
            tied = TiedWeight(mesh, splits.pipeline, weight)
            tied.copy()
            self.copy = None if tied.is_owner else weight
            self._tied = tied if weight is None or weight.requires_grad else None
        self._learns = {name: parameter.requires_grad for name, parameter in self.named}
        self._unchanged = self.named if self._divided else []
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
        if self.splits.pipeline is None:
            before = next(
                (gradient.microbatch for gradient in self.gradients if isinstance(gradient, Sharded)), None
            )
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
            self.splits.pipeline,
            list(self.modules),
            loss,
            microbatches=self.microbatches,
            schedule=parallel.options.schedule,
            shapes=(first, (first[0], tokens, self.model.hidden_size), last),
            dtype=self._compute_dtype,
            draws=draws,
        )

    def start_step(self, number: int) -> None:
        """Called before the first forward pass of a step. Raises TrainingError if parameters were frozen, unfrozen or added."""
        # The parameters of now: a program may have added some to the module.
        named = self._named()
        if moved := [
            name for name, parameter in named if parameter.requires_grad != self._learns.get(name, False)
        ]:
            how = "frozen" if self._learns.get(moved[0]) else "unfrozen"
            how = how if moved[0] in self._learns else "added"
            raise TrainingError(
                f"parameters were {how} after the Trainer was made, and its optimizer would not follow",
                given=f"requires_grad of {listed(moved)}, on {self.mesh.label}",
                expected="the same parameters that learn in each step",
                hint="trainer.save(folder), change train.frozen or requires_grad, and make a new Trainer of a new module, which loads the folder",
            )
        for gradients in self.gradients:
            gradients.start()
        for module in self.modules if self.model.drops else ():
            module.step = number  # type: ignore[assignment]
        self._versions = [tensor._version for _, tensor in self._unchanged]
        self.check_hooks(named)

    def finish_step(self) -> list[str]:
        """Called after the last backward pass. Sums gradients and, as DDP does, broadcasts the first rank's buffers. Returns the
        parameters that got no gradient on this rank, without those that may have none.

        Raises UnsupportedOp if a forward pass has changed a parameter.
        """
        pairs = zip(self._unchanged, self._versions, strict=True)
        if written := [name for (name, tensor), version in pairs if tensor._version != version]:
            raise UnsupportedOp(
                "a forward pass of this model changes its parameters",
                given=listed(written),
                expected="changes that do not depend on how samples are divided among ranks",
                hint="register_buffer, of which all ranks take the first rank's values after each step",
            )
        missing = [name for gradients in self.gradients for name in gradients.finish(raises=False)]
        for module in self.modules:
            self.splits.tensor.finish_gradients(module)
        if self.splits.gradients and self._buffers:
            buffers = [part._buffers[key] for part, key in self._buffers]
            broadcast_values(
                self.mesh, self.splits.gradients, [buffer for buffer in buffers if buffer is not None]
            )
        if self._tied is not None:
            self._tied.sum_gradients()
        return missing

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        tied = self._tied_weight()
        return [
            (self.model.tied if parameter is tied else name, parameter)
            for module in self.modules
            for name, parameter in module.named_parameters()
        ]

    @property
    def _divided(self) -> bool:
        """Whether other ranks have other samples, or other tokens of the same samples."""
        return self.data_size * self.splits.context.size > 1

    def know_hooks(self) -> None:
        """Take the hooks that the parameters have now for those of meshcomm. Called once, before the first step."""
        self._hooks = {number for _, parameter in self.named for number in hooks_of(parameter)}

    def check_hooks(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise UnsupportedOp if a program has registered a hook of a parameter, and gradients are summed afterwards."""
        if not (self._divided or self.microbatches > 1 or self._parallel.shard is not None):
            return
        hooked = [name for name, parameter in named if not hooks_of(parameter).keys() <= self._hooks]
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
                for name, parameter in self._named()
                for hook in hooks_of(parameter).values()
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
        weight = settings.balance_loss if settings is not None and settings.experts else 0.0
        apart = [parallel.context] if parallel.context else []
        return Splits(
            TensorSplit(
                mesh,
                parallel.tensor,
                dtype,
                parallel.options.sequence_parallel,
                overlaps=parallel.options.schedule != "zero_bubble",
            ),
            ContextSplit(mesh, parallel.context, parallel.options.attention),
            parallel.expert,
            balance_weight=weight / (self.microbatches * self.data_size),
            data=several(mesh, parallel.data_dims),
            gradients=several(mesh, parallel.gradient_dims),
            pipeline=parallel.pipeline if self._ranks > 1 else None,
            draws=Draws(mesh, train.seed, apart) if self.model.draws else None,
        )

    def _divide(self) -> list[Stage]:
        """Return the stages of this rank."""
        parallel, model = self._parallel, self.model
        per_rank = parallel.options.stages_per_rank if self._ranks > 1 else 1
        count = self._ranks * per_rank
        model.check(self.splits, count)
        costs = model.costs(1 if self._data is None else self._data.seq_len)
        layers = split_layers(model.num_layers, count, costs.layers, first=costs.embedding, last=costs.head)
        coord = self.mesh.coord(parallel.pipeline) if parallel.pipeline else 0
        return [Stage(index, count, layers[index]) for index in stages_of_rank(coord, self._ranks, per_rank)]

    def _in_float8(self) -> None:
        train, data = self._train, self._data
        if data is not None:
            check_tokens(train.micro_batch_size * data.seq_len // self.splits.context.size)
        for module in self.modules:
            to_float8(module, str(train.float8), self.mesh.device, self.model.vocab_size)

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
        self.check_hooks(self._named())
        if self._parallel.shard is None:
            return
        held = [(name, local(parameter.detach())) for name, parameter in self._named()]
        sparse = [name for name, part in parts if getattr(part, "sparse", False) is True]
        for what, names, expected, hint in (
            ("parameters without elements", [name for name, x in held if not x.numel()],
              "at least one element", "remove them"),
             ("scalar parameters", [name for name, x in held if not x.ndim],
             "parameters with at least one axis", "torch.ones(1) in place of torch.ones(())"),
            ("parameters that are not contiguous", [name for name, x in held if not x.is_contiguous()],
             "contiguous parameters", "nn.Parameter(x.contiguous())"),
            ("complex parameters", [name for name, x in held if x.is_complex()],
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
            zeros=self._train.on_unused == "zero",
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
        settings: dict[str, Any] = {"bucket_mb": parallel.options.bucket_mb, "hooks": hooks}
        settings |= {
            "zeros": self._train.on_unused == "zero",
            "op": "sum",
            "microbatches": self.microbatches,
            "broadcast": False,
        }
        of_experts = parallel.gradient_dims
        if parallel.expert:
            of_experts = parallel.expert_gradient_dims(mesh.layout.views)
        synced: list[GradientSync | Sharded] = []
        for kind, dims in enumerate((parallel.gradient_dims, of_experts)):
            parameters = [pair for kinds_of_module in kinds for pair in kinds_of_module[kind].items()]
            if parameters:
                synced.append(GradientSync(mesh, along(mesh, dims), parameters, **settings))
        return synced

    def _tied_weight(self) -> nn.Parameter | None:
        """Return the weight that the embedding and the head share, if one of this rank's stages has it."""
        weights = (getattr(module, "tied_weight", None) for module in self.modules)
        return next((weight for weight in weights if weight is not None), None)
