"""Published trainings: what the rows say, and torchtitan's loss beside plain torch."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.benchmarks.published import ROWS, LossParallel, config_of


def test_every_row_is_a_training_with_the_published_tokens() -> None:
    seconds = {}
    for row in ROWS:
        config = config_of(row)
        world = prod(config.mesh.dims.values())
        train, data = config.resolved(world).train, config.data
        assert train is not None and data is not None
        if row.seconds:
            seconds[row.name] = train.global_batch_size * data.seq_len / world / row.seconds
    # Tokens per second and GPU, as published.
    assert seconds["8B, 8 H100"] == pytest.approx(5762)
    assert seconds["70B, fsdp32 tp8, compiled, float8"] == pytest.approx(829)
    assert seconds["405B, the same, interleaved"] == pytest.approx(128)
    assert seconds["70B, 64 A100"] == pytest.approx(331)
    # 3.7 days for 10^12 tokens on 2,048 GPUs.
    assert 1e12 / seconds["DeepSeek-V3, pp16 ep64, 2,048 H800"] / 2048 / 86_400 == pytest.approx(
        3.66, abs=0.01
    )


def test_torchtitan_s_loss_has_torch_s_values_and_gradients() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7).bfloat16().requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(7, (2, 5))
    split = SimpleNamespace(dim="tp", mesh=SimpleNamespace(all_reduce=lambda dim, x, op="sum": x))
    loss = LossParallel.apply(logits, targets, None, split, 0.0, 0.0)
    expected = F.cross_entropy(twin.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, twin.grad)
