"""Low-rank adapters train on every mesh as on one process, and peft opens the exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshcomm
from meshcomm.commands import app
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.models import spec_model
from meshcomm.parallel.tensor.parameters import local
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.checkpoint.folder import find_checkpoint
from meshcomm.train.checkpoint.reader import Saved
from meshcomm.train.parity import Record, compare, record, reference
from tests.models.families import config_of, folder_of

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(64).reshape(2, 32) * 7 % 256

# The family, the mesh, and further settings.
OWN = "tests.models.own:spec"
MESHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dp2 tp2 sequence": ("llama", "dp=2 tp=2", {"sequence_parallel": True}),
    "fsdp4": ("llama tied", "fsdp=4", {}),
    "pp2 tp2": ("qwen3", "pp=2 tp=2", {}),
    "cp2 ring, recompute": ("llama", "dp=2 cp=2", {"train": {"activation_checkpointing": True}}),
    "ep2": ("mixtral", "dp=4", {"expert": "ep", "views": {"expert": {"edp": 2, "ep": 2}}}),
    "own, pp2 tp2 sequence": (OWN, "pp=2 tp=2", {"sequence_parallel": True}),
    "gpt2 tp4": ("gpt2", "tp=4", {"sequence_parallel": True}),
    "dropout, dp2 tp2 sequence": (
        "llama",
        "dp=2 tp=2",
        {"sequence_parallel": True, "lora": {"dropout": 0.2}},
    ),
    "dropout, tp2 cp2": ("mixtral", "tp=2 cp=2", {"attention": "ulysses", "lora": {"dropout": 0.2}}),
}


def lora_config(
    path: Path, family: str, dims: str, *, lora: dict[str, Any] | None = None, **more: Any
) -> Config:
    if family == OWN:
        model: dict[str, Any] = {"build": OWN}
    else:
        model = {"pretrained": str(folder_of(family, path, weights=True)), "dropout": 0.0}
    return config_of({**model, "lora": {"rank": 4, **(lora or {})}}, dims, **more)


def trained(config: Config) -> Record:
    """Check which parameters learn, and return the record of three steps."""
    with meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config).engine
        learning = {name for name, each in engine.named_parameters() if each.requires_grad}
        assert learning == {name for name, _ in engine.named_parameters() if ".lora_" in name} != set()
        held = {id(each) for group in engine.optimizer.param_groups for each in group["params"]}
        assert held == {id(each) for name, each in engine.named_parameters() if name in learning}
        saved = {name for name in engine.state() if name.startswith("model.")}
        assert saved == {f"model.{name}" for name in learning}
        return record(mesh, config, 3)


@pytest.mark.parity
@pytest.mark.parametrize("name", MESHES)
def test_adapters_learn_as_on_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    family, dims, more = MESHES[name]
    config = lora_config(tmp_path, family, dims, **more)
    (one,) = pool.run(trained, reference(config), ranks=1)
    moved = {key for key, grad in one.gradients.items() if grad.abs().max() > 0}
    assert moved == {key for key in one.weights if ".lora_" in key}
    ranks = pool.run(trained, config, ranks=4, timeout_s=120)
    assert {key for made in ranks for key in made.weights} == set(one.weights)
    for made in ranks:
        assert max(each.relative for each in compare(made, one)) < 1e-9


def run_of(config: Config) -> tuple[list[float], Any]:
    """The losses of a run, and the model's logits after it, on one rank only."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        losses = list(trainer.run().losses)
        logits = trainer.engine.modules[0].eval()(TOKENS).detach() if mesh.world_size == 1 else None
        return losses, logits


# peft reads an attribute that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.deep
def test_a_run_goes_on_elsewhere_and_its_adapters_are_those_of_peft(pool: Pool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, out = tmp_path / "base", tmp_path / "run"
    lora = {"targets": ["q_proj", "v_proj", "o_proj"], "alpha": 64.0}
    first, second, alone = (
        lora_config(
            folder,
            "llama tied",
            dims,
            lora=lora,
            train={"steps": steps, "checkpoint_every": 2, "lr": 0.01, "out": str(to)},
        )
        for dims, steps, to in (("pp=2 tp=2", 2, out), ("fsdp=4", 4, out), ("dp=1", 4, tmp_path / "alone"))
    )
    pool.run(run_of, first, ranks=4, timeout_s=120)
    elsewhere = pool.run(run_of, second, ranks=4, timeout_s=120)[0][0]
    ((losses, logits),) = pool.run(run_of, alone, ranks=1, timeout_s=120)
    assert elsewhere == pytest.approx(losses, rel=1e-9)
    saved = Saved(find_checkpoint(out)).kinds
    assert {name.partition(".")[0] for name in saved} == {"model", "optimizer", "plain", "run"}
    assert all(".lora_" in name for name in saved if name.startswith(("model.", "optimizer.")))

    result = CliRunner().invoke(app, ["export", str(out), str(tmp_path / "adapter"), "--pretrained"])
    assert result.exit_code == 0, result.output
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    before = base(TOKENS).logits
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert set(opened.peft_config["default"].target_modules) != set()
    result = CliRunner().invoke(app, ["export", str(out), str(tmp_path / "merged"), "--merged"])
    assert result.exit_code == 0, result.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert merged.config.architectures == base.config.architectures
    for model in (opened, merged):
        found = model.eval()(TOKENS).logits
        assert (found - before).abs().max() > 1e-3
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)


def narrow(config: Config, held: bool) -> tuple[list[float], list[float], set[torch.dtype], int]:
    """Losses and norms of three steps, the dtypes of frozen linear weights, and the bytes of all weights on this rank."""
    with pytest.MonkeyPatch.context() as patch, meshcomm.init(config) as mesh:
        if not held:
            patch.setattr(spec_model, "hold_frozen", lambda *_: None)
        engine = Trainer(mesh, config).engine
        named = engine.named_parameters()
        assert all(each.dtype == torch.float32 for _, each in named if each.requires_grad)
        kinds = {each.dtype for name, each in named if ".base_layer." in name}
        here = sum(each.nbytes for each in {*map(local, (each for _, each in named))})
        found = record(mesh, config, 3)
    return list(found.losses), list(found.norms), kinds, here


@pytest.mark.parity
@pytest.mark.parametrize("name", MESHES)
def test_frozen_weights_are_held_as_they_are_computed_with(pool: Pool, tmp_path: Path, name: str) -> None:
    family, dims, more = MESHES[name]
    train = {**more.get("train", {}), "dtype": "float32", "compute_dtype": "bfloat16"}
    config = lora_config(tmp_path, family, dims, **{**more, "train": train})
    ranks, before = (pool.run(narrow, config, held, ranks=4, timeout_s=120) for held in (True, False))
    for (losses, norms, kinds, here), (losses32, norms32, kinds32, here32) in zip(ranks, before, strict=True):
        assert (losses, norms) == (losses32, norms32)
        assert (kinds, kinds32) == ({torch.bfloat16}, {torch.float32})
        assert here < here32


def trainer_of(config: Config) -> list[str]:
    with meshcomm.init(config) as mesh, pytest.raises(MeshcommError) as caught:
        _ = Trainer(mesh, config).engine
    return [caught.value.what, str(caught.value.given), str(caught.value.hint)]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_prj"], ["names no linear layer of a LlamaForCausalLM", "q_prj", "q_proj"]),
        (["lm_head"], ["the head of a model cannot have an adapter", "lm_head", "remove it"]),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    pool: Pool, tmp_path: Path, targets: list[str], said: list[str]
) -> None:
    config = lora_config(tmp_path, "llama", "dp=1", lora={"targets": targets})
    (found,) = pool.run(trainer_of, config, ranks=1)
    assert all(each in text for each, text in zip(said, found, strict=True)), found


def test_the_built_in_model_gets_no_adapters() -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "intermediate_size": 8}
    with pytest.raises(ConfigError, match=r"model\.lora"):
        load_config({"mesh": {"dims": {"dp": 1}}, "model": {**sizes, "lora": {"rank": 2}}})
