"""State that steps change besides weights: it is saved or refused by name, restored bit by bit, and not changed by a look."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import MeshcommError, UnsupportedOp
from meshcomm.parallel import tensor_parallel, unsplit_state, whole
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.export import export_weights
from tests.train.runs import config_on
from tests.train.test_trainer import BASE as FOUR_STEPS
from tests.train.test_trainer import BATCH, Net, loss, mine, samples

pytestmark = pytest.mark.long

STEPS, CUT = 6, 3
BASE = {**FOUR_STEPS, "train": {**FOUR_STEPS["train"], "steps": STEPS}}


# -- optimizers, modules and schedulers as users write them ---------------------------------------


class Momentum(Optimizer):
    """Counts its steps in an int and in an attribute. The size of an update depends on both."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.rounds = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.rounds += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["average"] = torch.zeros_like(p)
                    state["seen"] = {"steps": [], "last": None}
                state["step"] += 1
                state["seen"]["steps"].append(state["step"])
                state["average"].lerp_(p.grad, 1 / (1 + len(state["seen"]["steps"])))
                p.sub_(state["average"], alpha=group["lr"] / (state["step"] + self.rounds))


class Growing(Optimizer):
    """Keeps scalars in its groups, as Prodigy and schedule-free optimizers do."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "d": 1e-2, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            group["weight_sum"] += group["d"] ** 2
            group.setdefault("first", group["d"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["d"] * (1 + group["k"]) / (1 + group["weight_sum"]))


class Noisy(torch.optim.SGD):
    """Adds noise from torch's default generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, dtype=p.dtype) * 1e-2)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "int step": Momentum,
    "scalars in groups": Growing,
    "dampening": lambda groups: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.05, t0=2, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, amsgrad=True),
    "foreach": lambda groups: torch.optim.NAdam(groups, lr=0.01, weight_decay=0.1, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}
# Their state has other shapes than the parameters, or they draw random numbers, so they cannot update a part of a tensor.
OF_WHOLE: dict[str, Callable[[Any], Optimizer]] = {
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
    "noise": lambda groups: Noisy(groups, lr=0.1),
}


class Counting(Net):
    """The outputs depend on the number of calls, which is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.scale(super().forward(x)) / (1 + 0.1 * self.calls)
        return y

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Scale(nn.Module):
    """A module with a tensor as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.by *= 1.01
        return x * self.by

    def get_extra_state(self) -> Any:
        return torch.tensor(self.by, dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        self.by = float(state)


def frozen() -> Net:
    made = Net()
    made.down.weight.requires_grad_(False)
    made.head.bias.requires_grad_(False)
    return made


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(3, 3)
        self.again.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(super().forward(x))
        return y


MODULES: dict[str, Callable[[], nn.Module]] = {"extra state": Counting, "frozen": frozen, "tied": Tied}


class Remembers:
    """A callable object whose attributes LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


class Drifting(LRScheduler):
    """Its rates depend on observed values, not on the number of steps."""

    def __init__(self, optimizer: Optimizer, seen: Callable[[], float]) -> None:
        self.sum, self._see = 0.0, seen
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.sum += self._see()
        return [base / (1 + self.sum) for base in self.base_lrs]


def closure(optimizer: Optimizer) -> LRScheduler:
    rates = iter([0.9**n for n in range(99)])
    return LambdaLR(optimizer, lambda _: next(rates))


SEEN = [1.0]
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "closure": closure,
    "object": lambda optimizer: LambdaLR(optimizer, Remembers()),
    "step": lambda optimizer: StepLR(optimizer, 2),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 4)], [2]
    ),
    "chain": lambda optimizer: ChainedScheduler([LinearLR(optimizer), StepLR(optimizer, 3)], optimizer),
    "own": lambda optimizer: Drifting(optimizer, lambda: SEEN[0]),
}


# -- a training that is cut in two ------------------------------------------------------------------


def trainer_of(mesh: Any, config: Config, module: Any, optimizer: Any, scheduler: Any) -> Trainer:
    made = module()
    if config.parallel is not None and config.parallel.tensor is not None:
        tensor_parallel(made, mesh, config.parallel.tensor, {"up": "column", "down": "row"})
    return Trainer(mesh, config, made, loss=loss, optimizer=optimizer, scheduler=scheduler)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    found = {name: whole(p).detach().clone() for name, p in trainer.engine.named_parameters()}
    return {**found, "lr": torch.tensor([group["lr"] for group in trainer.optimizer.param_groups][:1])}


def parts(kind: str, name: str) -> tuple[Any, Any, Any]:
    module = MODULES[name] if kind == "module" else Net
    optimizer = {**OPTIMIZERS, **OF_WHOLE}[name] if kind == "optimizer" else OPTIMIZERS["dampening"]
    return module, optimizer, SCHEDULERS[name] if kind == "scheduler" else None


def trained(
    config: Config, kind: str, names: list[str], folder: Path, first: int | None = None
) -> dict[str, Any]:
    """The weights after all steps of a training.

    Without `first`, it saves before the first step and after some steps. With `first`, it resumes after that step.
    """
    found = {}
    with meshcomm.init(config) as mesh:
        for name in names:
            SEEN[0] = 1.0
            trainer = trainer_of(mesh, config, *parts(kind, name))
            if first is None:
                trainer.save(folder / name / "begin")
            else:
                SEEN[0] = 5.0
                trainer.load(folder / name / ("cut" if first else "begin"))
                SEEN[0] = 0.0 if first else 1.0
            for step in range((first or 0) + 1, STEPS + 1):
                if first is None and step == CUT + 1:
                    trainer.save(folder / name / "cut")
                trainer.step(*mine(trainer)(step))
                SEEN[0] = 0.0 if step == CUT else SEEN[0]
            found[name] = weights(trainer)
    return found


def ranks_of(config: Config) -> int:
    return config.mesh.layout(None).world_size


@pytest.mark.parametrize(
    ("kind", "case", "other"),
    [
        # Each also resumes on its own mesh, so every kind of shard is saved and loaded.
        ("module", "fsdp=2", "dp=2 tp=2"),
        *(
            pytest.param(*each, marks=pytest.mark.parity)
            for each in (
                ("optimizer", "fsdp=2", "dp=1 tp=2"),
                ("optimizer", "dp=1 tp=2", "dp=2"),
                ("optimizer", "dp=2", "fsdp=2"),
                # Their state counts forward passes, so both meshes have as many ranks with separate samples.
                ("module", "dp=2 tp=2", "dp=2"),
                ("module", "dp=2", "fsdp=2"),
                ("scheduler", "dp=2", "fsdp=2"),
                ("scheduler", "dp=2 tp=2", "one=1"),
            )
        ),
    ],
)
@pytest.mark.deep_cases(r"\[module-fsdp=2-dp=2 tp=2")
def test_a_resumed_training_is_bit_equal(
    pool: Pool, tmp_path: Path, kind: str, case: str, other: str
) -> None:
    names = list({"optimizer": OPTIMIZERS, "module": MODULES, "scheduler": SCHEDULERS}[kind])
    # The check before training refuses Counting, because its state depends on the rank and not on the step.
    settings = ["train.check=false"] if kind == "module" else []
    here, there = config_on(BASE, case, *settings), config_on(BASE, other, *settings)
    (expected, *_) = pool.run(trained, here, kind, names, tmp_path, ranks=ranks_of(here), timeout_s=120)
    for first in (0, CUT):
        again = pool.run(trained, here, kind, names, tmp_path, first, ranks=ranks_of(here), timeout_s=120)
        for name in names:
            for rank in again:
                for key, value in rank[name].items():
                    assert torch.equal(value, expected[name][key]), (name, key, first)
    moved = pool.run(trained, there, kind, names, tmp_path, CUT, ranks=ranks_of(there), timeout_s=120)
    for name in names:
        for key, value in moved[0][name].items():
            # In float64, only the order of sums differs. Rprop uses signs, which may flip.
            torch.testing.assert_close(value, expected[name][key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", ["dp=2", "one=1"])
@pytest.mark.deep_cases(r"\[one=1")
def test_state_of_other_shapes_and_noise_come_back(pool: Pool, tmp_path: Path, case: str) -> None:
    config, names = config_on(BASE, case), list(OF_WHOLE)
    (expected, *_) = pool.run(trained, config, "optimizer", names, tmp_path, ranks=ranks_of(config))
    for rank in pool.run(trained, config, "optimizer", names, tmp_path, CUT, ranks=ranks_of(config)):
        for name in names:
            for key, value in rank[name].items():
                assert torch.equal(value, expected[name][key]), (name, key)


# -- a look -----------------------------------------------------------------------------------------


def looked_at(config: Config, folder: Path | None, names: list[str]) -> dict[str, Any]:
    found = {}
    with meshcomm.init(config) as mesh:
        for name in names:
            trainer = trainer_of(mesh, config, frozen, OPTIMIZERS[name], None)
            if folder is not None:
                before = trainer.state()
                assert not any(key.startswith("optimizer.") for key in before)
                trainer.save(folder / name)
            for step in range(1, 4):
                trainer.step(*mine(trainer)(step))
                if folder is not None:
                    trainer.state()
            found[name] = weights(trainer)
    return found


@pytest.mark.parametrize(
    "case", ["dp=2", *(pytest.param(each, marks=pytest.mark.parity) for each in ("fsdp=2", "dp=1 tp=2"))]
)
def test_a_look_changes_nothing(pool: Pool, tmp_path: Path, case: str) -> None:
    config, names = config_on(BASE, case), list(OPTIMIZERS)
    without = pool.run(looked_at, config, None, names, ranks=2)
    for ours, theirs in zip(pool.run(looked_at, config, tmp_path, names, ranks=2), without, strict=True):
        for name in names:
            assert all(torch.equal(value, theirs[name][key]) for key, value in ours[name].items()), name


# -- what cannot be saved ---------------------------------------------------------------------------


class Odd(Tensor):
    """A tensor subclass that does not belong to torch."""


class Keeps(torch.optim.SGD):
    """Keeps something in the state of each parameter."""

    def __init__(self, groups: Any, what: str) -> None:
        super().__init__(groups, lr=0.1)
        self.what = what
        self.window, self.mean = deque([0], maxlen=2), torch.zeros(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if self.what == "deque":
            self.window.append(1)
        elif self.what == "own tensor":
            self.mean += 1
        for group in self.param_groups:
            for p in group["params"]:
                gradient: Any = p.grad
                if self.what == "object":
                    self.state[p]["projector"] = object()
                elif self.what == "group object":
                    group["projector"] = object()
                elif self.what == "own part":
                    self.state[p]["mean"] = getattr(gradient, "_local_tensor", gradient).clone()
                elif self.what == "own kind of part":
                    # As for torchao's moments of 8 bits.
                    part = gradient.to_local().clone().as_subclass(Odd)
                    self.state[p]["mean"] = DTensor.from_local(part, p.device_mesh, p.placements)
                elif self.what == "part of a sum":
                    self.state[p]["norm"] = gradient.sum()
                elif self.what == "number of a part":
                    part = getattr(gradient, "_local_tensor", gradient)
                    self.state[p]["norm"] = part.norm().item()
                elif self.what == "inner":
                    self.inner = torch.optim.SGD([p])


class Random(Net):
    """Extra state that depends on a rank's own samples."""

    seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum().item()
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def not_saved(config: Config, what: str, folder: Path) -> str:
    with meshcomm.init(config) as mesh:
        module = Random if what == "samples" else Net
        scheduler = Holds if what == "scheduler" else None
        trainer = trainer_of(mesh, config, module, partial(Keeps, what=what), scheduler)
        trainer.step(*mine(trainer)(1))
        with pytest.raises(MeshcommError) as caught:
            trainer.save(folder / what)
        return str(caught.value)


class Holds(LambdaLR):
    def __init__(self, optimizer: Optimizer) -> None:
        self.handle = object()
        super().__init__(optimizer, lambda _: 1.0)


@pytest.mark.parametrize(
    ("what", "case", "words"),
    [
        ("object", "dp=2", "the optimizer's state of up.weight cannot be saved"),
        ("group object", "dp=2", "param_groups[0], projector cannot be saved"),
        ("own part", "fsdp=2", "optimizer.up.weight.mean cannot be saved"),
        ("own kind of part", "fsdp=2", "optimizer.up.weight.mean cannot be saved"),
        ("part of a sum", "fsdp=2", "optimizer.up.weight.norm cannot be saved"),
        ("number of a part", "fsdp=2", "ranks that hold the same state differ in plain.parameter."),
        ("inner", "dp=2", "the attribute inner of Keeps cannot be saved"),
        ("deque", "dp=2", "the attribute window of Keeps cannot be saved"),
        ("own tensor", "dp=2", "the attribute mean of Keeps cannot be saved"),
        ("samples", "dp=2", "ranks that hold the same state differ in plain.module."),
        ("scheduler", "dp=2", "Holds.state_dict(), handle cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_named(pool: Pool, tmp_path: Path, what: str, case: str, words: str) -> None:
    for said in pool.run(not_saved, config_on(BASE, case), what, tmp_path, ranks=2):
        assert words in said.splitlines()[0]


def another(config: Config, folder: Path, save: bool) -> str:
    with meshcomm.init(config) as mesh:
        trainer = trainer_of(mesh, config, Net, OPTIMIZERS["adam" if save else "dampening"], None)
        if save:
            trainer.step(*mine(trainer)(1))
            trainer.save(folder)
            return ""
        with pytest.raises(MeshcommError) as caught:
            trainer.load(folder)
        return str(caught.value)


def test_the_state_of_another_optimizer_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(another, config_on(BASE, "one=1"), tmp_path / "saved", True, ranks=1)
    (said,) = pool.run(another, config_on(BASE, "one=1"), tmp_path / "saved", False, ranks=1)
    assert said.splitlines()[:3] == [
        "the checkpoint does not fit: the optimizer's state",
        "  given:    that of Adam",
        "  expected: that of SGD",
    ]


# -- buffers ----------------------------------------------------------------------------------------


class Running(Net):
    """Statistics of this rank's samples, which forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            self.count += int((x > 0).sum())
        return super().forward(x - self.mean)


def ran(config: Config) -> list[Any]:
    """The buffers after each step."""
    found = []
    with meshcomm.init(config) as mesh:
        trainer = trainer_of(mesh, config, Running, OPTIMIZERS["adam"], None)
        for step in range(1, 3):
            trainer.step(*mine(trainer)(step))
            found.append({name: each.clone() for name, each in trainer.modules[0].named_buffers()})
    return found


@pytest.mark.parametrize("case", ["dp=2", "fsdp=2", "dp=2 tp=2"])
def test_buffers_that_follow_from_samples_are_the_first_rank_s(pool: Pool, case: str) -> None:
    config = config_on(BASE, case, "train.check=false")
    first, *others = pool.run(ran, config, ranks=ranks_of(config))
    module = Running().double()
    for step in range(2):
        for microbatch in samples(step + 1)[0][: BATCH // 2].split(2):
            module(microbatch)
        assert all(torch.equal(first[step][name], each) for name, each in module.named_buffers())
        for other in others:
            assert all(torch.equal(other[step][name], each) for name, each in first[step].items())


# -- weights that leave -----------------------------------------------------------------------------


class Fused(nn.Module):
    """A weight that fuses three weights, and a weight with two names."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.qkv, self.down, self.out = nn.Linear(6, 24), nn.Linear(8, 3), nn.Linear(3, 3)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y: Tensor = self.again(self.out(self.down(q * k + v)))
        return y


def saved_fused(config: Config, out: Path) -> dict[str, Tensor]:
    """The state of the module as it was before the split, from a run with a checkpoint in `out`."""
    with meshcomm.init(config) as mesh:
        module = Fused()
        tensor_parallel(module, mesh, "tp", {"qkv": "column:3", "down": "row"})
        trainer = Trainer(mesh, config, module, loss=loss, optimizer=OPTIMIZERS["adam"])
        trainer.step(*mine(trainer)(1))
        trainer.save(out / "checkpoints" / "step-000001")
        return unsplit_state(trainer.modules[0])


def test_exported_weights_are_those_of_the_module_s_state_dict(pool: Pool, tmp_path: Path) -> None:
    (expected, *_) = pool.run(saved_fused, config_on(BASE, "dp=1 tp=2"), tmp_path, ranks=2)
    export_weights(tmp_path, tmp_path / "weights")
    found = load_file(tmp_path / "weights")
    module = Fused().double()
    module.load_state_dict(found)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def saved_counting(config: Config, out: Path) -> None:
    with meshcomm.init(config) as mesh:
        trainer_of(mesh, config, Counting, OPTIMIZERS["adam"], None).save(out / "checkpoints" / "step-000000")


def test_weights_without_an_extra_state_that_they_need_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved_counting, config_on(BASE, "one=1"), tmp_path, ranks=1)
    with pytest.raises(UnsupportedOp, match="the extra state of the model is not a tensor"):
        export_weights(tmp_path, tmp_path / "weights")


# -- closures, moves and other actions of programs --------------------------------------------------


def of_all(groups: Any) -> Optimizer:
    return torch.optim.LBFGS([each for group in groups for each in group["params"]])


def with_lbfgs(config: Config) -> list[str]:
    found = []
    with meshcomm.init(config) as mesh:
        for make in (torch.optim.LBFGS, of_all):
            with pytest.raises(MeshcommError) as caught:
                trainer_of(mesh, config, Net, make, None)
            found.append(caught.value.what)
    return found


def test_an_optimizer_that_asks_for_the_loss_is_refused(pool: Pool) -> None:
    assert pool.run(with_lbfgs, config_on(BASE, "one=1"), ranks=1) == [
        ["LBFGS cannot take a step from gradients only"] * 2
    ]
