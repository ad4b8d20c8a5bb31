"""On two simulated ranks, a program's own optimizers match plain torch on one process, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import ConfigError, MeshcommError, UnsupportedOp
from meshcomm.models import ModelSpec
from meshcomm.parallel import optimizer
from meshcomm.parallel.optimizer import decay_groups, made_of
from meshcomm.parallel.split_update import check_apart, check_fused
from meshcomm.train import Trainer
from meshcomm.transfer.fused import FUSED, Parts

STEPS = 5
Make = Callable[[list[dict[str, Any]]], Optimizer]


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
    return x, torch.randn(8, 3, generator=draw, dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def held(optimizer: Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


class InPlace(Optimizer):
    """Changes gradients in place, as torch's SGD did until 1.8. A subclass says how."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    def change(self) -> None:
        for each in held(self):
            each.grad.add_(each.detach(), alpha=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.change()
        for each in held(self):
            each.add_(each.grad, alpha=-0.1)


class Centralised(InPlace):
    def change(self) -> None:
        for each in held(self):
            each.grad.sub_(each.grad.mean(-1, keepdim=True))


class Clips(InPlace):
    def change(self) -> None:
        nn.utils.clip_grad_norm_(held(self), 0.05)


def hooked(groups: Any) -> Optimizer:
    optimizer = SGD(groups, lr=0.1)

    def clamp(one: Optimizer, *_: Any) -> None:
        for each in held(one):
            each.grad.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clamp)
    return optimizer


class Lookahead(Optimizer):
    """Shares the groups and the state of another optimizer, and does not call Optimizer.__init__."""

    def __init__(self, groups: Any) -> None:
        self.base = Adam(groups, lr=0.1)
        self.param_groups, self.state, self.count = self.base.param_groups, self.base.state, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first = not self.count
        if first:
            begun = [each.clone() for each in held(self)]
        self.base.step()
        self.count += 1
        for place, each in enumerate(held(self)):
            slow = self.state[each].setdefault("slow", begun[place] if first else None)
            if self.count % 2 == 0:
                each.copy_(slow.lerp_(each, 0.5))


class Both(Optimizer):
    """Consists of two optimizers."""

    def __init__(self, groups: Any) -> None:
        mine = [each for group in groups for each in group["params"]]
        self.parts = (Adam(mine[:1], lr=0.1), SGD(mine[1:], lr=0.1))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def alone(make: Make) -> list[float]:
    module, losses = net(), []
    # Matrices come before vectors, as in the groups of a Trainer.
    mine = sorted(module.parameters(), key=lambda each: each.ndim < 2)
    optimizer = make([{"params": mine}])
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(module(x), y)
        for each in mine:
            each.grad = None
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(mesh: meshcomm.Mesh, make: Make) -> Any:
    settings = {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "lr": 0.1, "dtype": "float64"}
    config = {
        "mesh": {"dims": {"dp": 2}, "device": "cpu"},
        "parallel": {"data": "dp"},
        "train": {**settings, "schedule": "constant"},
    }
    try:
        trainer = Trainer(mesh, load_config(config), net(), loss=F.mse_loss, optimizer=make)
        for step in range(STEPS):
            trainer.step(*(each.chunk(2)[mesh.coord("dp")] for each in batch(step)))
        return [done.loss for done in trainer.results()], trainer.not_checked, sorted(trainer.state())
    except MeshcommError as error:
        return str(error)


@pytest.mark.parametrize("make", [InPlace, Centralised, Clips, hooked])
def test_gradients_may_be_changed_in_place(make: Make) -> None:
    expected = alone(make)
    for found in meshcomm.simulate(trained, dims={"dp": 2}, args=(make,)):
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(expected, rel=1e-12)
        assert found[1] == ""


@pytest.mark.parametrize(("make", "state"), [(Lookahead, "slow"), (Both, "exp_avg")])
def test_an_optimizer_may_consist_of_others_and_do_without_the_init_of_torch(make: Make, state: str) -> None:
    expected = alone(make)
    for found in meshcomm.simulate(trained, dims={"dp": 2}, args=(make,)):
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(expected, rel=1e-12)
        assert f"optimizer.0.weight.{state}" in found[2]


class Without(Optimizer):
    def __init__(self, groups: Any) -> None:
        self.base = SGD(groups, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_an_optimizer_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no parameter groups"):
        made_of(Without, decay_groups(net()))


class Keeps(Optimizer):
    """Extrapolates from the last two gradients. A subclass copies the kept gradient."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    def kept(self, grad: Tensor) -> Tensor:
        return grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in held(self):
            before = self.state[each].get("before", each.grad)
            each.add_(2 * each.grad - before, alpha=-0.1)
            self.state[each]["before"] = self.kept(each.grad)


class Copies(Keeps):
    def kept(self, grad: Tensor) -> Tensor:
        return grad.clone()


class KeepsAndDrops(Keeps):
    """The next step finds no gradient, but the kept gradient still uses the memory of the sum over ranks."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()


@pytest.mark.parametrize("kind", [Keeps, KeepsAndDrops])
def test_a_gradient_that_is_kept_without_a_copy_is_refused(kind: type[Keeps]) -> None:
    for found in meshcomm.simulate(trained, dims={"dp": 2}, args=(kind,)):
        assert "keeps gradients from one step to the next" in found


def test_a_gradient_that_is_kept_as_a_copy_is_right() -> None:
    expected = alone(Copies)
    for found in meshcomm.simulate(trained, dims={"dp": 2}, args=(Copies,)):
        assert found[0] == pytest.approx(expected, rel=1e-12)


# -- weights with several parts, which have one more axis if they are split ---------------------------------


def by_axes(groups: Any) -> Optimizer:
    """Groups for matrices and for vectors, as in nanoGPT."""
    mine = [each for group in groups for each in group["params"]]
    matrices, vectors = ([each for each in mine if (each.dim() > 1) is wanted] for wanted in (True, False))
    return AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}], lr=0.1
    )


def by_width(groups: Any) -> Optimizer:
    return AdamW(
        [{"params": [each], "lr": 0.1 / each.shape[-1]} for group in groups for each in group["params"]]
    )


class Late(Optimizer):
    """Decays matrices after a warm-up."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for each in held(self):
            if self.count > 4 and each.ndim > 1:
                each.mul_(0.9)
            each.add_(each.grad, alpha=-0.1)


class Orthogonal(Optimizer):
    """Like Muon: uses the sign of the singular values of a matrix, and of each element of any other parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in held(self):
            update = each.grad.sign()
            if each.ndim == 2:
                u, _, v = torch.linalg.svd(each.grad, full_matrices=False)
                update = u @ v
            each.add_(update, alpha=-0.1)


WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(..., WIDTH) -> the same shape."""
        q, k, v = self.qkv(x).chunk(3, -1)
        y: Tensor = x + self.out(q * k + v)
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens) -> (samples, tokens, 16)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def split(mesh: meshcomm.Mesh, make: Make) -> str:
    settings = {"steps": 2, "global_batch_size": 4, "micro_batch_size": 4, "lr": 0.1}
    config = {
        "mesh": {"dims": {"tp": 2}, "device": "cpu"},
        "parallel": {"tensor": "tp"},
        "data": {"seq_len": 4},
        "train": settings,
    }
    spec = ModelSpec(
        module=Net,
        hidden_size=WIDTH,
        vocab_size=16,
        layers="blocks",
        first=("embed",),
        last=("head",),
        split={"blocks.*.qkv": "column:3", "blocks.*.out": "row"},
    )
    try:
        trainer = Trainer(mesh, load_config(config), spec, optimizer=make)
        assert trainer.engine
    except MeshcommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("make", [by_axes, by_width, Late, Orthogonal])
def test_an_optimizer_that_looks_at_shapes_is_refused_for_parts(make: Make) -> None:
    for said in meshcomm.simulate(split, dims={"tp": 2}, args=(make,)):
        assert "does not update blocks.0.qkv" in said
        assert "in place of" in said


@pytest.mark.parametrize("make", [AdamW, InPlace])
def test_an_optimizer_of_elements_updates_parts(make: Make) -> None:
    assert meshcomm.simulate(split, dims={"tp": 2}, args=(make,)) == ["", ""]


def test_parts_along_columns_are_compared_too() -> None:
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 4, 6))
    setattr(module, FUSED, {"weight": Parts((8, 8, 8), 1)})
    check_fused(lambda of: AdamW(decay_groups(of)), nn.ModuleList([module]))
    with pytest.raises(UnsupportedOp, match="in 3 axes in place of 2"):
        check_fused(lambda of: Orthogonal(decay_groups(of)), nn.ModuleList([module]))


class LateNorm(InPlace):
    """Divides by the norm of all gradients after a warm-up."""

    count = 0

    def change(self) -> None:
        self.count += 1
        if self.count > 3:
            nn.utils.clip_grad_norm_(held(self), 0.05)


def test_an_optimizer_of_all_parameters_after_a_warm_up_is_refused_for_stages() -> None:
    with pytest.raises(UnsupportedOp, match="stages of a pipeline"):
        check_apart(lambda of: LateNorm(decay_groups(of)))


class OfAll(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        mine = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in mine]).norm()
        for each in mine:
            each.data.add_(each.grad / norm, alpha=-0.1)


def test_an_optimizer_of_all_parameters_is_refused_for_stages() -> None:
    with pytest.raises(UnsupportedOp, match="stages of a pipeline"):
        check_apart(lambda of: OfAll(optimizer.decay_groups(of), lr=0.1))
    check_apart(lambda of: torch.optim.AdamW(optimizer.decay_groups(of), lr=0.1))
    check_apart(lambda of: torch.optim.Adafactor(optimizer.decay_groups(of), lr=0.1))
