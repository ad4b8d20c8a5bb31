"""The Trainer with the user's own module, optimizer, loss, schedule, data and callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.parallel import tensor_parallel, whole
from meshcomm.testing import Pool
from meshcomm.train import Callback, Start, Step, Summary, Trainer, learning_rate
from tests.sizes import train_of
from tests.train.runs import config_on

BATCH, STEPS = 8, 4


BASE: dict[str, Any] = {
    "mesh": {"device": "cpu", "timeout_s": 60.0},
    "train": train_of(STEPS, BATCH, 2, lr=0.05, dtype="float64"),
}


def sections(dims: str, out: Path | str = "unused", *more: str) -> Config:
    """A mesh, its roles and [train]. The model and the data come from code."""
    return config_on(BASE, dims, f'train.out="{out}"', *more)


ONE = sections("one=1")
MESHES = ["dp=2", "fsdp=2", "dp=2 fsdp=2", "dp=2 tp=2", "fsdp=2 tp=2"]


class Net(nn.Module):
    """A user's own module."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.down(self.up(x).relu()))
        return y


def loss(y: Tensor, targets: Tensor) -> Tensor:
    return (y - targets).square().mean()


def samples(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin()


def mine(trainer: Trainer) -> Any:
    """This rank's share of the global batch, as a function of the step."""
    each = BATCH // trainer.engine.data_size
    here = slice(trainer.engine.data_coord * each, (trainer.engine.data_coord + 1) * each)
    return lambda step: tuple(part[here] for part in samples(step))


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


def falls(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained(config: Config, scheduled: bool) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """Losses and whole weights of a user's module. Ranks start with different weights."""
    with meshcomm.init(config) as mesh:
        assert config.parallel is not None
        split = config.parallel.tensor
        module = Net(0 if mesh.rank == 0 or split else mesh.rank)
        if split is not None:
            tensor_parallel(module, mesh, split, {"up": "column", "down": "row"})
        more: dict[str, Any] = {"optimizer": sgd, "scheduler": falls} if scheduled else {}
        trainer = Trainer(mesh, config, module, loss=loss, **more)
        done = []
        for step in range(1, STEPS + 1):
            trainer.step(*mine(trainer)(step))
            done += trainer.results()
        named = trainer.engine.named_parameters()
        return tuple(each.loss for each in done), {name: whole(p).detach() for name, p in named}


def by_hand() -> tuple[list[float], dict[str, Tensor]]:
    """The results of `trained` with sgd and its schedule, in plain torch."""
    module = Net().double()
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1]},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = sgd(groups)
    schedule, losses = falls(optimizer), []
    for step in range(1, STEPS + 1):
        x, targets = samples(step)
        optimizer.zero_grad()
        value = loss(module(x), targets)
        value.backward()
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    return losses, {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.deep_cases(r"\[dp=2 (fsdp=2|tp=2)\]")
def test_a_module_trains_as_in_plain_torch_on_every_mesh(pool: Pool, dims: str) -> None:
    config = sections(dims)
    ranks = pool.run(trained, config, True, ranks=config.mesh.layout(None).world_size)
    losses, weights = by_hand()
    for ours, held in ranks:
        assert ours == pytest.approx(losses, rel=1e-12)
        assert set(held) == set(weights)
        for name, value in held.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-12, atol=1e-13)


def test_without_an_optimiser_the_configuration_has_one(pool: Pool) -> None:
    (alone,) = pool.run(trained, ONE, False, ranks=1)
    for losses, _ in pool.run(trained, sections("dp=2 fsdp=2"), False, ranks=4):
        assert losses == pytest.approx(alone[0], rel=1e-9)


def test_evaluation_leaves_what_is_in_eval_mode_there() -> None:
    def modes(mesh: Mesh) -> tuple[bool, bool]:
        module = Net()
        module.up.eval()
        Trainer(mesh, ONE, module.double(), loss=loss).evaluate([samples(1)])
        return module.training, module.up.training

    assert meshcomm.simulate(modes, ONE) == [(True, False)]


def evaluated(config: Config) -> float:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, Net(), loss=loss)
        # A loader gives another floating-point type than the weights have.
        return trainer.evaluate([tuple(each.float() for each in mine(trainer)(step)) for step in (1, 2)])


def test_evaluation_of_a_module_is_the_mean_of_its_loss(pool: Pool) -> None:
    module = Net().double()
    with torch.no_grad():
        parts = [[each.float().double() for each in samples(step)] for step in (1, 2)]
        by_torch = sum(loss(module(x), y).item() for x, y in parts) / 2
    for dims, ranks in (("dp=2", 2), ("dp=2 fsdp=2", 4)):
        for found in pool.run(evaluated, sections(dims), ranks=ranks):
            assert found == pytest.approx(by_torch, rel=1e-12)


def two_rates(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # Matrices learn at train.lr, vectors at a fifth of it.
    made = torch.optim.SGD(groups, lr=0.05)
    for group in made.param_groups:
        group["weight_decay"] = 0.0
        if all(each.ndim < 2 for each in group["params"]):
            group["lr"] = 0.01
    return made


def moved(config: Config) -> dict[str, tuple[float, ...]]:
    """For each parameter, the size of its update relative to its gradient, in two steps."""
    with meshcomm.init(config) as mesh:
        module = Net()
        trainer = Trainer(mesh, config, module, loss=loss, optimizer=two_rates)
        found: dict[str, tuple[float, ...]] = {}
        for step in (1, 2):
            before = {name: each.detach().clone() for name, each in module.named_parameters()}
            trainer.step(*mine(trainer)(step))
            for name, each in module.named_parameters():
                assert each.grad is not None
                rate = (before[name] - each.detach()).norm() / each.grad.norm()
                found[name] = (*found.get(name, ()), rate.item())
        return found


def test_a_group_s_rate_is_its_share_of_the_schedule(pool: Pool) -> None:
    config = sections("dp=2", "unused", 'train.schedule="linear"', "train.warmup_steps=2")
    train = config.train
    assert train is not None
    rates = [learning_rate(train, step) for step in (1, 2)]
    assert rates[0] < rates[1] == train.lr
    for found in pool.run(moved, config, ranks=2):
        for name, each in found.items():
            share = 0.2 if name.endswith("bias") else 1.0
            assert each == pytest.approx([share * rate for rate in rates], rel=1e-9), name


class Notes(Callback):
    def __init__(self, last: int = 0) -> None:
        self.last, self.calls = last, []  # type: ignore[var-annotated]

    def on_start(self, start: Start) -> None:
        self.calls.append(("start", start.parameters))

    def on_step(self, step: Step) -> None:
        self.calls.append(("step", step.step, step.lr))
        self.stop = step.step == self.last

    def on_save(self, step: int, folder: Path) -> None:
        self.calls.append(("save", step))

    def on_end(self, summary: Summary, error: BaseException | None) -> None:
        self.calls.append(("end", summary.steps))


class Endless:
    """Batches in order, as a loader gives them. Two steps are an epoch."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __iter__(self) -> Iterator[Any]:
        return iter([self.of(1), self.of(2)])


def ran(config: Config, last: int = 0) -> tuple[Summary, list[Any]]:
    notes = Notes(last)
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config, Net(), loss=loss, optimizer=sgd, scheduler=falls, callbacks=[notes])
        assert notes.trainer is trainer
        return trainer.run(Endless(mine(trainer))), notes.calls


def test_a_run_is_told_stopped_and_resumed_with_its_schedule_and_its_data(pool: Pool, tmp_path: Path) -> None:
    every = "train.checkpoint_every=1"
    whole_run = pool.run(ran, sections("dp=2", tmp_path / "whole", every), ranks=2)
    assert whole_run[0][1][:4] == [
        ("start", 6 * 16 + 16 + 16 * 3 + 3 + 12),
        ("step", 1, 0.1),
        ("save", 1),
        ("step", 2, 0.05),
    ]
    assert whole_run[0][1][-1] == ("end", STEPS)
    for summary, calls in pool.run(ran, sections("dp=2", tmp_path / "cut", every), 2, ranks=2):
        assert summary.steps == 2 and calls[-2:] == [("save", 2), ("end", 2)]
    resumed = pool.run(ran, sections("fsdp=2", tmp_path / "cut", every, "train.resume=true"), ranks=2)
    for (summary, calls), (first, all_calls) in zip(resumed, whole_run, strict=True):
        assert summary.losses == pytest.approx(first.losses, rel=1e-12)
        assert calls[1:] == all_calls[5:]


def refused(config: Config, what: str) -> str:
    try:
        with meshcomm.init(config) as mesh:
            _try(mesh, config, what)
    except MeshcommError as error:
        return str(error)
    return "nothing"


def _try(mesh: Mesh, config: Config, what: str) -> None:
    if what == "no model":
        Trainer(mesh, config)
        return
    trainer = Trainer(mesh, config, Net(), loss=loss, **MAKES.get(what, {}))
    inputs, targets = samples(1)
    if what == "no data":
        trainer.run()
    elif what == "share":
        trainer.step(inputs, targets)
    elif what == "end":
        trainer.run(iter([samples(1), samples(1)]))
    elif what == "no grad":
        with torch.no_grad():
            trainer.step(inputs, targets)
    elif what == "lists":
        trainer.step(inputs.tolist(), targets.tolist())  # type: ignore[arg-type]


OTHER = Net()
MAKES: dict[str, Any] = {
    "others": {"optimizer": lambda groups: torch.optim.SGD(OTHER.parameters(), lr=0.1)},
    "none": {"optimizer": lambda groups: None},
    "another": {"scheduler": lambda optimizer: falls(sgd([{"params": [torch.ones(1)]}]))},
    "made": {"scheduler": falls(sgd([{"params": [torch.ones(1)]}]))},
}
REFUSED = [
    ("others", "fsdp=2", "the SGD would not train this model"),
    ("none", "dp=2", "the optimizer cannot be created"),
    ("another", "dp=2", "the LambdaLR belongs to another optimizer"),
    ("made", "dp=2", "the scheduler cannot be made"),
    ("lists", "dp=2", "the data of step 1 are not inputs and targets"),
    ("no grad", "one=1", "a step needs gradients, on rank 0 (one=0)"),
    ("end", "one=1", "the data ended before the training"),
    ("no model", "dp=2", "no model is given, and the configuration has none"),
    ("no data", "dp=2", "no data are given, and the configuration has none"),
    ("share", "dp=2", "the step has the wrong number of samples for this rank"),
    ("not split", "dp=2 tp=2", "no parameter of the module is split along tp, the dim of parallel.tensor"),
]


@pytest.mark.parametrize(("what", "dims", "words"), REFUSED)
def test_what_does_not_fit_is_refused(pool: Pool, tmp_path: Path, what: str, dims: str, words: str) -> None:
    config = sections(dims, tmp_path)
    for said in pool.run(refused, config, what, ranks=config.mesh.layout(None).world_size):
        lines = said.splitlines()
        assert lines[0] == words and lines[-1].startswith("  try: ")


def larger() -> Any:
    """A module with two additional tensors."""
    made: Any = Net()
    made.head = nn.Sequential(made.head, nn.Linear(3, 3, bias=False))
    made.register_buffer("counts", torch.zeros(2))
    return made


def loaded(config: Config, folder: Path, damage: str) -> str:
    """The error of `load` for the folder of a larger model, for a damaged lock, or for a folder that does not exist."""
    with meshcomm.init(config) as mesh:
        made = Trainer(mesh, config, larger() if damage == "larger" else Net(), loss=loss)
        made.step(*mine(made)(1))
        made.save(folder)
        lock = folder / "lock.json"
        if mesh.rank == 0 and damage == "missing":
            lock.unlink()
        elif mesh.rank == 0 and damage == "older":
            lock.write_text(lock.read_text().replace('"format": 5', '"format": 3'))
        elif mesh.rank == 0 and damage == "changed":
            lock.write_text(lock.read_text().replace('"step": 1', '"step": 7'))
        mesh.barrier()
        other = Trainer(mesh, config, Net(1), loss=loss)
        before = other.state()
        with pytest.raises(MeshcommError) as caught:
            other.load(folder / "nowhere" if damage == "elsewhere" else folder)
        assert all(torch.equal(each, before[name]) for name, each in other.state().items())
        return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words", "given"),
    [
        ("larger", "the checkpoint does not fit: model.", "4 of 8 tensors in "),
        ("older", "a checkpoint's lock.json cannot be read", "format 3, which only the version"),
        ("missing", "a checkpoint's lock.json is missing", "No such file"),
        ("changed", "a checkpoint's lock.json cannot be read", "its SHA-256 differs"),
        ("elsewhere", "a checkpoint's lock.json cannot be read", "nowhere is not one"),
    ],
)
def test_a_misfitting_folder_changes_nothing(
    pool: Pool, tmp_path: Path, damage: str, words: str, given: str
) -> None:
    config = sections("dp=2", tmp_path)
    for said in pool.run(loaded, config, tmp_path / "saved", damage, ranks=2):
        assert said.startswith(words) and given in said, said
