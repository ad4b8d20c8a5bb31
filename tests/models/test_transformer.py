"""The built-in model: its parts against torch's, its logits against plain code, and its values by seed and name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.config import ModelConfig
from meshcomm.mesh import Mesh
from meshcomm.models.transformer import Transformer, initialise, rms_norm, rotary_table, rotate
from meshcomm.parallel import Stage, TensorSplit
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.splits import Splits
from tests.train.test_steps import ONE_STEP, NoMesh


@pytest.mark.parametrize("trained", ["both", "x", "weight"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_torch_s(dtype: torch.dtype, trained: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, generator=generator).to(dtype)
    weight = torch.rand(8, generator=generator).to(dtype)
    found: list[list[Tensor | None]] = []
    for norm in (
        lambda x, weight: rms_norm(x, weight, 1e-3),
        lambda x, weight: F.rms_norm(x, (8,), weight, 1e-3),
    ):
        mine = x.clone().requires_grad_(trained != "weight")
        scale = weight.clone().requires_grad_(trained != "x")
        y = norm(mine, scale)
        y.backward(x.flip(0))
        found.append([y.detach(), mine.grad, scale.grad])
    assert found[0][0] is not None and found[0][0].dtype == dtype
    room = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(found[0], found[1], rtol=room, atol=room)


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (x[i], x[i + 4]) of each position, as complex numbers, by the position's angles."""
    angle = torch.arange(x.shape[-2], dtype=torch.float64).outer(
        theta ** -(torch.arange(0, 8, 2) / 8.0).double()
    )
    a, b = x.chunk(2, -1)
    y = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([y.real, y.imag], -1)


def test_positions_turn_pairs_and_gradients_are_turned_back() -> None:
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table, given = rotary_table(6, 8, 100.0), x.clone().requires_grad_()
    expected = x.clone().requires_grad_()
    for result in (rotate(given, table), turned(expected, 100.0)):
        (result * x.flip(0)).sum().backward()
    torch.testing.assert_close(rotate(x, table), turned(x, 100.0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(given.grad, expected.grad, rtol=1e-12, atol=1e-12)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        rotate(given.bfloat16(), table.float())
    assert [each.shape for each in kept] == [table.shape]
    assert rotate(x.bfloat16(), table.float()).dtype == torch.bfloat16


def plain_logits(
    weights: dict[str, Tensor],
    config: ModelConfig,
    tokens: Tensor,
    experts: Callable[[str, Tensor], Tensor] | None = None,
) -> Tensor:
    """The transformer again, written from the formulas: loops over heads, complex rotations.

    experts: computes a layer's experts, if it has any, from the name of the layer and the normed hidden states.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, weights[name + ".weight"])

    length, size = tokens.shape[1], config.hidden_size // config.num_heads
    turn = torch.polar(
        torch.ones(length, size // 2, dtype=torch.float64),
        torch.tensor(
            [[p * config.rope_theta ** (-2 * i / size) for i in range(size // 2)] for p in range(length)],
            dtype=torch.float64,
        ),
    )

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    x = weights["embed.weight"][tokens]
    future = torch.ones(length, length).triu(1).bool()
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attn_norm")
        q, k, v = (linear(h, at + f"attn.w{name}").split(size, -1) for name in "qkv")
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = rotated(q[head]) @ rotated(k[shared]).mT / math.sqrt(size)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[shared])
        x = x + linear(torch.cat(heads, -1), at + "attn.wo")
        h = norm(x, at + "ff_norm")
        if experts is not None and config.has_experts(layer):
            x = x + experts(at + "ff.", h)
            continue
        gate = linear(h, at + "ff.w1")
        x = x + linear(gate * gate.sigmoid() * linear(h, at + "ff.w3"), at + "ff.w2")
    return linear(norm(x, "norm"), "head")


def test_the_model_is_the_transformer_it_says_it_is() -> None:
    config = ModelConfig(num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, intermediate_size=40)
    mesh = cast(Mesh, NoMesh())
    split = Splits(TensorSplit(mesh, None, torch.float64), ContextSplit(mesh, None))
    model = Transformer(split, config, Stage(0, 1, range(2)), 9, ONE_STEP)
    initialise(model, config, seed=1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens), plain_logits(weights, config, tokens), rtol=1e-12, atol=1e-13)


def test_weights_follow_from_the_seed_and_the_name_alone() -> None:
    config = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=2, intermediate_size=16)
    mesh = cast(Mesh, NoMesh())
    split = Splits(TensorSplit(mesh, None), ContextSplit(mesh, None))

    def drawn(seed: int, stage: Stage) -> dict[str, Tensor]:
        model = Transformer(split, config, stage, 4, ONE_STEP)
        initialise(model, config, seed)
        return dict(model.named_parameters())

    all_of_it = drawn(3, Stage(0, 1, range(4)))
    parts = {**drawn(3, Stage(0, 2, range(1))), **drawn(3, Stage(1, 2, range(1, 4)))}
    assert list(parts) == list(all_of_it)
    assert all(torch.equal(parts[name], value) for name, value in all_of_it.items())
    other = drawn(4, Stage(0, 1, range(4)))
    assert not torch.equal(other["layers.2.attn.wq.weight"], all_of_it["layers.2.attn.wq.weight"])
    assert not torch.equal(all_of_it["layers.1.ff.w1.weight"], all_of_it["layers.2.ff.w1.weight"])
