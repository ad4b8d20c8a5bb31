"""What is trained? The `[model]` section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from meshcomm.config.model import Model
from meshcomm.config.nearest import nearest
from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.wording import toml

Fraction = Annotated[float, Field(ge=0, lt=1)]
_OF_EXPERTS = ("experts_per_token", "experts_every", "capacity_factor", "balance_loss")


class ModelConfig(Model):
    """`[model]`: a decoder-only transformer over bytes."""

    layers: int = Field(ge=1, description="Number of transformer blocks.", examples=[4])
    width: int = Field(ge=1, description="Elements of a token's vector.", examples=[128])
    heads: int = Field(ge=1, description="Attention heads of the queries; width divides by it.", examples=[8])
    kv_heads: int = Field(
        ge=1, description="Attention heads of keys and values; heads divides by it.", examples=[4]
    )
    ff: int = Field(ge=1, description="Elements inside the feed-forward block.", examples=[384])
    rope_theta: float = Field(default=10000.0, gt=0, description="Base of the rotary angles. Default 10000.")
    norm_eps: float = Field(
        default=1e-5, gt=0, description="Added to the mean square in RMSNorm. Default 1e-5."
    )
    tied_embeddings: bool = Field(
        default=False, description="The head uses the embedding's weights. Default false."
    )
    dropout: Fraction = Field(
        default=0.0,
        description="Share of each block's outputs that is set to zero in training. Default 0.",
    )
    experts: int = Field(
        default=0,
        ge=0,
        description="Feed-forward blocks to choose from in a layer. Default 0: one, no choice.",
    )
    experts_per_token: int = Field(
        default=2, ge=1, description="With experts: how many of them each token goes through. Default 2."
    )
    experts_every: int = Field(
        default=1,
        ge=1,
        description="With experts: n, where layers n, 2n, ... have them, counted from 1. Default 1: all.",
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="With experts: tokens that one takes at most, as a multiple of an even share; the rest skip "
        "it. None: no limit.",
    )
    balance_loss: float = Field(
        default=0.01,
        ge=0,
        description="With experts: weight of the loss that asks for an even load. Default 0.01.",
    )

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

    def problems(self, broken: Broken) -> Iterator[Problem]:
        """See Model.problems."""
        width, heads, kv_heads = self.width, self.heads, self.kv_heads
        if not broken.touches("heads", "kv_heads") and heads % kv_heads:
            yield Problem(
                "kv_heads",
                f"heads is not divisible by kv_heads: {heads} % {kv_heads} = {heads % kv_heads}",
                given=f"heads = {heads}, kv_heads = {kv_heads}",
                expected="heads divisible by kv_heads: equally many query heads share each of them",
                hint=either(
                    [f"model.kv_heads = {n}" for n in nearest(kv_heads, lambda n: heads % n == 0)]
                    + [f"model.heads = {n}" for n in nearest(heads, lambda n: n % kv_heads == 0, 1)]
                ),
            )
        if not broken.touches("width", "heads"):
            yield from self._head_size(width, heads)
        if not broken.touches("experts"):
            yield from self._experts(broken)

    def _head_size(self, width: int, heads: int) -> Iterator[Problem]:
        fitting = [f"model.width = {n}" for n in nearest(width, lambda n: n % (2 * heads) == 0)]
        if width % heads:
            yield Problem(
                "width",
                f"width is not divisible by heads: {width} % {heads} = {width % heads}",
                given=f"width = {width}, heads = {heads}",
                expected="heads of equal, even size: width divisible by 2*heads",
                hint=either(fitting),
            )
        elif self.head_size % 2:
            yield Problem(
                "width",
                f"the size of a head is odd: {width} / {heads} = {self.head_size}",
                given=f"width = {width}, heads = {heads}",
                expected="an even size: rotary embeddings turn pairs of elements",
                hint=either(fitting),
            )

    def _experts(self, broken: Broken) -> Iterator[Problem]:
        if not self.experts:
            for field in _OF_EXPERTS:
                if self.given(field):
                    yield Problem(
                        field,
                        "no effect without model.experts",
                        given=f"{field} = {toml(getattr(self, field))}, experts = 0",
                        expected="experts of 1 or more",
                        hint=either([f"remove model.{field}", "model.experts = 8"]),
                    )
            return
        if self.experts_per_token > self.experts and not broken.touches("experts_per_token"):
            yield Problem(
                "experts_per_token",
                f"more than there are experts: {self.experts_per_token} > {self.experts}",
                given=f"experts_per_token = {self.experts_per_token}, experts = {self.experts}",
                expected=f"1 to {self.experts}",
                hint=either(
                    [f"model.experts_per_token = {self.experts}", f"model.experts = {self.experts_per_token}"]
                ),
            )
        if self.experts_every > self.layers and not broken.touches("experts_every", "layers"):
            yield Problem(
                "experts_every",
                f"no layer has experts: {self.experts_every} > {self.layers}",
                given=f"experts_every = {self.experts_every}, layers = {self.layers}",
                expected=f"1 to {self.layers}",
                hint=either([f"model.experts_every = {self.layers}", f"model.layers = {self.experts_every}"]),
            )
