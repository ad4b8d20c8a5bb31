"""The counts of a step equal the counts that follow from the model and the mesh."""

from __future__ import annotations

import pytest

from meshcomm.parallel import norm
from tests.benchmarks import counted
from tests.sizes import model_of


def test_calls_and_flops_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(counted.SHAPES, "tiny", {**model_of(2, 64, 4, 2, 128), "vocab_size": 256})
    monkeypatch.setattr(norm, "_norms", norm._norms)
    found = counted.counted(counted.Case("tiny", {"fsdp": 4}, {"shard": "fsdp"}, tokens=32), counted.ours)
    # Each layer is gathered for each pass, everything else once. The norm, the number of tokens and the loss are summed.
    assert found["calls"] == {"all_reduce": 3, "all_gather": 5, "reduce_scatter": 3}
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 256 * 64
    # Forward, and twice that for backward. Attention, with 4 heads of 16: forward, and two and a half times that for backward.
    assert found["flops"] == 6 * 32 * weights + 2 * 7 * 2 * 32 * 32 * 64
    table = 256 * 64
    layers = weights - table + 2 * 2 * 64
    assert found["bytes"]["all_gather"] == 2 * (2 * layers + 2 * table + 64)
    assert found["operators"] > 200
