"""In the simulator, ranks are lost and come back later or never: at every moment, the others continue with fewer ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import RankFailed, RankLost
from meshcomm.job.replacing import sizes_of
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.simulator.run import run_ranks
from meshcomm.train import Trainer
from tests.elastic.test_simulated_losses import settings_of

THREE = {"mesh": {"dims": {"dp": 3}}, "elastic": {"min": {"dp": 1}}}


def loop(mesh: Mesh) -> tuple[list[int], float]:
    """The sizes that the mesh has had, and a sum over steps that does not depend on them."""
    step, total, sizes = 0, 0.0, [mesh.size("dp")]

    def of_the_farthest() -> tuple[int, float]:
        every: list[tuple[int, float]] = mesh.objects.all_gather("dp", (step, total))
        return max(every)

    if mesh.elastic.generation.number:
        step, total = of_the_farthest()
    while True:
        try:
            while step < 40:
                x = mesh.all_reduce("dp", torch.tensor([float(step) / mesh.size("dp")]))
                mesh.barrier("dp")
                step, total = step + 1, total + round(x.item())
            mesh.elastic.finish()
            return sizes, total
        except RankLost as error:
            mesh.elastic.reopen(error)
            sizes.append(mesh.size("dp"))
            step, total = of_the_farthest()


@pytest.mark.parametrize("number", range(5, 80, 5))
def test_a_loop_of_ones_own_with_fewer(number: int) -> None:
    found = meshcomm.simulate(loop, THREE, lose={1: number}, schedule_seed=number)
    assert found[1] is None
    assert [found[0], found[2]] == [([3, 2], 780.0) if number > 20 else found[0]] * 2
    assert found[0][0][-1] == 2 and found[0][1] == 780.0


@pytest.mark.parametrize("number", range(24, 80, 4))
def test_a_loop_of_ones_own_grows_back(number: int) -> None:
    text = {**THREE, "elastic": {"min": {"dp": 1}, "replace": 1, "delay_s": 30}}
    found = meshcomm.simulate(loop, text, lose={1: number}, schedule_seed=number)
    # The lost rank comes back before the others are done, or not at all.
    if found[1] is None:
        assert [found[0], found[2]] == [([3, 2], 780.0)] * 2
    else:
        assert found[0] == found[2] == ([3, 2, 3], 780.0) and found[1][1] == 780.0


def test_too_few() -> None:
    text = {**THREE, "elastic": {"min": {"dp": 2}}}
    with pytest.raises(RankFailed, match="lost and cannot be replaced: too few processes are left") as caught:
        meshcomm.simulate(loop, text, lose={1: 30, 2: 30})
    assert {*caught.value.by_rank} <= {1, 2}


def smaller(folder: Path, elastic: str) -> Config:
    """A training of two steps on dp=4 cp=2, whose global batch of 12 fits dp=4, 3, 2 and 1."""
    folder.mkdir(exist_ok=True)
    settings = settings_of(folder, evaluates=False)
    batch = ["train.global_batch_size=12", "train.micro_batch_size=1"]
    return load_config(settings, [*batch, f"elastic={elastic}"])


def trained(settings: Config, lose: Mapping[int, int], seed: int) -> list[tuple[float, ...]]:
    """The losses of the ranks that completed."""

    def body() -> tuple[float, ...]:
        with init(settings) as mesh:
            return Trainer(mesh, settings).run().losses

    sizes = sizes_of(settings, 8)
    found = run_ranks(body, 8, seed, 60.0, lose=lose, elastic=settings.elastic, sizes=sizes)
    return [each for each in found if each is not None]


def at_any_moments(folder: Path, elastic: str, times: int, first: int) -> int:
    """Lose two ranks at random operations. Return how often a rank has come back."""
    settings = smaller(folder, elastic)
    whole = trained(smaller(folder, "{ min = { dp = 1 } }"), {}, 0)
    assert len(whole) == 8
    draw, back = random.Random(first), 0
    for seed in range(first, first + times):
        lose = {process: draw.randrange(1, 120) for process in draw.sample(range(8), 2)}
        found = trained(settings, lose, seed)
        for losses in found:
            assert losses == pytest.approx(whole[0], rel=1e-12), (lose, seed)
        assert len(found) in (4, 6, 8), (lose, seed)
        back += len(found) == 8
    return back


def test_a_training_with_fewer(tmp_path: Path) -> None:
    assert at_any_moments(tmp_path, "{ min = { dp = 1 } }", 3, 0) == 0


@pytest.mark.deep
def test_a_training_grows_back(tmp_path: Path) -> None:
    at_any_moments(tmp_path, "{ min = { dp = 1 }, replace = 2, delay_s = 300.0 }", 3, 10)


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_training_at_many_moments(tmp_path: Path) -> None:
    assert at_any_moments(tmp_path / "fewer", "{ min = { dp = 1 } }", 50, 100) == 0
    assert at_any_moments(tmp_path / "back", "{ min = { dp = 1 }, replace = 2, delay_s = 300.0 }", 50, 200)
