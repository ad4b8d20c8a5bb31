"""Predictions of the dry run beside published trainings: `python -m tests.benchmarks.published [WORD ...]`.

Each row is predicted from counts and from the device's numbers in `DEVICES`. No number belongs to a row.
With WORDs, only rows whose name contains one of them are predicted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from math import prod
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshcomm.config import Config, load_config
from meshcomm.dryrun.rank import RankStep, pretended_step
from meshcomm.dryrun.training import dry_facts, priced
from meshcomm.dryrun.world import World, dry_world
from meshcomm.parallel import recompute
from meshcomm.parallel.tensor import layers
from meshcomm.predict.stages import attention_costs, part_costs
from meshcomm.show.units import seconds_text
from tests.benchmarks.table import markdown


class Device(NamedTuple):
    """matmul, float8: measured TFLOP/s of the fastest bfloat16 and float8 matmuls (github.com/stas00/ml-engineering,
    compute/accelerator, August 2026). memory: GB/s of the data sheet. node: GB/s of one direction of NVLink that NCCL reaches.
    """

    matmul: float
    float8: float | None
    memory: float
    node: float
    network: float


DEVICES: Final = {
    # torchtitan's H100 have HBM2e of 2.4 TB/s, and are limited to 500 W. The matmuls were measured at 700 W.
    "H100 96 GB": Device(794.5, 1402.6, 2400, 300, 50),
    "H100": Device(794.5, 1402.6, 3350, 300, 50),
    # An H100 with fewer links: NVLink of 160 GB/s, 50 GB/s of InfiniBand, of which the report reaches 40.
    "H800": Device(794.5, 1402.6, 3350, 160, 40),
    # Korthikanti et al. 2022 and torchtitan: DGX A100 with 200 Gbit/s for each GPU.
    "A100": Device(271.2, None, 2039, 235, 22),
}
_LLAMA: Final = {"vocab_size": 128_256, "num_kv_heads": 8}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "num_heads": 32},
    "70B": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_layers": 80, "num_heads": 64},
    "405B": {**_LLAMA, "hidden_size": 16_384, "intermediate_size": 53_248, "num_layers": 126, "num_heads": 128},
    "Llama 2 13B": {
        "vocab_size": 32_000, "num_kv_heads": 40, "hidden_size": 5120, "intermediate_size": 13_824, "num_layers": 40,
        "num_heads": 40,
    },
    # Two matrices of 4 times the width stand here as three of 8/3, which are as many weights and products.
    "GPT-3 175B": {
        "vocab_size": 51_200, "num_kv_heads": 96, "hidden_size": 12_288, "intermediate_size": 32_768, "num_layers": 96,
        "num_heads": 96,
    },
}  # fmt: skip


class Row(NamedTuple):
    """One published training. samples, at_once: samples of a data rank in a step, and in a microbatch. gib: the most that
    torch's allocator reserved. seconds: of a step. tflops: of a rank, if only they are published.
    compiled: torch.compile fuses the operators that are no matmuls. titan: whether it is torchtitan's program of December 2024.
    """

    name: str
    model: str
    dims: dict[str, int]
    device: str
    samples: int
    at_once: int
    recompute: bool | str
    gib: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    tokens: int = 8192
    options: dict[str, Any] | None = None
    compiled: bool = False
    float8: bool = False
    titan: bool = True


def _rate(samples: int, tokens: int, ranks: int, rate: float) -> float:
    """Seconds of a step of a data rank of `ranks` GPUs at a published number of tokens a second and GPU."""
    return samples * tokens / ranks / rate


_FULL, _OPS = True, "selective"
_SEQUENCE: Final = {"sequence_parallel": True}
_INTERLEAVED: Final = {**_SEQUENCE, "schedule": "interleaved_1f1b"}
_PP8: Final = {"pp": 8, "fsdp": 8, "tp": 8}
# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3, 4, 5, and docs/performance.md (A100). Grattafiori et al. 2024,
# table 4. Korthikanti et al. 2022, table 5. DeepSeek-AI 2024, section 1: 180,000 GPU hours for 10^12 tokens.
ROWS: Final = [
    Row("8B, 8 H100", "8B", {"fsdp": 8}, "H100 96 GB", 2, 2, _OPS, 82.4, _rate(2, 8192, 1, 5762)),
    Row("8B, 8 H100, compiled", "8B", {"fsdp": 8}, "H100 96 GB", 2, 2, _OPS, 77.0, _rate(2, 8192, 1, 6667), compiled=True),
    Row("8B, 128 H100", "8B", {"fsdp": 128}, "H100 96 GB", 2, 2, _OPS, 67.0, _rate(2, 8192, 1, 5605)),
    Row("8B, 128 H100, compiled", "8B", {"fsdp": 128}, "H100 96 GB", 2, 2, _OPS, 62.0, _rate(2, 8192, 1, 6514), compiled=True),
    Row(
        "70B, fsdp32 tp8, compiled, float8", "70B", {"fsdp": 32, "tp": 8}, "H100 96 GB", 16, 16, _FULL, 71.9,
        _rate(16, 8192, 8, 829), options=_SEQUENCE, compiled=True, float8=True,
    ),
    Row(
        "405B, pp8 fsdp8 tp8, 1F1B, compiled, float8", "405B", _PP8, "H100 96 GB", 32, 4, _FULL, 82.5, _rate(32, 8192, 64, 100),
        options=_SEQUENCE, compiled=True, float8=True,
    ),
    Row(
        "405B, the same, interleaved", "405B", _PP8, "H100 96 GB", 32, 4, _FULL, 72.7, _rate(32, 8192, 64, 128),
        options={**_INTERLEAVED, "stages_per_rank": 2}, compiled=True, float8=True,
    ),
    Row("8B, 64 A100", "8B", {"fsdp": 64}, "A100", 1, 1, _OPS, None, _rate(1, 8192, 1, 2973)),
    Row("70B, 64 A100", "70B", {"fsdp": 64}, "A100", 1, 1, _FULL, None, _rate(1, 8192, 1, 331)),
    Row("Llama 2 13B, 64 A100", "Llama 2 13B", {"fsdp": 64}, "A100", 2, 2, False, None, _rate(2, 4096, 1, 2162), tokens=4096),
    Row(
        "GPT-3 175B, pp8 tp8, 64 A100", "GPT-3 175B", {"pp": 8, "dp": 1, "tp": 8}, "A100", 64, 1, _OPS, None, 13.75,
        tokens=2048, options={**_INTERLEAVED, "stages_per_rank": 3}, compiled=True, titan=False,
    ),
    Row(
        "405B, pp16 dp128 tp8, 16,384 H100", "405B", {"fsdp": 128, "pp": 16, "tp": 8}, "H100", 16, 1, False, None, tflops=400,
        options={**_INTERLEAVED, "stages_per_rank": 4}, compiled=True, titan=False,
    ),
    Row(
        "DeepSeek-V3, pp16 ep64, 2,048 H800", "configs/published/deepseek_v3.toml", {}, "H800", 120, 1, _FULL, None,
        15_360 * 4096 / 1e12 * 180_000 * 3600 / 2048, tokens=4096, compiled=True, titan=False,
    ),
]  # fmt: skip
_PARTS: Final = {"fsdp": "shard", "dp": "data", "tp": "tensor", "pp": "pipeline"}


def config_of(row: Row) -> Config:
    """Return a row's training as a configuration."""
    if row.model.endswith(".toml"):
        return load_config(row.model, [f"topology.tflops={DEVICES[row.device].matmul}"])
    device, model = DEVICES[row.device], MODELS[row.model]
    options = {"options": row.options} if row.options else {}
    copies = row.dims.get("fsdp", 1) * row.dims.get("dp", 1)
    data: dict[str, Any] = {
        "mesh": {"dims": row.dims, "device": "cuda"},
        "topology": {
            "ranks_per_node": 8,
            "links": {
                "node": {"latency_us": 2.0, "bandwidth_gbytes_s": device.node},
                "network": {"latency_us": 10.0, "bandwidth_gbytes_s": device.network},
            },
            "tflops": device.matmul,
        },
        "parallel": {**options, **{_PARTS[dim]: dim for dim in row.dims}},
        "model": model,
        "data": {"seq_len": row.tokens},
        "train": {
            "steps": 1,
            "global_batch_size": copies * row.samples,
            "micro_batch_size": row.at_once,
            "compute_dtype": "bfloat16",
            "activation_checkpointing": row.recompute,
        },
    }
    if not row.compiled:
        data["topology"]["memory_bandwidth_gbytes_s"] = device.memory
    config = load_config(data)
    if row.float8:
        assert config.model is not None and device.float8 is not None
        # The linear layers of blocks, but neither attention nor the head.
        costs, attention = (
            part_costs(config.model, row.tokens),
            sum(attention_costs(config.model, row.tokens)),
        )
        linear, rest = sum(costs.layers) - attention, attention + costs.head
        tflops = (linear + rest) / (linear / device.float8 + rest / device.matmul)
        config = load_config(data, [f"topology.tflops={tflops:.1f}"])
    return config


class LossParallel(torch.autograd.Function):
    """The operators of torch.distributed.tensor.parallel.loss_parallel on this rank's logits, in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, counted: Tensor, split: Any, *_: float) -> Tensor:
        """Return the sum of the losses."""
        x = logits.flatten(0, -2).float()
        shifted = x - split.mesh.all_reduce(split.dim, x.amax(-1, keepdim=True), op="max")
        total = split.mesh.all_reduce(split.dim, shifted.exp().sum(-1, keepdim=True))
        result = shifted - total.log()
        place = targets.reshape(-1, 1) % result.shape[-1]
        ctx.save_for_backward(result, place)
        ctx.shape = logits.shape
        loss: Tensor = -split.mesh.all_reduce(split.dim, result.gather(-1, place)).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of the logits."""
        result, place = ctx.saved_tensors
        target = torch.zeros_like(result).scatter_(-1, place, -1.0)
        gradient = (target + result.exp()) * grad
        return gradient.to(torch.bfloat16).view(ctx.shape), None, None, None, None, None


@contextmanager
def as_torchtitan() -> Iterator[None]:
    """Compute as torchtitan did in December 2024 (commit 9dec370): the loss of all tokens at once, in float32; "selective"
    recomputes every second matmul of a block (train.py, parallelize_llama.py).
    """

    def contexts() -> Any:
        numbers: Counter[bool] = Counter()

        def policy(context: Any, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:
            if op is torch.ops.aten.mm.default:
                numbers[context.is_recompute] += 1
                if numbers[context.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return recompute._policy(context, op, *args, **more)

        first, again = create_selective_checkpoint_contexts(policy)
        return recompute._Region(first, False), recompute._Region(again, True)

    with ExitStack() as patches:
        patches.enter_context(patch.object(layers, "_FEW", sys.maxsize))
        patches.enter_context(patch.object(layers, "_CrossEntropy", LossParallel))
        patches.enter_context(patch.object(recompute, "_contexts", contexts))
        yield


def step_of(config: Config, titan: bool, rank: int, world: int) -> RankStep:
    """Return the step of one rank."""
    with as_torchtitan() if titan else ExitStack():
        return pretended_step(config, rank, world)


@cache
def ran(settings: str, titan: bool) -> World:
    """Dry-run one rank of each stage. settings: a configuration without speeds, as JSON."""
    config = load_config(json.loads(settings))
    world = prod(config.mesh.dims.values())
    assert config.parallel is not None
    layout, pipeline = config.plan(world).layout, config.parallel.pipeline
    first = layout.rank_of(0)
    ranks = [first] if pipeline is None else sorted(map(int, layout.group_of(first, pipeline)))
    return dry_world(partial(step_of, config.resolved(world), titan), layout, pipeline, ranks)


def predicted(config: Config, titan: bool) -> dict[str, Any]:
    """Return the bytes of the rank that needs the most, and the times of the rank that ends last."""
    settings = config.model_dump(exclude_unset=True, mode="json", exclude={"topology"})
    world = ran(json.dumps(settings), titan)
    world = world._replace(replay=priced(config.topology)([*world.steps.values()], str))
    facts = dry_facts(world, config.resolved(world.layout.world_size), config.topology, 0.0)
    stages, step = facts["memory"]["stages"], facts["step"]
    return {
        "peak": max(stage["peak_bytes"] for stage in stages),
        "reserved": max(stage["reserved_bytes"] for stage in stages),
        "exposed": {dim: s for dim, s in step["exposed_s"].items() if s > 0.01 * step["seconds"]},
        "late": sum(step["late_s"].values()),
        **{name: step[name] for name in ("seconds", "compute_s", "tflops")},
    }


def compared(row: Row) -> dict[str, Any]:
    """Return a row's published and predicted figures."""
    config = config_of(row)
    as_theirs = predicted(config, row.titan)
    as_ours = predicted(config, False) if row.gib else as_theirs
    seconds = row.seconds or as_theirs["seconds"] * as_theirs["tflops"] / (row.tflops or 1)
    return {"row": row, "ours": as_ours, "theirs": as_theirs, "seconds": seconds}


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f}"


def memory_table(found: list[dict[str, Any]]) -> str:
    """Return the table of memory, in GB."""
    return markdown(
        {
            "memory in GB": lambda each: each["row"].name,
            "tensors of meshcomm": lambda each: _gb(each["ours"]["peak"]),
            "with torchtitan's loss and recomputation": lambda each: _gb(each["theirs"]["peak"]),
            "reserved": lambda each: _gb(each["theirs"]["reserved"]),
            "published, reserved": lambda each: _gb(each["row"].gib * 2**30),
            "predicted / published": lambda each: (
                f"{each['theirs']['reserved'] / each['row'].gib / 2**30:.2f}"
            ),
        },
        [each for each in found if each["row"].gib],
    )


def time_table(found: list[dict[str, Any]]) -> str:
    """Return the table of times."""

    def exposed(each: dict[str, Any]) -> str:
        parts = [f"{dim} {seconds_text(seconds)}" for dim, seconds in each["theirs"]["exposed"].items()]
        return ", ".join(parts) or "0"

    return markdown(
        {
            "a step": lambda each: each["row"].name,
            "compute": lambda each: seconds_text(each["theirs"]["compute_s"]),
            "exposed": exposed,
            "until others arrive": lambda each: seconds_text(each["theirs"]["late"]),
            "predicted": lambda each: seconds_text(each["theirs"]["seconds"]),
            "published": lambda each: seconds_text(each["seconds"]),
            "predicted / published": lambda each: f"{each['theirs']['seconds'] / each['seconds']:.2f}",
        },
        found,
    )


def main(words: list[str]) -> None:
    """Print both tables."""
    chosen = [row for row in ROWS if not words or any(word in row.name for word in words)]
    found = []
    for row in chosen:
        found.append(compared(row))
        print(row.name, found[-1], file=sys.stderr, flush=True)
    print(memory_table(found), time_table(found), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
