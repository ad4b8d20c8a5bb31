"""Arguments of a Trainer and of its steps that programs confuse: each ends in an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.train import Callback, Trainer


def _net() -> nn.Module:
    return nn.Linear(3, 2)


def told(dims: int = 1, targets: Any = True, **given: Any) -> str:
    """The error of a step, or "" if there is none."""
    train = {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "lr": 0.1}
    config = {"mesh": {"dims": {"dp": dims}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def body(mesh: meshcomm.Mesh) -> str:
        arguments = {"model": _net(), "loss": F.mse_loss, **given}
        try:
            trainer = Trainer(mesh, meshcomm.config.load_config(config), **arguments)
            trainer.step(x, *([x[:, :2]] if targets is True else [targets] if targets is not None else []))
        except MeshcommError as error:
            return str(error)
        return ""

    return meshcomm.simulate(body, dims={"dp": dims})[0]


class OfInputs(nn.Module):
    """A loss with a third argument."""

    def forward(self, outputs: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) + 0 * inputs.sum()


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a class of models": ({"model": nn.Linear}, "the class Linear"),
    "a function that builds a model": ({"model": _net}, "call it"),
    "the name of a model": ({"model": "gpt2"}, "'gpt2'"),
    "the name of a loss": ({"loss": "mse"}, "loss = 'mse'"),
    "a class of losses": ({"loss": nn.MSELoss}, "loss=MSELoss()"),
    "a loss of one argument": ({"loss": lambda y: y.mean()}, "a function with (y)"),
    "a loss of four arguments": ({"loss": lambda a, b, c, d: a.mean()}, "(a, b, c, d)"),
    "a number for callbacks": ({"callbacks": 5}, "callbacks = 5"),
    "one callback": ({"callbacks": Callback()}, "callbacks=[callback]"),
    "a class of callbacks": ({"callbacks": [Callback]}, "callbacks=[Callback()]"),
    "a function as a callback": ({"callbacks": [print]}, "on_step"),
    "no targets": ({"targets": None}, "targets = None"),
    "classes along axis 1": (
        {
            "model": nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 5, 1)),
            "loss": None,
            "targets": torch.zeros(4, 3, dtype=torch.int64),
        },
        "the classes along the last axis",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case: str) -> None:
    given, words = MISTAKES[case]
    assert words in told(**given)


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), OfInputs(), lambda *both: F.mse_loss(*both), lambda y, t, weight=1.0: F.mse_loss(y, t)],
)
def test_losses_of_other_forms_are_called(loss: Any) -> None:
    assert told(loss=loss) == ""
