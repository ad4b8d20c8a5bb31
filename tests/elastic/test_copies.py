"""Parts of a model that only one rank holds: after its loss, all ranks go back to copies in the ranks' memory."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import WORLD
from meshcomm.simulator.run import run_ranks
from meshcomm.train import Callback, Start, Step, Trainer, elastic
from meshcomm.transfer import boxes
from tests.elastic.deaths import MESHES, config_of, left_over, simulated, training
from tests.elastic.test_simulated_losses import SMALLER

STEPS = 5
EVERY = 2
PLAYS = {"dp": "data", "tp": "tensor", "fsdp": "shard", "pp": "pipeline"}


class Trained(NamedTuple):
    """One rank's run. steps: each reported step, and the number of operations by then. resumed: steps it resumed after."""

    losses: tuple[float, ...]
    steps: tuple[tuple[int, int], ...]
    resumed: tuple[int, ...]


class Notes(Callback):
    """Records the reports of the first rank of a process."""

    def __init__(self, operations: Any) -> None:
        self.steps: list[tuple[int, int]] = []
        self.resumed: list[int] = []
        self._operations = operations

    def on_start(self, start: Start) -> None:
        if start.resumed is not None:
            self.resumed.append(start.resumed.step)

    def on_step(self, step: Step) -> None:
        self.steps.append((step.step, self._operations()))


def settings_of(folder: Path, sizes: Mapping[str, int], more: str = "", words: Sequence[str] = ()) -> Config:
    """A training of a few steps."""
    dims = ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
    text = f'[mesh]\ndims = {{ {dims} }}\ndevice = "cpu"\n[parallel]\n'
    text += "".join(f'{PLAYS[dim]} = "{dim}"\n' for dim in sizes)
    text += config_of("dp4", STEPS).partition('data = "dp"\n')[2]
    for usual, smaller in {**SMALLER, "num_layers = 4": "num_layers = 2"}.items():
        assert usual in text
        text = text.replace(usual, smaller)
    path = folder / "train.toml"
    path.write_text(text + more)
    return load_config(path, [f'train.out="{folder}/out"', *words])


def trained(settings: Config, ranks: int, lose: Mapping[int, int], seed: int) -> list[Trained]:
    def body() -> Trained:
        world: Any = WORLD.get()
        with init(settings) as mesh:
            notes = Notes(lambda: world._actor.operations)
            losses = Trainer(mesh, settings, callbacks=[notes]).run().losses
            return Trained(losses, tuple(notes.steps), tuple(notes.resumed))

    found: list[Trained] = run_ranks(body, ranks, seed, 60.0, lose=lose)
    return found


SIZES = [{"tp": 2}, {"dp": 2, "tp": 2}]
OF_THE_GATE = [pytest.param(SIZES[0]), pytest.param(SIZES[1], marks=pytest.mark.faults)]


@pytest.mark.parametrize("sizes", OF_THE_GATE, ids=" ".join)
def test_all_go_back_to_the_last_copies(sizes: Mapping[str, int], tmp_path: Path) -> None:
    settings = settings_of(tmp_path, sizes, f"[elastic]\nreplace = 9\ncopy_every = {EVERY}\n")
    ranks = math.prod(sizes.values())
    whole = trained(settings, ranks, {}, 0)
    draw = random.Random(1)
    back = set()
    for seed in range(4):
        rank, step = draw.randrange(ranks), draw.randrange(2, STEPS)
        # The rank is lost at some operation of the step after `step`.
        began, ended = (at for number, at in whole[rank].steps if number in (step, step + 1))
        found = trained(settings, ranks, {rank: draw.randrange(began + 1, ended)}, seed)
        assert all(each.losses == whole[0].losses for each in found), (rank, step, seed)
        (after,) = {each.resumed[-1] for each in found}
        # It may be one copy earlier if the rank was lost while a copy was made.
        assert after >= (step // EVERY * EVERY or 1) - EVERY * (step % EVERY == 0), (rank, step, seed)
        back.add(step - after)
    assert "dp" in sizes or max(back) > 0


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sizes", SIZES, ids=" ".join)
def test_two_ranks_at_any_two_operations(sizes: Mapping[str, int], tmp_path: Path) -> None:
    settings = settings_of(tmp_path, sizes, f"[elastic]\nreplace = 9\ncopy_every = {EVERY}\n")
    ranks = math.prod(sizes.values())
    whole = trained(settings, ranks, {}, 0)
    draw = random.Random(2)
    last = whole[0].steps[-1][1]
    for seed in range(60):
        lose = {rank: draw.randrange(1, last) for rank in draw.sample(range(ranks), 2)}
        found = trained(settings, ranks, lose, seed)
        assert all(each.losses == whole[0].losses for each in found), (lose, seed)


@pytest.mark.parametrize(
    "sizes", [pytest.param({"tp": 2}, marks=pytest.mark.deep), {"pp": 2}], ids=["tp", "pp"]
)
def test_without_copies_it_goes_back_to_the_beginning(sizes: Mapping[str, int], tmp_path: Path) -> None:
    settings = settings_of(tmp_path, sizes, "[elastic]\nreplace = 9\n")
    whole = trained(settings, 2, {}, 0)
    found = trained(settings, 2, {1: whole[1].steps[-2][1] + 3}, 0)
    assert [each.losses for each in found] == [whole[0].losses] * 2
    assert [number for number, _ in found[0].steps].count(1) == 2
    assert not found[0].resumed


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_next_rank_gets_a_copy_however_many_tensors_each_has(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "BUCKET_BYTES", 64)

    def tensors(rank: int) -> dict[str, torch.Tensor]:
        return {f"{number}": torch.full((number, rank + 1), float(number)) for number in range(3 * rank + 2)}

    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        copies = elastic.copy_of_previous(mesh, "pp", elastic.regions_of(tensors(mesh.rank)))
        return {name: region.held for (name, *_), (region,) in copies.items()}

    for rank, copies in enumerate(meshcomm.simulate(body, dims={"pp": ranks})):
        expected = tensors((rank - 1) % ranks)
        assert copies.keys() == expected.keys()
        assert all(torch.equal(copies[name], x) for name, x in expected.items())


@pytest.mark.faults
def test_a_process_with_shards_is_killed(tmp_path: Path) -> None:
    """The lost shards are restored from copies, because no checkpoint is on disk."""
    assert "fsdp2" in MESHES
    text = config_of("fsdp2", 12) + "[elastic]\ncopy_every = 3\n"
    with training(tmp_path, text, 1) as job:
        assert job.await_step(7), job.log.read_text()
        job.kill(1, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.log.read_text()
        assert [line["loss"] for line in job.lines] == pytest.approx(
            simulated(tmp_path, "dp2", 12), rel=1e-12
        )
        (after,) = (line for line in job.log.read_text().splitlines() if "continues after step" in line)
        assert any(f"after step {step} with the state of the other ranks" in after for step in (6, 9)), after
    assert not left_over(tmp_path)
