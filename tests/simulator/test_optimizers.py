"""Optimizers of split parameters in the simulator match one process, even if a step needs the norm of a whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.mesh import Mesh
from meshcomm.parallel import tensor_parallel


class Lamb(torch.optim.Optimizer):
    """The rate of each parameter depends on its norm and on the norm of its gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-0.1 * float(p.data.norm() / (p.grad.norm() + 1e-6)))


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=2)


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: lambda parameters, name=name: getattr(torch.optim, name)(parameters, lr=0.1)  # type: ignore[misc]
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
}  # fmt: skip
MADE |= {
    "lamb": Lamb,
    "lbfgs": lbfgs,
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, maximize=True),
}


def trained(mesh: Mesh | None, make: Callable[[Any], torch.optim.Optimizer], closed: bool = False) -> Tensor:
    torch.manual_seed(0)
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


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("closed", [False, True])
def test_an_optimizer_of_split_parameters_gives_the_numbers_of_one_process(name: str, closed: bool) -> None:
    if name == "lbfgs" and not closed:
        return
    want = trained(None, MADE[name], closed)
    for got in meshcomm.simulate(trained, dims={"tp": 2}, args=(MADE[name], closed)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
