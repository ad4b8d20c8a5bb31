"""Meshes of 8 ranks whose training must be that of one process, and the base that they change."""

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
    "dp4 tp2 experts everywhere": _case({"dp": 4, "tp": 2}, {"data": "dp", "tensor": "tp"}, **_EXPERTS),
}
