"""Meshes with shards become smaller and larger, and every rank finds its new parts in the memory of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config
from meshcomm.job.replacing import sizes_of
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import WORLD
from meshcomm.simulator.run import run_ranks
from meshcomm.train import Callback, Step, Trainer
from tests.elastic.test_copies import STEPS, Notes, Trained, settings_of

BATCH = ["train.global_batch_size=12", "train.micro_batch_size=1"]


def trained(settings: Config, lose: Mapping[int, int], seed: int) -> list[Trained]:
    """Train on the mesh of the settings. Return the results of the ranks that are there at the end."""
    ranks = math.prod(settings.mesh.dims.values())

    def body() -> Trained:
        world: Any = WORLD.get()
        with init(settings) as mesh:
            notes = Notes(lambda: world._actor.operations)
            losses = Trainer(mesh, settings, callbacks=[notes]).run().losses
            return Trained(losses, tuple(notes.steps), tuple(notes.resumed))

    sizes = sizes_of(settings, ranks)
    found = run_ranks(body, ranks, seed, 60.0, lose=lose, elastic=settings.elastic, sizes=sizes)
    return [each for each in found if each is not None]


class StopsAfter(Callback):
    """Ends a run after a step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: Step) -> None:
        self.stop = step.step == self._step


def resumed_by_hand(
    folder: Path, sizes: Mapping[str, int], smaller: Mapping[str, int], after: int
) -> tuple[float, ...]:
    """The losses of a run that is stopped after a step, and resumed from its checkpoint on a smaller mesh."""
    folder.mkdir()
    losses = []
    for dims, resume in ((sizes, "false"), (smaller, "true")):
        words = [*BATCH, f"train.checkpoint_every={STEPS}", f"train.resume={resume}"]
        settings = settings_of(folder, dims, words=words)

        def body(settings: Config = settings, resume: str = resume) -> tuple[float, ...]:
            with init(settings) as mesh:
                stops = [] if resume == "true" else [StopsAfter(after)]
                return Trainer(mesh, settings, callbacks=stops).run().losses

        losses = run_ranks(body, math.prod(dims.values()), 0, 60.0)
    first: tuple[float, ...] = losses[0]
    return first


@pytest.mark.parametrize(
    ("sizes", "elastic", "smaller", "lost", "lost_steps"),
    [
        pytest.param(*({"dp": 4}, "min = { dp = 2 }", {"dp": 3}, 2, 0), marks=pytest.mark.deep),
        # Another rank has the lost shard, but no rank of the smaller mesh has the parts that it needs. The test below does so, too.
        pytest.param(
            *({"dp": 2, "fsdp": 2}, "min = { fsdp = 1 }", {"dp": 2, "fsdp": 1}, 1, 0), marks=pytest.mark.deep
        ),
        pytest.param(
            *({"fsdp": 2, "tp": 2}, "min = { fsdp = 1 }\ncopy_every = 2", {"fsdp": 1, "tp": 2}, 2, 1),
            marks=pytest.mark.deep,
        ),
        ({"fsdp": 4}, "min = { fsdp = 2 }\ncopy_every = 2", {"fsdp": 3}, 2, 1),
    ],
    ids=["dp", "dp fsdp", "fsdp tp", "fsdp"],
)
def test_fewer_ranks_need_no_checkpoint(
    sizes: Mapping[str, int],
    elastic: str,
    smaller: Mapping[str, int],
    lost: int,
    lost_steps: int,
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, sizes, f"[elastic]\n{elastic}\n", BATCH)
    whole = trained(settings, {}, 0)
    # In the step after step 3; the last copies are of step 2.
    left = trained(settings, {lost: whole[lost].steps[2][1] + 3}, lost)
    assert len(left) == math.prod(smaller.values())
    ((after,),) = {each.resumed for each in left}
    assert 3 - lost_steps <= after <= 4
    assert not (tmp_path / "out" / "checkpoints").exists()
    by_hand = resumed_by_hand(tmp_path / "by_hand", sizes, smaller, after)
    for each in left:
        assert each.losses == by_hand
        assert each.losses == pytest.approx(whole[0].losses, rel=1e-12)


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 2, "fsdp": 2}, pytest.param({"fsdp": 2, "dp": 2}, marks=pytest.mark.deep)],
    ids=["dp fsdp", "fsdp dp"],
)
def test_the_mesh_grows_without_a_checkpoint(sizes: Mapping[str, int], tmp_path: Path) -> None:
    """New shards come from ranks that had larger ones. No step is run twice."""
    text = "[elastic]\nmin = { fsdp = 1 }\nreplace = 1\ndelay_s = 80\n"
    settings = settings_of(tmp_path, sizes, text, BATCH)
    whole = trained(settings, {}, 0)
    grown = 0
    for seed in range(3):
        found = trained(settings, {1: whole[1].steps[1][1] + 3}, seed)
        for each in found:
            assert each.losses == pytest.approx(whole[0].losses, rel=1e-12), seed
            numbers = [number for number, _ in each.steps]
            assert numbers == sorted({*numbers}), seed
        # The first ranks have resumed on the smaller mesh, and then on the full one.
        resumed = {each.resumed for each in found}
        grown += (
            len(found) == 4 and max(map(len, resumed)) == 2 and len({after[-1] for after in resumed}) == 1
        )
        if grown:
            break
    assert grown
