"""ModelSpec: how to cut a plain module into stages, split it over ranks, and load its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from meshcomm.errors import ConfigError, ShapeError
from meshcomm.models.weights import Conversions, Names
from meshcomm.parallel.context import ByHeads
from meshcomm.parallel.expert.packed import Axes
from meshcomm.parallel.memory import on_meta, seeded, without_values
from meshcomm.parallel.model import LossOf
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.tensor.plan import Entry, matches
from meshcomm.predict.stages import PartCosts


class Attend(Protocol):
    """Attention of this rank's queries over the full sequence; see `ContextSplit.attend`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        by: ByHeads | None = None,
    ) -> Tensor: ...


class StageContext(NamedTuple):
    """The context in which a forward function runs.

    stage:     the pipeline stage that runs.
    layers:    the blocks of this stage, in order.
    positions: int64 (tokens,): the position of each of this rank's tokens in its sample, before
               sequence_parallel splits the tokens. With data.document_mask, int64 (samples, tokens): positions
               in the documents.
    dtype:     the dtype of hidden states: train.compute_dtype, or train.dtype if compute_dtype is not set.
    through:   runs a block as configured, with x as its first argument: `here.through(block, x, mask=None)`.
    """

    stage: Stage
    layers: tuple[nn.Module, ...]
    positions: Tensor
    dtype: torch.dtype
    through: Callable[..., Any]


Forward: TypeAlias = Callable[[Any, Any, StageContext], Any]

KINDS: Final[Mapping[str, str]] = {
    **{part: f"parallel.{part}" for part in ("tensor", "context", "pipeline", "expert")},
    "sequence_parallel": "parallel.options.sequence_parallel",
}
"""Each key of ModelSpec.cannot -> the corresponding setting of the configuration."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model for `Trainer` and `[model] build`. If a feature needs a field that is omitted, an error names the field.

    module:     builds the full model. Every rank calls it. Memory is allocated for buffers but not for parameters.
    hidden_size: size of a token's hidden state between layers; required for pipelines.
    vocab_size: number of token IDs, and of logits that the head outputs. 0 if inputs are not tokens: such a model is not
                compared with the unsplit model before training.
    layers:     dotted name of the ModuleList or ModuleDict that contains the blocks. A pipeline divides the
                blocks into stages, FSDP gathers them one at a time, and `train.activation_checkpointing` and
                `train.compile` apply to each of them. If "", the model cannot be divided.
    first:      dotted names of the modules that only the first stage needs, such as an embedding.
    last:       dotted names of the modules that only the last stage needs, such as a norm and a head.
    forward:    (module, x, here) -> y: runs the parts of the module on this stage, on inputs, which may be a tree, or hidden
                states. The last stage may return a tree if `loss` is given and there is no pipeline.
                Parts on other stages are None. If omitted, `module.forward` is used on every stage: see
                `own_forward`.
    positions:  the argument of `module.forward` that takes positions, int64 (1, tokens); for context
                parallelism. A family of transformers is given positions only with context parallelism or packed documents.
    split:      a plan for `tensor_parallel`, which splits the module along the tensor dim.
    sequence:   entries to add to `split` or replace in it if parallel.options.sequence_parallel is true.
    undivided:  entries that replace entries of `split` if `vocab_size` is not divisible by the number of ranks.
                The embedding and the head then stay unsplit, and every rank computes all logits. The style "vocab" splits
                both for any size.
    attention:  (module, attend) -> None: makes every attention layer of the module call `attend`; for context
                parallelism.
    experts:    patterns of modules with packed experts -> how their parameters are split along the tensor dim.
                Axis 0 of each parameter is the expert; see `meshcomm.parallel.expert.spread_experts`.
    dropped:    pattern of parts of blocks, such as "layers.*.mlp" -> dropout probability for the output, (batch,
                sequence, hidden_size), in training. The same elements are dropped on every mesh. Needs `layers`
                and `forward`.
    tied:       names of the weights of the embedding and the head, if they share one weight.
    added:      patterns of parameters that are not in `weights` and that `initialise` generates, such as adapters.
                A checkpoint contains only these parameters. All other parameters are frozen, and are read or
                generated again.
    initialise: (name, shape) -> the values of a full parameter, the same on every rank. If None, `module`
                initializes the parameters after torch.manual_seed(train.seed); each rank then briefly builds the
                full model.
    original:   (weights) -> the unsplit reference model in float64. The argument maps the names that `stored` returns
                to tensors, or is None to read the folder. `meshcomm parity` compares with this model before the first
                step. If omitted, the reference is the model that `module` builds.
    weights:    a folder of safetensors that contains the parameters. If None, the parameters are initialized.
    stored:     (name) -> the name of the parameter in the folder, and whether it is stored transposed. For a
                parameter with three axes, such as an experts' weight, the name is a tuple of rows of names: see
                meshcomm.models.weights.Names. `stored` may also be an object that converts in both directions:
                see meshcomm.models.weights.Conversions.
    loss:       (outputs, targets) of a microbatch -> its mean, (sum, count), or a dictionary with "loss" and terms to log;
                see `meshcomm.parallel.loss.OwnLoss`. If None, cross-entropy of logits, averaged over all targets of the
                global batch except -100.
    loss_takes_slices: whether `loss` is given this rank's slices of the logits and the sequence, not whole outputs.
    costs:      (seq_len) -> the costs of the parts, for balancing stages. If None, all layers cost the same.
    small:      builds the same model with few, narrow layers. Before training, the split small model is compared
                with the unsplit small model; see `meshcomm.models.check`. If None, the model itself is compared if it
                has at most 4 million parameters.
    cannot:     "tensor", "sequence_parallel", "context", "pipeline" or "expert" -> why the model does not
                support it.
    """

    module: Callable[[], nn.Module]
    hidden_size: int = 0
    vocab_size: int = 0
    layers: str = ""
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    forward: Forward | None = None
    positions: str = ""
    split: Mapping[str, Entry] = field(default_factory=dict)
    sequence: Mapping[str, Entry] | None = None
    undivided: Mapping[str, Entry] | None = None
    attention: Callable[[Any, Attend], None] | None = None
    experts: Mapping[str, Axes] = field(default_factory=dict)
    dropped: Mapping[str, float] = field(default_factory=dict)
    tied: tuple[str, str] | None = None
    added: tuple[str, ...] = ()
    initialise: Callable[[str, tuple[int, ...]], Tensor] | None = None
    original: Callable[[Mapping[str, Tensor] | None], nn.Module] | None = None
    weights: Path | None = None
    stored: Callable[[str], tuple[Names, bool]] | Conversions | None = None
    loss: LossOf | None = None
    loss_takes_slices: bool = False
    costs: Callable[[int], PartCosts] | None = None
    small: Callable[[], ModelSpec] | None = None
    cannot: Mapping[str, str] = field(default_factory=dict)

    def stored_tensors(self, name: str, value: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors that store a parameter in the model's folder, by name. They may share its memory.

        value: the parameter, or a tensor of the same shape without memory.
        """
        if self.stored is not None and not callable(self.stored):
            return self.stored.stored(name, value)
        names, transposed = (name, False) if self.stored is None else self.stored(name)
        if isinstance(names, str):
            return {names: value.T if transposed else value}
        # Experts are stacked along axis 0, and the tensors of a row along axis 1.
        shape = value.shape
        if len(shape) < 2 or len(names) != shape[0] or any(shape[1] % len(row) for row in names):
            raise ShapeError(
                f"ModelSpec.stored does not fit {name}",
                given=f"shape {tuple(shape)}, and {len(names)} rows of {sorted({len(row) for row in names})} names",
                expected="a row of names for each index of axis 0, and a number of names that divides axis 1",
                hint="return a single name for a parameter that one tensor stores",
            )
        parts = {
            stored_name: part
            for row, rows in zip(names, value, strict=True)
            for stored_name, part in zip(row, rows.unflatten(0, (len(row), -1)), strict=True)
        }
        return {stored_name: part.T if transposed else part for stored_name, part in parts.items()}


def reduced(spec: ModelSpec) -> ModelSpec:
    """Return the spec of `spec.small` or, without it, the same one."""
    return spec if spec.small is None else spec.small()


def blocks_of(module: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Return the blocks of a module by key, in order. One object may be there several times. The result is empty if
    `layers` is "".
    """
    held: dict[str, Any] = module.get_submodule(layers)._modules if layers else {}
    return dict(held)


def cut(module: nn.Module, spec: ModelSpec, stage: Stage) -> tuple[nn.Module, ...]:
    """Remove the parts of other stages from `module`, and return its remaining blocks. Names do not change."""
    blocks = list(blocks_of(module, spec.layers).items())
    if spec.layers:
        blocks_of_stage = {key: block for place, (key, block) in enumerate(blocks) if place in stage.layers}
        module.get_submodule(spec.layers)._modules = dict(blocks_of_stage)
        blocks = list(blocks_of_stage.items())
    gone = (() if stage.is_first else spec.first) + (() if stage.is_last else spec.last)
    for name in gone:
        parent, _, key = name.rpartition(".")
        setattr(module.get_submodule(parent), key, None)
    return tuple(block for _, block in blocks)


def default_values(spec: ModelSpec, seed: int) -> Mapping[str, Tensor]:
    """Return the values that `module` writes into its parameters, generated from the seed. A shared parameter has several names."""
    with seeded(seed):
        named = spec.module().named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in named}


def unfilled(spec: ModelSpec, seed: int, family: bool = False) -> nn.Module:
    """Return the full module with its parameters on the meta device. All its other tensors have the values that one
    process generates from the seed: a table of random features is part of the function, as a weight is.

    family: whether the module belongs to a family of transformers, which computes such tensors from its config. The full
            module is then never built.
    """
    with seeded(seed):
        start = torch.get_rng_state()
        with on_meta():
            module = spec.module()
        if family or torch.equal(torch.get_rng_state(), start):
            return module
        # Initializing a parameter on the meta device draws nothing, so later draws differ from those of one process.
        torch.default_generator.manual_seed(seed)
        return without_values(spec.module())


def generator_of(seed: int, name: str) -> np.random.Generator:
    """Return the generator of a parameter's values, which then depend only on seed and name, not on the mesh."""
    # NumPy's generators give the same numbers on every kind of processor; torch's are not guaranteed to.
    return np.random.default_rng(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16]))


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Return a full float32 parameter of normally distributed values; see `generator_of`."""
    drawn = generator_of(seed, name).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(drawn * np.float32(std))


def check_kinds(spec: ModelSpec) -> None:
    """Raise ConfigError for keys in `cannot` that are not in KINDS, because they would have no effect."""
    unknown = [kind for kind in spec.cannot if kind not in KINDS]
    if unknown:
        raise ConfigError(
            "ModelSpec.cannot has a key that is not a kind of parallelism",
            given=f"cannot: {', '.join(map(repr, unknown))}",
            expected=", ".join(KINDS),
            hint=f"ModelSpec(cannot={{{next(iter(KINDS))!r}: reason}})",
        )


def check_names(spec: ModelSpec, module: nn.Module) -> None:
    """Raise a ConfigError that lists all names and patterns in `spec` that match no part of the full module."""
    parts = dict.fromkeys(name for name, _ in module.named_modules(remove_duplicate=False))
    parameters = dict.fromkeys(name for name, _ in module.named_parameters(remove_duplicate=False))
    blocks = {spec.layers: f"layers = {spec.layers!r}"} if spec.layers else {}
    named = {name: f"{end}: {name!r}" for end in ("first", "last") for name in getattr(spec, end)}
    wrong = [text for name, text in {**blocks, **named}.items() if name not in parts | parameters]
    wrong += [f"tied: {name!r}" for name in spec.tied or () if name not in parameters]
    for plan in ("split", "sequence", "undivided", "dropped", "experts"):
        for pattern in getattr(spec, plan) or {}:
            if not any(matches(pattern, name) for name in (*parts, *parameters)):
                wrong.append(f"{plan}: {pattern!r}")
    if (
        spec.layers in parts
        and spec.layers
        and not isinstance(module.get_submodule(spec.layers), (nn.ModuleList, nn.ModuleDict))
    ):
        wrong.append(f"layers = {spec.layers!r} is neither a ModuleList nor a ModuleDict")
    if wrong:
        known = list(
            dict.fromkeys(
                ".".join("*" if component.isdecimal() else component for component in name.split("."))
                for name in sorted(filter(None, parts), key=lambda name: name.count("."))
            )
        )
        raise ConfigError(
            f"a ModelSpec names parts that a {type(module).__name__} does not have",
            given="\n".join(wrong),
            expected="dotted names of its parts, with * for any text within one component",
            hint=", ".join(known),
        )
