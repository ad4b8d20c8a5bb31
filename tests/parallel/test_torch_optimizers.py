"""Each optimizer of torch.optim is that of one process on each kind of mesh, or is refused by its name and reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.parallel import tensor_parallel, whole
from meshcomm.train import Trainer
from tests.sizes import train_of
from tests.train.runs import config_on
from tests.train.test_trainer import BATCH, Net, loss, mine, samples

STEPS = 4
BASE: dict[str, Any] = {
    "mesh": {"device": "cpu", "timeout_s": 60.0},
    "train": train_of(STEPS, BATCH, 2, lr=0.01, dtype="float64", schedule="constant", check=False),
}
MESHES = ("dp=2", "fsdp=2", "dp=1 tp=2")
SAME = dict.fromkeys(MESHES, "")
SPLIT = "Adafactor cannot update parameters that are split over ranks"
CLOSURE = "LBFGS cannot take a step from gradients only"
SPARSE = "SparseAdam updates only tables with sparse gradients"
# For each class: its arguments, and the error on each mesh, or "" if it is the same as on one process. docs/guide/training.md shows it.
TABLE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "ASGD": ({"t0": 1}, SAME),
    "Adadelta": ({}, SAME),
    "Adafactor": ({}, {"dp=2": "", "fsdp=2": SPLIT, "dp=1 tp=2": SPLIT}),
    "Adagrad": ({}, SAME),
    "Adam": ({"amsgrad": True}, SAME),
    "AdamW": ({}, SAME),
    "Adamax": ({}, SAME),
    "LBFGS": ({}, dict.fromkeys(MESHES, CLOSURE)),
    # By train.groups: tests/parallel/test_muon.py. As an optimizer of one's own, it sees only parts of matrices.
    "Muon": ({}, dict.fromkeys(MESHES, "Muon only supports 2D parameters")),
    "NAdam": ({}, SAME),
    "RAdam": ({}, SAME),
    "RMSprop": ({"momentum": 0.5, "centered": True}, SAME),
    "Rprop": ({}, SAME),
    "SGD": ({"momentum": 0.9, "nesterov": True}, SAME),
    # tests/parallel/test_sparse.py trains tables with it.
    "SparseAdam": ({}, dict.fromkeys(MESHES, SPARSE)),
}


def test_the_table_has_each_class() -> None:
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    assert classes - {"Optimizer"} == TABLE.keys()


def by_hand(name: str) -> dict[str, Tensor]:
    module = Net().double()
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1]},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = getattr(torch.optim, name)(groups, lr=0.01, **TABLE[name][0])
    for step in range(1, STEPS + 1):
        x, targets = samples(step)
        optimizer.zero_grad()
        loss(module(x), targets).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def trained(config: Config, name: str) -> list[dict[str, Tensor]]:
    def body(mesh: Mesh) -> dict[str, Tensor]:
        module: nn.Module = Net()
        if config.parallel is not None and config.parallel.tensor is not None:
            tensor_parallel(module, mesh, config.parallel.tensor, {"up": "column", "down": "row"})
        made = lambda groups: getattr(torch.optim, name)(groups, lr=0.01, **TABLE[name][0])  # noqa: E731
        trainer = Trainer(mesh, config, module, loss=loss, optimizer=made)
        for step in range(1, STEPS + 1):
            trainer.step(*mine(trainer)(step))
        trainer.results()
        return {name: whole(p).clone() for name, p in trainer.engine.named_parameters()}

    return meshcomm.simulate(body, config)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dims", MESHES)
def test_it_is_that_of_one_process_or_is_refused(name: str, dims: str) -> None:
    refused = TABLE[name][1][dims]
    if refused:
        with pytest.raises(MeshcommError, match=refused):
            trained(config_on(BASE, dims), name)
        return
    expected = by_hand(name)
    for found in trained(config_on(BASE, dims), name):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)
