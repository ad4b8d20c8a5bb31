"""Logits of transformers' own models after a version has arrived, bit for bit those of the folder that transformers saves and reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.train import Trainer
from tests.models.families import config_of
from tests.transfer.test_naming import SOURCES, published

transformers = pytest.importorskip("transformers")


def logits(model: Any) -> Tensor:
    """Return the logits of a fixed input."""
    tokens = torch.arange(48).view(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        scores: Tensor = model.eval()(tokens, use_cache=False).logits
    return scores


def halve(module: nn.Module) -> None:
    """Update each weight in a way that rounds nothing, so that the update does not depend on splits."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def folders(family: str, path: Path) -> list[Path]:
    """Return the folders of two versions of a model, which transformers has saved."""
    first, second = published(family, path / "1"), path / "2"
    model = transformers.AutoModelForCausalLM.from_pretrained(first)
    halve(model)
    model.save_pretrained(second)
    return [first, second]


def read(path: Path) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path)
    return model


def unread(path: Path) -> nn.Module:
    """Return the model of a folder with random weights."""
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(path)
    )
    return model


def versions(
    config: Any, source: Path, engine: Callable[[Mesh, nn.Module], nn.Module], paths: list[Path]
) -> list[tuple[Tensor, Tensor]] | None:
    """Train on ranks 0 to 3 and generate on ranks 4 and 5. Return pairs of logits: the generator's, and an engine's that meshcomm
    has not touched. The first pair has random weights, the others those of each version and of its folder.
    """
    trains = meshcomm.init(config, overrides=["mesh.ranks=[0,1,2,3]"])
    generates = meshcomm.init(dims={"tp": 2}, ranks=range(4, 6), device="cpu")
    link = meshcomm.link(trains, generates, bucket_bytes=20_000)
    if trains.is_member:
        trainer = Trainer(trains, config)
        weights = link.weights(trainer.modules)
        weights.push(version=1).wait()
        halve(trainer.modules)
        weights.push(version=2).wait()
        return None
    model = engine(generates, unread(source))
    weights = link.weights(model)
    pairs = [(logits(model), logits(engine(generates, unread(source))))]
    for path in paths:
        weights.pull()
        pairs.append((logits(model), logits(engine(generates, read(path)))))
    return pairs


def check(family: str, folder: Path, engine: Callable[[Mesh, nn.Module], nn.Module]) -> None:
    paths = folders(family, folder)
    config = config_of(
        {"pretrained": str(paths[0]), "dropout": 0.0}, train={"dtype": "float32"}, **SOURCES[family]
    )
    ranks = meshcomm.simulate(
        lambda mesh: versions(config, paths[0], engine, paths), dims={"all": 6}, timeout_s=240.0
    )
    for pairs in ranks[4:]:
        (before, other), *arrived = pairs
        assert not torch.equal(before, other)
        for number, (ours, expected) in enumerate(arrived, start=1):
            assert expected.isfinite().all()
            assert torch.equal(ours, expected), f"version {number}: {(ours - expected).abs().max()}"
            assert not torch.equal(ours, before), f"version {number} is the one before"
            before = ours


@pytest.mark.parametrize(
    "family",
    [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.parity) for name in SOURCES],
)
def test_a_plain_engine_computes_what_the_folder_computes(family: str, tmp_path: Path) -> None:
    check(family, tmp_path, lambda mesh, model: model)


def split(mesh: Mesh, model: nn.Module) -> nn.Module:
    """Split a Llama along tp by torch's styles, the embedding and the head included."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh["tp"], plan)


def test_a_split_engine_computes_what_it_computes_with_the_folder(tmp_path: Path) -> None:
    """Sums differ between splits, so both engines are split alike."""
    check("qwen3", tmp_path, split)
