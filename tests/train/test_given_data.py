"""Data of a program that cannot give every rank its share of every step are refused by name before they train."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.train import Trainer

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(64, 4, dtype=torch.float64, generator=_GENERATOR)
Y = torch.randn(64, 1, dtype=torch.float64, generator=_GENERATOR)
SGD = torch.optim.SGD


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def config_of(out: Path, ranks: int = 2, **train: Any) -> Config:
    return load_config(
        {
            "mesh": {"dims": {"dp": ranks}, "device": "cpu", "timeout_s": 60.0},
            "parallel": {"data": "dp"},
            "train": {
                **{"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.05, "dtype": "float64"},
                **{"schedule": "constant", "out": str(out), **train},
            },
        }
    )


def trainer_of(mesh: Mesh, config: Config, module: nn.Module | None = None, **more: Any) -> Trainer:
    module = net() if module is None else copy.deepcopy(module)
    more = {"loss": nn.functional.mse_loss, "optimizer": lambda groups: SGD(groups, lr=0.05), **more}
    return Trainer(mesh, config, module, **more)


def share(mesh: Mesh, step: int = 1, size: int = 8) -> tuple[Tensor, Tensor]:
    """This rank's share of a step of so many samples."""
    x, y = (each[(step - 1) * size : step * size].chunk(mesh.data_world_size) for each in (X, Y))
    return x[mesh.data_rank], y[mesh.data_rank]


def said_on(config: Config, action: Callable[[Mesh], object]) -> list[str]:
    """The texts of the errors of all ranks; "" for none."""

    def program(mesh: Mesh) -> str:
        try:
            action(mesh)
        except MeshcommError as error:
            return str(error)
        return ""

    return meshcomm.simulate(program, config)


# -- skipped steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_leaves_the_running_statistics_of_a_batch_norm(tmp_path: Path, ranks: int) -> None:
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    def run(mesh: Mesh) -> list[dict[str, Tensor]]:
        config = config_of(tmp_path / str(mesh.rank), ranks, on_nonfinite="skip", micro_batch_size=8 // ranks)
        trainer, found = trainer_of(mesh, config, module), []
        for factor in (1.0, math.nan, 1.0):
            x, y = share(mesh)
            trainer.step(x * factor, y)
            trainer.results()
            found.append({name: each.clone() for name, each in trainer.modules[0].named_buffers()})
        return found

    for first, skipped, after in meshcomm.simulate(run, config_of(tmp_path, ranks)):
        assert all(torch.equal(each, skipped[name]) for name, each in first.items())
        assert not torch.equal(first["1.running_mean"], after["1.running_mean"])
        assert all(bool(each.isfinite().all()) for each in after.values())
