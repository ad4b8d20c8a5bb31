"""A split module that fails on its example: the error names the part, its size and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import tensor_parallel

IDS = torch.arange(16).view(2, 8) % 12
ATTENTION = {"attn.[qkv]": "column", "attn.o": "row"}
HEADS = {"attn": {"set": {"heads": "split", "kv_heads": "split"}}}
SPLIT = {**ATTENTION, **HEADS, "mlp.up": "column", "mlp.down": "row", "head": "column"}


class Attention(nn.Module):
    """Grouped heads of four elements; the positions are counted from the input."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = 4, kv_heads
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k, self.v = nn.Linear(16, 4 * kv_heads), nn.Linear(16, 4 * kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[:2]
        q = self.q(x).view(*shape, self.heads, 4).transpose(1, 2)
        k, v = (each(x).view(*shape, self.kv_heads, 4).transpose(1, 2) for each in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(12, 16), Attention(kv_heads)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(16, 160))
        self.mlp.add_module("down", nn.Linear(160, 16))
        self.head = nn.Linear(16, 12)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.mlp(self.attn(self.embed(ids))))
        if labels is None:
            return logits  # type: ignore[no-any-return]
        return F.cross_entropy(logits.view(-1, 12), labels.flatten())


def without(*names: str, **more: Any) -> dict[str, Any]:
    return {name: style for name, style in {**SPLIT, **more}.items() if name not in names}


@pytest.mark.parametrize(
    ("plan", "model", "example", "sequence", "part", "cure"),
    [
        (without("mlp.down"), Model, [IDS], False, 'in "mlp.down", a Linear', '"mlp.down": "row", as it gets 80 of its 160 inputs'),
        (without("mlp.up"), Model, [IDS], False, 'in "mlp.down", a Linear', '"mlp.down" gets all of its 160 inputs: a "column" before it'),
        (without("attn"), Model, [IDS], False, 'in "attn", a Attention', '"attn": {"set": {"heads": "split"}}, 4 now'),
        ({**without("attn"), "attn": {"set": {"heads": "split"}}}, lambda: Model(1), [IDS], False, 'in "attn"', "a size of tp that divides kv_heads = 1, which cannot be split by tp = 2"),
        (SPLIT, Model, {"ids": IDS, "labels": IDS}, False, "in the module itself, a Model", '"head": "column:whole", or no labels'),
        ({**SPLIT, "embed": "vocab"}, Model, [IDS], True, 'in "attn", a Attention', '"attn": "enter" if it takes the length from its input, "replicate" if it needs all: it gets 4 of 8 places'),
    ],
    ids=["a forgotten row", "a forgotten column", "heads", "one head", "labels", "the length of a slice"],
)  # fmt: skip
def test_the_part_its_size_and_the_cure_are_named(
    plan: dict[str, Any], model: Callable[[], nn.Module], example: Any, sequence: bool, part: str, cure: str
) -> None:
    torch.manual_seed(0)
    module = model()

    def program(mesh: Mesh, module: nn.Module) -> None:
        with pytest.raises(TrainingError) as caught:
            tensor_parallel(module, mesh, "tp", plan, sequence_parallel=sequence, example=example)
        text = str(caught.value)
        assert part in text.splitlines()[0], text
        assert cure in text, text
        assert isinstance(caught.value.__cause__, Exception)

    meshcomm.simulate(program, dims={"tp": 2}, args=(module,))


def test_the_cures_help() -> None:
    """What the errors say is what makes the module come out equal."""
    torch.manual_seed(0)
    plan = {**SPLIT, "head": "column:whole", "attn": {"style": "enter", **HEADS["attn"]}}

    def program(mesh: Mesh, module: nn.Module) -> None:
        tensor_parallel(module, mesh, "tp", plan, example={"ids": IDS, "labels": IDS})

    meshcomm.simulate(program, dims={"tp": 2}, args=(Model(),))
