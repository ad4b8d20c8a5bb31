"""The training loop itself runs in the simulator and computes on every mesh what one process computes."""

from __future__ import annotations

from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank
from meshcomm.models.build import model_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.splits import sections
from meshcomm.parallel.tensor import local
from meshcomm.train import Callback, Summary, run
from tests.train.every_setting import EVERY

STEPS = 3
RATE = 0.02
BASE: dict[str, Any] = {
    "mesh": {"dims": {"pp": 1, "dp": 1, "tp": 1}, "device": "cpu"},
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp"},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64, "tied_embeddings": True},
    "data": {"seq_len": 32, "max_bytes": 100_000},
    "train": {
        **EVERY, "steps": STEPS, "global_batch_size": 4, "micro_batch_size": 1, "warmup_steps": 2, "dtype": "float64",
    },
}  # fmt: skip


def settings(out: Path, *overrides: str) -> Config:
    return load_config(BASE, [f'train.out="{out}"', *overrides])


def train(config: Config, world: int) -> list[Summary]:
    def body(mesh: Mesh) -> Summary:
        return run(mesh, config, Callback())

    return meshcomm.simulate(body, config, world_size=world)


def test_the_losses_of_one_process(tmp_path: Path) -> None:
    (alone,) = train(settings(tmp_path / "alone"), 1)
    split = train(settings(tmp_path / "split", "mesh.dims={ pp = 1, dp = 2, tp = 2 }"), 4)
    assert alone.losses[-1] < alone.losses[0]
    for summary in split:
        assert summary.losses == pytest.approx(alone.losses, rel=1e-12)


@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.dims={ pp = 2, dp = 1, tp = 1 }"],
        ["mesh.dims={ pp = 1, dp = 2, tp = 1 }", 'parallel.shard="dp"', "parallel.data="],
        ["mesh.dims={ pp = 2, dp = 2, tp = 1 }", "train.checkpoint_every=2"],
    ],
    ids=["pipeline", "shard", "checkpoint"],
)
def test_what_uses_torchs_groups(overrides: list[str], tmp_path: Path) -> None:
    (alone,) = train(settings(tmp_path / "alone"), 1)
    split = settings(tmp_path / "split", *overrides)
    for summary in train(split, prod(split.mesh.dims.values())):
        assert summary.losses == pytest.approx(alone.losses, rel=1e-12)


def test_every_setting_of_a_step_changes_the_losses(tmp_path: Path) -> None:
    (every,) = train(settings(tmp_path / "every"), 1)
    for name in EVERY:
        (without,) = train(settings(tmp_path / name, f"train.{name}="), 1)
        assert without.losses != pytest.approx(every.losses, rel=1e-6), name


class Interrupted(Exception):
    """A rank leaves a step, as after a loss of another rank."""


def states(mesh: Mesh, config: Config, how: str) -> list[dict[str, Tensor]]:
    """The state after each of three steps, the second of which is completed, repeated or skipped. Each rank has its own parts.

    completed: rank 0 applies the step. The others leave it as they receive the norms, and apply it later. repeated: all ranks leave
    it there. skipped: its gradients are not finite.
    """
    known = sections(mesh, config)
    assert known.model is not None and known.data is not None
    engine: Any = Engine(mesh, config, model_of(known.model, known.data, known.train))

    def step(number: int, *, leaves: bool = False, spoilt: bool = False) -> None:
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(256, (4, 33), generator=draw).chunk(engine.data_size)[engine.data_coord]
        finish, norm = engine._loss.finish, engine._norm.norm
        sums: list[Any] = []

        def finished(loss: Any) -> Any:
            sums.append(finish(loss))
            return sums[0]._replace(factor=torch.tensor(torch.nan)) if spoilt else sums[0]

        def left() -> Tensor:
            found: Tensor = norm()
            if not leaves:
                return found
            if how == "completed":
                # What rank 0 waits for.
                engine._results.add(number, RATE, sums[0], found)
            raise Interrupted

        with patch.object(engine._loss, "finish", finished), patch.object(engine._norm, "norm", left):
            engine.step(tokens[:, :-1], tokens[:, 1:], RATE, number)

    found = []
    for number in range(1, STEPS + 1):
        if number == 2 and how in ("completed", "repeated"):
            with suppress(Interrupted):
                step(number, leaves=how == "repeated" or mesh.rank > 0)
            outcome = of_every_rank(mesh, engine.outcome())[0]
            if how == "repeated":
                engine.undo()
                step(number)
            elif mesh.rank:
                engine.complete(number, outcome)
        else:
            step(number, spoilt=number == 2 and how == "skipped")
        found.append({name: local(x.detach()).clone() for name, x in engine.state().items()})
    return found


@pytest.mark.parametrize("split", ["parallel.data=dp", "parallel.shard=dp"])
def test_a_step_that_is_completed_or_repeated_or_skipped(split: str, tmp_path: Path) -> None:
    dims = ["mesh.dims={ pp = 2, dp = 2, tp = 1 }", "parallel.data=", split]
    config = settings(tmp_path, *dims, 'train.on_nonfinite="skip"')
    whole, completed, repeated, skipped = (
        meshcomm.simulate(states, config, args=(config, how))
        for how in ("", "completed", "repeated", "skipped")
    )
    for rank, expected in enumerate(whole):
        for number, state in enumerate(expected):
            for name, value in state.items():
                assert torch.equal(value, completed[rank][number][name]), (name, number)
                assert torch.equal(value, repeated[rank][number][name]), (name, number)
        for name, value in skipped[rank][0].items():
            assert torch.equal(value, skipped[rank][1][name]), name
        assert any(not torch.equal(value, skipped[rank][2][name]) for name, value in skipped[rank][0].items())
