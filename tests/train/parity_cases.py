"""Meshes that must train like one process, and the configurations that they change."""

from __future__ import annotations

from typing import Any

from tests.sizes import model_of, train_of
from tests.train.runs import parallel_of, roles_of, sizes_of

BASE: dict[str, Any] = {
    "mesh": {"dims": {"dp": 8}, "device": "cpu", "timeout_s": 60.0, "reports": ""},
    "parallel": {"data": "dp"},
    "model": model_of(4, 32, 8, 4, 48, dropout=0.1),
    "data": {"seq_len": 32, "max_bytes": 200_000},
    "train": train_of(20, 16, 1, warmup_steps=2, dtype="float64", clip_norm=1.0),
}
# Every run trains these on 4 processes: each part that needs torch's groups, a pipeline and shards, with each other
# part. tests/train/test_random_configs.py trains the other pairs in the simulator.
SMALL: dict[str, Any] = {
    **BASE,
    "model": model_of(2, 16, 4, 2, 24, dropout=0.1),
    "data": {"seq_len": 16, "max_bytes": 50_000},
    "train": {**BASE["train"], "steps": 3, "global_batch_size": 4, "warmup_steps": 1},
}
_EXPERTS = {"experts": 8, "experts_per_token": 2, "experts_every": 2, "balance_loss": 0.02}
_MODEL = ("num_layers", "num_kv_heads", "tied_embeddings", "capacity_factor")
_TRAIN = ("activation_checkpointing", "compile", "micro_batch_size")


def case(dims: str, view: str = "", *, base: Any = BASE, experts: int = 0, **settings: Any) -> dict[str, Any]:
    """`base` on other dims, such as "pp=2 dp=4", each with its role.

    view: the dims of a view with the experts' dim, ep. settings: of [model], [train] or [parallel].
    """
    sizes = sizes_of(dims)
    mesh = {**BASE["mesh"], "dims": sizes, **({"views": {"expert": sizes_of(view)}} if view else {})}
    parallel = roles_of(sizes) | ({"expert": "ep"} if view else {})
    model = {**base["model"], **({**_EXPERTS, "experts": experts} if experts else {})}
    train = dict(base["train"])
    for key, value in settings.items():
        (model if key in _MODEL else train if key in _TRAIN else parallel)[key] = value
    return {**base, "mesh": mesh, "parallel": parallel_of(**parallel), "model": model, "train": train}


def small(dims: str, view: str = "", **settings: Any) -> dict[str, Any]:
    """Like `case`, with SMALL as the base. With a view, there are four experts."""
    return case(dims, view, base=SMALL, experts=4 if view else 0, **settings)


CASES: dict[str, dict[str, Any]] = {
    "dp8": case("dp=8"),
    "tp8": case("tp=8", num_kv_heads=8, micro_batch_size=4),
    "dp2 tp4": case("dp=2 tp=4", micro_batch_size=2),
    "dp2 tp4 sequence": case("dp=2 tp=4", sequence_parallel=True, micro_batch_size=2),
    "pp2 dp2 tp2": case("pp=2 dp=2 tp=2"),
    "pp2 dp2 tp2 gpipe": case("pp=2 dp=2 tp=2", schedule="gpipe"),
    "pp2 dp2 tp2 sequence recompute": case(
        "pp=2 dp=2 tp=2", sequence_parallel=True, activation_checkpointing=True
    ),
    "pp2 dp2 tp2 zero bubble": case("pp=2 dp=2 tp=2", schedule="zero_bubble", stages_per_rank=2),
    "pp4 dp2 interleaved": case("pp=4 dp=2", schedule="interleaved_1f1b", stages_per_rank=2, num_layers=8),
    "pp4 tp2": case("pp=4 tp=2", micro_batch_size=2),
    "pp2 dp4 tied": case("pp=2 dp=4", tied_embeddings=True),
    "dp4 tp2 tied": case("dp=4 tp=2", tied_embeddings=True),
    "cp2 dp2 tp2": case("dp=2 cp=2 tp=2", micro_batch_size=2),
    "cp2 dp2 tp2 sequence": case("dp=2 cp=2 tp=2", sequence_parallel=True, micro_batch_size=2),
    "pp2 cp2 tp2": case("pp=2 cp=2 tp=2"),
    "cp4 tp2 ulysses": case("cp=4 tp=2", attention="ulysses", micro_batch_size=4),
    "cp8 ring": case("cp=8", micro_batch_size=4),
    "dp4 cp2 ulysses": case("dp=4 cp=2", attention="ulysses"),
    "shard4 tp2": case("fsdp=4 tp=2"),
    "shard8": case("fsdp=8"),
    "hsdp 2x2 tp2": case("dp=2 fsdp=2 tp=2"),
    "pp2 shard2 tp2": case("pp=2 fsdp=2 tp=2"),
    "pp2 shard2 tp2 tied": case("pp=2 fsdp=2 tp=2", tied_embeddings=True),
    "shard2 cp2 tp2": case("fsdp=2 cp=2 tp=2"),
    "ep4 edp2": case("dp=8", "edp=2 ep=4", experts=8),
    "ep8 capacity": case("dp=8", "edp=1 ep=8", experts=8, capacity_factor=1.0),
    "pp2 ep2 tp2": case("pp=2 dp=2 tp=2", "pp=2 edp=1 ep=2 tp=2", experts=8),
    "dp2 cp2 tp2 ep4": case("dp=2 cp=2 tp=2", "edp=1 ep=4 tp=2", experts=8),
    "hsdp 2x4 ep2": case("dp=2 fsdp=4", "copies=2 edp=2 ep=2", experts=8),
    "shard8 ep4": case("fsdp=8", "edp=2 ep=4", experts=8),
    "pp2 shard4 ep2 interleaved": case(
        "pp=2 fsdp=4", "pp=2 edp=2 ep=2", experts=8, schedule="interleaved_1f1b", stages_per_rank=2
    ),
    "shard4 tp2 ep2 sequence recompute": case(
        "fsdp=4 tp=2", "edp=2 ep=2 tp=2", experts=2, sequence_parallel=True, activation_checkpointing=True
    ),
    "shard2 cp2 tp2 ep2": case("fsdp=2 cp=2 tp=2", "edp=2 ep=2 tp=2", experts=8),
    "shard8 ep8 capacity": case("fsdp=8", "ep=8", experts=8, capacity_factor=1.0),
    "dp4 tp2 experts everywhere": case("dp=4 tp=2", experts=8),
}
PAIRS: dict[str, dict[str, Any]] = {
    "pp2 dp2 interleaved tied": small(
        "pp=2 dp=2", schedule="interleaved_1f1b", stages_per_rank=2, num_layers=4, tied_embeddings=True
    ),
    # All microbatches in flight, uneven stages, and the inner dim outside; below, permuted ranks.
    "pp2 tp2 sequence recompute": small(
        "tp=2 pp=2", sequence_parallel=True, activation_checkpointing=True, num_layers=3, schedule="gpipe"
    ),
    "pp2 cp2": small("pp=2 cp=2"),
    "pp2 ep2": small("pp=2 dp=2", "pp=2 edp=1 ep=2"),
    "dp2 shard2": small("dp=2 fsdp=2"),
    "shard2 tp2": small("fsdp=2 tp=2"),
    "shard4 ep2": small("fsdp=4", "edp=2 ep=2"),
    "shard4 ep4 capacity": small("fsdp=4", "ep=4", capacity_factor=1.0),
    "pp2 shard2 ep1": small("pp=2 fsdp=2", "pp=2 edp=2 ep=1", reshard=True),
    "shard2 cp2 ulysses": small("fsdp=2 cp=2", attention="ulysses"),
}
PAIRS["pp2 tp2 sequence recompute"]["mesh"]["rank_order"] = [3, 1, 0, 2]
