"""Batch norms with a custom forward, and in compiled layers: two ranks give the results of plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import MeshcommError
from meshcomm.models import ModelSpec
from meshcomm.testing import Pool
from meshcomm.train import Trainer

STEPS = 3


class Then(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Gated(nn.BatchNorm1d):
    def __init__(self, width: int) -> None:
        super().__init__(width, momentum=None)
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


class Functional(nn.BatchNorm1d):
    """Calls torch's function with other weights."""

    def forward(self, x: Tensor) -> Tensor:
        held = (self.running_mean, self.running_var, self.weight.abs(), self.bias)
        return F.batch_norm(x, *held, self.training, 0.3, self.eps)


class Low(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        held = (self.weight, self.bias, self.running_mean, self.running_var)
        return torch.batch_norm(x, *held, self.training, 0.3, eps=self.eps, cudnn_enabled=False)


class Frozen(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        held = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *held, False, 0.0, self.eps)


class Renamed(nn.BatchNorm1d):
    pass


class Follows(nn.BatchNorm1d):
    """Computes the mean of its samples without torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        mean = x.mean(0)
        self.running_mean.lerp_(mean.detach(), 0.1)
        return x - mean


class Communicates(nn.SyncBatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def on_the_object(width: int) -> nn.Module:
    norm = nn.BatchNorm1d(width)
    norm.forward = MethodType(lambda self, x: torch.relu(nn.BatchNorm1d.forward(self, x)), norm)  # type: ignore[method-assign]
    return norm


def net(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.Linear(16, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    return x, torch.randn(8, 3, generator=draw, dtype=torch.float64)


def alone(module: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, module.state_dict()


def trained(mesh: meshcomm.Mesh, norm: Callable[[int], nn.Module], check: bool) -> Any:
    settings = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4, "lr": 0.1, "dtype": "float64"}
    config = {
        "mesh": {"dims": {"dp": 2}, "device": "cpu"},
        "parallel": {"data": "dp"},
        "train": {**settings, "schedule": "constant", "check": check},
    }
    module = net(norm)
    try:
        trainer = Trainer(
            mesh,
            load_config(config),
            module,
            loss=F.mse_loss,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        )
        for step in range(STEPS):
            trainer.step(*(each.chunk(2)[mesh.coord("dp")] for each in batch(step)))
        return [done.loss for done in trainer.results()], module.state_dict()
    except MeshcommError as error:
        return str(error)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("norm", [Then, Gated, Functional, Low, Frozen, Renamed, on_the_object])
def test_a_forward_of_ones_own_is_kept(norm: Callable[[int], nn.Module], check: bool) -> None:
    losses, state = alone(net(norm))
    for found in meshcomm.simulate(trained, dims={"dp": 2}, args=(norm, check)):
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(losses, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("norm", "words"),
    [(Follows, "does not call F.batch_norm"), (Communicates, "a subclass of nn.SyncBatchNorm")],
)
def test_statistics_that_cannot_be_synchronised_are_refused(norm: Any, words: str) -> None:
    for said in meshcomm.simulate(trained, dims={"dp": 2}, args=(norm, False)):
        assert "cannot use the samples of all ranks" in said
        assert words in said


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16, bias=False), nn.Linear(16, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(16), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def compiled(backend: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Train with compiled layers. Returns the state before, the losses, and the state afterwards."""
    settings = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4, "lr": 0.1, "dtype": "float64"}
    config = load_config(
        {
            "mesh": {"dims": {"dp": 2}, "device": "cpu", "backend": backend},
            "parallel": {"data": "dp"},
            "train": {**settings, "schedule": "constant", "compile": True},
        }
    )
    with meshcomm.init(config) as mesh:
        trainer = Trainer(
            mesh,
            config,
            ModelSpec(module=Layered, loss=F.mse_loss, layers="layers"),
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        )
        (module,) = trainer.modules
        before = {name: value.clone() for name, value in module.state_dict().items()}
        for step in range(STEPS):
            trainer.step(*(each.chunk(2)[mesh.coord("dp")] for each in batch(step)))
        return before, [done.loss for done in trainer.results()], dict(module.state_dict())


@pytest.mark.deep
def test_layers_with_batch_norms_are_compiled(pool: Pool) -> None:
    ranks = pool.run(compiled, "gloo", ranks=2, timeout_s=240)
    module = Layered().double()
    module.load_state_dict(ranks[0][0])
    losses, expected = alone(module)
    for _, found, state in ranks:
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)
