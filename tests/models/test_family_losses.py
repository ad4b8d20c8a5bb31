"""A term that a family adds to the cross-entropy counts as on one process, or the model is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

import transformers

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import RankFailed, UnsupportedOp
from meshcomm.testing import Pool
from meshcomm.train import Trainer

from .families import config_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 4},
    # It has a shared expert, and layers without experts.
    "Qwen2MoeConfig": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
}
STEPS, SAMPLES, TOKENS, PIECE, LR = 3, 8, 32, 2, 0.1
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralConfig": ("dp=2 tp=2", {"sequence_parallel": True}),
    "Qwen2MoeConfig": ("fsdp=4", {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2}}}),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    """The inputs and targets of each step. Microbatches have different numbers of targets."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(SMALL["vocab_size"], (SAMPLES, TOKENS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[
            torch.rand(targets.shape, generator=generator) < torch.rand(SAMPLES, 1, generator=generator)
        ] = -100
        found.append((tokens[:, :-1], targets))
    return found


def alone(folder: Path) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step, computed by transformers' model and a plain optimizer."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    optimizer, found = torch.optim.SGD(model.parameters(), lr=LR), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss, count = torch.zeros((), dtype=torch.float64), (targets != -100).sum()
        for x, y in zip(inputs.split(PIECE), targets.split(PIECE), strict=True):
            out = model(x, labels=y, shift_labels=y)
            mean = F.cross_entropy(out.logits.flatten(0, 1), y.flatten())
            # transformers computes the cross-entropy in float32.
            own = mean + model.config.router_aux_loss_coef * out.aux_loss
            assert abs((own - out.loss).item()) < 1e-5
            loss = loss + own * (y != -100).sum() / count
        loss.backward()
        norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def on_a_mesh(config: Config) -> list[tuple[float, float]]:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, optimizer=partial(torch.optim.SGD, lr=LR))
        dim = "dp" if "dp" in mesh.layout.dims else "fsdp"
        size, coord = mesh.size(dim), mesh.coord(dim)
        for step in batches():
            trainer.step(*(each.chunk(size)[coord] for each in step))
        results = trainer.results()
        assert all(0 < done.terms["aux_loss"] < done.loss for done in results)
        return [(done.loss, done.gradient_norm) for done in results]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.deep_cases(r"\[Qwen2Moe")
def test_the_auxiliary_loss_of_routers_counts(pool: Pool, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    said = getattr(transformers, kind)(**SMALL, **FAMILIES[kind])
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(said).save_pretrained(tmp_path)
    expected = [value for pair in alone(tmp_path) for value in pair]
    dims, more = MESHES[kind]
    config = config_of(
        {"pretrained": str(tmp_path)},
        dims,
        train={
            "steps": STEPS,
            "global_batch_size": SAMPLES,
            "micro_batch_size": PIECE,
            "clip_norm": None,
            "weight_decay": 0.0,
            "schedule": "constant",
            "lr": LR,
        },
        **more,
    )
    for pairs in pool.run(on_a_mesh, config, ranks=4, timeout_s=120):
        # transformers computes routers and rotary angles in float32.
        assert [value for pair in pairs for value in pair] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dims", ["pp=2", "cp=2"])
def test_an_auxiliary_loss_of_which_a_rank_has_a_part_is_refused(tmp_path: Path, dims: str) -> None:
    transformers.MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    config = config_of({"pretrained": str(tmp_path), "random_weights": True}, dims)
    with pytest.raises(RankFailed, match=r"auxiliary loss \(output_router_logits\)"):
        meshcomm.simulate(partial(_train, config), config)


def _train_padded(config: Config, mesh: meshcomm.Mesh) -> None:
    tokens = torch.randint(1, SMALL["vocab_size"], (1, TOKENS))
    Trainer(mesh, config).step(
        {"input_ids": tokens, "attention_mask": (torch.arange(TOKENS) < 20).long()[None]}
    )


def test_padding_does_not_count_in_an_auxiliary_loss(tmp_path: Path) -> None:
    # transformers passes the mask to the auxiliary loss.
    transformers.MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    train = {"global_batch_size": 2, "micro_batch_size": 1}
    config = config_of({"pretrained": str(tmp_path), "random_weights": True}, "dp=2", train=train)
    with pytest.raises(RankFailed, match="auxiliary loss would count the padding"):
        meshcomm.simulate(partial(_train_padded, config), config)


def _train(config: Config, mesh: meshcomm.Mesh) -> None:
    assert Trainer(mesh, config).engine


def _step(config: Config, masked: int, mesh: meshcomm.Mesh) -> float:
    tokens = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % SMALL["vocab_size"]
    mask = (torch.arange(TOKENS) < TOKENS - masked).expand_as(tokens)
    trainer = Trainer(mesh, config)
    trainer.step({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(~mask, -100)})
    return trainer.results()[0].terms["aux_loss"]


@pytest.mark.parametrize("masked", [0, 1, 9])
def test_padding_that_an_auxiliary_loss_would_count_is_refused(tmp_path: Path, masked: int) -> None:
    transformers.MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    config = config_of({"pretrained": str(tmp_path), "random_weights": True}, "dp=1")
    if not masked:
        assert meshcomm.simulate(partial(_step, config, masked), config)[0] > 0
        return
    with pytest.raises(RankFailed, match="the routers' auxiliary loss would count the padding of step 1"):
        meshcomm.simulate(partial(_step, config, masked), config)


@pytest.mark.parametrize("setting", ["z_loss", "label_smoothing"])
def test_settings_of_the_built_in_loss_are_refused_beside_an_auxiliary_loss(
    tmp_path: Path, setting: str
) -> None:
    transformers.MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    model = {"pretrained": str(tmp_path), "random_weights": True}
    config = config_of(model, "dp=1", train={setting: 0.01})
    with pytest.raises(RankFailed) as caught:
        meshcomm.simulate(partial(_train, config), config)
    assert "cannot be combined with the routers' auxiliary loss" in str(caught.value)
    assert f"train.{setting} = 0.01, and output_router_logits = true" in str(caught.value)


@pytest.mark.parametrize("factor", [0.0, 0.1])
def test_another_term_of_a_familys_loss_is_refused(tmp_path: Path, factor: float) -> None:
    transformers.BambaConfig(
        **{
            name: SMALL[name]
            for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        },
        intermediate_size=32,
        num_key_value_heads=2,
        z_loss_coefficient=factor,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        attn_layer_indices=[1],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(tmp_path)
    config = config_of({"pretrained": str(tmp_path), "random_weights": True}, "dp=1")
    with meshcomm.init(config) as mesh:
        if factor:
            with pytest.raises(UnsupportedOp, match="the loss of a BambaForCausalLM has terms"):
                Trainer(mesh, config)
        else:
            Trainer(mesh, config)
