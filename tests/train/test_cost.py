"""FLOPs of a step equal a count by hand on every mesh, MFU needs a known peak, and peak memory is reported for the right rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config
from meshcomm.predict.stages import part_costs
from meshcomm.testing import Pool
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl, host_syncs
from meshcomm.train import Callback, Summary, Trainer, run
from meshcomm.train import cost as cost_module
from meshcomm.train.agree import agree, agreed_corpus
from meshcomm.train.cost import Cost, FlopCounter, known_peak, peak_flops, peak_memory
from meshcomm.train.data import batches_of
from tests.train.runs import config_on, metrics, run_json
from tests.train.test_trainer import BATCH, Net, loss, samples, sections

pytestmark = pytest.mark.long

BASE: dict[str, Any] = {
    "mesh": {"dims": {"one": 1}, "device": "cpu", "timeout_s": 60.0},
    "parallel": {},
    "model": {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 64},
    "data": {"seq_len": 16, "max_bytes": 20_000},
    "train": {"steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
}


def on(dims: str, *overrides: str, out: Path | str = "unused", **parallel: Any) -> Config:
    return config_on(BASE, dims, f'train.out="{out}"', *overrides, **parallel)


def counted(config: Config) -> float:
    """The FLOPs of the model in the first of two steps, on all ranks."""
    with meshcomm.init(config) as mesh:
        corpus = agreed_corpus(mesh, agree(mesh, config), 0)
        engine = Trainer(mesh, config).engine
        cost = Cost(mesh, engine.sections.train.model_copy(update={"peak_flops": 1.0}))
        batches = batches_of(engine, corpus)
        for step in (1, 2):
            with cost.counting():
                engine.step(*batches(step), 1e-3, step)
        cost.compare_counts()
        rates = cost.rates(1.0)
        assert rates is not None and rates.mfu == pytest.approx(rates.model_flops_per_s)
        return rates.mfu * math.prod(dict(mesh.dims).values())


def by_hand(config: Config) -> tuple[int, int]:
    """Multiply-adds of a step's forward pass: all of them, and the part for attention scores."""
    assert config.model is not None and config.data is not None and config.train is not None
    costs = part_costs(config.model, config.data.seq_len)
    tokens = config.train.global_batch_size * config.data.seq_len
    scores = config.model.num_layers * 2 * config.data.seq_len * config.model.hidden_size
    return (sum(costs.layers) + costs.head) * tokens, scores * tokens


@pytest.mark.parametrize(
    ("dims", "parallel"),
    [
        ("one=1", {}),
        ("dp=2 tp=2", {"sequence_parallel": True}),
        ("fsdp=2 cp=2", {"attention": "ulysses"}),
        ("pp=2 fsdp=2", {}),
        ("pp=2 tp=2", {"schedule": "zero_bubble", "stages_per_rank": 2}),
    ],
)
@pytest.mark.deep_cases(r"\[((dp=2 tp|fsdp=2 cp)=2|pp=2)")
def test_six_flops_for_each_multiply_add(pool: Pool, dims: str, parallel: dict[str, Any]) -> None:
    config = on(dims, **parallel)
    macs, _ = by_hand(config)
    ranks = math.prod(config.mesh.dims.values())
    assert set(pool.run(counted, config, ranks=ranks)) == {6 * macs}


def test_what_is_computed_again_is_not_counted(pool: Pool) -> None:
    config = on("dp=2", "train.activation_checkpointing=true")
    assert set(pool.run(counted, config, ranks=2)) == {6 * by_hand(config)[0]}


@pytest.mark.parametrize(
    ("dims", "more", "share"),
    [
        # Of four blocks of scores, a ring computes the two on the diagonal and half of each other block.
        ("cp=2", [], 1 / 4),
        # A token goes to some experts only.
        ("dp=2", ["model.experts=4", "model.experts_per_token=2"], 0),
    ],
)
def test_what_a_rank_leaves_out_is_not_counted(pool: Pool, dims: str, more: list[str], share: float) -> None:
    config = on(dims, *more)
    macs, scores = by_hand(config)
    assert set(pool.run(counted, config, ranks=2)) == {6 * (macs - scores * share)}


def test_what_needs_no_gradient_is_not_counted_in_backward() -> None:
    """A user's module: a convolution whose input needs no gradient, followed by a frozen layer."""
    module = nn.Sequential(nn.Conv1d(2, 3, 5, bias=False), nn.Flatten(), nn.Linear(12, 6, bias=False))
    module[2].weight.requires_grad_(False)
    counter = FlopCounter()
    with counter:
        module(torch.randn(7, 2, 8)).sum().backward()
    forward, linear = 2 * 7 * 3 * 4 * 2 * 5, 2 * 7 * 12 * 6
    assert counter.model == 2 * forward + 2 * linear


class Checkpointed(nn.Module):
    """Two matrix products that are computed again, one of them in an autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return Product.apply(self.first(x), self.second.weight)  # type: ignore[no-any-return, no-untyped-call]

        y: Tensor = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
        return y


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w.T, x.T @ grads[0]


def test_recomputing_is_told_from_backward_inside_of_an_autograd_function() -> None:
    counter = FlopCounter()
    with counter:
        Checkpointed()(torch.randn(8, 8, requires_grad=True)).sum().backward()
    assert counter.model == 6 * 1024


@pytest.mark.parity
def test_compiled_blocks_stay_compiled_and_count_the_same(pool: Pool) -> None:
    config = on("one=1", "train.compile=true", "model.num_layers=1")
    assert pool.run(counted, config, ranks=1) == [6 * by_hand(config)[0]]


# -- the most that a device can do ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", False, 989.4),
        ("NVIDIA H100 80GB HBM3", "float32", True, 494.7),
        ("NVIDIA H200", "float32", False, 66.9),
        ("NVIDIA H100 PCIe", "bfloat16", False, 756),
        ("NVIDIA H200 NVL", "bfloat16", False, 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", False, 989.4),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", False, 312),
        ("NVIDIA A10", "bfloat16", False, 125),
        ("AMD Instinct MI300X", "bfloat16", False, 1307.4),
        # Other chips, partitions of chips, and values that no data sheet has.
        ("NVIDIA A10G", "bfloat16", False, None),
        ("NVIDIA H20", "bfloat16", False, None),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16", False, None),
        ("NVIDIA B200", "float32", True, None),
        ("NVIDIA H100 80GB HBM3", "float64", False, None),
    ],
)
def test_peaks_of_devices(name: str, dtype: str, tf32: bool, tera: float | None) -> None:
    found = known_peak(name, dtype, tf32)
    assert found == (None if tera is None else pytest.approx(tera * 1e12))


def test_a_cpu_has_no_peak_unless_the_config_says_one() -> None:
    train = on("one=1").train
    assert train is not None and peak_flops(train, torch.device("cpu")) is None
    assert peak_flops(train.model_copy(update={"peak_flops": 2e11}), torch.device("cpu")) == 2e11


# -- the reports of a run --------------------------------------------------------------------------


def trained(config: Config) -> Summary:
    def of_rank(device: torch.device) -> tuple[int, str]:
        return 1000 + (mesh.rank == 1), "planted"

    with meshcomm.init(config) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_module, "peak_memory", of_rank)
        return run(mesh, config, Callback())


@pytest.mark.parametrize("peak", [None, 2e9])
def test_mfu_needs_a_known_peak(pool: Pool, tmp_path: Path, peak: float | None) -> None:
    more = [] if peak is None else [f"train.peak_flops={peak}"]
    config = on("dp=2", *more, out=tmp_path)
    macs, _ = by_hand(config)
    summaries = pool.run(trained, config, ranks=2)
    for line in metrics(tmp_path):
        each = 6 * macs / (8 * 16) * line["tokens_per_s"] / 2
        assert line["model_flops_per_s"] == pytest.approx(each)
        assert (line["peak_memory_bytes"], line["peak_memory_rank"]) == (1001, 1)
        assert line.get("mfu") == (None if peak is None else pytest.approx(each / peak))
    ended = run_json(tmp_path)["ended"]
    for summary in summaries:
        assert summary.rates is not None and summary.memory is not None
        assert summary.memory == (1001, 1, "planted")
        assert (ended["mfu"] is None) == (summary.rates.mfu is None) == (peak is None)
        assert (ended["peak_memory_bytes"], ended["peak_memory_rank"]) == (1001, 1)


def gathers(config: Config) -> int:
    with meshcomm.init(config) as mesh:
        summary = run(mesh, config, Callback())
        assert summary.traffic is not None
        return sum(
            row["calls"] for row in summary.traffic.facts()["rows"] if row["call"].startswith("objects")
        )


def test_ranks_are_compared_twice_however_many_steps_there_are(pool: Pool, tmp_path: Path) -> None:
    few, many = (
        set(pool.run(gathers, on("dp=2", f"train.steps={n}", out=tmp_path), ranks=2)) for n in (2, 6)
    )
    assert len(few) == 1 and few == many


def syncs(config: Config) -> list[int]:
    """The number of host syncs at the beginning of each step."""
    with emulated_nccl(), meshcomm.init(config) as mesh:
        found = []
        trainer = Trainer(mesh, config, Net(), loss=loss, optimizer=None)

        def share(step: int) -> tuple[Tensor, Tensor]:
            found.append(host_syncs())
            here = slice(mesh.coord("dp") * BATCH // 2, (mesh.coord("dp") + 1) * BATCH // 2)
            x, y = samples(step)
            return x[here].float(), y[here].float()

        trainer.run(share)
        return found


def test_a_step_that_logs_nothing_waits_for_nothing_in_a_run(pool: Pool, tmp_path: Path) -> None:
    more = (
        "train.log_every=100",
        'train.dtype="float32"',
        "train.steps=12",
        "mesh.validate_calls=2",
        f'mesh.backend="{NAME}"',
    )
    config = sections("dp=2", tmp_path, *more)
    for found in pool.run(syncs, config, ranks=2):
        assert found[10] == found[5]


def test_peak_memory_of_a_cpu_is_that_of_the_process() -> None:
    held = torch.ones(1 << 24)
    nbytes, kind = peak_memory(torch.device("cpu"))
    assert kind == "resident in the process"
    assert nbytes >= 0.9 * psutil.Process().memory_info().rss > held.nbytes
