"""Moving averages of weights are those of torch's AveragedModel, on every mesh, after a resume, and in exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel import tensor_parallel, whole
from meshcomm.parallel.average import Average
from meshcomm.train import Trainer
from meshcomm.train.export import export_weights
from tests.sizes import train_of
from tests.train.runs import config_on
from tests.train.test_trainer import BATCH, Net, loss, mine, samples, sgd

# The spoilt step comes when the averages differ from the weights.
STEPS, CUT, SPOILT, DECAY = 5, 3, 4, 0.7
BASE: dict[str, Any] = {
    "mesh": {"device": "cpu", "timeout_s": 60.0},
    "train": train_of(STEPS, BATCH, 2, lr=0.1, dtype="float64", schedule="constant", check=False)
    | {"ema": DECAY, "on_nonfinite": "skip"},
}


def by_hand() -> tuple[dict[str, Tensor], float]:
    """The averages after all steps in plain torch, and the loss of the last batch with them."""
    module = Net().double()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in module.parameters() if p.ndim > 1]},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer, average = sgd(groups), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(1, STEPS + 1):
        if step == SPOILT:
            continue  # Its gradients are not finite, so neither the weights nor the averages change.
        x, targets = samples(step)
        optimizer.zero_grad()
        loss(module(x), targets).backward()
        optimizer.step()
        average.update_parameters(module)
    x, targets = samples(STEPS)
    named = dict(average.module.named_parameters())
    return {name: value.detach() for name, value in named.items()}, float(loss(average(x), targets).detach())


def trained(config: Config, saved: Path, first: int = 0) -> list[tuple[dict[str, Tensor], float, list[str]]]:
    """For each rank in the simulator: the averages after all steps, the loss with them, and two errors."""

    def body(mesh: Mesh) -> tuple[dict[str, Tensor], float, list[str]]:
        module = Net()
        if config.parallel is not None and config.parallel.tensor is not None:
            tensor_parallel(module, mesh, config.parallel.tensor, {"up": "column", "down": "row"})
        trainer = Trainer(mesh, config, module, loss=loss, optimizer=sgd)
        if first:
            trainer.load(saved / f"step-{CUT:06}")
        for step in range(first + 1, STEPS + 1):
            x, targets = mine(trainer)(step)
            trainer.step(x * torch.nan if step == SPOILT else x, targets)
            if step == CUT and not first:
                trainer.save(saved / f"step-{CUT:06}")
        trainer.results()
        before = [whole(p).clone() for _, p in trainer.engine.named_parameters()]
        errors = []
        with trainer.averaged():
            found = {name: whole(p).clone() for name, p in trainer.engine.named_parameters()}
            value = trainer.evaluate([mine(trainer)(STEPS)])
            for wrong in (lambda: trainer.step(*mine(trainer)(1)), lambda: trainer.save(saved / "wrong")):
                with pytest.raises(TrainingError, match="the weights of now are the averages") as error:
                    wrong()
                errors.append(str(error.value))
        after = [whole(p) for _, p in trainer.engine.named_parameters()]
        assert all(map(torch.equal, before, after))
        return found, value, errors

    return meshcomm.simulate(body, config)


@pytest.mark.parametrize(("dims", "other"), [("dp=2", "fsdp=2"), ("fsdp=2 tp=2", "dp=2")])
def test_they_are_those_of_torch(tmp_path: Path, dims: str, other: str) -> None:
    averages, value = by_hand()
    for ranks in (
        trained(config_on(BASE, dims), tmp_path),
        trained(config_on(BASE, other), tmp_path, CUT),
    ):
        for found, of_rank, _ in ranks:
            assert found.keys() == averages.keys()
            for name in averages:
                torch.testing.assert_close(found[name], averages[name], rtol=1e-12, atol=1e-13, msg=name)
            assert of_rank == pytest.approx(value, rel=1e-12)


def test_they_are_exported_if_asked_for(tmp_path: Path) -> None:
    trained(config_on(BASE, "dp=2"), tmp_path)
    saved = tmp_path / f"step-{CUT:06}"
    for ema in (True, False):
        export_weights(saved, tmp_path / f"{ema}.safetensors", ema=ema)
    module = Net().double()
    averages, weights = (load_file(tmp_path / f"{ema}.safetensors") for ema in (True, False))
    assert averages.keys() == weights.keys() == dict(module.named_parameters()).keys()
    assert not torch.equal(averages["up.weight"], weights["up.weight"])


def test_before_the_first_applied_step_they_are_the_weights() -> None:
    """Also if the weights are filled after the averages were made, in memory that has no numbers, and if steps are skipped."""
    weight = torch.nn.Parameter(torch.full((3,), torch.nan))
    average = Average([("weight", weight)], 0.9, torch.device("cpu"))
    weight.data.fill_(2.0)
    average.update(torch.tensor(1.0))
    with average.swapped():
        assert weight.tolist() == [2.0] * 3
    average.values["weight"].fill_(torch.nan)
    average.update(torch.tensor(0.0))
    weight.data.fill_(3.0)
    average.update(torch.tensor(0.0))
    assert average.values["weight"].tolist() == pytest.approx([2.1] * 3)
