"""ReduceLROnPlateau is given the validation loss after each evaluation, as in plain torch, and goes on after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.parallel import whole
from meshcomm.train import Trainer
from tests.sizes import train_of
from tests.train.runs import config_on
from tests.train.test_trainer import BATCH, Net, loss, mine, samples, sgd

STEPS, EVERY = 8, 2
BASE: dict[str, Any] = {
    "mesh": {"device": "cpu", "timeout_s": 60.0},
    "train": train_of(STEPS, BATCH, 2, lr=0.1, dtype="float64", check=False)
    | {"eval_every": EVERY, "evaluate": "tests.train.test_metric_scheduler:judge", "checkpoint_every": 4},
}


def judge(trainer: Trainer) -> float:
    return trainer.evaluate([mine(trainer)(99)])


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    # Every evaluation that does not fall by 90 % counts as bad.
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)


def by_hand(last: int = STEPS) -> tuple[dict[str, Tensor], float]:
    """The weights and the learning rate after all steps in plain torch."""
    module = Net().double()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in module.parameters() if p.ndim > 1]},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = sgd(groups)
    scheduler = plateau(optimizer)
    for step in range(1, last + 1):
        x, targets = samples(step)
        optimizer.zero_grad()
        loss(module(x), targets).backward()
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                scheduler.step(loss(module(samples(99)[0]), samples(99)[1]))
    return {name: p.detach() for name, p in module.named_parameters()}, optimizer.param_groups[0]["lr"]


def trained(config: Config, scheduler: Any = plateau) -> list[tuple[dict[str, Tensor], float]]:
    def body(mesh: Mesh) -> tuple[dict[str, Tensor], float]:
        trainer = Trainer(mesh, config, Net(), loss=loss, optimizer=sgd, scheduler=scheduler)
        trainer.run(mine(trainer))
        weights = {name: whole(p).clone() for name, p in trainer.engine.named_parameters()}
        return weights, trainer.optimizer.param_groups[0]["lr"]

    return meshcomm.simulate(body, config)


def check(ranks: list[tuple[dict[str, Tensor], float]]) -> None:
    weights, lr = by_hand()
    assert 0 < lr < 0.1 / 4
    for found, of_rank in ranks:
        assert of_rank == pytest.approx(lr, rel=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_it_is_that_of_torch_and_goes_on_on_another_mesh(tmp_path: Path) -> None:
    out = f'train.out="{tmp_path}"'
    check(trained(config_on(BASE, "dp=2", out)))
    (tmp_path / "checkpoints" / "step-000008").rename(tmp_path / "later")
    check(trained(config_on(BASE, "fsdp=2", out, "train.resume=true")))


def test_other_settings_and_a_run_without_evaluations_are_refused(tmp_path: Path) -> None:
    out = f'train.out="{tmp_path}"'
    with pytest.raises(MeshcommError, match="needs a metric, and nothing is evaluated"):
        trained(config_on(BASE, "dp=2", out, "train.eval_every=0", "train.evaluate="))
    trained(config_on(BASE, "dp=2", out, "train.steps=4"))
    with pytest.raises(MeshcommError, match="the state of ReduceLROnPlateau, which follows from a metric"):
        trained(
            config_on(BASE, "dp=2", out, "train.resume=true"),
            lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.9),
        )
