"""Programs in which a Trainer's module or its parameters also belong to something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.testing import Pool
from meshcomm.train import Trainer

STEPS = 4


def config(dims: dict[str, int], parallel: dict[str, str], **train: Any) -> Config:
    settings = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4, "lr": 0.1, "dtype": "float64"}
    return load_config(
        {
            "mesh": {"dims": dims, "device": "cpu"},
            "parallel": parallel,
            "train": {**settings, "schedule": "constant", **train},
        }
    )


DATA = config({"dp": 2}, {"data": "dp"})


def drawn(seed: int, width: int) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(widths[0], 8), nn.Tanh(), nn.Linear(8, widths[1])).double()


def made(groups: Any) -> torch.optim.Optimizer:
    return SGD(groups, lr=0.1)


def said(body: Callable[[meshcomm.Mesh], Any]) -> list[Any]:
    def run(mesh: meshcomm.Mesh) -> Any:
        torch.manual_seed(0)
        try:
            return body(mesh)
        except MeshcommError as error:
            return str(error)

    return meshcomm.simulate(run, DATA)


def mine(mesh: meshcomm.Mesh, x: Tensor) -> Tensor:
    return x.chunk(2)[mesh.coord("dp")]


def test_a_hook_that_is_registered_between_steps_is_refused() -> None:
    def hook(mesh: meshcomm.Mesh) -> None:
        module: Any = net(6, 3)
        trainer = Trainer(mesh, DATA, module, loss=F.mse_loss, optimizer=made)
        for step in range(3):
            if step == 2:
                module[2].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            trainer.step(mine(mesh, drawn(step, 6)), mine(mesh, drawn(step, 3)))

    for text in said(hook):
        assert "a hook of a parameter" in text
        assert "2.weight" in text


def test_a_hook_that_is_removed_again_is_not() -> None:
    def hook(mesh: meshcomm.Mesh) -> int:
        module: Any = net(6, 3)
        module[0].weight.register_hook(lambda grad: grad * 0).remove()
        trainer = Trainer(mesh, DATA, module, loss=F.mse_loss, optimizer=made)
        for step in range(3):
            trainer.step(mine(mesh, drawn(step, 6)), mine(mesh, drawn(step, 3)))
            module[0].weight.register_post_accumulate_grad_hook(lambda each: each.grad.zero_()).remove()
        return len(trainer.results())

    assert said(hook) == [3, 3]


def test_a_module_belongs_to_one_trainer() -> None:
    def twice(mesh: meshcomm.Mesh) -> None:
        module = net(6, 3)
        first = Trainer(mesh, DATA, module, loss=F.mse_loss, optimizer=made)
        Trainer(mesh, DATA, module, loss=F.mse_loss, optimizer=made)
        first.results()

    for text in said(twice):
        assert "already belongs to another Trainer" in text
        assert "0.weight" in text


def test_a_trainer_may_follow_another() -> None:
    def phases(mesh: meshcomm.Mesh) -> list[float]:
        module: Any = net(6, 3)
        losses = []
        for frozen in (True, False):
            module[0].requires_grad_(not frozen)
            trainer = Trainer(mesh, DATA, module, loss=F.mse_loss, optimizer=made)
            trainer.step(mine(mesh, drawn(0, 6)), mine(mesh, drawn(1, 3)))
            losses += [done.loss for done in trainer.results()]
            del trainer
        return losses

    torch.manual_seed(0)
    module: Any = net(6, 3)
    expected = []
    for frozen in (True, False):
        loss = F.mse_loss(module(drawn(0, 6)), drawn(1, 3))
        expected.append(float(loss.detach()))
        loss.backward()
        with torch.no_grad():
            for name, each in module.named_parameters():
                if not (frozen and name.startswith("0.")):
                    each -= 0.1 * each.grad
                each.grad = None
    for losses in said(phases):
        assert losses == pytest.approx(expected, rel=1e-12)


# -- a generator and a discriminator -------------------------------------------------------------------


def of_both(outputs: tuple[Tensor, Tensor], targets: None) -> Tensor:
    return (F.softplus(outputs[0]) + F.softplus(-outputs[1])).mean()


class Both(nn.Module):
    def __init__(self, judge: nn.Module) -> None:
        super().__init__()
        self.judge = judge

    def forward(self, made: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """(samples, 6), (samples, 6) -> two scores (samples, 1)."""
        return self.judge(made), self.judge(real)


def gan_alone() -> list[float]:
    torch.manual_seed(0)
    maker, judge, losses = net(4, 6), net(6, 1), []
    for step in range(STEPS):
        z, real = drawn(step, 4), drawn(step + 10, 6)
        for module in (maker, judge):
            if module is maker:
                loss = F.softplus(-judge(maker(z))).mean()
            else:
                loss = of_both((judge(maker(z).detach()), judge(real)), None)
            losses.append(float(loss.detach()))
            grads = torch.autograd.grad(loss, [*module.parameters()])
            with torch.no_grad():
                for each, grad in zip(module.parameters(), grads, strict=True):
                    each -= 0.1 * grad
    return losses


def gan(mesh: meshcomm.Mesh, frozen: bool) -> list[float]:
    maker, judge = net(4, 6), net(6, 1)
    judges = Trainer(mesh, DATA, Both(judge), loss=of_both, optimizer=made)
    makes = Trainer(mesh, DATA, maker, loss=lambda y, _: F.softplus(-judge(y)).mean(), optimizer=made)
    losses = []
    for step in range(STEPS):
        z, real = mine(mesh, drawn(step, 4)), mine(mesh, drawn(step + 10, 6))
        judge.requires_grad_(not frozen)
        makes.step(z)
        judge.requires_grad_(True)
        with torch.no_grad():
            y = maker(z)
        judges.step((y, real))
        losses += [done.loss for each in (makes, judges) for done in each.results()]
    return losses


def test_a_loss_may_use_the_module_of_another_trainer() -> None:
    expected = gan_alone()
    for losses in said(lambda mesh: gan(mesh, True)):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_the_error_names_the_way_out() -> None:
    for text in said(lambda mesh: gan(mesh, False)):
        assert "outside of a step" in text
        assert "module.requires_grad_(False)" in text


# -- sharded ---------------------------------------------------------------------------------------------


def penalised(settings: Config) -> str:
    torch.manual_seed(0)
    module = net(6, 3)

    def penalty(outputs: Tensor, targets: Tensor, inputs: Tensor) -> Tensor:
        x = inputs.detach().requires_grad_()
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return F.mse_loss(outputs, targets) + (grad.norm(dim=1) - 1).square().mean()

    with meshcomm.init(settings) as mesh:
        trainer = Trainer(mesh, settings, module, loss=penalty, optimizer=made)
        try:
            trainer.step(*(drawn(step, width)[:4] for step, width in ((0, 6), (1, 3))))
        except MeshcommError as error:
            return str(error)
    return ""


def test_a_gradient_penalty_through_a_sharded_module_is_refused(pool: Pool) -> None:
    for text in pool.run(penalised, config({"fs": 2}, {"shard": "fs"}), ranks=2):
        assert "cannot be computed through a sharded module" in text
