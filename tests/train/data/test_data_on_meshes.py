"""Data by the roles of dims: data rank and world, means over tokens, samples that are divided twice, and resuming in an epoch."""

from __future__ import annotations

import json
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import meshcomm
from meshcomm.config import Config, ParallelConfig
from meshcomm.errors import AutogradError, LayoutError, MeshcommError, ShapeError, TrainingError, UnknownDim
from meshcomm.mesh import Mesh
from meshcomm.parallel.batch import check_inputs
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from tests.sizes import train_of
from tests.train.data.test_load import tokenizer
from tests.train.runs import config_on, losses_or_error, trained

BASE: dict[str, Any] = {
    "mesh": {"dims": {"one": 1}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {},
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 32},
    # 20 samples of 16 tokens: an epoch ends within the third step of 8.
    "data": {"seq_len": 16, "max_bytes": 321},
    "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "seed": 7, "dtype": "float64"},
}


def on(dims: str, *overrides: str, **parallel: Any) -> Config:
    return config_on(BASE, dims, *overrides, **parallel)


# -- rank and world of the data -------------------------------------------------------------------


def shares(config: Config) -> tuple[int, int, int]:
    with meshcomm.init(config) as mesh:
        return mesh.rank, mesh.data_rank, mesh.data_world_size


@pytest.mark.parametrize(
    ("dims", "expected"),
    [("dp=2 tp=2", [0, 0, 1, 1]), ("fsdp=2 dp=2", [0, 2, 1, 3]), ("pp=2 cp=2", [0, 0, 0, 0])],
)
def test_data_rank_and_world_follow_from_the_roles(pool: Pool, dims: str, expected: list[int]) -> None:
    found = pool.run(shares, on(dims), ranks=4)
    assert [data_rank for _, data_rank, _ in sorted(found)] == expected
    assert {world for *_, world in found} == {max(expected) + 1}


def test_a_mesh_without_roles_says_what_to_ask() -> None:
    def ask(mesh: Mesh) -> str:
        with pytest.raises(LayoutError) as caught:
            _ = mesh.data_rank
        return str(caught.value.hint)

    found = meshcomm.simulate(ask, dims={"dp": 2, "fsdp": 2})
    assert found[0].startswith('mesh.coord("dp") and mesh.size("dp"), or a merged dim')


# -- means ----------------------------------------------------------------------------------------


def means(mesh: Mesh) -> list[Any]:
    rank = mesh.rank
    weight = torch.tensor(1.5, requires_grad=True, dtype=torch.float64)
    # Each rank has another number of tokens, and a loss for each token.
    losses = weight * torch.arange(1, rank + 2, dtype=torch.float64)
    mean = mesh.mean(("dp", "fsdp"), losses.sum(), rank + 1)
    (3 * mean).backward()
    assert weight.grad is not None
    grad = mesh.all_reduce("dp", mesh.all_reduce("fsdp", weight.grad.clone()))
    several = mesh.mean("dp", torch.tensor([1.0, rank]), torch.tensor([1, 3]))
    half = mesh.mean("all", torch.tensor(rank, dtype=torch.bfloat16), 257 if rank else 0)
    empty = mesh.mean("dp", torch.zeros(()), 0)
    return [mean.item(), grad.item(), several.tolist(), half, bool(empty.isnan())]


def test_a_mean_weights_by_tokens_over_any_dims_and_has_the_gradient_of_the_own_part() -> None:
    found = meshcomm.simulate(means, dims={"dp": 2, "fsdp": 2}, merge={"all": ["dp", "fsdp"]})
    every = [loss for rank in range(4) for loss in range(1, rank + 2)]
    whole = sum(every) / len(every)
    for rank, (mean, grad, several, half, empty) in enumerate(found):
        assert mean == pytest.approx(1.5 * whole, rel=1e-15)
        assert grad == pytest.approx(3 * whole, rel=1e-15)
        assert several == pytest.approx([1.0, (rank % 2 + rank % 2 + 2) / 6])
        assert half.dtype == torch.float32 and half.item() == pytest.approx(6 / (3 * 257))
        assert empty


def without_a_group(mesh: Mesh) -> tuple[int, float]:
    before = mesh.stats()
    mesh.mean("dp", torch.tensor(float(mesh.rank)), 1)
    calls = sum(int(row["calls"]) for row in mesh.stats().since(before).facts()["rows"])
    return calls, mesh.mean(("dp", "tp"), torch.tensor(float(mesh.rank)), 1).item()


def test_a_mean_is_one_message_and_needs_no_group_over_all_its_dims() -> None:
    assert set(meshcomm.simulate(without_a_group, dims={"dp": 2, "tp": 2})) == {(1, 1.5)}


def test_means_that_have_no_meaning_are_refused() -> None:
    def refuse(mesh: Mesh) -> None:
        cases: list[tuple[type[MeshcommError], Any]] = [
            (ShapeError, lambda: mesh.mean("dp", torch.ones(2, dtype=torch.int64), 1)),
            (ShapeError, lambda: mesh.mean("dp", 3.0, 1)),  # type: ignore[arg-type]
            (ShapeError, lambda: mesh.mean("dp", torch.ones(2), torch.ones(3))),
            (AutogradError, lambda: mesh.mean("dp", torch.ones(()), torch.ones((), requires_grad=True))),
            (UnknownDim, lambda: mesh.mean("ep", torch.ones(()), 1)),
            (UnknownDim, lambda: mesh.mean(("dp", "ep"), torch.ones(()), 1)),
        ]
        for kind, call in cases:
            with pytest.raises(kind):
                call()

    meshcomm.simulate(refuse, dims={"dp": 2})


# -- samples that are shared out twice ------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(17) * 7 + index) % 256


def with_a_sampler(config: Config, by_role: bool) -> float | str:
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config).engine
        trainer.checked_steps = 2
        roles = {"num_replicas": mesh.data_world_size, "rank": mesh.data_rank} if by_role else {}
        sampler = DistributedSampler(Rows(), shuffle=False, **roles)
        loader = DataLoader(Rows(), batch_size=8 // (mesh.data_world_size if by_role else 4), sampler=sampler)
        try:
            for step, rows in enumerate(loader, 1):
                trainer.step(rows[:, :-1], rows[:, 1:], 1e-3, step)
            return trainer.results()[0].loss
        except TrainingError as error:
            return str(error)


def compared(mesh: Mesh, along: str, whole: bool) -> str:
    """The error on every rank if one rank's batch differs from the batches of its neighbours along a dim."""
    parallel = ParallelConfig(data="dp", pipeline="pp", context="cp", tensor="tp")
    x = torch.arange(6).reshape(2, 3) + 10 * mesh.coord("dp")
    odd = mesh.coord(along) == 1 and (whole or mesh.rank == mesh.layout.world_size - 1)
    try:
        check_inputs(mesh, parallel, x, x + 1 + odd)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("along", "part"), [("pp", "pipeline"), ("cp", "context"), ("tp", "tensor")])
def test_other_samples_along_a_dim_that_divides_none_are_named(along: str, part: str) -> None:
    dims = {"pp": 2, "dp": 2, "cp": 2, "tp": 2}
    stride = {"pp": 8, "cp": 2, "tp": 1}[along]
    said = set(meshcomm.simulate(compared, dims=dims, args=(along, True)))
    assert len(said) == 1
    text = said.pop()
    assert text.startswith(f"ranks along {along} ({part}) have different samples")
    assert f"rank {stride} against rank 0, which differ only in their coord along {along}" in text
    # Only the last rank has another batch.
    (text,) = set(meshcomm.simulate(compared, dims=dims, args=(along, False)))
    assert "rank 15 against rank" in text
    assert set(meshcomm.simulate(compared, dims=dims, args=("dp", True))) == {""}


def test_a_sampler_by_role_trains_and_one_of_the_whole_job_is_named(pool: Pool) -> None:
    config = on("dp=2 tp=2")
    losses = set(pool.run(with_a_sampler, config, True, ranks=4))
    assert len(losses) == 1
    (alone,) = pool.run(with_a_sampler, on("one=1"), True, ranks=1)
    # The first step has the same samples in another order.
    assert losses.pop() == pytest.approx(alone, rel=1e-12)
    texts = set(pool.run(with_a_sampler, config, False, ranks=4))
    assert len(texts) == 1
    text = str(texts.pop())
    assert text.startswith("ranks along tp (tensor) have different samples")
    assert "rank 1 against rank 0, which differ only in their coord along tp" in text
    assert "DistributedSampler(dataset, num_replicas=mesh.data_world_size, rank=mesh.data_rank)" in text


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, constant: bool = False) -> None:
        self._constant = constant

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((3,), 0.0 if self._constant else index + 1.0)
        return x, x[:1]


def steps_on(config: Config) -> list[str]:
    """Train on DataLoaders whose samplers may not divide the samples among the ranks along dp and fsdp."""
    with meshcomm.init(config) as mesh:
        world, rank, dp = mesh.data_world_size, mesh.data_rank, mesh.coord("dp")
        samplers = {
            "none": (1, 0),
            "dp only": (2, dp),
            "sum": (world, dp + mesh.coord("fsdp")),
            "by role": (world, rank),
        }
        found = []
        for kind in (*samplers, "constant", "one batch"):
            data = Numbers(kind == "constant")
            replicas, part = samplers.get(kind, (1, 0))
            sampler: Any = DistributedSampler(
                data, num_replicas=replicas, rank=part, shuffle=kind != "one batch"
            )
            loader: Any = DataLoader(data, batch_size=2, sampler=sampler)
            trainer = Trainer(mesh, config, torch.nn.Linear(3, 1), loss=torch.nn.functional.mse_loss)
            text = ""
            try:
                for batch in islice(repeat(next(iter(loader))) if kind == "one batch" else loader, 3):
                    trainer.step(*batch)
            except TrainingError as error:
                text = str(error)
            found.append(text)
        return found


def test_ranks_along_data_that_read_the_same_samples_are_named(pool: Pool) -> None:
    base = {"mesh": {"device": "cpu", "timeout_s": 60.0}, "train": train_of(4, 8, 2, dtype="float64")}
    first, *others = pool.run(steps_on, config_on(base, "dp=2 fsdp=2"), ranks=4)
    assert all(each == first for each in others)
    # Equal samples, or the same batch in each step, prove nothing.
    pairs = [
        "rank 1 equals that of rank 0",
        "rank 1 equals that of rank 0",
        "rank 2 equals that of rank 1",
        "",
        "",
        "",
    ]
    for text, pair in zip(first, pairs, strict=True):
        assert pair in text and bool(pair) == text.startswith("ranks along dp, fsdp read the same samples"), (
            text
        )


# -- resuming -------------------------------------------------------------------------------------


def samples(out: Path, step: int) -> int:
    found: int = json.loads((out / f"checkpoints/step-{step:06d}/lock.json").read_text())["samples"]
    return found


@pytest.mark.parity
def test_a_resume_within_an_epoch_on_another_mesh_with_another_batch(pool: Pool, tmp_path: Path) -> None:
    (undisturbed,) = pool.run(trained, on("one=1", f'train.out="{tmp_path}/a"'), ranks=1)
    assert len(set(undisturbed.losses)) == 6
    out = f'train.out="{tmp_path}/b"'
    short = on("dp=2", out, "train.steps=2", "train.checkpoint_every=1", 'train.schedule="constant"')
    pool.run(trained, short, ranks=2)
    assert samples(tmp_path / "b", 2) == 16
    more = [out, "train.checkpoint_every=1", "train.resume=true", 'train.schedule="constant"']
    on_four = on("pp=2 tp=2", *more, "train.steps=4")
    results = pool.run(trained, on_four, ranks=4)
    (again,) = pool.run(
        trained,
        on("one=1", f'train.out="{tmp_path}/c"', "train.steps=4", 'train.schedule="constant"'),
        ranks=1,
    )
    assert results[0].losses == pytest.approx(again.losses, rel=1e-10)
    assert samples(tmp_path / "b", 4) == 32
    # Another batch size continues after the samples that were read.
    larger = on("dp=2", *more, "train.global_batch_size=12", 'train.resume_changed=["global_batch_size"]')
    pool.run(trained, larger, ranks=2)
    assert (samples(tmp_path / "b", 5), samples(tmp_path / "b", 6)) == (44, 56)


# -- a tokenizer ----------------------------------------------------------------------------------


def test_ranks_train_on_text_that_was_tokenised_once(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 40)
    words = tokenizer(tmp_path / "model")
    data = [f'data.files=["{tmp_path}/a.txt"]', f'data.tokenizer="{words}"', "data.max_bytes=4000"]
    more = ["data.seq_len=4", "train.steps=2", f'train.out="{tmp_path}/out"']
    config = on("dp=2 tp=2", *data, *more, "model.vocab_size=6")
    losses = pool.run(losses_or_error, config, ranks=4)
    assert len(set(losses)) == 1 and len(losses[0]) == 2
    assert len(list((tmp_path / "out").glob("*tokens-*"))) == 1
    small = on("dp=2 tp=2", *data, *more, "model.vocab_size=4")
    texts = pool.run(losses_or_error, small, ranks=4)
    assert all("the data has token 4, but the model's vocabulary is 0 to 3" in text for text in texts)
    assert all(f"4 at position 120 of {tmp_path}/a.txt" in text for text in texts)
    assert all(f"{words} has 5 tokens" in text for text in texts)


# -- streams and rows -----------------------------------------------------------------------------


# The order of a stream on any number of ranks: test_build.py. The count in a checkpoint: above.
@pytest.mark.parity
def test_a_stream_resumes_on_another_mesh(pool: Pool, tmp_path: Path) -> None:
    texts = "\n".join(json.dumps({"text": f"row {number}, " * 9}) for number in range(20))
    (tmp_path / "a.jsonl").write_text(texts)
    args = f'{{path="json", data_files="{tmp_path}/a.jsonl", split="train", streaming=true, cache_dir="{tmp_path}/cache"}}'
    base = BASE | {"data": {"seq_len": 16, "build": "datasets:load_dataset", "tokenizer": "bytes"}}
    more = [f"data.args={args}", 'train.schedule="constant"', "train.checkpoint_every=2"]
    # An epoch of 128 samples ends within the third step of 48.
    more += ["train.global_batch_size=48", "train.micro_batch_size=12"]

    def config(dims: str, out: str, *changes: str) -> Config:
        return config_on(base, dims, *more, f'train.out="{tmp_path}/{out}"', *changes)

    (whole,) = pool.run(trained, config("one=1", "a", "train.steps=4"), ranks=1)
    pool.run(trained, config("dp=2", "b", "train.steps=2"), ranks=2)
    found = pool.run(trained, config("fsdp=2 tp=2", "b", "train.steps=4", "train.resume=true"), ranks=4)
    assert samples(tmp_path / "b", 4) == 192
    assert all(each.losses == pytest.approx(whole.losses, rel=1e-10) for each in found)
