"""Optimisers by name, groups of parameters, and what is left of both in a checkpoint: the same on every mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import ConfigError
from meshcomm.parallel import whole
from meshcomm.parallel.optimizer import KINDS
from meshcomm.testing import Pool
from meshcomm.train import Trainer, learning_rate
from meshcomm.train.agree import corpus_of
from meshcomm.train.data import batches_of
from meshcomm.train.parity import compare, in_float64, record, reference
from tests.train.test_training import TINY

MESHES = ["{ pp = 1, dp = 2, tp = 2 }", "{ pp = 1, dp = 4, tp = 1 }"]


def config_of(name: str, dims: str, *more: str) -> Config:
    args = {"sgd": "{ momentum = 0.9 }", "rmsprop": "{ momentum = 0.5, centered = true }"}.get(name, "{}")
    config, _ = in_float64(
        load_config(TINY, [f"mesh.dims={dims}", f'train.optimizer="{name}"', f"train.optimizer_args={args}"])
    )
    groups = 'train.groups={ "embed*" = { lr = 0.5 }, "*.wq.*" = { weight_decay = 0.0 } }'
    return load_config(config, [groups, "train.weight_decay=0.1", "train.lr=0.01", *more])


def recorded(config: Config) -> Any:
    with meshcomm.init(config) as mesh:
        return record(mesh, config, 3)


# The others share their code with one of these.
_OFTEN = ("adamw",)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in _OFTEN else pytest.mark.parity) for each in KINDS]
)
def test_every_optimiser_is_the_same_on_a_mesh(pool: Pool, name: str) -> None:
    shard = "parallel={ shard = 'dp', tensor = 'tp', pipeline = 'pp' }"
    (alone,) = pool.run(recorded, reference(config_of(name, MESHES[0])), ranks=1)
    for config in (config_of(name, MESHES[0]), config_of(name, MESHES[0], shard)):
        for found in pool.run(recorded, config, ranks=4):
            assert max(each.relative for each in compare(found, alone)) < 1e-9, name


def resumed(config: Config, folder: Path, save: bool) -> dict[str, Tensor]:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        batches = batches_of(trainer.engine, corpus_of(trainer.engine.sections))
        first = 1
        if not save:
            trainer.load(folder)
            first = 3
        for step in range(first, 5):
            if step == 3 and save:
                trainer.save(folder)
            trainer.engine.step(*batches(step), 0.01, step)
        trainer.results()
        return {name: whole(p).detach().clone() for name, p in trainer.engine.named_parameters()}


@pytest.mark.parity
@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_state_is_put_back_on_another_mesh(pool: Pool, tmp_path: Path, name: str) -> None:
    ranks = pool.run(resumed, config_of(name, MESHES[0]), tmp_path / "saved", True, ranks=4)
    for found in pool.run(resumed, config_of(name, MESHES[1]), tmp_path / "saved", False, ranks=4):
        for key, value in found.items():
            torch.testing.assert_close(value, ranks[0][key], rtol=1e-9, atol=1e-11)


def refused(config: Config) -> str:
    with meshcomm.init(config) as mesh:
        try:
            _ = Trainer(mesh, config).engine
        except ConfigError as error:
            return error.what
    return ""


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("train.optimizer_args={ momentun = 0.9 }", "torch.optim.SGD takes no momentun"),
        ("train.optimizer_args={ lr = 0.9 }", "torch.optim.SGD takes no lr, which is a setting of its own"),
        ('train.groups={ "nothing*" = { lr = 0.1 } }', "no parameter is called nothing*"),
    ],
)
def test_what_no_optimiser_knows_is_told(pool: Pool, more: str, what: str) -> None:
    assert pool.run(refused, config_of("sgd", "{ pp = 1, dp = 1, tp = 1 }", more), ranks=1) == [what]


def test_wsd_stays_and_falls_at_the_end() -> None:
    train = load_config(TINY, ["train.steps=100", 'train.schedule="wsd"', "train.lr=1.0"]).train
    assert train is not None
    rates = [learning_rate(train, step) for step in range(1, 101)]
    assert rates[0] == 0.5 and rates[1:90] == [1.0] * 89 and rates[-1] == pytest.approx(0.1)
    # A tenth of what is then all of the steps: the rest of a longer run begins where this one was stable.
    longer = train.model_copy(update={"steps": 200})
    assert [learning_rate(longer, step) for step in range(1, 91)] == rates[:90]
