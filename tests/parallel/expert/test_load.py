"""Balance losses, biases and loads of experts are those of one process, in plain torch or transformers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers")

import transformers

import meshcomm
from meshcomm.config import Config, ModelConfig, load_config
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.models.families import hugging_face
from meshcomm.models.transformer import Transformer, initialise
from meshcomm.parallel import Stage, TensorSplit
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.splits import Splits
from meshcomm.testing import Pool
from meshcomm.train import Trainer, save_pretrained
from tests.models.families import config_of
from tests.models.test_transformer import plain_logits
from tests.sizes import model_of, train_of
from tests.train.runs import metrics, trained
from tests.train.test_steps import ONE_STEP, NoMesh

STEPS, SAMPLES, TOKENS, LR, SPEED = 4, 8, 32, 0.1, 0.03
TRAIN = {**train_of(STEPS, SAMPLES, 2, lr=LR), "clip_norm": None, "schedule": "constant", "check": False}
MODEL = model_of(4, 16, 4, 2, 24, vocab_size=64, experts=4, experts_every=2)
MODEL |= {"bias_update_speed": SPEED, "balance_loss": 0.05, "capacity_factor": 1.1}
EP2 = {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2}}}
TP2 = {"expert": "ep", "views": {"expert": {"ep": 2, "tp": 2}}}
MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "ep2": ("dp=4", EP2),
    "dp2 tp2 ep2": ("dp=2 tp=2", {**TP2, "sequence_parallel": True}),
    "pp2 cp2": ("pp=2 cp=2", {}),
    "fsdp2 tp2 ep2 recomputed": ("fsdp=2 tp=2", {**TP2, "recompute": True}),
}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(64, (SAMPLES, TOKENS + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


class Alone:
    """The built-in model with experts in one process: loops over experts and samples."""

    def __init__(self, model: dict[str, Any]) -> None:
        self.config = config = ModelConfig(**model)
        split = Splits(
            TensorSplit(cast(Mesh, NoMesh()), None, torch.float64), ContextSplit(cast(Mesh, NoMesh()), None)
        )
        of = Transformer(split, config, Stage(0, 1, range(config.num_layers)), TOKENS, ONE_STEP)
        initialise(of, config, 0)
        self.weights = {name: x.detach().clone().requires_grad_() for name, x in of.named_parameters()}
        layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
        self.biases = {layer: torch.zeros(config.experts, dtype=torch.float64) for layer in layers}
        self.loads: dict[int, Tensor] = {}
        self.dropped = 0
        self.balance = torch.zeros(())

    def experts(self, at: str, x: Tensor) -> Tensor:
        layer, config, slots = int(at.split(".")[1]), self.config, self.config.experts_per_token
        weights = {
            name: self.weights[at + name]
            for name in ("router.weight", "experts.w1", "experts.w2", "experts.w3")
        }
        probabilities = F.softmax(x @ weights["router.weight"].T, -1)
        chosen = (probabilities + self.biases[layer]).topk(slots).indices
        factors = probabilities.gather(-1, chosen)
        factors = factors / factors.sum(-1, keepdim=True)
        self.loads[layer] = torch.bincount(chosen.flatten(), minlength=config.experts)
        y, assert_factor = torch.zeros_like(x), config.capacity_factor
        assert assert_factor is not None
        limit = -int(-assert_factor * TOKENS * slots // config.experts)
        for sample in range(len(x)):
            share = torch.bincount(chosen[sample].flatten(), minlength=config.experts) / (TOKENS * slots)
            self.balance = self.balance + config.experts * (
                share * probabilities[sample].mean(0)
            ).sum() / len(x)
            for expert in range(config.experts):
                w1, w2, w3 = (weights[f"experts.w{n}"][expert] for n in (1, 2, 3))
                # First choices come before second choices.
                places = (expert == chosen[sample].T).nonzero()
                self.dropped += max(0, len(places) - limit)
                for slot, token in places[:limit].tolist():
                    row = x[sample, token]
                    y[sample, token] += factors[sample, token, slot] * (w2 @ (F.silu(w1 @ row) * (w3 @ row)))
        return y

    def run(self) -> list[dict[str, Any]]:
        found = []
        for inputs, targets in batches():
            self.balance, self.dropped = torch.zeros((), dtype=torch.float64), 0
            logits = plain_logits(self.weights, self.config, inputs, self.experts)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            grads = torch.autograd.grad(
                loss + self.config.balance_loss * self.balance, [*self.weights.values()]
            )
            with torch.no_grad():
                for weight, grad in zip(self.weights.values(), grads, strict=True):
                    weight -= LR * grad
                for layer, bias in self.biases.items():
                    load = self.loads[layer].double()
                    bias += SPEED * (load.mean() - load).sign()
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            shares = {f"{layer}": (load / load.sum()).tolist() for layer, load in self.loads.items()}
            found.append(
                {
                    "loss": loss.item(),
                    "norm": norm.item(),
                    "load": shares,
                    "dropped": self.dropped / sum(load.sum().item() for load in self.loads.values()),
                }
            )
        return found


def on_a_mesh(config: Config) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The losses, norms and loads of the steps, and the biases on this rank afterwards."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, optimizer=partial(torch.optim.SGD, lr=LR))
        engine, loads = trainer.engine, []
        for step in batches():
            trainer.step(*(x.chunk(engine.data_size)[engine.data_coord] for x in step))
            loads.append(engine.expert_loads())
        found = [
            {
                "loss": done.loss,
                "norm": done.gradient_norm,
                "load": load["expert_load"],
                "dropped": load["experts_dropped"],
            }
            for done, load in zip(trainer.results(), loads, strict=True)
        ]
        return found, {name: x.clone() for name, x in trainer.engine.state().items() if name.endswith("bias")}


def _mesh(name: str, model: dict[str, Any], **train: Any) -> Config:
    dims, more = MESHES[name]
    options = {key: value for key, value in more.items() if key != "recompute"}
    train = {**TRAIN, "activation_checkpointing": 4 if "recompute" in more else False, **train}
    return config_of(model, dims, train=train, tokenizer=None, **options)


@pytest.fixture(scope="module")
def alone() -> tuple[list[dict[str, Any]], dict[int, Tensor]]:
    of = Alone(MODEL)
    found = of.run()
    assert any(row["dropped"] for row in found)
    return found, of.biases


@pytest.mark.parametrize("name", MESHES)
def test_biases_losses_and_loads_are_those_of_one_process(pool: Pool, alone: Any, name: str) -> None:
    expected, biases = alone
    results = pool.run(on_a_mesh, _mesh(name, MODEL), ranks=4, timeout_s=120)
    for found, _ in results:
        for row, other in zip(found, expected, strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-10)
            assert row["norm"] == pytest.approx(other["norm"], rel=1e-10)
            assert row["dropped"] == pytest.approx(other["dropped"], abs=1e-6)
            for layer, shares in other["load"].items():
                assert row["load"][layer] == pytest.approx(shares, abs=1e-6)
    together = {key: x for _, of_rank in results for key, x in of_rank.items()}
    assert len(together) == len(biases) == 2
    for layer, bias in biases.items():
        assert bias.abs().max() > SPEED
        assert torch.equal(together[f"model.layers.{layer}.ff.router.e_score_correction_bias"], bias)


def test_a_run_reports_the_loads_of_logged_steps(pool: Pool, tmp_path: Path) -> None:
    config = config_of({**MODEL, "vocab_size": 256}, "pp=2 dp=2", train={**TRAIN, "steps": 3}, tokenizer=None)
    config = load_config(
        config, ["data.validation=0.2", "train.eval_every=1", "train.log_every=2", f'train.out="{tmp_path}"']
    )
    pool.run(trained, config, ranks=4)
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        shares = line["expert_load"]
        assert [*shares] == ["1", "3"]
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in shares.values())
        busiest = max(4 * max(row) for row in shares.values())
        assert line["expert_max_over_mean"] == pytest.approx(busiest, abs=1e-3)
        # Choices of evaluations do not count.
        choices = [share * SAMPLES * TOKENS * 2 for row in shares.values() for share in row]
        assert choices == pytest.approx([round(count) for count in choices], abs=1e-2)


# -- families of transformers ---------------------------------------------------------------------------

FACTS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {"Glm4MoeConfig": {"head_dim": 8, "n_group": 1}, "DeepseekV3Config": LATENT}


def by_transformers(folder: Path) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """The losses, the biases after the last step, and the loads of the last layer in the last step."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    routers = {name: part for name, part in model.named_modules() if hasattr(part, "e_score_correction_bias")}
    loads = {name: torch.zeros(FACTS["n_routed_experts"], dtype=torch.float64) for name in routers}

    def count(name: str, part: Any, args: Any, out: Any) -> None:
        loads[name] += torch.bincount(out[2].flatten(), minlength=FACTS["n_routed_experts"])

    for name, part in routers.items():
        part.register_forward_hook(partial(count, name))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        for load in loads.values():
            load.zero_()
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, part in routers.items():
            part.e_score_correction_bias += SPEED * (loads[name].mean() - loads[name]).sign()
    biases = {
        f"{name}.e_score_correction_bias": part.e_score_correction_bias for name, part in routers.items()
    }
    return losses, biases, (load / load.sum()).tolist()


def a_part_of_the_steps(config: Config, begin: int, end: int, folder: Path, exported: Path | None) -> Any:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, optimizer=partial(torch.optim.SGD, lr=LR))
        if begin:
            trainer.load(folder)
        engine, loads = trainer.engine, {}
        for inputs, targets in [*batches()][begin:end]:
            trainer.step(*(x.chunk(engine.data_size)[engine.data_coord] for x in (inputs, targets)))
            loads = engine.expert_loads()
        losses = [done.loss for done in trainer.results()]
        if exported is None:
            trainer.save(folder)
        else:
            save_pretrained(trainer, exported)
        return losses, loads


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.deep_cases(r"\[Glm")
def test_biases_of_a_family_go_through_a_checkpoint_and_an_export(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(1)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(getattr(transformers, kind)(**FACTS | FAMILIES[kind])).save_pretrained(tmp_path / "from")
    expected, biases, shares = by_transformers(tmp_path / "from")
    model = {"pretrained": str(tmp_path / "from"), "bias_update_speed": SPEED}
    losses, parts = [], ((0, 2, "pp2 cp2" if kind == "Glm4MoeConfig" else "ep2"), (2, 4, "dp2 tp2 ep2"))
    for begin, end, name in parts:
        out = tmp_path / "to" if begin else None
        results = pool.run(
            a_part_of_the_steps,
            _mesh(name, model),
            begin,
            end,
            tmp_path / "saved",
            out,
            ranks=4,
            timeout_s=120,
        )
        losses += results[0][0]
    # transformers computes routers in float32.
    assert losses == pytest.approx(expected, rel=1e-6)
    for _, loads in results:
        assert loads["expert_load"]["2"] == pytest.approx(shares, abs=1e-6)
    after = auto.from_pretrained(tmp_path / "to", dtype=torch.float64)
    for name, bias in biases.items():
        # transformers keeps biases in float32.
        torch.testing.assert_close(after.get_buffer(name), bias, rtol=0, atol=1e-7)
    assert max(bias.abs().max() for bias in biases.values()) > SPEED


def test_a_family_without_biases_is_refused(tmp_path: Path) -> None:
    facts = {**FACTS, "num_local_experts": 4}
    transformers.MixtralConfig(**facts).save_pretrained(tmp_path)
    config = config_of(
        {"pretrained": str(tmp_path), "random_weights": True, "bias_update_speed": SPEED}, "dp=1"
    )
    assert config.model is not None and config.train is not None
    with pytest.raises(UnsupportedOp, match=r"a mixtral has no biases[\s\S]*e_score_correction_bias"):
        hugging_face(config.model, TOKENS, config.train)
