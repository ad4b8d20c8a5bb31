"""Parts of the built-in model: its norm against torch's, its rotary positions against complex numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.models.transformer import rms_norm, rotary_table, rotate


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
