"""A loss or gradient that is not finite is never applied and never saved: the run ends, or skips the step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.tensor import local
from meshcomm.testing import Pool
from meshcomm.train import Callback, Step, Summary, run
from meshcomm.train import trainer as trainers
from tests.sizes import train_of
from tests.train.checkpoint.test_checkpoints import TINY, names
from tests.train.runs import gradient_node, metrics, run_json

pytestmark = pytest.mark.long

Plant = tuple[str, int, str, range]


def tiny(out: Path, dims: str, *overrides: str) -> Config:
    train = {**TINY["train"], **train_of(5, 8, 2, out=str(out), checkpoint_every=1, keep=9)}
    return load_config({**TINY, "train": train}, [f"mesh.dims={dims}", *overrides])


def spoilt(config: Config, plant: Plant) -> tuple[Summary | str, list[str]]:
    """Train with `rank`'s gradient of `name` spoilt at `steps`: by backward, or after ranks have summed it.

    Returns the summary or the error, and the faults that the callback received.
    """
    how, rank, name, steps = plant
    make, nodes = trainers.Engine, []

    def engine(*args: Any, **named: Any) -> Engine:
        trainer: Any = make(*args, **named)
        step, finish = trainer.step, trainer.gradients[-1].finish
        now = [0]

        def stepping(inputs: Any, targets: Any, lr: Any, number: int, *more: Any) -> Any:
            now[0] = number
            return step(inputs, targets, lr, number, *more)

        trainer.step = stepping
        if trainer.mesh.rank == rank:
            parameter = dict(trainer.named_parameters())[name]

            def finishing(**how: Any) -> Any:
                missing = finish(**how)
                if now[0] in steps:
                    local(parameter.grad).view(-1)[-1] = math.inf
                return missing

            if how == "backward":
                # A hook on the parameter would be refused.
                nodes.append(gradient_node(parameter))
                nodes[0].register_prehook(
                    lambda grads: tuple(grad * math.nan for grad in grads) if now[0] in steps else grads
                )
            else:
                trainer.gradients[-1].finish = finishing
        return trainer

    class Told(Callback):
        def __init__(self) -> None:
            self.faults: list[str] = []

        def on_step(self, step: Step) -> None:
            self.faults += [step.fault] * bool(step.fault)

    told = Told()
    trainers.Engine = engine  # type: ignore[assignment, misc]
    try:
        with meshcomm.init(config) as mesh:
            return run(mesh, config, told), told.faults
    except TrainingError as error:
        return str(error), told.faults
    finally:
        trainers.Engine = make  # type: ignore[misc]


WQ = "layers.0.attn.wq.weight"
CASES: list[tuple[str, Plant, list[str]]] = [
    (  # summed along dp, so both ranks of tp=1 have it
        "{ pp = 1, dp = 2, tp = 2 }",
        ("backward", 3, WQ, range(3, 4)),
        [
            f"rank 1 (pp=0 dp=0 tp=1): nan in the gradient of {WQ}",
            "only at tp=1 (tensor), on rank 1 3",
            "the same along dp (data), where gradients are summed",
        ],
    ),
    (  # a fault in one rank's memory, in a weight that all ranks have whole: no other rank's norm has it
        "{ pp = 1, dp = 2, tp = 2 }",
        ("memory", 2, "norm.weight", range(3, 4)),
        [
            "rank 2 (pp=0 dp=1 tp=0): inf in the gradient of norm.weight",
            "only at dp=1 (data) tp=0 (tensor), on rank 2",
        ],
    ),
    (
        "{ pp = 2, dp = 2, tp = 1 }",
        ("memory", 1, "embed.weight", range(3, 4)),
        [
            "rank 1 (pp=0 dp=1 tp=0): inf in the gradient of embed.weight",
            "only at pp=0 (pipeline) dp=1 (data), on rank 1",
        ],
    ),
]


@pytest.mark.parametrize(
    ("dims", "plant", "where"),
    [*(pytest.param(*each, marks=pytest.mark.parity) for each in CASES[:-1]), CASES[-1]],
)
@pytest.mark.deep_cases(r"\[\{ pp = 2, dp = 2")
def test_a_gradient_that_is_not_finite_ends_the_run_on_every_rank_and_is_not_saved(
    pool: Pool, tmp_path: Path, dims: str, plant: Plant, where: list[str]
) -> None:
    config = tiny(tmp_path, dims)
    ((text, _), *others) = pool.run(spoilt, config, plant, ranks=4)
    assert isinstance(text, str) and {other for other, _ in others} == {text}
    lines = text.splitlines()
    assert lines[0] == f"the gradient norm of step 3 is {'nan' if plant[0] == 'backward' else 'inf'}"
    assert [line.removeprefix("  given:").strip() for line in lines[1 : 1 + len(where)]] == where
    assert lines[-2:] == [
        "  expected: finite numbers on every rank; this step is not applied, and no later state is saved",
        "  try:      continue from the last checkpoint (train.resume = true) with a smaller train.lr than 0.003, "
        'or with train.on_nonfinite = "skip"',
    ]
    assert names(tmp_path) == ["job", "latest", "step-000001", "step-000002"]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    about = run_json(tmp_path)
    assert (about["state"], about["ended"]["steps"]) == ("stopped", 2)
    assert about["ended"]["reason"] == f"TrainingError: {lines[0]}"
    # A resumed run continues to the end as if nothing had happened.
    good = load_config(config, ["train.resume=true"])
    for summary, _ in pool.run(spoilt, good, (*plant[:3], range(0)), ranks=4):
        assert isinstance(summary, Summary) and summary.steps == 5
        assert all(map(math.isfinite, summary.losses))


def test_such_a_step_can_be_left_out_on_all_ranks_alike(pool: Pool, tmp_path: Path) -> None:
    dims, plant, where = CASES[1]
    config = tiny(tmp_path, dims, 'train.on_nonfinite="skip"', "train.log_every=5")
    found = pool.run(spoilt, config, plant, ranks=4)
    summary, faults = found[0]
    assert isinstance(summary, Summary)
    for other, told in found:
        assert isinstance(other, Summary) and (other.steps, other.skipped, told) == (5, 1, faults)
        assert other.losses == summary.losses
    assert faults == ["\n".join(where)]
    lines = metrics(tmp_path)
    assert [(line["step"], line["skipped"], line["gradient_norm"] is None) for line in lines] == [
        (1, 0, False),
        (3, 1, True),
        (5, 1, False),
    ]
    assert lines[1]["fault"] == faults[0] and "fault" not in lines[2]
    locks = [json.loads((tmp_path / f"checkpoints/step-{n:06d}/lock.json").read_text()) for n in (2, 3, 5)]
    assert [lock["skipped"] for lock in locks] == [0, 1, 1]
    # The weights have nothing of the step: all ranks continue from the same finite weights.
    assert all(map(math.isfinite, summary.losses)) and summary.losses[3] < summary.losses[0]


def test_leaving_out_every_step_is_no_training(pool: Pool, tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        "{ pp = 1, dp = 1, tp = 1 }",
        'train.on_nonfinite="skip"',
        "train.steps=20",
        "train.checkpoint_every=50",
        "train.global_batch_size=2",
    )
    ((text, faults),) = pool.run(spoilt, config, ("backward", 0, WQ, range(2, 21)), ranks=1)
    assert isinstance(text, str)
    assert text.startswith(
        "steps 2 to 12 have no finite result, so skipping them does not help\n  given:    rank 0"
    )
    assert len(faults) == 10


def stepped(config: Config, samples: int, target: int) -> str:
    """The error of a step with `samples` samples on each rank."""
    with meshcomm.init(config) as mesh:
        trainer = trainers.Trainer(mesh, config)
        x = torch.arange(samples * 8).reshape(samples, 8) % 256
        try:
            trainer.step(x, torch.full_like(x, target))
            trainer.results()
        except MeshcommError as error:
            return str(error)
    return ""


def test_a_step_without_a_target_and_a_short_batch_say_so(pool: Pool, tmp_path: Path) -> None:
    config = tiny(tmp_path, "{ pp = 1, dp = 2, tp = 1 }", "data.seq_len=8")
    for found in pool.run(stepped, config, 4, -100, ranks=2):
        assert "nothing in the global batch counts, so the mean is 0/0: all targets are -100" in found
        assert "too large" not in found and "train.lr" not in found
    for found in pool.run(stepped, config, 2, 1, ranks=2):
        assert "drop_last=True in the DataLoader if this is the short last batch" in found
    for found in pool.run(stepped, config, 8, 1, ranks=2):
        assert "train.global_batch_size = 16" in found and "drop_last" not in found


# -- means over nothing ----------------------------------------------------------------------------


def mean_of_kept(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[targets > 0].mean()


def sum_of_kept(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs[targets > 0].sum(), (targets > 0).sum()


def infinite(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum() + math.inf


@pytest.mark.parametrize("loss", [mean_of_kept, sum_of_kept, infinite])
def test_a_mean_over_an_empty_mask_is_called_that(loss: Any) -> None:
    settings = train_of(2, 4, 2, check=False, on_nonfinite="stop")
    mesh_settings = {"dims": {"dp": 2}, "device": "cpu"}
    config = load_config({"mesh": mesh_settings, "parallel": {"data": "dp"}, "train": settings})

    def said(mesh: meshcomm.Mesh) -> str:
        trainer = trainers.Trainer(mesh, config, torch.nn.Linear(3, 1), loss=loss)
        kept = mesh.rank if loss is mean_of_kept else 0
        trainer.step(torch.ones(2, 3), torch.full((2, 1), kept))
        with pytest.raises(TrainingError) as caught:
            trainer.results()
        return str(caught.value)

    for found in meshcomm.simulate(said, config):
        assert "overflows" not in found
        if loss is infinite:
            assert "the loss of its samples is inf on rank 0 1" in found and "0/0" not in found
        elif loss is sum_of_kept:
            assert "so the mean is 0/0" in found and "the counts that the loss returned add up to 0" in found
        else:
            assert "every element of every gradient is finite, but the loss is not" in found
            assert "the loss of its samples is nan on rank 0: a mean over no elements is 0/0" in found
            assert "return (sum, count) from the loss" in found
