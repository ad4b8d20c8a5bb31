"""What is trained, and what does it demand of the other sections? The `[model]` section."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from meshcomm.config.pretrained import dropouts_of, is_gated, misunderstood, sizes_of, windows_of
from meshcomm.config.problems import Near, Problem, nearest, remainder, shared
from meshcomm.config.section import Fraction, FrozenTable, Section, Table, Text, no_effect, rule, setting
from meshcomm.config.training import Training, demand
from meshcomm.errors import ConfigError


def _fact(description: str, example: int) -> Any:
    """What follows from `pretrained`, is not asked of what is built by code, and must be said of the built-in model."""
    return Field(default=None, ge=1, description=description, examples=[example])


class ModelConfig(Section):
    """`[model]`: what is trained. A decoder-only transformer by its sizes, a folder as transformers writes it, or code."""

    place = "model"
    pretrained: Text | None = setting(
        None,
        "A folder with the config.json and the safetensors of a model of transformers, relative to the config file: the "
        "sizes below follow from it. None: the built-in transformer, or build.",
        examples=["Llama-3.2-1B"],
    )
    random_weights: bool = setting(False, "With pretrained: weights are drawn from train.seed, not read.")
    build: Text | None = setting(
        None,
        "module:function, which returns an nn.Module or a meshcomm.models.ModelSpec. None: pretrained, or built in.",
        examples=["my_package.models:gpt"],
    )
    args: FrozenTable[str | int | float | bool] = Field(
        default_factory=Table,
        description="With build: what the function is called with, by name.",
        examples=[{"layers": 4}],
    )
    layers: int = _fact("Number of transformer blocks.", 4)
    width: int = _fact("Elements of a token's vector.", 128)
    heads: int = _fact("Attention heads of the queries; width divides by it.", 8)
    kv_heads: int = _fact("Attention heads of keys and values; heads divides by it.", 4)
    ff: int = _fact("Elements inside the feed-forward block.", 384)
    vocabulary: int = setting(256, "Number of different tokens. Default 256: bytes.", ge=1)
    head: int | None = setting(None, "Elements of one head. None: width / heads.", ge=1)
    rope_theta: float = setting(10000.0, "Base of the rotary angles.", gt=0)
    norm_eps: float = setting(1e-5, "Added to the mean square in RMSNorm.", gt=0)
    tied_embeddings: bool = setting(False, "The head uses the embedding's weights.")
    dropout: Fraction = setting(
        0.0,
        "Share of what attention and feed-forward of each block give that is set to zero in training, in the same "
        "places on every mesh. With pretrained it is to be said where the folder's config.json has dropout.",
    )
    experts: int = setting(
        0, "Feed-forward blocks to choose from in a layer. Default 0: one, no choice.", ge=0
    )
    experts_per_token: int = setting(2, "With experts: how many of them each token goes through.", ge=1)
    experts_every: int = setting(
        1, "With experts: n, where layers n, 2n, ... have them, counted from 1. Default 1: all.", ge=1
    )
    capacity_factor: float | None = setting(
        None,
        "With experts: tokens that one takes at most, as a multiple of an even share; the rest skip "
        "it. None: no limit.",
        gt=0,
    )
    balance_loss: float = setting(0.01, "With experts: weight of the loss that asks for an even load.", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _of_pretrained(cls, data: Any) -> Any:
        """The sizes that the folder's config.json says, where it can be read; `_folder` tells why not."""
        if isinstance(data, dict) and isinstance(data.get("pretrained"), str):
            with contextlib.suppress(ValueError, OSError):
                return {**sizes_of(Path(data["pretrained"])), **data}
        return data

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.width // self.heads if self.head is None else self.head

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, how many keys a query meets at most; None: all before it."""
        if self.pretrained is not None:
            with contextlib.suppress(ValueError, OSError):
                return windows_of(Path(self.pretrained), self.layers)
        return (None,) * self.layers

    @property
    def ff_matrices(self) -> int:
        """Of a feed-forward block: gate, up and down; GPT-2 has no gate."""
        if self.pretrained is not None:
            with contextlib.suppress(ValueError, OSError):
                return 3 if is_gated(Path(self.pretrained)) else 2
        return 3

    @property
    def reads_weights(self) -> bool:
        """Whether its weights come from a folder."""
        return self.pretrained is not None and not self.random_weights

    @property
    def is_built_in(self) -> bool:
        """Whether it is the transformer that meshcomm has."""
        return self.pretrained is None and self.build is None

    def sized(self, what: str) -> ModelConfig:
        """Itself, for `what` follows from its sizes. Raises ConfigError where code builds it and none are said."""
        unknown = [name for name in FACTS if getattr(self, name) is None]
        if unknown:
            raise ConfigError(
                f"{what} cannot be predicted for a model that code builds",
                given=f'model.build = "{self.build}" without {", ".join(unknown)}',
                expected="its sizes, from which it follows",
                hint=", ".join(f"model.{name} = ..." for name in unknown),
            )
        return self

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of one feed-forward block."""
        return self.experts > 0 and (layer + 1) % self.experts_every == 0


FACTS = ("layers", "width", "heads", "kv_heads", "ff")


def _said(name: str) -> None:
    @rule(ModelConfig, name)
    def check(model: ModelConfig) -> Iterator[Problem]:
        if getattr(model, name) is None and model.is_built_in:
            example = ModelConfig.model_fields[name].examples or [1]
            yield Problem(
                "missing",
                "a whole number of 1 or more",
                [f"model.{name} = {example[0]}", 'model.pretrained = "FOLDER"'],
                f"no {name}",
                name,
            )


for _name in FACTS:
    _said(_name)


@rule(ModelConfig, "pretrained", "build")
def _one_source(model: ModelConfig) -> Iterator[Problem]:
    if model.pretrained is not None and model.build is not None:
        yield Problem("two models", "one of both", ["remove model.build", "remove model.pretrained"])


@rule(ModelConfig, "build")
def _function(model: ModelConfig) -> Iterator[Problem]:
    if model.build is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", model.build):
        yield Problem("no function is named", "module:function", ['model.build = "my_package.models:gpt"'])


@rule(ModelConfig, "pretrained")
def _folder(model: ModelConfig) -> Iterator[Problem]:
    if model.pretrained is None:
        return
    folder = Path(model.pretrained)
    try:
        if wrong := list(misunderstood(folder)):
            yield from wrong
            return
        known = sizes_of(folder)
    except (ValueError, OSError) as error:
        yield Problem(
            f"no model of transformers: {error}",
            "a folder with a config.json that save_pretrained wrote",
            ["model.save_pretrained(folder)"],
        )
        return
    for name, value in known.items():
        if getattr(model, name) != value:
            yield Problem(
                f"the folder's config.json has {name} {value}",
                f"{value}, or nothing: it follows from the folder",
                [f"remove model.{name}"],
                f"{name} = {getattr(model, name)}",
                name,
            )


no_effect(
    ModelConfig,
    "random_weights",
    "pretrained",
    lambda model: model.pretrained,
    "pretrained beside it",
    'model.pretrained = "FOLDER"',
    why=" without model.pretrained: weights are drawn",
)
no_effect(
    ModelConfig,
    "args",
    "build",
    lambda model: model.build or not model.args,
    "build beside it",
    'model.build = "my_package.models:gpt"',
    why=" without model.build",
)
no_effect(
    ModelConfig,
    "rope_theta norm_eps",
    "pretrained build",
    lambda model: model.is_built_in,
    "a setting of the built-in model",
    why=": the model's own configuration says it",
)


no_effect(
    ModelConfig,
    "dropout",
    "build",
    lambda model: model.build is None,
    "a setting of the built-in model",
    why=": what is built says it",
)


@rule(ModelConfig, "dropout", "pretrained")
def _dropout(model: ModelConfig) -> Iterator[Problem]:
    if model.pretrained is None or model.given("dropout"):
        return
    with contextlib.suppress(ValueError, OSError):
        if found := dropouts_of(Path(model.pretrained)):
            said = ", ".join(f"{name} = {value}" for name, value in found.items())
            yield Problem(
                "the model drops out, by random numbers that would differ from mesh to mesh",
                "model.dropout, in the same places on every mesh: behind attention and feed-forward of each block, "
                "nowhere else; 0.0 trains without",
                [f"model.dropout = {max(found.values())}", "model.dropout = 0.0"],
                f"{said} in the folder's config.json",
            )


# -- by itself --------------------------------------------------------------------------------------


@rule(ModelConfig, "heads", "kv_heads")
def _shared_kv_heads(model: ModelConfig) -> Iterator[Problem]:
    heads, kv_heads = model.heads, model.kv_heads
    if heads % kv_heads:
        yield Problem(
            f"heads is not divisible by kv_heads: {remainder(heads, kv_heads)}",
            "heads divisible by kv_heads: equally many query heads share each of them",
            chain(
                (f"model.kv_heads = {n}" for n in nearest(kv_heads, lambda n: heads % n == 0)),
                (f"model.heads = {n}" for n in nearest(heads, lambda n: n % kv_heads == 0, 1)),
            ),
            key="kv_heads",
        )


@rule(ModelConfig, "width", "heads")
def _head_size(model: ModelConfig) -> Iterator[Problem]:
    width, heads = model.width, model.heads
    if not model.is_built_in or model.head is not None:
        return
    fitting = (f"model.width = {n}" for n in nearest(width, lambda n: n % (2 * heads) == 0))
    if width % heads:
        what = f"width is not divisible by heads: {remainder(width, heads)}"
        yield Problem(what, "heads of equal, even size: width divisible by 2*heads", fitting)
    elif model.head_size % 2:
        what = f"the size of a head is odd: {width} / {heads} = {model.head_size}"
        yield Problem(what, "an even size: rotary embeddings turn pairs of elements", fitting)


no_effect(
    ModelConfig,
    "experts_per_token experts_every capacity_factor balance_loss",
    "experts",
    lambda model: model.experts,
    "experts of 1 or more",
    "model.experts = 8",
    why=" without model.experts",
)


@rule(ModelConfig, "experts_per_token", "experts")
def _experts_of_a_token(model: ModelConfig) -> Iterator[Problem]:
    each, experts = model.experts_per_token, model.experts
    if 0 < experts < each:
        ways = [f"model.experts_per_token = {experts}", f"model.experts = {each}"]
        yield Problem(f"more than there are experts: {each} > {experts}", f"1 to {experts}", ways)


@rule(ModelConfig, "experts_every", "layers", "experts")
def _layers_with_experts(model: ModelConfig) -> Iterator[Problem]:
    every, layers = model.experts_every, model.layers
    if model.experts and every > layers:
        ways = [f"model.experts_every = {layers}", f"model.layers = {every}"]
        yield Problem(f"no layer has experts: {every} > {layers}", f"1 to {layers}", ways)


# -- on a mesh --------------------------------------------------------------------------------------


def _along_tensor(name: str) -> None:
    @demand(ModelConfig, f"model.{name}", "tensor")
    def check(training: Training, model: ModelConfig) -> Iterator[Problem]:
        number, size = getattr(model, name), training.size("tensor")
        if number % size:
            dim = training.dim("tensor")
            yield Problem(
                f"{name} is not divisible by {dim}: {remainder(number, size)}",
                f"{name} divisible by mesh.dims.{dim}",
                [Near(f"mesh.dims.{dim}", 2), Near(f"model.{name}")],
            )


for _name in ("heads", "kv_heads", "ff"):
    _along_tensor(_name)


@demand(ModelConfig, "parallel.overlap")
def _overlap(training: Training, model: ModelConfig) -> Iterator[Problem]:
    if training.parallel.overlap and not model.is_built_in:
        yield Problem(
            "layers that a plan splits gather the sequence at once: overlap has no effect on them",
            "the built-in model",
            ["parallel.overlap = false"],
            key="parallel.overlap",
        )


@demand(ModelConfig, "tensor")
def _vocabulary(training: Training, model: ModelConfig) -> Iterator[Problem]:
    size, tokens = training.size("tensor"), model.vocabulary
    # Embedding and head of a folder stay whole where they cannot be split; code says itself what it can.
    if model.is_built_in and tokens % size:
        dim = training.dim("tensor")
        yield Problem(
            f"the vocabulary of {tokens} is not divisible by {dim}: {remainder(tokens, size)}",
            f"a divisor of {tokens}",
            [Near(f"mesh.dims.{dim}", 2)],
            key=f"mesh.dims.{dim}",
        )


@demand(ModelConfig, "model.layers", "pipeline", "parallel.stages_per_rank")
def _layers_of_stages(training: Training, model: ModelConfig) -> Iterator[Problem]:
    layers, ranks, each = model.layers, training.size("pipeline"), training.parallel.stages_per_rank
    if ranks > 1 and layers < ranks * each:
        stages = str(ranks) if each == 1 else f"{ranks}*{each} = {ranks * each}"
        fewer = Near("parallel.stages_per_rank"), Near(f"mesh.dims.{training.dim('pipeline')}")
        yield Problem(
            f"fewer layers than stages: {layers} < {stages}",
            "at least one layer for each stage",
            [f"model.layers = {ranks * each}", *fewer[each == 1 :]],
        )


@demand(ModelConfig, "model.heads", "model.kv_heads", "tensor", "context", "parallel.attention")
def _heads_of_ulysses(training: Training, model: ModelConfig) -> Iterator[Problem]:
    tensor, context = training.size("tensor"), training.size("context")
    heads, kv_heads = model.heads // tensor, model.kv_heads // tensor
    if training.parallel.attention != "ulysses" or model.heads % tensor or model.kv_heads % tensor:
        return
    dim = training.dim("context") if context > 1 else ""
    ways: list[str | Near] = [Near(f"mesh.dims.{dim}"), 'parallel.attention = "ring"']
    if heads % context:
        quotient = shared(model.heads, tensor) + remainder(heads, context)
        yield Problem(
            f"a rank's heads are not divisible by {dim}: {quotient}",
            f"equally many heads for each of the {context} ranks along {dim}, which exchange tokens for heads",
            [Near("model.heads"), *ways],
        )
    elif kv_heads % context and context % kv_heads:
        quotient = shared(model.kv_heads, tensor) + remainder(kv_heads, context)
        yield Problem(
            f"neither a rank's kv_heads nor {dim} divides the other: {quotient}, {remainder(context, kv_heads)}",
            f"equally many for each of the {context} ranks along {dim}, or each on equally many of them",
            [Near("model.kv_heads"), *ways],
            key="model.kv_heads",
        )


@demand(ModelConfig, "parallel.expert", "model.experts")
def _experts_that_are_split(training: Training, model: ModelConfig) -> Iterator[Problem]:
    if "expert" in training.parallel.parts and not model.experts:
        size = training.open_size("expert") or 1
        some = 8 if 8 % size == 0 else next(nearest(8, lambda n: n % size == 0))
        ways = [f"model.experts = {some}", "remove parallel.expert"]
        yield Problem("no effect: the model has no experts", "model.experts of 1 or more", ways)


@demand(ModelConfig, "model.experts", "expert")
def _experts_along_their_dim(training: Training, model: ModelConfig) -> Iterator[Problem]:
    size = training.size("expert")
    if model.experts % size:
        dim = training.dim("expert")
        yield Problem(
            f"experts is not divisible by {dim}: {remainder(model.experts, size)}",
            f"equally many experts for each of the {size} ranks along {dim}",
            [Near("model.experts", 2)],
        )
