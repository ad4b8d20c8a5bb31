"""Makes a module that is written for one device trainable on a mesh, as its ModelSpec describes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.config import TrainConfig
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.models.assumptions import own_positions
from meshcomm.models.family_code import family_code
from meshcomm.models.lora import hold_frozen
from meshcomm.models.own_forward import OwnForward, absent_parts, put_in
from meshcomm.models.plans import with_shared_heads
from meshcomm.models.spec import (
    KINDS,
    ModelSpec,
    StageContext,
    blocks_of,
    check_kinds,
    check_names,
    cut,
    default_values,
    unfilled,
)
from meshcomm.models.weights import Folder, Source
from meshcomm.parallel.batch_norm import batch_norms, synchronise
from meshcomm.parallel.become import become
from meshcomm.parallel.context.documents import places, within
from meshcomm.parallel.dropout import DROPOUTS, Dropout, Drops, check_dropouts
from meshcomm.parallel.expert import spread_experts
from meshcomm.parallel.loss import check_loss, logits_of
from meshcomm.parallel.memory import cast, check_cast, on_meta, seeded
from meshcomm.parallel.model import Model, OwnLoss
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.recompute import compile_blocks, run
from meshcomm.parallel.splits import Splits, along
from meshcomm.parallel.tensor import TensorSplit, assign, tensor_parallel
from meshcomm.parallel.tensor.example import Calls, explained
from meshcomm.parallel.tensor.plan import Rule, matches, rules_of
from meshcomm.parallel.tree import called, first_tensor, with_tensors
from meshcomm.predict.stages import PartCosts
from meshcomm.transfer.fused import unfused


@final
class SpecModel(Model):
    """A `Model` that a spec describes.

    seq_len: number of tokens in a full sample.
    family:  whether the spec describes a family of models, whose plan may name parts that this model lacks.
    packed:  whether samples are packed documents.
    Raises ConfigError for names in the spec that match nothing. `check` raises UnsupportedOp for features that the spec
    omits.
    """

    def __init__(
        self,
        spec: ModelSpec,
        train: TrainConfig,
        seq_len: int,
        *,
        family: bool = False,
        packed: bool = False,
    ) -> None:
        self.spec, self._train, self.seq_len, self.family, self.packed = spec, train, seq_len, family, packed
        check_kinds(spec)
        with on_meta(), seeded(train.seed):
            whole = spec.module()
        if not family:
            check_names(spec, whole)
        self.num_layers = max(1, len(blocks_of(whole, spec.layers)))
        self.hidden_size, self.vocab_size = spec.hidden_size, spec.vocab_size
        self.tied = spec.tied[0] if spec.tied else ""
        self.drops = any(spec.dropped.values())
        self.any_length = not self.drops and not packed
        self.saves_all = not spec.added
        self.own_loss = None if spec.loss is None else OwnLoss(spec.loss, spec.loss_takes_slices)
        # A family's own loss is that of routers, which choose experts for all tokens.
        self.counts_all_tokens = family and spec.loss is not None
        self._batch_norms = batch_norms(whole)
        blocks = list(blocks_of(whole, spec.layers).values())
        self._repeated = [place for place, block in enumerate(blocks) if block in blocks[:place]]
        self._shared = [] if self._repeated else _shared_by_stages(whole, spec)
        self._dropouts = [pair for pair in whole.named_modules() if isinstance(pair[1], DROPOUTS)]
        # torch lists a tied weight once, under the name of the module that was registered first, which may be the head.
        head, embedding = (spec.tied[1], spec.tied[0]) if spec.tied else ("", "")
        named = (embedding if name == head else name for name, _ in whole.named_parameters())
        self._names = list(dict.fromkeys(named))
        saved = whole.state_dict()
        self._buffers = [name for name, _ in whole.named_buffers() if name in saved and self.spec.weights]
        # transformers' class attributes: names that occur only in older folders, and the part without a head.
        self._ignored = tuple(getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ())
        self._base = str(getattr(whole, "base_model_prefix", ""))

    def costs(self, seq_len: int) -> PartCosts:
        """See Model."""
        return super().costs(seq_len) if self.spec.costs is None else self.spec.costs(seq_len)

    def stage(self, splits: Splits, stage: Stage) -> nn.Module:
        """See Model."""
        spec, train = self.spec, self._train
        module: Any = unfilled(spec, train.seed, self.family)
        if not self.family:
            check_cast(module, train)
        cast(module, getattr(torch, train.dtype))
        if spec.added and train.compute_dtype:
            hold_frozen(module, getattr(torch, train.compute_dtype), spec.tied or ())
        for part in module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(splits.mesh.device)
        if self._batch_norms:
            synchronise(module, splits.mesh, along(splits.mesh, splits.data))
        if spec.tied and stage.count == 1:
            head = module.get_submodule(spec.tied[1].rpartition(".")[0])
            setattr(head, spec.tied[1].rpartition(".")[2], module.get_parameter(spec.tied[0]))
        calls_blocks, order = bool(spec.layers) and spec.forward is None, list(blocks_of(module, spec.layers))
        if calls_blocks:
            dtype = getattr(torch, train.compute_dtype or train.dtype)
            absent = absent_parts(module, spec.layers, spec.first, stage, dtype, splits.mesh.device)
        layers = cut(module, spec, stage)
        if spec.attention is not None and (self.packed or splits.context.size > 1):
            spec.attention(module, splits.context.attend)
        become(module, _Stage)
        module.meshcomm_stage = _Facts(self, splits, stage, layers)
        split = splits.tensor
        experts = self._spread(module, splits)
        if split.size > 1:
            plan = dict(spec.split)
            if split.sequence_parallel:
                plan |= spec.sequence or {}
            if not self._divides(splits):
                plan |= spec.undivided or {}
            plan = {pattern: entry for pattern, entry in plan.items() if _has(module, pattern)}
            if self.family:
                plan = with_shared_heads(plan, module, split.size)
            rules = rules_of(split, module, plan)[0]
            behind = (rules.get(name, Rule()) for name in spec.last)
            module.meshcomm_stage.gathers = any("whole" in (r.input, r.sequence) for r in behind)
            if not train.compile:
                module.meshcomm_stage.rules = rules
            tensor_parallel(module, split.mesh, split.dim, plan, sequence_parallel=split.sequence_parallel)
        for name, part in experts.items():
            module.set_submodule(name, part)
        if self.drops:
            _have_dropped(module, spec.dropped, split)
        if calls_blocks:
            put_in(module, spec.layers, order, absent)
            for name in spec.first if stage.is_first and train.compute_dtype else ():
                if isinstance(part := module.get_submodule(name), nn.Embedding):
                    part.register_forward_hook(lambda part, args, output: output.to(dtype))
        if train.compile:
            facts = module.meshcomm_stage
            facts.activation_checkpointing = compile_blocks(
                dict.fromkeys(layers), facts.activation_checkpointing
            )
        return module  # type: ignore[no-any-return]

    def _spread(self, module: nn.Module, splits: Splits) -> dict[str, nn.Module]:
        """Distribute a module's experts over ranks and return them by name. The experts are removed from the module,
        because plans do not cover them.
        """
        experts = {
            name: (part, axes)
            for name, part in module.named_modules()
            for pattern, axes in self.spec.experts.items()
            if matches(pattern, name)
        }
        for name, (part, axes) in experts.items():
            spread_experts(part, splits.tensor, splits.expert, axes, name)
            if self._train.compile:
                # A loop over experts runs different operations in every step.
                part.forward = torch.compiler.disable(part.forward)
            module.set_submodule(name, nn.Identity())
        return {name: part for name, (part, _) in experts.items()}

    def fill(self, module: nn.Module, stage: Stage) -> None:
        """See Model."""
        spec, parameters = self.spec, unfused(dict(module.named_parameters()), module)
        if spec.weights is None:
            drawn: Mapping[str, Tensor] = {} if spec.initialise else default_values(spec, self._train.seed)
            for name, parameter in parameters.items():
                assign(
                    parameter,
                    spec.initialise(name, tuple(parameter.shape)) if spec.initialise else drawn[name],
                )
            return
        with Folder(spec.weights, **self.folder_options()) as folder:
            sources = self.sources(folder)
            folder.check(sources, [name for name in self._names if not self._is_added(name)], self._buffers)
            for name, parameter in parameters.items():
                if spec.initialise is not None and self._is_added(name):
                    assign(parameter, spec.initialise(name, tuple(parameter.shape)))
                elif spec.tied and name in spec.tied:
                    folder.read_twice([sources[tied] for tied in spec.tied if tied in sources], parameter)
                else:
                    folder.read(sources[name], parameter)
            for name, buffer in module.named_buffers():
                if name in self._buffers and name in sources:
                    folder.read(sources[name], buffer)

    def _is_added(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self.spec.added)

    def folder_options(self) -> dict[str, Any]:
        """Return the arguments of `Folder` for this model."""
        tied = (f"^{re.escape(name)}$" for name in (self.spec.tied or ())[1:])
        return {"base": self._base, "ignored": (*self._ignored, *tied)}

    def sources(self, folder: Folder) -> Mapping[str, Source]:
        """Return the source of each parameter in a folder.

        A tied weight that the folder stores twice is listed under both names.
        """
        stored = self.spec.stored
        if stored is not None and not callable(stored):
            return stored.sources(folder.names)
        names = (*self._names, *(self.spec.tied or ())[1:], *set(self._buffers).intersection(folder.names))
        return {name: Source(name) if stored is None else Source(*stored(name)) for name in names}

    def gives_positions(self, splits: Splits) -> bool:
        """Return whether `forward` is given positions. A family that is given all tokens of a sample counts itself, as it does
        for its users: some start at another number, or do not count padding.
        """
        return not self.family or self.packed or splits.context.size > 1

    def outputs(self, splits: Splits) -> int:
        """See Model."""
        return super().outputs(splits) if self._divides(splits) else self.vocab_size

    def _divides(self, splits: Splits) -> bool:
        spec = self.spec
        whole = spec.undivided and all(spec.split.get(name) == how for name, how in spec.undivided.items())
        return not whole and not (spec.undivided and self.vocab_size % splits.tensor.size)

    def check(self, splits: Splits, stages: int) -> None:
        """See Model."""
        spec, train, split = self.spec, self._train, splits.tensor
        check_loss(spec.loss)
        used = {
            "parallel.tensor": split.size > 1,
            "parallel.options.sequence_parallel": split.sequence_parallel,
            "parallel.context": splits.context.size > 1,
            "parallel.pipeline": stages > 1,
            "parallel.expert": splits.expert is not None,
            "train.activation_checkpointing": bool(train.activation_checkpointing),
            "train.compile": train.compile,
            "data.document_mask": self.packed,
        }
        cannot = {KINDS[part]: why for part, why in spec.cannot.items()}
        if self.family and self.gives_positions(splits) and (why := own_positions(spec)):
            cannot = {"parallel.context": why, "data.document_mask": why, **cannot}
        if "context" in spec.cannot:
            # If a model cannot attend to the tokens of other ranks, its attention cannot be limited to documents either.
            cannot["data.document_mask"] = spec.cannot["context"]
        if self._shared:
            why = f"{listed(self._shared)} are one weight, of which two stages would have copies"
            if spec.tied is None and len(self._shared) == 2:
                why += "; if they are an embedding and a head, ModelSpec.tied names them"
            cannot |= {"parallel.pipeline": why}
        if self._repeated:
            again = listed([f"{spec.layers}.{place}" for place in self._repeated])
            why = f"blocks that are in {spec.layers!r} before, and share their weights: {again}"
            cannot |= {"parallel.pipeline": why, "parallel.options.sequence_parallel": why}
        if self._batch_norms:
            norm = self._batch_norms[0]
            why = f"{norm} averages over all tokens of a batch, of which each rank has only a part"
            again = f"{norm} would update its statistics twice for each batch"
            cannot = {
                "parallel.tensor": why,
                "parallel.context": why,
                "train.activation_checkpointing": again,
                **cannot,
            }
        for part, why in cannot.items():
            if used.get(part):
                raise UnsupportedOp(
                    f"this model cannot be trained with {part}",
                    given=why,
                    expected="results that are the same on every mesh",
                    hint=f"remove {part}",
                )
        check_dropouts(self._dropouts, split)
        for part, names, what, there in self._needed():
            if used.get(part, True) and not there:
                raise UnsupportedOp(
                    f"this model cannot be trained with {part}",
                    given=f"a ModelSpec without {names}",
                    expected=what,
                    hint=f"ModelSpec({names.split()[0]}=...), or remove {part}",
                )

    def _needed(self) -> tuple[tuple[str, str, str, object], ...]:
        """Return each feature's setting, the field that it needs in the spec, a description, and whether the field is set."""
        spec = self.spec
        blocks, own = bool(spec.layers), spec.forward is None
        return (
            ("parallel.tensor", "split", "a plan of how each layer is split", spec.split),
            ("parallel.options.sequence_parallel", "sequence", "which parts work on slices of the sequence", spec.sequence is not None),
            ("parallel.context", "attention", "where attention is computed", spec.attention),
            ("parallel.context", "positions", "which argument takes positions", spec.positions or not own),
            ("data.document_mask", "attention", "where attention is computed", spec.attention),
            ("data.document_mask", "layers", "blocks that receive document numbers", blocks),
            ("data.document_mask", "positions", "which argument takes positions", spec.positions or not own),
            ("parallel.pipeline", "layers", "which blocks are divided among stages", blocks),
            ("parallel.pipeline", "forward", "how stages run on one tensor that is not of tokens", self.vocab_size or not own),
            ("ModelSpec.dropped", "layers", "blocks that receive sample numbers", blocks or not self.drops),
            ("train.activation_checkpointing", "layers", "which blocks are recomputed in the backward pass", blocks),
            ("train.compile", "layers", "which blocks are compiled", spec.layers),
            ("parallel.expert", "experts", "which weights are an expert's", spec.experts),
        )  # fmt: skip


def _shared_by_stages(module: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the names of one parameter that two stages may have, or an empty list. The weights in `spec.tied` are left out.

    Such a parameter belongs to two blocks, to a block and a part of the first or the last stage, or to parts of both stages.
    """
    parts = {**dict.fromkeys(spec.first, "first"), **dict.fromkeys(spec.last, "last")}
    parts |= {f"{spec.layers}.{key}": key for key in blocks_of(module, spec.layers)}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for aliases in names.values():
        places = {
            place for name in aliases for part, place in parts.items() if f"{name}.".startswith(f"{part}.")
        }
        if len(places) > 1 and {*aliases} != {*(spec.tied or ())}:
            return aliases
    return []


class _Facts:
    """The data that a stage's module needs. Copies of the module share this object."""

    def __init__(self, model: SpecModel, splits: Splits, stage: Stage, layers: tuple[nn.Module, ...]) -> None:
        self.spec, self.splits, self.stage, self.layers = model.spec, splits, stage, layers
        self.numbers = dict(zip(map(id, layers), stage.layers, strict=True)) if layers else {}
        train = model._train
        self.seed, self.family = train.seed, model.family
        self.activation_checkpointing = train.activation_checkpointing
        self.compute = None if train.compute_dtype is None else getattr(torch, train.compute_dtype)
        self.between = self.compute or getattr(torch, train.dtype)
        length = model.seq_len if model.vocab_size or stage.count > 1 else 0
        self.positions = splits.context.positions(length)
        self.positions_name = model.spec.positions if model.gives_positions(splits) else ""
        # Set until a split stage has run for the first time.
        self.rules: Mapping[str, Rule] | None = None
        # Whether the norm and the head after the blocks take full sequences.
        self.gathers = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Facts:
        return self

    def unsplit_calls(self, x: Any) -> Calls:
        """Run the full module on `x` without values, and return the calls to its parts up to the first error."""
        calls = Calls()
        with contextlib.suppress(Exception), torch.device("meta"), torch.no_grad():
            module = self.spec.module()
            with calls.watching(module):
                called(module, with_tensors(lambda tensor: tensor.to("meta"), x))
        return calls

    def exact(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the code of a transformers family."""
        return family_code(self.between) if self.family else contextlib.nullcontext()

    def passed_on(self, y: Any, samples: int) -> Tensor:
        """Return the tensor for the next stage, which has allocated memory for it.

        Raises ShapeError if the tensor does not have the expected shape.
        """
        split = self.splits.tensor
        tokens = len(self.positions) // (split.size if split.sequence_parallel else 1)
        expected = (samples, tokens, self.spec.hidden_size)
        if not isinstance(y, Tensor) or tuple(y.shape) != expected:
            raise ShapeError(
                f"stage {self.stage.index} does not pass on hidden states",
                given=f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}",
                expected=f"{expected}: samples, tokens, hidden_size",
                hint="remove parallel.pipeline; or use ModelSpec(forward=...), and the hidden_size of its blocks",
            )
        # Sent tensors must be contiguous.
        return y.to(self.between).contiguous()

    def last_output(self, y: Any) -> Any:
        """Return the outputs for the loss. Raises UnsupportedOp for an output that a pipeline cannot return."""
        output = logits_of(y) if self.spec.loss is None else y
        if self.stage.count > 1 and not isinstance(output, Tensor):
            raise UnsupportedOp(
                "the last stage of a pipeline returns one tensor",
                given=f"a {type(y).__name__}",
                expected="a tensor, from which the loss is computed",
                hint="ModelSpec(forward=...), which returns one; or remove parallel.pipeline",
            )
        return output

    def in_float64(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` wrapped so that it keeps float64, even when it is called again in the backward pass."""
        if not self.family or self.between != torch.float64:
            return call

        def called(*args: Any, **named: Any) -> Any:
            with self.exact():
                return call(*args, **named)

        return called

    def positions_of(self, x: Any, documents: Tensor | None) -> Tensor:
        """Return the positions of this rank's part of axis 1 of the inputs, which may have any length without a pipeline: in
        samples, (tokens,), or in documents, (samples, tokens).
        """
        if documents is not None:
            return places(documents)[:, self.positions]
        first, context = first_tensor(x), self.splits.context
        length = first.shape[1] if first.ndim > 1 else 0
        if self.stage.count > 1 or length == len(self.positions):
            return self.positions
        return context.positions(length * context.size)

    def own_forward(
        self, forward: Callable[..., Any], through: Callable[..., Any], x: Any, positions: Tensor
    ) -> Any:
        """Return the result of the module's own forward function for x on this stage."""
        entering, tokens = None, x
        if not self.stage.is_first:
            # Only the number of tokens is used.
            entering, tokens = x, self.positions.new_zeros(()).expand(x.shape[0], len(self.positions))
        name = self.positions_name
        named = {name: positions if positions.ndim > 1 else positions.unsqueeze(0)} if name else {}
        run = OwnForward(self.stage, self.layers, through, entering, self.splits.tensor, self.gathers)
        return run.run(forward, tokens, named)

    def through(
        self,
        drops: tuple[int, Tensor] | None,
        documents: Tensor | None,
        block: nn.Module,
        /,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Run a block and keep or recompute its activations. The block's index determines its random numbers.

        drops: the step number and the sample numbers, if there is dropout.
        """
        number, draws = self.numbers.get(id(block)), self.splits.draws
        if number is None:
            raise UnsupportedOp(
                "here.through was called with an argument that is not a block of the model",
                given=f"a {type(block).__name__}",
                expected=f"one of here.layers: the {len(self.layers)} blocks of {self.spec.layers!r} on this stage",
                hint="use here.through(block, x, mask=mask) for blocks, and call other parts directly",
            )
        call: Callable[..., Any] = block
        if drops is not None:
            x: Tensor = next(iter((*args, *named.values())))
            positions = self.positions[self.splits.tensor.positions(x.shape[1])]
            drops_here = Drops.at(self.seed, drops[0], drops[1], positions)
            call = _with_drops(block, (drops_here, drops_here._replace(positions=self.positions)))
        if draws is not None:
            call = draws.seeded(number, call)
        call = within(documents, call)
        return run(self.activation_checkpointing, number, self.in_float64(call), *args, **named)


# The dropout positions of the current block's input, and of this rank's full sequence. They are set again when a block
# is recomputed, because another microbatch may have started in the meantime.
_DROPS: Final[ContextVar[tuple[Drops, ...]]] = ContextVar("drops", default=())


def _with_drops(block: nn.Module, drops: tuple[Drops, ...]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        token = _DROPS.set(drops)
        try:
            return block(*args, **named)
        finally:
            _DROPS.reset(token)

    return call


def _have_dropped(module: nn.Module, shares: Mapping[str, float], split: TensorSplit) -> None:
    """Add dropout to the outputs of parts whose names match a pattern. If several match, the largest drop fraction applies."""
    for name, part in list(module.named_modules()):
        if share := max((share for pattern, share in shares.items() if matches(pattern, name)), default=0):
            part.meshcomm_dropout = Dropout(share, name)
            part.register_forward_hook(partial(_drop, split))


def _drop(split: TensorSplit, part: Any, args: object, output: Any) -> Any:
    """A forward hook that applies dropout. In transformers, attention returns a tuple of its output and its weights.

    meshcomm_features: the total number of features over all ranks, for a part whose output may be split along its features.
    """
    if isinstance(output, tuple):
        return _drop(split, part, args, output[0]), *output[1:]
    drops = _DROPS.get()
    if not drops:
        return part.meshcomm_dropout(output)
    # Mixtures of experts use the shape (batch * sequence, width).
    x = output.unflatten(0, (len(drops[0].keys), -1)) if output.ndim == 2 else output
    drops_of_length = next((drop for drop in drops if len(drop.positions) == x.shape[1]), drops[0])
    width = x.shape[-1]
    first = split.coord * width if getattr(part, "meshcomm_features", width) != width else 0
    return part.meshcomm_dropout(x, drops_of_length, first).view_as(output)


class _Stage:
    """The part of a user's module on one stage. step: the number of the current step, if there is dropout."""

    meshcomm_stage: _Facts
    step: int

    @property
    def meshcomm_blocks(self) -> tuple[nn.Module, ...]:
        """The blocks that FSDP gathers one at a time."""
        return self.meshcomm_stage.layers

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that the embedding and the head share, or None if this stage does not have it."""
        module: Any = self
        for name in self.meshcomm_stage.spec.tied or ():
            with contextlib.suppress(AttributeError):
                return module.get_parameter(name)  # type: ignore[no-any-return]
        return None

    def meshcomm_stored(self, name: str, value: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of the folder in which a parameter of this stage is stored. See `stored_parts`."""
        facts = self.meshcomm_stage
        tied = facts.spec.tied or ()
        if facts.stage.count == 1 or name not in tied:
            return facts.spec.stored_tensors(name, value)
        # The first and the last stage have equal copies of a weight that the embedding and the head share, under both names.
        return {key: part for alias in tied for key, part in facts.spec.stored_tensors(alias, value).items()}

    def forward(
        self, x: Any = None, samples: Tensor | None = None, documents: Tensor | None = None, **others: Any
    ) -> Any:
        """Run the parts of the module on this stage.

        others: named arguments, which only a ModelSpec's own forward passes: raises UnsupportedOp.

        samples: int64 (batch,), the samples' indices in the global batch; see Model.drops.
        documents: int64 (batch, full sequence); see Model.packed.

        Raises TrainingError if the first forward pass of a split module fails. The error names the part and the user's source
        line, and suggests fixes.
        """
        facts: _Facts = self.meshcomm_stage
        if others:
            raise UnsupportedOp(
                "a stage of a ModelSpec takes its inputs as one argument",
                given=f"named arguments {', '.join(others)}",
                expected="the inputs as they are given to the step",
                hint="in ModelSpec(forward=...), call the parts of the module, like module.embed(inputs['ids']), and not the module itself",
            )
        if facts.rules is None:
            return self._computed(x, samples, documents)
        rules, calls = facts.rules, Calls()
        module: Any = self
        try:
            with calls.watching(module, x):
                y = self._computed(x, samples, documents)
        except Exception as error:
            # Wrong sizes raise these exceptions. torch's own exception types report problems with memory or other ranks.
            if type(error).__module__.partition(".")[0] not in ("builtins", "einops"):
                raise
            before = facts.unsplit_calls(x)
            raise explained(error, facts.splits.tensor, rules, before, calls) from error
        facts.rules = None
        return y

    def _computed(self, x: Any, samples: Tensor | None, documents: Tensor | None) -> Any:
        facts: _Facts = self.meshcomm_stage
        kind = facts.splits.mesh.device.type
        mixed = torch.autocast(kind, facts.compute) if facts.compute else contextlib.nullcontext()
        with mixed, facts.exact():
            drops = None if samples is None else (self.step, samples)
            through = partial(facts.through, drops, documents)
            positions = facts.positions_of(x, documents)
            if facts.spec.forward is None:
                if not facts.layers:
                    y = called(super().forward, x)  # type: ignore[misc]
                else:
                    y = facts.own_forward(super().forward, through, x, positions)  # type: ignore[misc]
                if not facts.stage.is_last:
                    return facts.passed_on(y, len(x))
                return facts.last_output(y)
            context = StageContext(facts.stage, facts.layers, positions, facts.between, through)
            y = facts.spec.forward(self, x, context)
        if not facts.stage.is_last:
            return facts.passed_on(y, len(x))
        if isinstance(y, Tensor):
            return y.to(facts.between)
        return with_tensors(
            lambda tensor: tensor.to(facts.between) if tensor.is_floating_point() else tensor, y
        )


def _has(module: nn.Module, pattern: str) -> bool:
    """Return whether a plan's pattern matches any part on this stage. Some patterns match only parts on other stages."""
    named = chain(module.named_modules(), module.named_parameters())
    return any(matches(pattern, name) for name, _ in named)
