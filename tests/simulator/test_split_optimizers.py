"""Optimizers in the simulator, where a split parameter is a plain tensor: as on one process, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.errors import RankFailed, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel import tensor_parallel


class Lamb(torch.optim.Optimizer):
    """A rate for each parameter, by its norm and that of its gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-0.1 * float(p.data.norm() / (p.grad.norm() + 1e-6)))


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.1)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=2)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: lambda parameters, name=name: getattr(torch.optim, name)(parameters, lr=0.1)  # type: ignore[misc]
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
}  # fmt: skip
ELEMENTWISE |= {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, maximize=True),
}


def trained(mesh: Mesh | None, make: Callable[[Any], torch.optim.Optimizer], closed: bool = False) -> Tensor:
    torch.manual_seed(0)
    # Muon takes matrices alone.
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    if mesh is not None:
        tensor_parallel(net, mesh, "tp", {"0": "column", "2": "row"})
    optimizer = make(net.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        if closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return net(x).detach()


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("closed", [False, True])
def test_what_treats_elements_by_themselves_gives_the_numbers_of_one_process(name: str, closed: bool) -> None:
    want = trained(None, ELEMENTWISE[name], closed)
    for got in meshcomm.simulate(trained, dims={"tp": 2}, args=(ELEMENTWISE[name], closed)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "named"), [(Lamb, "Lamb"), (adafactor, "Adafactor"), (muon, "Muon"), (lbfgs, "LBFGS")]
)
@pytest.mark.parametrize("closed", [False, True])
def test_what_needs_the_whole_tensor_is_refused_by_name(make: Any, named: str, closed: bool) -> None:
    if make is lbfgs and not closed:
        return
    with pytest.raises(
        (UnsupportedOp, RankFailed), match=rf"{named}.step treats a part of a parameter"
    ) as caught:
        meshcomm.simulate(trained, dims={"tp": 2}, args=(make, closed))
    assert "along tp" in str(caught.value)
    # Where nothing is split it is what it is on one process.
    (got,) = meshcomm.simulate(trained, dims={"tp": 1}, args=(make, closed))
    torch.testing.assert_close(got, trained(None, make, closed))


def test_a_refused_step_leaves_nothing_behind() -> None:
    def program(mesh: Mesh) -> float:
        with pytest.raises(UnsupportedOp):
            trained(mesh, Lamb)
        x = torch.ones(4)
        return float(x.norm())

    assert meshcomm.simulate(program, dims={"tp": 2}) == [2.0, 2.0]
