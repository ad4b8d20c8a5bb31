"""Weights from a mesh to another and back, into memory that is NaN by then: every rank has the bits that it had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.train import Trainer
from tests.models.families import config_of
from tests.transfer.pairs import poisoned, random_whole, same_bits
from tests.transfer.test_naming import published

transformers = pytest.importorskip("transformers")

# The trainer's layout, on four ranks. Experts, tied and fused weights.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"dims": "pp=2 dp=2", "views": {"expert": {"pp": 2, "edp": 1, "ep": 2}}, "expert": "ep"},
    "llama tied": {"dims": "pp=2 tp=2"},
    "phi3": {"dims": "fsdp=2 tp=2"},
}


def memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's memory of each tensor."""
    with torch.no_grad():
        return {name: (x.to_local() if isinstance(x, DTensor) else x).detach() for name, x in tensors.items()}


def round_trip(source: Mesh, target: Mesh, given: Any, taken: Any, own: dict[str, Tensor]) -> None:
    """Send weights there and back. own: the tensors of this rank's model, `given` on the source and `taken` on the target."""
    there, back = meshcomm.link(source, target, bucket_bytes=5000), meshcomm.link(target, source)
    before = {name: part.clone() for name, part in memory(own).items()} if source.is_member else {}
    if source.is_member:
        there.weights(given).push(version=1).wait()
    else:
        assert there.weights(taken).pull() == 1
    if source.is_member:
        for part in memory(own).values():
            part.copy_(poisoned(part, random.Random(0)))
        assert back.weights(given).pull() == 1
        for name, part in memory(own).items():
            assert same_bits(part, before[name]), name
    else:
        back.weights(taken).push(version=1).wait()


@pytest.mark.parametrize(
    "family", [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.parity) for name in MODELS]
)
def test_a_model_returns_as_it_was(family: str, tmp_path: Path) -> None:
    """From a split model to transformers' own, whose weights are NaN at first, and back."""
    folder = published(family, tmp_path / "1")
    config = config_of(
        {"pretrained": str(folder), "dropout": 0.0}, train={"dtype": "float32"}, **MODELS[family]
    )
    size = 4

    def program(_: Mesh) -> None:
        trains = meshcomm.init(config, overrides=[f"mesh.ranks={[*range(size)]}"])
        generates = meshcomm.init(dims={"copy": 2}, ranks=range(size, size + 2), device="cpu")
        model: nn.Module
        if trains.is_member:
            model = Trainer(trains, config).modules
        else:
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(folder)
            )
            for part in memory(dict(model.named_parameters())).values():
                part.fill_(torch.nan)
        round_trip(trains, generates, model, model, dict(model.named_parameters()))

    meshcomm.simulate(program, dims={"all": size + 2}, timeout_s=240.0)


def test_tensors_of_every_kind_return_as_they_were() -> None:
    """Uneven and empty parts, scalars, and dtypes of one byte, whose bits are any."""
    shapes = {"uneven": (7, 5), "empty": (2, 3), "nothing": (0, 4), "vector": (5,), "scalar": ()}
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64, torch.int8)

    def program(_: Mesh) -> None:
        source = meshcomm.init(dims={"fsdp": 3}, ranks=range(3), device="cpu")
        target = meshcomm.init(dims={"copy": 2, "tp": 2}, ranks=range(3, 7), device="cpu")
        tensors: dict[str, Tensor] = {}
        for number, (name, shape) in enumerate(shapes.items()):
            for dtype in dtypes:
                whole = random_whole(shape, dtype, number)
                if target.is_member:
                    whole = torch.zeros_like(whole)
                mesh, axis = (source["fsdp"], 0) if source.is_member else (target["tp"], len(shape) - 1)
                tensors[f"{name} {dtype}"] = (
                    distribute_tensor(whole, mesh, [Shard(axis)], src_data_rank=None) if shape else whole
                )
        round_trip(source, target, tensors, tensors, tensors)

    meshcomm.simulate(program, dims={"all": 7})
