"""The state of an optimizer, gathered from a split module, loaded by plain torch in one process."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import meshcomm
from meshcomm.errors import LayoutError
from meshcomm.mesh import Mesh
from meshcomm.parallel import GradientSync, tensor_parallel, unsplit_optimizer_state, unsplit_state
from meshcomm.testing import Pool

PLAN: Any = {"qkv": "column:3", "out": "row", "up": "column", "down": "row"}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return cast(Tensor, self.down(self.up(x + self.out(q * k.tanh() + v)).relu()))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[Tensor]:
    return list(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_mesh(kind: str, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Three steps on dp2 tp2, each coord along "dp" with its half of the batch."""
    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu") as mesh:
        module = net()
        tensor_parallel(module, mesh, "tp", PLAN)
        sync = None
        if sharded:
            fully_shard(module, mesh=mesh["dp"])
        else:
            sync = GradientSync(mesh, "dp", module)
        made, settings = OPTIMIZERS[kind]
        groups = [{"params": list(module.qkv.parameters())}, {"params": other_parameters(module)}]
        optimizer = made(groups, **settings)
        for x in batches()[:3]:
            own = x.chunk(2)[mesh.coord("dp")]
            if sync is None:
                step(module, optimizer, own)
            else:
                with sync:
                    module(own).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return unsplit_state(module), unsplit_optimizer_state(module, optimizer)


def other_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in module.named_parameters() if not name.startswith("qkv")]


@pytest.mark.parametrize("sharded", [False, True], ids=["dp", "fsdp"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_plain_torch_goes_on_with_the_state_of_a_split_optimizer(
    pool: Pool, kind: str, sharded: bool
) -> None:
    module = net()
    made, settings = OPTIMIZERS[kind]

    def optimizer_of(module: Net) -> torch.optim.Optimizer:
        return made(
            [{"params": list(module.qkv.parameters())}, {"params": other_parameters(module)}], **settings
        )

    optimizer = optimizer_of(module)
    for x in batches()[:3]:
        step(module, optimizer, x)
    expected = copy.deepcopy(optimizer.state_dict())
    for weights, state in pool.run(on_mesh, kind, sharded, ranks=4):
        assert state["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(state["state"], expected["state"], rtol=1e-10, atol=1e-12)
        resumed = net()
        resumed.load_state_dict(weights)
        again = optimizer_of(resumed)
        again.load_state_dict(state)
        step(resumed, again, batches()[3])
    step(module, optimizer, batches()[3])
    torch.testing.assert_close(resumed.state_dict(), module.state_dict(), rtol=1e-10, atol=1e-12)


class Foreign(torch.optim.SGD):
    """An optimizer whose state is in its own tensors."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["moment"] = torch.zeros(3)


def refused(mesh: Mesh) -> str:
    module = net()
    tensor_parallel(module, mesh, "tp", PLAN)
    optimizer = Foreign(module.qkv.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(LayoutError) as caught:
        unsplit_optimizer_state(module, optimizer)
    return str(caught.value)


def created_before(mesh: Mesh) -> str:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tensor_parallel(module, mesh, "tp", PLAN)
    with pytest.raises(LayoutError) as caught:
        unsplit_optimizer_state(module, optimizer)
    return str(caught.value)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    for text in meshcomm.simulate(created_before, dims={"tp": 2}):
        assert "the optimizer has parameters that the module does not have" in text
        assert "after tensor_parallel and fully_shard" in text


def test_state_of_another_shape_is_refused_by_name() -> None:
    for text in meshcomm.simulate(refused, dims={"tp": 2}):
        assert 'the optimizer\'s "moment" of qkv.weight' in text
