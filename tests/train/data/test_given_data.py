"""A program's data that do not give every rank its share of every step are refused by name before they train."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.train import Trainer
from meshcomm.train.evaluation import evaluate_of

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(64, 4, dtype=torch.float64, generator=_GENERATOR)
Y = torch.randn(64, 1, dtype=torch.float64, generator=_GENERATOR)
SGD = torch.optim.SGD


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def config_of(out: Path, ranks: int = 2, **train: Any) -> Config:
    return load_config(
        {
            "mesh": {"dims": {"dp": ranks}, "device": "cpu", "timeout_s": 60.0},
            "parallel": {"data": "dp"},
            "train": {
                "steps": 6,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "lr": 0.05,
                "dtype": "float64",
                "schedule": "constant",
                "out": str(out),
                **train,
            },
        }
    )


def trainer_of(mesh: Mesh, config: Config, module: nn.Module | None = None, **more: Any) -> Trainer:
    module = net() if module is None else copy.deepcopy(module)
    more = {"loss": nn.functional.mse_loss, "optimizer": lambda groups: SGD(groups, lr=0.05), **more}
    return Trainer(mesh, config, module, **more)


def share(mesh: Mesh, step: int = 1, size: int = 8) -> tuple[Tensor, Tensor]:
    """This rank's share of a step of `size` samples."""
    x, y = (each[(step - 1) * size : step * size].chunk(mesh.data_world_size) for each in (X, Y))
    return x[mesh.data_rank], y[mesh.data_rank]


def said_on(config: Config, action: Callable[[Mesh], object]) -> list[str]:
    """The text of the error on each rank, or "" for no error."""

    def program(mesh: Mesh) -> str:
        try:
            action(mesh)
        except MeshcommError as error:
            return str(error)
        return ""

    return meshcomm.simulate(program, config)


# -- skipped steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_leaves_the_running_statistics_of_a_batch_norm(tmp_path: Path, ranks: int) -> None:
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    def run(mesh: Mesh) -> list[dict[str, Tensor]]:
        config = config_of(tmp_path / str(mesh.rank), ranks, on_nonfinite="skip", micro_batch_size=8 // ranks)
        trainer, found = trainer_of(mesh, config, module), []
        for factor in (1.0, math.nan, 1.0):
            x, y = share(mesh)
            trainer.step(x * factor, y)
            trainer.results()
            found.append({name: each.clone() for name, each in trainer.modules[0].named_buffers()})
        return found

    for first, skipped, after in meshcomm.simulate(run, config_of(tmp_path, ranks)):
        assert all(torch.equal(each, skipped[name]) for name, each in first.items())
        assert not torch.equal(first["1.running_mean"], after["1.running_mean"])
        assert all(bool(each.isfinite().all()) for each in after.values())


# -- evaluations of nothing -------------------------------------------------------------------------


def nothing() -> Iterator[tuple[Tensor, Tensor]]:
    yield from ()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "batches", [list, nothing, lambda: DataLoader(TensorDataset(X[:3], Y[:3]), 4, drop_last=True)]
)
def test_an_evaluation_of_nothing_is_refused(tmp_path: Path, ranks: int, batches: Callable[[], Any]) -> None:
    config = config_of(tmp_path, ranks)
    for text in said_on(config, lambda mesh: trainer_of(mesh, config).evaluate(batches())):
        assert text.startswith("there is nothing to evaluate") and "no batch" in text


# -- not data ---------------------------------------------------------------------------------------

NOT_DATA: dict[str, tuple[Callable[[Trainer], object], str]] = {
    "a dataset": (lambda trainer: trainer.run(TensorDataset(X, Y)), "TensorDataset, which yields no batches"),  # type: ignore[arg-type]
    "a number": (lambda trainer: trainer.run(42), "given:    42"),  # type: ignore[arg-type]
    "a function without a step": (lambda trainer: trainer.run(lambda: (X, Y)), "lambda step:"),  # type: ignore[arg-type]
    "evaluate None": (lambda trainer: trainer.evaluate(None), "given:    None"),  # type: ignore[arg-type]
    "evaluate a function": (
        lambda trainer: trainer.evaluate(lambda step: (X, Y)),  # type: ignore[arg-type]
        "a function, which yields no batches",
    ),
    "evaluate a dataset": (lambda trainer: trainer.evaluate(TensorDataset(X, Y)), "DataLoader(dataset"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", NOT_DATA)
def test_what_yields_no_batches_is_refused(tmp_path: Path, case: str) -> None:
    config, (action, says) = config_of(tmp_path), NOT_DATA[case]
    for text in said_on(config, lambda mesh: action(trainer_of(mesh, config))):
        assert says in text and "expected:" in text and "try:" in text
        assert text.startswith("the data ")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_without_gradients_is_refused_as_a_step_is(tmp_path: Path, mode: Any) -> None:
    config = config_of(tmp_path)

    def run(mesh: Mesh) -> None:
        trainer = trainer_of(mesh, config)
        with mode():
            trainer.run(lambda step: share(mesh, step))

    for text in said_on(config, run):
        assert (
            text.startswith("a step needs gradients, on rank") and "Trainer.run within torch.no_grad" in text
        )


def test_a_module_made_in_inference_mode_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def make(mesh: Mesh) -> None:
        with torch.inference_mode():
            trainer_of(mesh, config)

    for text in said_on(config, make):
        assert text.startswith("the module's tensors were made in inference mode") and "0.weight" in text


def test_batches_made_in_inference_mode_train(tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def losses(mesh: Mesh, inference: bool) -> list[float]:
        trainer = trainer_of(mesh, config)
        with torch.inference_mode(inference):
            batches = [tuple(each * 1 for each in share(mesh, step)) for step in (1, 2)]
        for batch in batches:
            trainer.step(*batch)
        return [done.loss for done in trainer.results()]

    plain, made = (meshcomm.simulate(losses, config, args=(each,)) for each in (False, True))
    assert plain == made


# -- lengths ----------------------------------------------------------------------------------------


def uneven(kind: str, mesh: Mesh) -> Any:
    """Three batches on the first rank, and two on the second one."""
    count = 3 - mesh.rank
    if kind == "lists":
        return [share(mesh, step) for step in range(1, count + 1)]
    return DataLoader(TensorDataset(X, Y), 4, sampler=list(range(mesh.rank, 64, 2))[: 4 * count])


@pytest.mark.parametrize("kind", ["lists", "loaders"])
def test_data_of_different_lengths_are_refused_if_a_rank_would_restart_before_others(
    tmp_path: Path, kind: str
) -> None:
    config, short = (config_of(tmp_path, steps=steps) for steps in (3, 2))
    for text in said_on(config, lambda mesh: trainer_of(mesh, config).run(uneven(kind, mesh))):
        assert text.startswith("the data have different numbers of batches")
        assert "2 on rank 1; 3 on rank 0" in text and "DistributedSampler(..., drop_last=True)" in text
    assert said_on(short, lambda mesh: trainer_of(mesh, short).run(uneven(kind, mesh))) == [""] * 2


# -- another batch size on resume -------------------------------------------------------------------


def test_an_iterable_does_not_go_on_with_another_batch_size(tmp_path: Path) -> None:
    first = config_of(tmp_path, steps=3, checkpoint_every=1)
    more: dict[str, Any] = {"resume": True, "resume_changed": ["global_batch_size"], "checkpoint_every": 1}
    other, same = (config_of(tmp_path, steps=4, global_batch_size=size, **more) for size in (4, 8))

    def batches(mesh: Mesh, size: int) -> list[tuple[Tensor, Tensor]]:
        return [share(mesh, step, size) for step in range(1, 5)]

    assert said_on(first, lambda mesh: trainer_of(mesh, first).run(batches(mesh, 8))) == ["", ""]
    for text in said_on(other, lambda mesh: trainer_of(mesh, other).run(batches(mesh, 4))):
        assert text.startswith("a list cannot go on with another batch size") and "lambda step:" in text
        assert "train.global_batch_size = 4, and 8 in" in text
    assert said_on(same, lambda mesh: trainer_of(mesh, same).run(batches(mesh, 8))) == ["", ""]


def test_a_function_of_the_step_goes_on_with_another_batch_size(tmp_path: Path) -> None:
    first = config_of(tmp_path, steps=3, checkpoint_every=1)
    more: dict[str, Any] = {"resume": True, "resume_changed": ["global_batch_size"], "checkpoint_every": 1}
    other = config_of(tmp_path, steps=4, global_batch_size=4, **more)
    for config, size in ((first, 8), (other, 4)):
        assert said_on(
            config, lambda mesh: trainer_of(mesh, config).run(lambda step: share(mesh, step, size))
        ) == ["", ""]


# -- schedulers and evaluations that would fail later -----------------------------------------------


def test_a_scheduler_that_ends_before_the_training_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def run(mesh: Mesh, steps: int) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR
        trainer_of(mesh, config, scheduler=lambda each: scheduler(each, 0.1, total_steps=steps)).run(
            lambda step: share(mesh, step)
        )

    for text in said_on(config, lambda mesh: run(mesh, 5)):
        assert text.startswith("the OneCycleLR ends before the training") and "total_steps = 5" in text
    assert said_on(config, lambda mesh: run(mesh, 6)) == ["", ""]


def without_a_parameter() -> float:
    return 1.0


def test_an_evaluation_that_takes_no_trainer_is_refused_at_the_start(tmp_path: Path) -> None:
    train = config_of(tmp_path).train
    assert train is not None
    named = train.model_copy(update={"evaluate": f"{__name__}:without_a_parameter"})
    with pytest.raises(MeshcommError, match="takes no trainer"):
        evaluate_of(named)


# -- hints ------------------------------------------------------------------------------------------


def test_a_batch_of_unequal_parts_or_of_three_says_what_to_change(tmp_path: Path) -> None:
    config = config_of(tmp_path)

    def targets(mesh: Mesh) -> None:
        x, y = share(mesh)
        trainer_of(mesh, config).step(x[:3], y[:2])

    def weights(mesh: Mesh) -> None:
        x, y = share(mesh)
        trainer_of(mesh, config).run([(x, y, y)])

    for text in said_on(config, targets):
        assert "3 inputs and 2 targets" in text and "try:      one target for each input" in text
    for text in said_on(config, weights):
        assert "a third element of a batch" in text and "(inputs, (targets, weights))" in text


# -- shares -----------------------------------------------------------------------------------------


def test_a_loader_whose_batch_size_is_not_the_share_is_refused_at_the_start(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for text in said_on(
        config, lambda mesh: trainer_of(mesh, config).run(DataLoader(TensorDataset(X, Y), batch_size=8))
    ):
        assert "batch_size = 8" in text and "try:      batch_size=4" in text


def test_a_short_batch_in_a_list_is_refused_at_the_start(tmp_path: Path) -> None:
    config, short = (config_of(tmp_path, steps=steps) for steps in (3, 2))

    def run(mesh: Mesh, config: Config) -> None:
        (x, y), last = share(mesh, 3), [share(mesh, step) for step in (1, 2)]
        trainer_of(mesh, config).run([*last, (x[:3], y[:3])])

    for text in said_on(config, lambda mesh: run(mesh, config)):
        assert text.startswith("the batch of step 3 has 3 samples on this rank")
    assert said_on(short, lambda mesh: run(mesh, short)) == ["", ""]


class Rows(IterableDataset[Any]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(X, Y, strict=True))[:10])


class Fours(BatchSampler):
    """A subclass with another name that makes torch's batches."""


@pytest.mark.parametrize(
    "loader",
    [
        lambda rows: DataLoader(rows, batch_size=None, sampler=BatchSampler(range(10), 4, drop_last=False)),
        lambda rows: DataLoader(Rows(), batch_size=4),
        lambda rows: DataLoader(rows, batch_sampler=Fours(range(10), 4, drop_last=False)),
    ],
)
def test_the_short_end_of_a_sampler_of_batches_or_of_a_stream_is_refused(
    tmp_path: Path, loader: Callable[[TensorDataset], Any]
) -> None:
    config = config_of(tmp_path)
    for text in said_on(
        config, lambda mesh: trainer_of(mesh, config).run(loader(TensorDataset(X[:10], Y[:10])))
    ):
        assert text.startswith("the last batch of an epoch, step 3, has only 2 samples")


class Uneven(IterableDataset[Any]):
    """31 samples without a length. Each of two ranks yields every second one, so 16 and 15."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __iter__(self) -> Iterator[Any]:
        rows = list(zip(X, Y, strict=True))[:31]
        return iter(rows[self._mesh.data_rank :: self._mesh.data_world_size])


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_streams_that_end_at_different_steps_are_refused_at_the_first_of_them(
    tmp_path: Path, on_nonfinite: str
) -> None:
    config = config_of(tmp_path, on_nonfinite=on_nonfinite)

    def run(mesh: Mesh, size: int) -> None:
        trainer = trainer_of(mesh, config)
        try:
            trainer.run(DataLoader(Uneven(mesh), batch_size=size, drop_last=True))
        except MeshcommError:
            for (_, ours), theirs in zip(trainer.engine.named_parameters(), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            raise

    # Plain torch, for the three steps for which every rank has samples.
    module = net()
    sgd = SGD(module.parameters(), lr=0.05)
    for rows in torch.arange(24).split(8):
        sgd.zero_grad()
        nn.functional.mse_loss(module(X[rows]), Y[rows]).backward()
        sgd.step()
    expected = [*module.parameters()]

    for text in said_on(config, lambda mesh: run(mesh, 4)):
        assert text.startswith("the data of some ranks ended before step 4")
