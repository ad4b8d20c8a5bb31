"""Examples find parts of a split module that compute other values, and explain failures in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.errors import RankFailed, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import TensorSplit, tensor_parallel
from tests.parallel.tensor.test_apply import IDS, module_of, parity, plan_of


@pytest.mark.parametrize(
    ("name", "broken", "sequence", "seen"),
    [
        ("leave", lambda split, x: x, False, "output 0: off by"),
        ("enter", lambda split, x: x, False, "gradient of embed.weight: off by"),
        ("partial_parameters", lambda split, module: {}, True, r"gradient of layers.0.norm1.weight: off by"),
    ],
)
def test_an_example_shows_what_is_computed_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, sequence: bool, seen: str
) -> None:
    monkeypatch.setattr(TensorSplit, name, broken)
    with pytest.raises(RankFailed, match=seen) as caught:
        meshcomm.simulate(parity, dims={"tp": 2}, args=("separate", sequence))
    assert "output" in seen or "output" not in str(caught.value).split("expected:")[0]


def without(*names: str, kind: str = "fused", **more: Any) -> dict[str, Any]:
    return {name: style for name, style in {**plan_of(kind), **more}.items() if name not in names}


MQA = {
    "layers.*.attn": {"set": {"heads": "split"}},
    "layers.*.attn.qkv": {"style": "column", "parts": [16, 4, 4]},
    "layers.*.attn.out": "row",
}


FAILING: list[tuple[str, dict[str, Any], str, bool, str, str]] = [
    ("fused", without("layers.*.mlp.2"), "", False, '"layers.0.mlp.2", a Linear', '"layers.0.mlp.2": "row", as it gets 16 of its 32 inputs'),
    ("fused", without("layers.*.mlp.0"), "", False, '"layers.0.mlp.2", a Linear', '"layers.0.mlp.2" gets all of its 32 inputs: a "column" before it'),
    ("fused", without("layers.*.attn"), "", False, '"layers.0.attn", a Fused', '"layers.0.attn": {"set": {"heads": "split"}}, 4 now'),
    ("mqa", without(**MQA), "", False, '"layers.0.attn", a Fused', "a size of tp that divides kv_heads = 1, which cannot be split by tp = 2"),
    ("fused", plan_of("fused"), "labels", False, "the module itself, a Small", '"head": "column:whole", or no labels'),
    ("separate", without(places="sequence", kind="separate"), "", True, "the module itself, a Small", '{"style": "replicate", "input": "whole", "axis": 0} for a part'),
    ("gqa", without(kind="gqa", **{"layers.*.attn": {"set": {"heads": "split", "kv_heads": "split"}}}), "", True, '"layers.0.attn", a Fused', '"layers.0.attn": "enter" if it reads the length from its input, "replicate" if it needs all: it gets 4 of 8 positions'),
]  # fmt: skip


def failing(mesh: Mesh) -> None:
    for kind, plan, labels, sequence, where, cure in FAILING:
        example = {"ids": IDS} | ({"labels": IDS} if labels else {})
        with pytest.raises(TrainingError) as caught:
            tensor_parallel(module_of(kind), mesh, "tp", plan, sequence_parallel=sequence, example=example)
        text = str(caught.value)
        assert f" fails on its example in {where}" in text.splitlines()[0], text
        assert text.count(cure) == 1, text
        assert isinstance(caught.value.__cause__, Exception)
    # The change that the error proposes makes the module equal again.
    cured = plan_of("fused") | {"head": "column:whole"}
    tensor_parallel(module_of("fused"), mesh, "tp", cured, example={"ids": IDS, "labels": IDS})


def test_a_part_that_fails_behind_the_split_its_size_and_the_cure_are_named() -> None:
    meshcomm.simulate(failing, dims={"tp": 2})


class Reshaped(nn.Module):
    """Attention that reshapes to the full width after the split columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, 8) -> the same shape."""
        y: Tensor = self.down(self.up(x).transpose(1, 2).transpose(1, 2).reshape(x.shape[0], x.shape[1], 16))
        return y


def reshaped(mesh: Mesh) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Reshaped())
    with pytest.raises(TrainingError) as caught:
        tensor_parallel(
            module, mesh, "tp", {"0.up": "column", "0.down": "row"}, example=(torch.randn(2, 3, 8),)
        )
    text = str(caught.value)
    assert 'fails on its example in "0", a Reshaped' in text
    line = Reshaped.forward.__code__.co_firstlineno + 2
    assert f"at {__file__}:{line} in forward: y: Tensor = self.down(self.up(x)" in text, text
    assert "reshape to [2, 3, -1] instead of [2, 3, 16]" in text


def test_the_line_of_the_users_forward_and_a_reshape_that_fits_are_named() -> None:
    meshcomm.simulate(reshaped, dims={"tp": 2})
