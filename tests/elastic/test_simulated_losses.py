"""In the simulator, a rank is lost at some operation of a training: at every moment, the run ends with the right losses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import RankFailed, RankLost, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.mesh.opening import init
from meshcomm.mesh.runtime import WORLD
from meshcomm.simulator.run import run_ranks
from meshcomm.train import Trainer
from tests.elastic.deaths import config_of
from tests.train.every_setting import overrides

SMALLER = {
    "num_layers = 4": "num_layers = 1",
    "hidden_size = 32": "hidden_size = 8",
    "intermediate_size = 64": "intermediate_size = 8",
    "num_heads = 4": "num_heads = 2",
    "seq_len = 32": "seq_len = 4",
}
RANKS = 8


class Trained(NamedTuple):
    """One rank's losses, and the numbers of its operations at the start of the first step and at the end."""

    losses: tuple[float, ...]
    began: int
    ended: int


def trained(
    settings: Config, lose: Mapping[int, int], seed: int, trainer: Callable[..., Trainer] = Trainer
) -> list[Trained]:
    """Train two steps on 8 ranks. lose: rank -> the number of the operation at which it is lost."""

    def body() -> Trained:
        world: Any = WORLD.get()
        with init(settings) as mesh:
            made = trainer(mesh, settings)
            began = world._actor.operations
            return Trained(made.run().losses, began, world._actor.operations)

    found: list[Trained] = run_ranks(body, RANKS, seed, 60.0, lose=lose)
    return found


def settings_of(folder: Path, *, evaluates: bool = True) -> Config:
    """A training of two steps on dp=4 cp=2."""
    text = config_of("dp4 cp2", 2, "eval_every = 1\neval_batches = 1\n" if evaluates else "")
    for usual, smaller in {**SMALLER, "[data]": "[data]\nvalidation = 0.3"}.items():
        assert usual in text
        text = text.replace(usual, smaller)
    path = folder / "train.toml"
    path.write_text(text)
    return load_config(path, [f'train.out="{folder}/out"', *overrides()])


def loses_at(folder: Path, moments: list[tuple[int, int, int]]) -> None:
    """Lose a rank at an operation, each time in another schedule. moments: (rank, number, seed)."""
    settings = settings_of(folder)
    whole = trained(settings, {}, 0)
    for rank, number, seed in moments:
        try:
            found = trained(settings, {rank: number}, seed)
        except RankFailed as error:
            # The loss is in the last exchange: ranks that have left it end their program and cannot be met again.
            cannot_be_replaced(error, rank)
            continue
        assert all(each.losses == whole[0].losses for each in found), (rank, number, seed)


def cannot_be_replaced(error: RankFailed, rank: int) -> None:
    """Check that `error` names `rank` as lost, the place of the loss, and the ranks that had ended."""
    what = rf"rank {rank} \(dp=.*\) was lost and cannot be replaced: ranks? [\d -]+ ha(s|ve) ended"
    assert re.fullmatch(what, error.what), error
    where = rf"rank {rank} was lost at its operation \d+, in \w+ at {re.escape(__file__)}:\d+"
    assert re.fullmatch(where, str(error.given)), error
    assert [*error.by_rank] == [rank]


def test_some_moments(tmp_path: Path) -> None:
    ended = trained(settings_of(tmp_path), {}, 0)[0].ended
    draw = random.Random(1)
    loses_at(tmp_path, [(draw.randrange(RANKS), draw.randrange(1, ended), seed) for seed in range(3)])


def test_muon_on_split_matrices_is_refused(tmp_path: Path) -> None:
    usual = settings_of(tmp_path, evaluates=False)
    muon = 'train.groups={ "layers.*.w?.weight" = { optimizer = "muon" } }'
    sharded = [
        "train.micro_batch_size=1",
        "mesh.dims={ dp = 4, fsdp = 2 }",
        'parallel={ data = "dp", shard = "fsdp" }',
    ]
    with pytest.raises(
        RankFailed, match="Muon on split matrices cannot continue after a rank is lost"
    ) as caught:
        trained(load_config(usual, [muon, *sharded]), {1: 10**6}, 0)
    assert all(type(error) is UnsupportedOp for error in caught.value.by_rank.values())
    # Whole matrices need no other rank.
    assert len(trained(load_config(usual, [muon]), {1: 10**6}, 0)) == RANKS


OVERFLOWS: Final = {"compute_dtype": "float16", "loss_scale": 1e19}
# Trainings of three steps: dims, [parallel], and changes to [model] and [train].
TRAININGS: Final[dict[str, tuple[dict[str, int], dict[str, str], dict[str, Any], dict[str, Any]]]] = {
    "float16": (
        {"dp": 4, "fsdp": 2},
        {"data": "dp", "shard": "fsdp"},
        {},
        {**OVERFLOWS, "micro_batch_size": 2},
    ),
    "float16 pp": ({"dp": 4, "pp": 2}, {"data": "dp", "pipeline": "pp"}, {"num_layers": 2}, OVERFLOWS),
    "float16 tp ema": ({"dp": 4, "tp": 2}, {"data": "dp", "tensor": "tp"}, {}, {**OVERFLOWS, "ema": 0.9}),
    "skip": ({"dp": 4, "cp": 2}, {"data": "dp", "context": "cp"}, {}, {"on_nonfinite": "skip", "lr": 3e38}),
    "bias updates": (
        {"dp": 8},
        {"data": "dp", "expert": "ep"},
        {"experts": 4, "experts_per_token": 2, "experts_every": 1, "bias_update_speed": 0.1},
        {},
    ),
    "shared heads": (
        {"dp": 2, "tp": 4},
        {"data": "dp", "tensor": "tp"},
        {"num_heads": 4, "num_kv_heads": 1, "hidden_size": 16},
        {"micro_batch_size": 2},
    ),
    "ema": ({"dp": 4, "cp": 2}, {"data": "dp", "context": "cp"}, {}, {"ema": 0.9}),
}


def training(name: str, folder: Path) -> Config:
    dims, parallel, model, train = TRAININGS[name]
    usual = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    return load_config(
        {
            "mesh": {"dims": dims, "device": "cpu", "timeout_s": 60.0}
            | ({"views": {"expert": {"edp": 4, "ep": 2}}} if "expert" in parallel else {}),
            "parallel": parallel,
            "model": usual | model,
            "data": {"seq_len": 4, "max_bytes": 4000},
            "train": {"steps": 3, "global_batch_size": 16, "micro_batch_size": 1, "check": False} | train,
        },
        [f'train.out="{folder}"'],
    )


def loses_one(name: str, folder: Path, moments: Iterable[tuple[int, int]]) -> None:
    """Lose a rank at an operation of one of TRAININGS. moments: (rank, number)."""
    whole = trained(training(name, folder / "whole"), {}, 0)
    for rank, number in moments:
        found = trained(training(name, folder / f"{rank} {number}"), {rank: number}, number)
        # repr, because nan != nan.
        assert {repr(each.losses) for each in found} == {repr(whole[0].losses)}, (rank, number)


def test_a_rank_is_lost_while_ranks_name_why_a_step_is_skipped(tmp_path: Path) -> None:
    """An engine has the step's results then, and has not decided or not reported the step."""
    loses_one("float16", tmp_path, [(1, 81), (1, 111), (1, 144)])


def test_a_step_that_ends_the_run_ends_it_also_if_a_rank_is_lost_meanwhile(tmp_path: Path) -> None:
    settings = load_config(training("skip", tmp_path), ["train.on_nonfinite=stop"])
    with pytest.raises(RankFailed, match=r"ranks 0 1 2 3 4 5 6 7 .*\n.*\n.*the loss of step 2 is nan"):
        trained(settings, {1: 153}, 153)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TRAININGS)
def test_some_moments_of_trainings_that_skip_steps_or_have_more_state(name: str, tmp_path: Path) -> None:
    whole = trained(training(name, tmp_path), {}, 0)
    draw = random.Random(4)
    ranks = [draw.randrange(RANKS) for _ in range(30)]
    loses_one(
        name, tmp_path, [(rank, draw.randrange(whole[rank].began + 1, whole[rank].ended)) for rank in ranks]
    )


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_operation_of_two_steps(rank: int, tmp_path: Path) -> None:
    each = trained(settings_of(tmp_path), {}, 0)[rank]
    loses_at(tmp_path, [(rank, number, number) for number in range(each.began + 1, each.ended + 1)])


@pytest.mark.faults
def test_two_ranks_at_any_two_moments(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    whole = trained(settings, {}, 0)
    draw = random.Random(2)
    for seed in range(100):
        lose = {rank: draw.randrange(1, whole[0].ended) for rank in draw.sample(range(RANKS), 2)}
        found = trained(settings, lose, seed)
        assert all(each.losses == whole[0].losses for each in found), (lose, seed)


class Drawn:
    """The program's data, in a different order each time that iteration begins."""

    def __init__(self, mesh: Mesh) -> None:
        self._draw = torch.Generator().manual_seed(mesh.coord("dp"))

    def __iter__(self) -> Any:
        while True:
            tokens = torch.randint(250, (2, 5), generator=self._draw)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.deep
def test_data_that_would_begin_again_in_another_order(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, evaluates=False)

    def body() -> tuple[tuple[float, ...], int]:
        world: Any = WORLD.get()
        with init(settings) as mesh:
            return Trainer(mesh, settings).run(Drawn(mesh)).losses, world._actor.operations

    expected = run_ranks(body, RANKS, 0, 60.0, lose={})
    draw = random.Random(3)
    for seed in range(8):
        lose = {draw.randrange(RANKS): draw.randrange(expected[0][1] // 2, expected[0][1] - 10)}
        found = run_ranks(body, RANKS, seed, 60.0, lose=lose)
        assert [each[0] for each in found] == [expected[0][0]] * RANKS, (lose, seed)


def loop(mesh: Mesh) -> tuple[int, float]:
    """A user-written loop, as in docs/guide/elastic.md."""
    step, total = 0, 0.0

    def of_the_farthest() -> tuple[int, float]:
        every: list[tuple[int, float]] = mesh.objects.all_gather("dp", (step, total))
        return max(every)

    if mesh.elastic.generation.number:
        step, total = of_the_farthest()
    while True:
        try:
            while step < 4:
                x = mesh.all_reduce("dp", torch.tensor([float(step + mesh.rank)]))
                mesh.barrier("dp")
                step, total = step + 1, total + x.item()
            mesh.barrier("dp")
            return step, total
        except RankLost as error:
            mesh.elastic.reopen(error)
            step, total = of_the_farthest()


@pytest.mark.parametrize("number", range(1, 40, 3))
def test_a_loop_of_ones_own(number: int) -> None:
    expected = meshcomm.simulate(loop, dims={"dp": 3})
    assert meshcomm.simulate(loop, dims={"dp": 3}, lose={1: number}, schedule_seed=number) == expected


def test_a_program_that_does_not_reopen_fails_by_name() -> None:
    def body(mesh: Mesh) -> None:
        for _ in range(20):
            mesh.all_reduce("dp", torch.ones(1))

    with pytest.raises(meshcomm.errors.RankFailed, match=r"RankLost: .*rank 1 was lost and replaced"):
        meshcomm.simulate(body, dims={"dp": 3}, lose={1: 14})


def test_a_rank_that_is_lost_as_others_end_is_named() -> None:
    """Depending on the schedule, others end before the loss or before they notice it, or all meet the new rank."""
    found = set()
    for seed in range(30):
        order: list[str] = []

        def body(mesh: Mesh, order: list[str] = order) -> int:
            while True:
                try:
                    mesh.all_reduce("dp", torch.ones(1))
                    if mesh.rank == 1:
                        order.append("lost")
                        mesh.store.set("done", "1")
                    order.append("ended")
                    return mesh.rank
                except RankLost as error:
                    mesh.elastic.reopen(error)

        try:
            assert meshcomm.simulate(body, dims={"dp": 3}, lose={1: 7}, schedule_seed=seed) == [0, 1, 2]
            found.add("met")
        except RankFailed as error:
            cannot_be_replaced(error, 1)
            found.add(order[0])
    assert found == {"met", "lost", "ended"}
