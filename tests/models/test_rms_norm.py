"""The norm of the built-in model beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.models.transformer import rms_norm


@pytest.mark.parametrize("trained", ["both", "x", "weight"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_it_is_torch_s(dtype: torch.dtype, trained: str) -> None:
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
