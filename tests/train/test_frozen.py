"""Frozen parameters do not change on any mesh, and the other parameters learn as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.parity import Record, compare, record, reference
from tests.models.families import config_of
from tests.train.parity_cases import small

# The first of four stages, the norms and one matrix.
FROZEN = ["embed*", "layers.0.*", "*norm*", "layers.2.attn.wo.*"]
MESHES: dict[str, dict[str, Any]] = {
    "dp2 tp2 sequence": small("dp=2 tp=2", num_layers=4, sequence_parallel=True),
    "fsdp4": small("fsdp=4", num_layers=4),
    "pp4": small("pp=4", num_layers=4),
    "pp2 dp2 tied": small("pp=2 dp=2", num_layers=4, tied_embeddings=True),
    "pp2 zero bubble": small(
        "pp=2 dp=2", num_layers=4, schedule="zero_bubble", stages_per_rank=2, micro_batch_size=1
    ),
    "cp2 recompute": small("dp=2 cp=2", num_layers=4, activation_checkpointing=True),
    "ep2": small("dp=4", "edp=2 ep=2", num_layers=4),
}
_DEEP = ("dp2 tp2 sequence", "pp4", "pp2 dp2 tied", "cp2 recompute")


def trained(config: Config) -> tuple[Record, list[str]]:
    """The record of three steps, and the names of this rank's frozen parameters. The optimizer has all others."""
    with meshcomm.init(config) as mesh:
        engine = Trainer(mesh, config).engine
        kept = {id(each) for group in engine.optimizer.param_groups for each in group["params"]}
        named = engine.named_parameters()
        assert [name for name, each in named if (id(each) in kept) != each.requires_grad] == []
        held = [name for name, each in named if not each.requires_grad]
        return record(mesh, config, 3), held


def alone(config: Config) -> tuple[Record, list[str], dict[str, bool]]:
    """The same on one process, and for each weight whether it still has its initial value."""
    with meshcomm.init(config) as mesh:
        drawn = {
            name: each.detach().clone() for name, each in Trainer(mesh, config).engine.named_parameters()
        }
    made, held = trained(config)
    return made, held, {name: torch.equal(made.weights[name], each.double()) for name, each in drawn.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.parity if each in _DEEP else ()) for each in MESHES]
)
@pytest.mark.deep_cases(r"\[fsdp4")
def test_what_is_frozen_stays_and_the_rest_is_that_of_one_process(pool: Pool, name: str) -> None:
    config = load_config(MESHES[name], [f"train.frozen={FROZEN}"])
    ((one, held, same),) = pool.run(alone, reference(config), ranks=1)
    assert sorted(held) == sorted(key for key, stayed in same.items() if stayed) != sorted(same)
    ranks = pool.run(trained, config, ranks=4, timeout_s=120)
    assert sorted({key for _, some in ranks for key in some}) == sorted(held)
    for made, _ in ranks:
        assert max(each.relative for each in compare(made, one)) < 1e-9


@pytest.mark.deep
def test_what_a_model_has_frozen_itself_stays(pool: Pool) -> None:
    config = config_of({"build": "tests.models.own:frozen"}, "pp=2 tp=2", sequence_parallel=True)
    ((one, held, same),) = pool.run(alone, reference(config), ranks=1)
    assert set(held) == {key for key in one.weights if key.startswith(("places.", "blocks.0.", "norm."))}
    assert sorted(held) == sorted(key for key, stayed in same.items() if stayed)
    for made, some in pool.run(trained, config, ranks=4, timeout_s=120):
        assert set(some) == set(held) & set(made.weights)
        assert max(each.relative for each in compare(made, one)) < 1e-9


def refused(config: Config) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(ConfigError) as caught:
        _ = Trainer(mesh, config).engine
    return caught.value.what


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("nothing*", "no parameter matches nothing*"), ("*", "all parameters of the model are frozen")],
)
def test_patterns_that_match_nothing_or_everything_are_refused(pool: Pool, pattern: str, said: str) -> None:
    config = load_config(small("pp=2"), [f'train.frozen=["{pattern}"]'])
    assert pool.run(refused, config, ranks=2) == [said, said]


# -- parameters that are unfrozen or added ---------------------------------------------------------


def halves(frozen: bool) -> torch.nn.Sequential:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    module[0].requires_grad_(not frozen)
    return module


def thawed(config: Config, folder: str) -> tuple[str, float]:
    """The error of a step after a layer was unfrozen, and the loss of a step after the fix that the error proposes."""
    with meshcomm.init(config) as mesh:
        torch.manual_seed(mesh.rank)
        x, y = torch.randn(4, 4), torch.tensor([0, 1, 1, 0])
        trainer = Trainer(mesh, config, module := halves(True))
        trainer.step(x, y)
        module[0].requires_grad_(True)
        try:
            trainer.step(x, y)
        except TrainingError as error:
            said = str(error)
        trainer.save(folder)
        trainer = Trainer(mesh, config, halves(False))
        trainer.load(folder)
        trainer.step(x, y)
        return said, trainer.results()[0].loss


@pytest.mark.parametrize("dim", ["dp", "fsdp"])
def test_a_parameter_that_is_unfrozen_between_steps_is_named(pool: Pool, tmp_path: Path, dim: str) -> None:
    config = load_config(
        {
            "mesh": {"dims": {dim: 2}, "device": "cpu"},
            "parallel": {"data" if dim == "dp" else "shard": dim},
            "train": {"steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "check": False},
        }
    )
    for said, loss in pool.run(thawed, config, str(tmp_path / "saved"), ranks=2):
        assert "parameters were unfrozen after the Trainer was made" in said and "0.weight, 0.bias" in said
        assert "train.frozen" in said and "a new Trainer of a new module" in said
        assert loss > 0


def grown(mesh: Any) -> str:
    """The error of a step after a layer was added to the module."""
    config = load_config(
        {
            "mesh": {"dims": dict(mesh.layout.dims), "device": "cpu"},
            "parallel": {"data": "dp"},
            "train": {"steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "check": False},
        }
    )
    trainer = Trainer(mesh, config, module := halves(False))
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 1, 0])
    trainer.step(x, y)
    module.append(torch.nn.Linear(2, 2))
    with pytest.raises(TrainingError) as refused:
        trainer.step(x, y)
    return str(refused.value)


def test_a_parameter_that_is_added_between_steps_is_named() -> None:
    for said in meshcomm.simulate(grown, dims={"dp": 2}):
        assert "parameters were added after the Trainer was made" in said and "2.weight, 2.bias" in said
