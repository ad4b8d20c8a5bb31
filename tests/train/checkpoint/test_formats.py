"""Checkpoints of earlier formats are read, and those of later ones are refused. `format_4` was written before format 5 existed."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import TrainingError
from meshcomm.parallel.tensor import whole
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.checkpoint.lock import Lock
from tests.sizes import train_of

FORMER = Path(__file__).parent / "format_4"


def continued(folder: Path, ranks: int) -> tuple[Tensor, Tensor, int, float]:
    """The weight, its momentum and the step of the checkpoint, and the loss of the next step."""
    settings: dict[str, Any] = {"momentum": 0.9}
    settings = train_of(4, 4, 4 // ranks, optimizer="sgd", optimizer_args=settings, lr=0.1, check=False)
    config = load_config(
        {
            "mesh": {"dims": {"fsdp": ranks}, "device": "cpu", "reports": ""},
            "parallel": {"shard": "fsdp"},
            "train": settings,
        }
    )
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, nn.Linear(4, 4, bias=False), loss=nn.functional.mse_loss)
        trainer.load(folder)
        done = trainer.engine.done
        ((_, weight),) = trainer.engine.named_parameters()
        found = [
            whole(x).detach().clone() for x in (weight, trainer.optimizer.state[weight]["momentum_buffer"])
        ]
        x = torch.eye(4)[4 // ranks * mesh.rank : 4 // ranks * (mesh.rank + 1)]
        trainer.step(x, x)
        return found[0], found[1], done, trainer.results()[0].loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_the_former_format_continues(pool: Pool, ranks: int) -> None:
    wanted = {name: torch.empty(4, 4) for name in ("model.weight", "optimizer.weight.momentum_buffer")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=FORMER, no_dist=True)
    weight, momentum = wanted.values()
    assert json.loads((FORMER / "lock.json").read_text())["format"] == 4
    for found in pool.run(continued, FORMER, ranks, ranks=ranks):
        assert torch.equal(found[0], weight) and torch.equal(found[1], momentum)
        assert found[2] == 2
        assert found[3] == pytest.approx((weight.T - torch.eye(4)).square().mean().item())


@pytest.mark.parametrize(
    ("number", "words"),
    [(6, "format 6, which a later version of meshcomm wrote"), (3, "format 3, which only the version")],
)
def test_other_formats_are_refused(number: int, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(FORMER, folder)
    lock = folder / "lock.json"
    lock.write_text(lock.read_text().replace('"format": 4', f'"format": {number}'))
    with pytest.raises(TrainingError) as caught:
        Lock.read(folder)
    assert words in str(caught.value) and "format 4 to 5" in str(caught.value.expected)
    assert (caught.value.hint == "update meshcomm") is (number > 5)


def test_a_lock_of_the_former_format_that_has_changed_is_refused(tmp_path: Path) -> None:
    text = (FORMER / "lock.json").read_text()
    assert Lock.parse(text).step == 2
    with pytest.raises(ValueError, match="has changed"):
        Lock.parse(text.replace('"step": 2', '"step": 3'))
