"""Validation gives the same mean loss on every mesh and with every schedule, and changes nothing in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import ConfigError, MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.testing import Pool
from meshcomm.train import Summary, Trainer, learning_rate
from meshcomm.train.agree import agree, agreed_corpus
from meshcomm.train.data import batches_of
from tests.sizes import model_of, train_of
from tests.train.runs import config_on, losses_or_error, metrics, trained

pytestmark = pytest.mark.long

BASE: dict[str, Any] = {
    "mesh": {"dims": {"one": 1}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {},
    "model": model_of(4, 32, 4, 2, 64, dropout=0.3),
    "data": {"seq_len": 16, "max_bytes": 20_000, "validation": 0.05},
    "train": train_of(4, 8, 2, seed=7, dtype="float64", eval_every=2, eval_batches=3),
}


def on(dims: str, out: Path | str, *overrides: str, **parallel: Any) -> Config:
    return config_on(BASE, dims, f'train.out="{out}"', *overrides, **parallel)


def by_hand(config: Config) -> tuple[float, float]:
    """The loss of the first three validation batches after two steps, by torch alone and by `evaluate` on a module in training mode."""
    with meshcomm.init(config) as mesh:
        corpus = agreed_corpus(mesh, agree(mesh, config), 0)
        trainer = Trainer(mesh, config).engine
        batches = batches_of(trainer, corpus)
        train = trainer.sections.train
        for step in (1, 2):
            trainer.step(*batches(step), learning_rate(train, step), step)
        text = b"".join(file.read_bytes() for file in corpus.files)[:20_000]
        first = len(corpus.parts[0]) * 16
        window = torch.tensor(list(text[first : first + 3 * 8 * 16 + 1]))
        module = trainer.modules[0].eval()
        with torch.no_grad():
            logits = module(window[:-1].view(-1, 16))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[1:])
        module.train()
        assert corpus.validation is not None
        ours = trainer.evaluate(batches_of(trainer, corpus.validation).in_order(3))
        assert module.training
        return float(loss), ours


def validation(out: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(out) if "validation_loss" in line]


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("alone")
    (summary,) = pool.run(trained, on("one=1", out), ranks=1)
    return summary, validation(out)


def test_it_is_the_mean_loss_in_eval_mode(
    pool: Pool, tmp_path: Path, alone: tuple[Summary, list[dict[str, Any]]]
) -> None:
    summary, lines = alone
    assert [(line["step"], line["validation_tokens"]) for line in lines] == [(2, 384), (4, 384)]
    assert (
        summary.evaluation is not None and summary.evaluation.validation_loss == lines[1]["validation_loss"]
    )
    ((by_torch, ours),) = pool.run(by_hand, on("one=1", tmp_path), ranks=1)
    assert ours == pytest.approx(by_torch, rel=1e-12) == lines[0]["validation_loss"]


def test_evaluating_changes_nothing(
    pool: Pool, tmp_path: Path, alone: tuple[Summary, list[dict[str, Any]]]
) -> None:
    without = on("one=1", tmp_path, "train.eval_every=0", "train.eval_batches=")
    assert pool.run(trained, without, ranks=1)[0].losses == alone[0].losses


@pytest.mark.parametrize(
    ("dims", "parallel"),
    [
        pytest.param("dp=2 tp=2", {"sequence_parallel": True}, marks=pytest.mark.parity),
        pytest.param("fsdp=2 cp=2", {}, marks=pytest.mark.parity),
        ("pp=2 dp=2", {}),
        pytest.param("pp=2 fsdp=2", {"schedule": "gpipe"}, marks=pytest.mark.parity),
        pytest.param(
            "pp=2 tp=2", {"schedule": "interleaved_1f1b", "stages_per_rank": 2}, marks=pytest.mark.parity
        ),
        ("pp=2 fsdp=2", {"schedule": "zero_bubble", "stages_per_rank": 2}),
    ],
)
@pytest.mark.deep_cases(r"\[pp=2 fsdp=2")
def test_it_is_equal_on_every_mesh(
    pool: Pool,
    tmp_path: Path,
    alone: tuple[Summary, list[dict[str, Any]]],
    dims: str,
    parallel: dict[str, Any],
) -> None:
    # It also holds with checkpoints between steps: the evaluation has freed the weights that it gathered.
    results = pool.run(trained, on(dims, tmp_path, "train.checkpoint_every=2", **parallel), ranks=4)
    assert len({(each.losses, each.evaluation and each.evaluation.validation_loss) for each in results}) == 1
    assert results[0].losses == pytest.approx(alone[0].losses, rel=1e-10)
    ours, theirs = ([line["validation_loss"] for line in lines] for lines in (validation(tmp_path), alone[1]))
    assert ours == pytest.approx(theirs, rel=1e-10)


def test_too_little_or_nothing_to_evaluate_is_told(pool: Pool, tmp_path: Path) -> None:
    (text,) = pool.run(losses_or_error, on("one=1", tmp_path, "data.validation=0.001"), ranks=1)
    assert "there is too little to evaluate" in text and "1 samples for validation" in text
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        on("one=1", tmp_path, "data.validation=0.0")
    with pytest.raises(ConfigError, match="no effect: nothing is evaluated"):
        on(
            "one=1",
            tmp_path,
            *("data.validation=", 'data.validation_files=["x"]', "train.eval_every=0", "train.eval_batches="),
        )


# -- short batches --------------------------------------------------------------------------------


def rows_of(mesh: Mesh, count: int, *shape: int) -> Tensor:
    """This rank's rows of `count` rows, dealt in turn, so that ranks have different numbers of them."""
    tokens = torch.randint(64, (count, *shape), generator=torch.Generator().manual_seed(count))
    return tokens[mesh.data_rank :: mesh.data_world_size]


def uneven(config: Config, counts: list[int]) -> list[float]:
    """The losses of a built-in model over tails of several lengths, the first in inference mode; then of a training step."""
    with meshcomm.init(config) as mesh:
        trainer, found = Trainer(mesh, config), list[float]()
        share = 8 // mesh.data_world_size
        for count in counts:
            mine = rows_of(mesh, count, 17)
            with torch.inference_mode(not found):
                found.append(trainer.evaluate([(each[:, :-1], each[:, 1:]) for each in mine.split(share)]))
        (x,) = rows_of(mesh, 8, 17).split(share)
        trainer.step(x[:, :-1], x[:, 1:])
        return [*found, *(done.loss for done in trainer.results())]


def uneven_by_hand(config: Config, counts: list[int]) -> list[float]:
    """The same losses from the module on one process, by torch's cross-entropy over all samples at once."""
    with meshcomm.init(config) as mesh:
        module, found = Trainer(mesh, config).modules[0].eval(), []
        for count in [*counts, 8]:
            tokens = rows_of(mesh, count, 17)
            logits = module(tokens[:, :-1])
            found.append(
                float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            )
        return found


COUNTS = [11, 9, 16, 5]


@pytest.fixture(scope="module")
def tails(pool: Pool) -> list[float]:
    found: list[float] = pool.run(
        uneven_by_hand, on("one=1", "unused", "model.dropout=0.0"), COUNTS, ranks=1
    )[0]
    return found


@pytest.mark.parametrize(
    ("dims", "parallel"),
    [
        ("one=1", {}),
        ("dp=2 tp=2", {"sequence_parallel": True}),
        ("fsdp=2 cp=2", {}),
        ("pp=2 dp=2", {}),
        ("dp=2 fsdp=2", {}),
    ],
)
@pytest.mark.deep_cases(r"\[dp=2 fsdp=2")
def test_uneven_tails_are_the_mean_over_all_samples(
    pool: Pool, tails: list[float], dims: str, parallel: dict[str, Any]
) -> None:
    config = on(dims, "unused", "model.dropout=0.0", **parallel)
    for found in pool.run(uneven, config, COUNTS, ranks=config.mesh.layout(None).world_size):
        assert found == pytest.approx(tails, rel=1e-10)


def distance(y: Tensor, targets: Tensor) -> Tensor:
    return (y - targets).abs().sum(-1).mean()


def uneven_of_its_own(config: Config, counts: list[int]) -> list[Any]:
    with meshcomm.init(config) as mesh:
        torch.manual_seed(0)
        trainer = Trainer(mesh, config, torch.nn.Linear(3, 3), loss=distance)
        found: list[Any] = []
        for count in counts:
            mine = rows_of(mesh, count, 3).double()
            found.append(
                trainer.evaluate([(each, each.sin()) for each in mine.split(8 // mesh.data_world_size)])
            )
        for rows in ([], [torch.ones(9, 3)]):
            try:
                trainer.evaluate([(each, each) for each in rows or [torch.ones(2, 3)] * (not mesh.rank)])
            except MeshcommError as error:
                found.append(error.what)
        return found


def test_uneven_tails_of_a_loss_of_ones_own(pool: Pool) -> None:
    torch.manual_seed(0)
    module, wanted = torch.nn.Linear(3, 3).double(), []
    for count in COUNTS:
        x = torch.randint(64, (count, 3), generator=torch.Generator().manual_seed(count)).double()
        wanted.append(distance(module(x), x.sin()).item())
    base = {"mesh": {"device": "cpu", "timeout_s": 60.0}, "train": train_of(4, 8, 2, dtype="float64")}
    for dims in ("dp=2", "fsdp=2", "fsdp=2 dp=2"):
        config = config_on(base, dims)
        for *found, nothing, many in pool.run(
            uneven_of_its_own, config, COUNTS, ranks=config.mesh.layout(None).world_size
        ):
            assert found == pytest.approx(wanted, rel=1e-12)
            assert nothing == "some ranks have nothing to evaluate"
            assert many == "an evaluation's batch has the wrong number of samples for this rank"
