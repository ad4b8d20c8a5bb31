"""Differences between a family's code and Llama's, on meshes as in plain transformers. Positions start at another number, modules
are called in another order than they are registered in, and a tied weight is stored under either name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from safetensors import safe_open

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import RankFailed, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.models import spec_model
from meshcomm.models.check import Use, check_model
from meshcomm.models.families import spec_of
from meshcomm.models.hf import Whole
from meshcomm.models.tiny import tiny
from meshcomm.testing import Pool
from meshcomm.train import Trainer, save_pretrained

from .families import config_of

WORDS, SAMPLES, TOKENS, STEPS, PAD, LR = 64, 4, 32, 2, 1, 0.1
BERT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "is_decoder": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Roberta", "XLMRoberta", "Camembert", "Data2VecText", "RobertaPreLayerNorm"), BERT),
    "XLMRobertaXL": BERT,
    # The embedding counts positions from 2, and the last norm is registered before the blocks.
    "OPT": {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "dropout": 0.0,
        "init_std": 0.2,
    },
}


def folder_of(family: str, path: Path) -> Path:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM
    model.from_config(config).save_pretrained(path)
    return path


def batches() -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each step. Some samples end with padding, and one has the padding token inside."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        tokens = torch.randint(PAD + 1, WORDS, (SAMPLES, TOKENS), generator=generator)
        labels = tokens.clone()
        for sample, length in enumerate((TOKENS, 20, 9, TOKENS)):
            tokens[sample, length:], labels[sample, length:] = PAD, -100
        tokens[3, 7] = PAD
        found.append((tokens, labels))
    return found


def alone(folder: Path) -> list[float]:
    """The losses of plain transformers in each step."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=LR), []
    for tokens, labels in batches():
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def config_for(folder: Path, dims: str, *changes: str) -> Config:
    train = {
        "steps": STEPS,
        "global_batch_size": SAMPLES,
        "micro_batch_size": 1,
        "clip_norm": None,
        "weight_decay": 0.0,
        "schedule": "constant",
        "lr": LR,
    }
    return load_config(config_of({"pretrained": str(folder)}, dims, train=train), list(changes))


def trained(config: Config, mesh: Mesh, out: Path | None = None) -> list[float]:
    trainer = Trainer(mesh, config, optimizer=partial(torch.optim.SGD, lr=LR))
    for each in batches():
        mine = [x.chunk(mesh.data_world_size)[mesh.data_rank] for x in each]
        trainer.step({"input_ids": mine[0], "labels": mine[1]})
    if out is not None:
        save_pretrained(trainer, out)
    return [done.loss for done in trainer.results()]


def on_processes(config: Config) -> list[float]:
    with meshcomm.init(config) as mesh:
        return trained(config, mesh)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.deep_cases(r"\[(XLM|Camembert|Data2Vec|RobertaPre)")
def test_a_family_counts_its_own_positions(tmp_path: Path, family: str) -> None:
    expected = alone(folder_of(family, tmp_path))
    config = config_for(tmp_path, "dp=2")
    for found in meshcomm.simulate(partial(trained, config), config):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", ["OPT", "XLMRoberta"])
@pytest.mark.deep_cases(r"\[XLMRoberta")
def test_stages_have_the_modules_that_they_call(pool: Pool, tmp_path: Path, family: str) -> None:
    expected = alone(folder_of(family, tmp_path))
    for found in pool.run(on_processes, config_for(tmp_path, "pp=2"), ranks=2, timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("check", ["true", "false"])
@pytest.mark.parametrize(
    ("dims", "change", "setting"),
    [
        ("cp=2", "data.max_bytes=200000", "parallel.context"),
        ("dp=2", "data.document_mask=true", "data.document_mask"),
    ],
)
def test_positions_that_a_family_counts_itself_are_not_given(
    tmp_path: Path, dims: str, change: str, setting: str, check: str
) -> None:
    config = config_for(folder_of("Roberta", tmp_path), dims, change, f"train.check={check}")
    with pytest.raises(RankFailed) as caught:
        meshcomm.simulate(partial(trained, config), config)
    assert f"cannot be trained with {setting}" in str(caught.value)
    assert "a RobertaForCausalLM counts the positions of its tokens itself" in str(caught.value)


def test_the_check_compares_with_the_positions_that_a_family_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_model, "own_positions", lambda spec: "")
    whole = Whole(tiny(transformers.RobertaConfig(**BERT, use_cache=False)), exact=True)
    spec = replace(spec_of(whole), initialise=partial(whole.initialise, 0))
    with pytest.raises(TrainingError, match=r"computes different results with parallel\.context"):
        check_model(spec, Use(context=True), family=True)


def test_a_tied_weight_is_read_under_the_name_that_was_saved(tmp_path: Path) -> None:
    with safe_open(folder_of("XLMRoberta", tmp_path / "a") / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "roberta.embeddings.word_embeddings.weight" in names and "lm_head.decoder.weight" not in names
    config = config_for(tmp_path / "a", "dp=1")
    meshcomm.simulate(lambda mesh: trained(config, mesh, tmp_path / "b"), config)
    model: Any = transformers.XLMRobertaForCausalLM
    _, info = model.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    again = config_for(tmp_path / "b", "dp=1")
    (found,) = meshcomm.simulate(partial(trained, again), again)
    assert found == pytest.approx(alone(tmp_path / "b"), rel=1e-9)
