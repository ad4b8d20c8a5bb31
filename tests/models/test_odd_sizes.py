"""Key and value heads that are fewer than the ranks along tensor, and vocabularies that these ranks do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import meshcomm
from meshcomm.config import Config, ModelConfig
from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec
from meshcomm.models.transformer import Transformer, initialise
from meshcomm.parallel import Stage, TensorSplit
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.splits import Splits
from meshcomm.train import Trainer, save_pretrained
from tests.models.families import config_of
from tests.models.test_transformer import plain_logits
from tests.sizes import model_of, train_of
from tests.train.test_steps import ONE_STEP, NoMesh

VOCAB, TOKENS, SAMPLES, STEPS, LR = 61, 32, 4, 2, 0.2
TRAIN = {**train_of(STEPS, SAMPLES, 1, lr=LR), "clip_norm": None, "schedule": "constant", "check": False}
SHARED: dict[str, Any] = {"tokenizer": None, "train": TRAIN}
SMOOTHING, Z_LOSS = 0.1, 0.01


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (SAMPLES, TOKENS + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def steps_of(trainer: Trainer, begin: int, end: int) -> list[float]:
    engine = trainer.engine
    for step in [*batches()][begin:end]:
        trainer.step(*(x.chunk(engine.data_size)[engine.data_coord] for x in step))
    return [value for done in trainer.results() for value in (done.loss, done.gradient_norm)]


def program(
    config: Config, begin: int, end: int, folder: Path, exported: Path | None, mesh: Mesh
) -> list[float]:
    """The losses and the norms of some steps, after which the state is saved, or exported."""
    trainer = Trainer(mesh, config, optimizer=partial(torch.optim.SGD, lr=LR))
    if begin:
        trainer.load(folder)
    found = steps_of(trainer, begin, end)
    if exported is not None:
        save_pretrained(trainer, exported)
    elif end < STEPS:
        trainer.save(folder)
    return found


def simulated(config: Config, *args: Any) -> list[float]:
    (found, *others) = meshcomm.simulate(partial(program, config, *args), config)
    assert all(other == pytest.approx(found, rel=1e-12) for other in others)
    return cast("list[float]", found)


def built_in(tied: bool) -> dict[str, Any]:
    return model_of(2, 16, 4, 1, 24, vocab_size=VOCAB, tied_embeddings=tied)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), label_smoothing=SMOOTHING)
    return plain + Z_LOSS * logits.logsumexp(-1).square().mean()


def alone(model: dict[str, Any]) -> list[float]:
    """The same steps of the built-in model in plain torch."""
    config, mesh = ModelConfig(**model), cast(Mesh, NoMesh())
    split = Splits(TensorSplit(mesh, None, torch.float64), ContextSplit(mesh, None))
    of = Transformer(split, config, Stage(0, 1, range(config.num_layers)), TOKENS, ONE_STEP)
    initialise(of, config, 0)
    weights = {name: x.detach().clone().requires_grad_() for name, x in of.named_parameters()}
    found = []
    for inputs, targets in batches():
        named = {**weights, "head.weight": weights.get("head.weight", weights["embed.weight"])}
        loss = smoothed(plain_logits(named, config, inputs), targets)
        grads = torch.autograd.grad(loss, [*weights.values()])
        with torch.no_grad():
            for weight, grad in zip(weights.values(), grads, strict=True):
                weight -= LR * grad
        found += [loss.item(), torch.stack([grad.norm() for grad in grads]).norm().item()]
    return found


@pytest.mark.parametrize(
    ("dims", "then", "more", "tied"),
    [
        ("tp=4", "fsdp=2 tp=2", {}, False),
        ("fsdp=2 tp=2", "tp=4", {"sequence_parallel": True}, True),
        ("pp=2 tp=2", "dp=2", {}, True),
    ],
    ids=str,
)
def test_the_built_in_model_is_the_same_and_resumes_on_other_sizes(
    tmp_path: Path, dims: str, then: str, more: dict[str, Any], tied: bool
) -> None:
    model, folder = built_in(tied), tmp_path / "saved"
    shared = {"tokenizer": None, "train": {**TRAIN, "label_smoothing": SMOOTHING, "z_loss": Z_LOSS}}
    found = simulated(config_of(model, dims, **shared, **more), 0, 1, folder, None)
    found += simulated(config_of(model, then, **shared), 1, 2, folder, None)
    assert found == pytest.approx(alone(model), rel=1e-10)


def tables() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).double()


def with_an_own_loss(config: Config, mesh: Mesh) -> list[float]:
    spec = ModelSpec(
        module=tables, hidden_size=8, vocab_size=VOCAB, split={"0": "vocab", "1": "vocab"}, loss=smoothed
    )
    return steps_of(Trainer(mesh, config, spec, optimizer=partial(torch.optim.SGD, lr=LR)), 0, STEPS)


def test_a_loss_of_ones_own_is_given_whole_logits() -> None:
    model = tables()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=LR), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = smoothed(model(inputs), targets)
        loss.backward()
        norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
        optimizer.step()
        expected += [loss.item(), norm.item()]
    config = config_of(built_in(False), "tp=4", **SHARED).model_copy(update={"model": None})
    for found in meshcomm.simulate(partial(with_an_own_loss, config), config):
        assert found == pytest.approx(expected, rel=1e-10)


FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"tie_word_embeddings": True},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.deep_cases(r"\[Qwen")
def test_a_family_is_that_of_transformers_and_exported_without_padding(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    facts: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
    }
    facts |= {"num_attention_heads": 8, "num_key_value_heads": 2, **FAMILIES[kind]}
    facts |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(getattr(transformers, kind)(**facts))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "from")
    model = auto.from_pretrained(tmp_path / "from", dtype=torch.float64)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=LR), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
        optimizer.step()
        expected += [loss.item(), norm.item()]
    settings, folder = {"pretrained": str(tmp_path / "from")}, tmp_path / "saved"
    more = {**SHARED, "sequence_parallel": kind == "Qwen3Config"}
    found = simulated(config_of(settings, "tp=4", **more), 0, 1, folder, None)
    found += simulated(config_of(settings, "pp=2 tp=2", **more), 1, 2, folder, tmp_path / "to")
    # transformers computes norms and rotary angles in float32.
    assert found == pytest.approx(expected, rel=1e-5)
    after = auto.from_pretrained(tmp_path / "to", dtype=torch.float64).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-6)


def test_heads_that_ranks_cannot_share_and_too_small_vocabularies_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"num_kv_heads is not divisible by tp: 3 % 4 = 3[\s\S]*or a divisor"
    ):
        config_of(model_of(2, 24, 12, 3, 24), "tp=4", **SHARED)
    with pytest.raises(ConfigError, match=r"model.vocab_size: too small"):
        config_of(model_of(2, 16, 8, 2, 24, vocab_size=5), "tp=4", **SHARED)
