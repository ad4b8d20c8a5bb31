"""One rank makes a call of a Trainer while the others make another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshcomm
from meshcomm.errors import CallMismatchError
from meshcomm.train import Trainer


def _alone(mesh: meshcomm.Mesh, what: str, folder: str) -> list[str]:
    train = {"steps": 2, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1}
    dims = {"dp": mesh.size("dp"), "tp": 1}
    config = {"mesh": {"dims": dims, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    trainer = Trainer(mesh, meshcomm.config.load_config(config), nn.Linear(3, 2), loss=F.mse_loss)
    x = torch.arange(24.0).reshape(8, 3).chunk(mesh.size("dp"))[mesh.coord("dp")]
    try:
        if mesh.rank == 1 and what == "evaluate":
            trainer.evaluate([(x, x[:, :2])])
        if mesh.rank == 1 and what == "save":
            trainer.save(folder)
        trainer.step(x, x[:, :2])
    except CallMismatchError as error:
        return [str(error), repr(error.mismatched_ranks)]
    return []


@pytest.mark.parametrize("what", ["evaluate", "save"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_names_the_calls_of_all(tmp_path: Path, what: str, ranks: int) -> None:
    dims = {"dp": ranks, "tp": 1}
    for said in meshcomm.simulate(_alone, dims=dims, args=(what, str(tmp_path / "state"))):
        assert said, "a rank went on"
        assert f"rank 1: Trainer.{what} at {__file__}:" in said[0]
        assert f"Trainer.step at {__file__}:" in said[0]
        assert said[1] == ("(0, 1)" if ranks == 2 else "(1,)")
