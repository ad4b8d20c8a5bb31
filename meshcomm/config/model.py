"""The `[model]` section: the model to train."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from meshcomm.config.pretrained import dropouts_of, has_gate, misunderstood, read, sizes_of, windows_of
from meshcomm.config.problems import Problem, multiples, nearest, remainder
from meshcomm.config.section import (
    Arguments,
    Fraction,
    FrozenList,
    Function,
    NoEffect,
    Section,
    Table,
    Text,
    one_of,
    too_large,
)
from meshcomm.errors import ConfigError
from meshcomm.layout.sizes import divisors


def _fact(example: int) -> Any:
    """Return a field for a size that the built-in model requires. `pretrained` determines its value, and models built by
    code do not need it.
    """
    return Field(default=None, ge=1, examples=[example])


FACTS = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")


def _facts(model: ModelConfig) -> Iterator[Problem]:
    for name in FACTS:
        if getattr(model, name) is None and model.is_built_in:
            example = (ModelConfig.model_fields[name].examples or [1])[0]
            ways = [f"model.{name} = {example}", 'model.pretrained = "FOLDER"']
            yield Problem(name, "missing", "an integer of 1 or more", ways, f"no {name}")


def _folder(model: ModelConfig) -> Iterator[Problem]:
    if model.pretrained is None:
        return
    path = Path(model.pretrained) / "config.json"
    try:
        settings = read(path)
    except (ValueError, OSError) as error:
        what, expected = f"not a transformers model: {error}", "a config.json that save_pretrained wrote"
        ways = ["model.save_pretrained(folder)"]
        yield Problem("pretrained", what, expected, ways, model.written("pretrained"))
        return
    yield from misunderstood(model.pretrained, settings, model.reads_weights)
    for name, value in sizes_of(model.pretrained).items():
        if getattr(model, name) != value:
            what = f"the folder's config.json has {name} {value}"
            expected = f"{value}, or no setting, because the folder determines it"
            yield Problem(name, what, expected, [f"remove model.{name}"], model.written(name))


def _dropout(model: ModelConfig) -> Iterator[Problem]:
    shares = dropouts_of(model.pretrained)
    if shares and not model.given("dropout"):
        what = "the model has dropout, whose random numbers would differ from mesh to mesh"
        expected = "model.dropout, which drops the same elements of each block's outputs on every mesh"
        ways = [f"model.dropout = {max(shares.values())}", "model.dropout = 0.0"]
        written = ", ".join(f"{name} = {value}" for name, value in shares.items())
        yield Problem("dropout", what, expected, ways, f"{written} in the folder's config.json")


def _shared_kv_heads(model: ModelConfig) -> Iterator[Problem]:
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    if None not in (num_heads, num_kv_heads) and num_heads % num_kv_heads:
        what = f"num_heads is not divisible by num_kv_heads: {remainder(num_heads, num_kv_heads)}"
        expected = (
            "num_heads divisible by num_kv_heads, so that the same number of query heads share each kv head"
        )
        ways = [f"model.num_kv_heads = {n}" for n in nearest(num_kv_heads, divisors(num_heads))]
        ways += [f"model.num_heads = {n}" for n in multiples(num_heads, num_kv_heads, 1)]
        yield Problem("num_kv_heads", what, expected, ways, model.written("num_heads num_kv_heads"))


def _head_size(model: ModelConfig) -> Iterator[Problem]:
    hidden_size, num_heads = model.hidden_size, model.num_heads
    if not model.is_built_in or model.head_dim is not None or None in (hidden_size, num_heads):
        return
    fitting = [f"model.hidden_size = {n}" for n in multiples(hidden_size, 2 * num_heads)]
    given = model.written("hidden_size num_heads")
    if hidden_size % num_heads:
        what = f"hidden_size is not divisible by num_heads: {remainder(hidden_size, num_heads)}"
        expected = "heads of equal, even size: hidden_size divisible by 2*num_heads"
        yield Problem("hidden_size", what, expected, fitting, given)
    elif model.head_size % 2:
        what = f"the head size is odd: {hidden_size} / {num_heads} = {model.head_size}"
        expected = "an even size: rotary embeddings rotate pairs of elements"
        yield Problem("hidden_size", what, expected, fitting, given)


def _experts(model: ModelConfig) -> Iterator[Problem]:
    if model.experts:
        yield from too_large(model, "experts_per_token", "experts", "more than the number of experts")
    if model.experts and model.num_layers is not None:
        yield from too_large(model, "experts_every", "num_layers experts", "no layer has experts")


class LoraConfig(Section):
    """`[model.lora]`: low-rank adapters (Hu et al. 2021), created by peft. Only the adapters are trained and saved in
    checkpoints.
    """

    place = "model.lora"
    rank: int = Field(default=8, ge=1)
    """Rank of the adapters. An adapted layer computes W x + (alpha / rank) B A x, where A has `rank` rows."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapter's output B A x is scaled by alpha / rank."""
    dropout: Fraction = 0.0
    """Fraction of the elements of x to drop before A in training. The same elements are dropped on every mesh."""
    targets: FrozenList[Text] = Field(default=(), examples=[["q_proj", "v_proj"]])
    """Linear layers to adapt, by full name or last component. Default []: all linear layers in the blocks."""


class ModelConfig(Section):
    """`[model]`: the model to train, given as the sizes of a built-in decoder-only transformer, a transformers model
    folder, or code.
    """

    place = "model"
    rules = (
        NoEffect("random_weights", "pretrained", way='pretrained = "FOLDER"'),
        NoEffect("args", "build", way='build = "my_package.models:gpt"'),
        NoEffect("lora", "pretrained build", way='pretrained = "FOLDER"'),
        NoEffect("rope_theta norm_eps", "pretrained", (None,), why=": the folder's config.json sets it"),
        NoEffect(
            "capacity_factor balance_loss",
            "pretrained",
            (None,),
            why=": the model family's own code routes tokens",
        ),
        NoEffect(
            "rope_theta norm_eps dropout bias_update_speed",
            "build",
            (None,),
            why=": the model's own code sets it",
        ),
        NoEffect(
            "experts_per_token experts_every capacity_factor balance_loss bias_update_speed",
            "experts",
            way="experts = 8",
        ),
        partial(one_of, fields="pretrained build", what="models"),
        *(_facts, _folder, _dropout, _shared_kv_heads, _head_size, _experts),
    )
    pretrained: Text | None = Field(default=None, examples=["Llama-3.2-1B"])
    """A folder written by save_pretrained, relative to the config file. Its config.json determines the sizes below. If
    omitted, the built-in model or the model from build is used.
    """
    random_weights: bool = False
    """With pretrained: generate random weights from train.seed instead of reading the folder's weights."""
    build: Function | None = Field(default=None, examples=["my_package.models:gpt"])
    """module:function that returns an nn.Module or a meshcomm.models.ModelSpec. If omitted, the model of pretrained or
    the built-in model is used.
    """
    args: Arguments = Field(default_factory=Table, examples=[{"num_layers": 4}])
    """With build: keyword arguments for the function."""
    lora: LoraConfig | None = None
    """With pretrained or build: train only low-rank adapters of the linear layers. If omitted, all weights are trained."""
    num_layers: int = _fact(4)
    """Number of transformer blocks."""
    hidden_size: int = _fact(128)
    """Size of the hidden states."""
    num_heads: int = _fact(8)
    """Number of query heads; must divide hidden_size."""
    num_kv_heads: int = _fact(4)
    """Number of key and value heads; must divide num_heads."""
    intermediate_size: int = _fact(384)
    """Hidden size of the feed-forward block."""
    vocab_size: int = Field(default=256, ge=1)
    """Number of tokens in the vocabulary. Default 256: bytes."""
    head_dim: int | None = Field(default=None, ge=1)
    """Size of one head. If omitted, it is hidden_size / num_heads."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary position embedding."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of RMSNorm, added to the mean square."""
    tied_embeddings: bool = False
    """Whether the embedding and the head share one weight."""
    dropout: Fraction = 0.0
    """Dropout probability for attention and feed-forward outputs in training. The same elements are dropped on every
    mesh. With pretrained, this setting is required if the folder's config.json has dropout.
    """
    experts: int = Field(default=0, ge=0)
    """Number of expert feed-forward blocks per layer. Default 0: one feed-forward block, no routing."""
    experts_per_token: int = Field(default=2, ge=1)
    """With experts: number of experts per token."""
    experts_every: int = Field(default=1, ge=1)
    """With experts: interval n between layers that have experts: layers n, 2n, ..., counted from 1. Default 1: all layers."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """With experts: maximum number of tokens per expert, as a multiple of an even share. Excess tokens skip the
    expert. If omitted, there is no limit.
    """
    balance_loss: float = Field(default=0.01, ge=0)
    """With experts: weight of the load-balancing loss."""
    bias_update_speed: float = Field(default=0.0, ge=0)
    """With experts: how much each step changes an expert's bias, which is added to its score when experts are chosen, towards
    an even load. Families of transformers need such a bias (DeepSeek-V3, GLM-4.5). Default 0: biases do not change.
    """

    @model_validator(mode="before")
    @classmethod
    def _of_pretrained(cls, data: Any) -> Any:
        """Add the sizes from the folder's config.json, if the file can be read; otherwise, `_folder` reports the reason."""
        if isinstance(data, dict) and isinstance(data.get("pretrained"), str):
            return {**sizes_of(data["pretrained"]), **data}
        return data

    @property
    def head_size(self) -> int:
        """Size of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer: the maximum number of keys per query, or None for all earlier keys. Empty
        if no layer has a window.
        """
        return windows_of(self.pretrained)

    @property
    def ff_matrices(self) -> int:
        """Number of matrices in a feed-forward block: gate, up and down. Some model families have no gate."""
        return 3 if has_gate(self.pretrained) else 2

    @property
    def reads_weights(self) -> bool:
        """Whether the weights are read from a folder."""
        return self.pretrained is not None and not self.random_weights

    @property
    def is_built_in(self) -> bool:
        """Whether this is meshcomm's built-in transformer."""
        return self.pretrained is None and self.build is None

    def sized(self, what: str) -> ModelConfig:
        """Return this section. Raises ConfigError, which names `what`, if code builds the model and a size is missing."""
        unknown = [name for name in FACTS if getattr(self, name) is None]
        if unknown:
            raise ConfigError(
                f"{what} cannot be predicted for a model that code builds",
                given=f'model.build = "{self.build}" without {", ".join(unknown)}',
                expected="the model's sizes, on which the prediction depends",
                hint=", ".join(f"model.{name} = ..." for name in unknown),
            )
        return self

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts instead of one feed-forward block."""
        return self.experts > 0 and (layer + 1) % self.experts_every == 0
