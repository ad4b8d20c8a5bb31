"""Meshes whose training must be that of one process, and the bases that they change."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "mesh": {"dims": {"dp": 8}, "device": "cpu", "timeout_s": 60.0, "reports": ""},
    "parallel": {"data": "dp"},
    "model": {"layers": 4, "width": 32, "heads": 8, "kv_heads": 4, "ff": 48, "dropout": 0.1},
    "data": {"sequence": 32, "max_bytes": 200_000},
    "train": {
        "steps": 20,
        "global_batch": 16,
        "microbatch": 1,
        "warmup_steps": 2,
        "dtype": "float64",
        "clip_norm": 1.0,
    },
}

_EXPERTS = {"experts": 8, "experts_per_token": 2, "experts_every": 2, "balance_loss": 0.02}


def _case(dims: dict[str, int], parallel: dict[str, Any], views: Any = None, **model: Any) -> dict[str, Any]:
    """BASE with other dims and parts; keyword arguments change [model], or [train] where it has them."""
    mesh = {**BASE["mesh"], "dims": dims, **({} if views is None else {"views": views})}
    train = {key: model.pop(key) for key in ("recompute", "compile", "microbatch") if key in model}
    return {
        **BASE,
        "mesh": mesh,
        "parallel": parallel,
        "model": {**BASE["model"], **model},
        "train": {**BASE["train"], **train},
    }


_3D = {"data": "dp", "tensor": "tp", "pipeline": "pp"}
_CP = {"data": "dp", "tensor": "tp", "context": "cp"}

CASES: dict[str, dict[str, Any]] = {
    "dp8": _case({"dp": 8}, {"data": "dp"}),
    "tp8": _case({"tp": 8}, {"tensor": "tp"}, kv_heads=8, microbatch=4),
    "dp2 tp4": _case({"dp": 2, "tp": 4}, {"data": "dp", "tensor": "tp"}, microbatch=2),
    "dp2 tp4 sequence": _case(
        {"dp": 2, "tp": 4}, {"data": "dp", "tensor": "tp", "sequence_parallel": True}, microbatch=2
    ),
    "pp2 dp2 tp2": _case({"pp": 2, "dp": 2, "tp": 2}, _3D),
    "pp2 dp2 tp2 gpipe": _case({"pp": 2, "dp": 2, "tp": 2}, {**_3D, "schedule": "gpipe"}),
    "pp2 dp2 tp2 sequence recompute": _case(
        {"pp": 2, "dp": 2, "tp": 2}, {**_3D, "sequence_parallel": True}, recompute=True
    ),
    "pp2 dp2 tp2 zero bubble": _case(
        {"pp": 2, "dp": 2, "tp": 2}, {**_3D, "schedule": "zero_bubble", "stages_per_rank": 2}
    ),
    "pp4 dp2 interleaved": _case(
        {"pp": 4, "dp": 2},
        {"data": "dp", "pipeline": "pp", "schedule": "interleaved_1f1b", "stages_per_rank": 2},
        layers=8,
    ),
    "pp4 tp2": _case({"pp": 4, "tp": 2}, {"pipeline": "pp", "tensor": "tp"}, microbatch=2),
    "pp2 dp4 tied": _case({"pp": 2, "dp": 4}, {"data": "dp", "pipeline": "pp"}, tied_embeddings=True),
    "dp4 tp2 tied": _case({"dp": 4, "tp": 2}, {"data": "dp", "tensor": "tp"}, tied_embeddings=True),
    "cp2 dp2 tp2": _case({"dp": 2, "cp": 2, "tp": 2}, _CP, microbatch=2),
    "cp2 dp2 tp2 sequence": _case(
        {"dp": 2, "cp": 2, "tp": 2}, {**_CP, "sequence_parallel": True}, microbatch=2
    ),
    "pp2 cp2 tp2": _case({"pp": 2, "cp": 2, "tp": 2}, {"pipeline": "pp", "context": "cp", "tensor": "tp"}),
    "cp4 tp2 ulysses": _case(
        {"cp": 4, "tp": 2}, {"context": "cp", "tensor": "tp", "attention": "ulysses"}, microbatch=4
    ),
    "cp8 ring": _case({"cp": 8}, {"context": "cp"}, microbatch=4),
    "dp4 cp2 ulysses": _case({"dp": 4, "cp": 2}, {"data": "dp", "context": "cp", "attention": "ulysses"}),
    "shard4 tp2": _case({"fsdp": 4, "tp": 2}, {"shard": "fsdp", "tensor": "tp"}),
    "shard8": _case({"fsdp": 8}, {"shard": "fsdp"}),
    "hsdp 2x2 tp2": _case({"dp": 2, "fsdp": 2, "tp": 2}, {"data": "dp", "shard": "fsdp", "tensor": "tp"}),
    "pp2 shard2 tp2": _case(
        {"pp": 2, "fsdp": 2, "tp": 2}, {"pipeline": "pp", "shard": "fsdp", "tensor": "tp"}
    ),
    "pp2 shard2 tp2 tied": _case(
        {"pp": 2, "fsdp": 2, "tp": 2},
        {"pipeline": "pp", "shard": "fsdp", "tensor": "tp"},
        tied_embeddings=True,
    ),
    "shard2 cp2 tp2": _case(
        {"fsdp": 2, "cp": 2, "tp": 2}, {"shard": "fsdp", "context": "cp", "tensor": "tp"}
    ),
    "ep4 edp2": _case({"dp": 8}, {"data": "dp", "expert": "ep"}, {"expert": {"edp": 2, "ep": 4}}, **_EXPERTS),
    "ep8 capacity": _case(
        {"dp": 8},
        {"data": "dp", "expert": "ep"},
        {"expert": {"edp": 1, "ep": 8}},
        **_EXPERTS,
        capacity_factor=1.0,
    ),
    "pp2 ep2 tp2": _case(
        {"pp": 2, "dp": 2, "tp": 2},
        {**_3D, "expert": "ep"},
        {"expert": {"pp": 2, "edp": 1, "ep": 2, "tp": 2}},
        **_EXPERTS,
    ),
    "dp2 cp2 tp2 ep4": _case(
        {"dp": 2, "cp": 2, "tp": 2},
        {**_CP, "expert": "ep"},
        {"expert": {"edp": 1, "ep": 4, "tp": 2}},
        **_EXPERTS,
    ),
    "hsdp 2x4 ep2": _case(
        {"dp": 2, "fsdp": 4},
        {"data": "dp", "shard": "fsdp", "expert": "ep"},
        {"expert": {"copies": 2, "edp": 2, "ep": 2}},
        **_EXPERTS,
    ),
    "shard8 ep4": _case(
        {"fsdp": 8}, {"shard": "fsdp", "expert": "ep"}, {"expert": {"edp": 2, "ep": 4}}, **_EXPERTS
    ),
    "pp2 shard4 ep2 interleaved": _case(
        {"pp": 2, "fsdp": 4},
        {
            "pipeline": "pp",
            "shard": "fsdp",
            "expert": "ep",
            "schedule": "interleaved_1f1b",
            "stages_per_rank": 2,
        },
        {"expert": {"pp": 2, "edp": 2, "ep": 2}},
        **_EXPERTS,
    ),
    "shard4 tp2 ep2 sequence recompute": _case(
        {"fsdp": 4, "tp": 2},
        {"shard": "fsdp", "tensor": "tp", "expert": "ep", "sequence_parallel": True},
        {"expert": {"edp": 2, "ep": 2, "tp": 2}},
        **{**_EXPERTS, "experts": 2},
        recompute=True,
    ),
    "shard2 cp2 tp2 ep2": _case(
        {"fsdp": 2, "cp": 2, "tp": 2},
        {"shard": "fsdp", "context": "cp", "tensor": "tp", "expert": "ep"},
        {"expert": {"edp": 2, "ep": 2, "tp": 2}},
        **_EXPERTS,
    ),
    "shard8 ep8 capacity": _case(
        {"fsdp": 8},
        {"shard": "fsdp", "expert": "ep"},
        {"expert": {"ep": 8}},
        **_EXPERTS,
        capacity_factor=1.0,
    ),
    "dp4 tp2 experts everywhere": _case({"dp": 4, "tp": 2}, {"data": "dp", "tensor": "tp"}, **_EXPERTS),
}

# What every run trains, on 4 processes: each part that needs torch's groups, a pipeline and shards, with each other
# part. The simulator has the other pairs, tests/train/test_random_configs.py.
SMALL: dict[str, Any] = {
    **BASE,
    "model": {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "ff": 24, "dropout": 0.1},
    "data": {"sequence": 16, "max_bytes": 50_000},
    "train": {**BASE["train"], "steps": 3, "global_batch": 4, "warmup_steps": 1},
}


_MODEL = ("layers", "tied_embeddings", "capacity_factor")


def small(
    dims: dict[str, int], views: Any = None, *, experts: bool = False, **parallel: Any
) -> dict[str, Any]:
    """SMALL with other dims and parts; keyword arguments are [parallel], or [train] and [model] where these have them."""
    mesh = {**BASE["mesh"], "dims": dims, **({} if views is None else {"views": views})}
    train = {key: parallel.pop(key) for key in ("recompute",) if key in parallel}
    model = {key: parallel.pop(key) for key in _MODEL if key in parallel}
    return {
        **SMALL,
        "mesh": mesh,
        "parallel": parallel,
        "model": {**SMALL["model"], **model, **({**_EXPERTS, "experts": 4} if experts else {})},
        "train": {**SMALL["train"], **train},
    }


PAIRS: dict[str, dict[str, Any]] = {
    "pp2 dp2 interleaved tied": small(
        {"pp": 2, "dp": 2},
        data="dp",
        pipeline="pp",
        schedule="interleaved_1f1b",
        stages_per_rank=2,
        layers=4,
        tied_embeddings=True,
    ),
    "pp2 tp2 sequence recompute": small(
        {"tp": 2, "pp": 2}, pipeline="pp", tensor="tp", sequence_parallel=True, recompute=True, layers=3
    ),
    "pp2 cp2": small({"pp": 2, "cp": 2}, pipeline="pp", context="cp"),
    "pp2 ep2": small(
        {"pp": 2, "dp": 2},
        {"expert": {"pp": 2, "edp": 1, "ep": 2}},
        experts=True,
        data="dp",
        pipeline="pp",
        expert="ep",
    ),
    "dp2 shard2": small({"dp": 2, "fsdp": 2}, data="dp", shard="fsdp"),
    "shard2 tp2": small({"fsdp": 2, "tp": 2}, shard="fsdp", tensor="tp"),
    "shard4 ep2": small(
        {"fsdp": 4}, {"expert": {"edp": 2, "ep": 2}}, experts=True, shard="fsdp", expert="ep"
    ),
    "shard4 ep4 capacity": small(
        {"fsdp": 4}, {"expert": {"ep": 4}}, experts=True, shard="fsdp", expert="ep", capacity_factor=1.0
    ),
    "pp2 shard2 ep1": small(
        {"pp": 2, "fsdp": 2},
        {"expert": {"pp": 2, "edp": 2, "ep": 1}},
        experts=True,
        pipeline="pp",
        shard="fsdp",
        expert="ep",
        reshard=True,
    ),
    "shard2 cp2 ulysses": small({"fsdp": 2, "cp": 2}, shard="fsdp", context="cp", attention="ulysses"),
}

# Ranks in disorder, the inner dim outside, uneven stages, all microbatches in flight.
PAIRS["pp2 tp2 sequence recompute"]["mesh"]["rank_order"] = [3, 1, 0, 2]
PAIRS["pp2 tp2 sequence recompute"]["parallel"]["schedule"] = "gpipe"
