"""A run ends by its validation loss on every rank after the same step; it saves, gives the reason, and does not continue when resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import meshcomm
from meshcomm.config import Config, TrainConfig, load_config
from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Engine
from meshcomm.testing import Pool
from meshcomm.train import Callback, Evaluation, Step, Summary, run
from meshcomm.train.callbacks import Best, EarlyStop
from tests.train.runs import run_json, trained
from tests.train.test_evaluation import on

pytestmark = pytest.mark.long

# The losses of successive evaluations. Ranks other than the first see slightly higher ones.
FALLS_TWICE = [3.0, 2.0, 2.5, 1.99, 2.5, 2.5, 2.5, 2.5]


def evaluated(config: Config, planted: list[float] | None) -> Summary:
    """A run whose evaluations return the values of `planted` in turn."""
    with meshcomm.init(config) as mesh, pytest.MonkeyPatch.context() as patch:
        if planted is not None:
            left = iter(planted)
            patch.setattr(Engine, "evaluate", lambda *_: next(left) + 0.02 * mesh.rank)
        return run(mesh, config, Callback())


def stopping(out: Path, *overrides: str, dims: str = "pp=2") -> Config:
    every = ("train.steps=20", "train.eval_every=2", "train.checkpoint_every=100")
    return on(dims, out, *every, *overrides)


def test_a_run_ends_once_the_loss_has_not_fallen_and_says_so(pool: Pool, tmp_path: Path) -> None:
    config = stopping(tmp_path, "train.patience=2", "train.min_delta=0.1")
    # 1.99 is lower than 2.0, but not by enough: after steps 6 and 8, two evaluations have not lowered the loss.
    results = pool.run(evaluated, config, FALLS_TWICE, ranks=2)
    why = "the validation loss has not fallen by more than 0.1 in 2 evaluations: it was 2.0000 after step 4"
    assert {(each.steps, each.stopped) for each in results} == {(8, why)}
    found = run_json(tmp_path)
    assert (found["state"], found["ended"]["steps"], found["ended"]["reason"]) == ("finished", 8, why)
    # The last step has a checkpoint, whatever its number.
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000008\n"

    # Resumed with the same settings, the run has nothing left to do.
    again = load_config(config, ["train.resume=true"])
    for each in pool.run(evaluated, again, [], ranks=2):
        assert (each.steps, each.stopped, each.losses) == (8, why, results[0].losses)
    # With more patience the run continues, and so does the count.
    longer = load_config(again, ["train.patience=3"])
    for each in pool.run(evaluated, longer, [2.5, 2.5], ranks=2):
        assert each.steps == 10 and "in 3 evaluations: it was 2.0000 after step 4" in each.stopped


@pytest.mark.parametrize(
    ("settings", "losses", "after", "why"),
    [
        # A lower loss restarts the count.
        ({"patience": 2}, FALLS_TWICE, 6, "has not fallen in 2 evaluations: it was 1.9900 after step 4"),
        # After the fourth evaluation, only the first rank has reached the target.
        ({"target_loss": 1.995}, FALLS_TWICE, 4, "is 1.9900, train.target_loss = 1.995"),
        # A loss that is not finite is not lower.
        ({"patience": 2}, [math.nan, math.inf, 1.0], 2, "has not fallen in 2 evaluations"),
    ],
)
def test_the_evaluation_that_ends_a_run(
    settings: dict[str, Any], losses: list[float], after: int, why: str
) -> None:
    train = TrainConfig(steps=20, global_batch_size=8, micro_batch_size=1, eval_every=1, **settings)

    def judged(mesh: Mesh) -> tuple[int, str]:
        callback = EarlyStop(mesh, train, Best())
        for number, loss in enumerate(losses, 1):
            callback.on_eval(Evaluation(number, loss + 0.02 * mesh.rank, 1, 0.0))
            if callback.stop:
                return number, callback.reason
        return 0, ""

    assert set(meshcomm.simulate(judged, dims={"dp": 2})) == {(after, f"the validation loss {why}")}


@pytest.mark.parity
def test_other_data_have_another_lowest_loss(pool: Pool, tmp_path: Path) -> None:
    config = stopping(tmp_path, "train.target_loss=1.995")
    pool.run(evaluated, config, FALLS_TWICE, ranks=2)
    other = load_config(config, ["train.resume=true", "data.max_bytes=15000", "train.steps=10"])
    changed = load_config(other, ['train.resume_changed=["data"]'])
    assert {(each.steps, each.stopped) for each in pool.run(evaluated, changed, [9.0], ranks=2)} == {(10, "")}


class Stops(Callback):
    def on_step(self, step: Step) -> None:
        self.stop = step.step == 3


def test_a_callback_that_ends_a_run_is_named_and_its_last_step_is_saved(pool: Pool, tmp_path: Path) -> None:
    for each in pool.run(trained, stopping(tmp_path), Stops(), ranks=2):
        assert (each.steps, each.stopped) == (3, "Stops.stop")
    assert run_json(tmp_path)["ended"]["reason"] == "Stops.stop"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000003\n"


@pytest.mark.parametrize("key", ["patience=2", "target_loss=1.0"])
def test_without_evaluations_there_is_nothing_to_end_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"no effect without train.eval_every"):
        stopping(tmp_path, "data.validation=", "train.eval_every=0", "train.eval_batches=", f"train.{key}")
    with pytest.raises(ConfigError, match=r"no effect without train.patience"):
        stopping(tmp_path, "train.min_delta=0.1")
