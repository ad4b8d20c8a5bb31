"""What is trained, and what does it demand of the other sections? The `[model]` section."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pydantic import Field

from meshcomm.config.problems import Near, Problem, nearest, remainder, shared
from meshcomm.config.section import Fraction, Section, no_effect, rule, setting
from meshcomm.config.training import Training, demand


class ModelConfig(Section):
    """`[model]`: a decoder-only transformer over bytes."""

    place = "model"
    layers: int = Field(ge=1, description="Number of transformer blocks.", examples=[4])
    width: int = Field(ge=1, description="Elements of a token's vector.", examples=[128])
    heads: int = Field(ge=1, description="Attention heads of the queries; width divides by it.", examples=[8])
    kv_heads: int = Field(
        ge=1, description="Attention heads of keys and values; heads divides by it.", examples=[4]
    )
    ff: int = Field(ge=1, description="Elements inside the feed-forward block.", examples=[384])
    rope_theta: float = setting(10000.0, "Base of the rotary angles.", gt=0)
    norm_eps: float = setting(1e-5, "Added to the mean square in RMSNorm.", gt=0)
    tied_embeddings: bool = setting(False, "The head uses the embedding's weights.")
    dropout: Fraction = setting(0.0, "Share of each block's outputs that is set to zero in training.")
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

    @property
    def vocabulary(self) -> int:
        """Number of different tokens: the 256 bytes."""
        return 256

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts in place of one feed-forward block."""
        return self.experts > 0 and (layer + 1) % self.experts_every == 0


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


@demand(ModelConfig, "tensor")
def _vocabulary(training: Training, model: ModelConfig) -> Iterator[Problem]:
    size, bytes_ = training.size("tensor"), model.vocabulary
    if bytes_ % size:
        dim = training.dim("tensor")
        yield Problem(
            f"the {bytes_} bytes are not divisible by {dim}: {remainder(bytes_, size)}",
            f"a divisor of {bytes_}",
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
