"""A language model of thirty lines that knows nothing of meshes, and the spec that splits it every way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.models import Attend, ModelSpec, StageContext


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), width // heads
        self.after, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.attend: Attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) -> the same shape."""
        q, k, v = (
            each.unflatten(-1, (-1, self.head)).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Own(nn.Module):
    """Tokens -> logits."""

    def __init__(self, width: int = 16, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) int64 -> (samples, tokens, 256)."""
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def alone() -> nn.Module:
    """The module without a spec: for data and shard."""
    return Own()


def _forward(module: Any, x: Tensor, here: StageContext) -> Tensor:
    if here.stage.is_first:
        x = module.tokens(x) + module.places(here.positions)
    for block in here.layers:
        x = here.through(block, x=x)
    return module.logits(module.norm(x)) if here.stage.is_last else x


def _attention(module: nn.Module, attend: Attend) -> None:
    for part in module.modules():
        if isinstance(part, Block):
            part.attend = attend


def spec(width: int = 16, dropped: float = 0.0) -> ModelSpec:
    """A spec with all settings."""
    return ModelSpec(
        module=lambda: Own(width),
        hidden_size=width,
        vocab_size=256,
        layers="blocks",
        first=("tokens", "places"),
        last=("norm", "logits"),
        forward=_forward,
        split={
            "tokens": "vocab",
            "blocks.*.qkv": "column:3",
            "blocks.*.out": "row",
            "blocks.*.up": "column",
            "blocks.*.down": "row",
            "logits": "column",
        },
        sequence={
            "places": {"style": "replicate", "input": "whole", "axis": 0},
            "blocks.*.norm": "sequence",
            "blocks.*.after": "sequence",
            "norm": "sequence",
        },
        attention=_attention,
        dropped={"blocks.*.out": dropped, "blocks.*.down": dropped},
    )


def as_it_is() -> ModelSpec:
    """A spec that runs the module's forward on every stage."""
    return replace(spec(), forward=None, attention=None)


class Frozen(Own):
    """A model with frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.places, self.blocks[0], self.norm):
            part.requires_grad_(False)


def frozen() -> ModelSpec:
    """The full spec of the model with frozen parts."""
    return replace(spec(), module=Frozen)


class Twice(Own):
    """Runs its blocks a second time."""

    def forward(self, x: Tensor) -> Tensor:
        """As Own's."""
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.logits(self.norm(x))


class Skips(Own):
    """Adds the first block's output after the last block."""

    def forward(self, x: Tensor) -> Tensor:
        """As Own's."""
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        x = first = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.logits(self.norm(x + first))


class Placed(Own):
    """Takes positions as an argument, and has a parameter that only the first stage needs."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """As Own's. where: (1, tokens)."""
        x = self.tokens(x) + self.places(where) + self.start
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def placed() -> ModelSpec:
    """A spec that runs the module's forward with the positions of a rank."""
    first = ("tokens", "places", "start")
    return replace(as_it_is(), module=Placed, first=first, positions="where", attention=_attention)


def twice() -> ModelSpec:
    """A model that cannot run block by block."""
    return replace(as_it_is(), module=Twice)


def skips() -> ModelSpec:
    """A model that would have to pass more than hidden states between stages."""
    return replace(as_it_is(), module=Skips)


def dropping() -> ModelSpec:
    """A spec with dropout after blocks, but without the setting that names the blocks."""
    return ModelSpec(module=Own, vocab_size=256, dropped={"blocks.*.out": 0.1})
