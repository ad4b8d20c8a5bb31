"""Creates the training configuration of a transformers model from its config.json and a few sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from meshcomm.config.parallel import USUAL_NAMES
from meshcomm.config.pretrained import dropouts_of, read, sizes_of
from meshcomm.errors import ConfigError

PARTS: Final = {name: USUAL_NAMES[name] for name in ("pp", "dp", "fsdp", "cp", "tp")}
"""The role of each dim, by name. `ep`, the dim along which experts are distributed, is also allowed."""

TOPOLOGY: Final[dict[str, Any]] = {
    "ranks_per_node": 8,
    "links": {
        "node": {"latency_us": 2.0, "bandwidth_gbytes_s": 300.0},
        "network": {"latency_us": 10.0, "bandwidth_gbytes_s": 50.0},
    },
    "tflops": 400,
    "memory_gbytes": 80,
}
"""Nodes with eight GPUs such as the H100 and one network card per GPU, at 400 of the H100's 989 bfloat16 TFLOPS."""

_EXAMPLE: Final = "--dims pp=16,fsdp=64,tp=8,ep=64"


def is_of_model(path: Path) -> bool:
    """Return whether the file is a model's config.json rather than a meshcomm configuration."""
    with suppress(OSError, ValueError):
        return path.suffix == ".json" and "model_type" in read(path)
    return False


def training_of(path: Path, dims: str) -> dict[str, Any]:
    """Return a configuration with the nodes of TOPOLOGY, bfloat16, activation checkpointing, samples of 4,096 tokens, and
    two microbatches per stage.

    path: a config.json. dims: for example "pp=16,fsdp=64,tp=8,ep=64"; ep must divide the number of ranks left
    after pp and tp.
    Raises ConfigError if `dims` is invalid or ep does not divide that number.
    """
    sizes = _sizes(dims)
    spread = sizes.pop("ep", 1)
    fixed = {name: sizes[name] for name in ("pp", "tp") if name in sizes}
    ranks_left = math.prod(sizes.values()) // math.prod(fixed.values())
    if path.name != "config.json" or ranks_left % spread:
        raise ConfigError(
            "experts cannot be distributed over these ranks"
            if ranks_left % spread
            else "this is not a model folder",
            given=f"{dims}: {ranks_left} ranks left after pp and tp, ep={spread}"
            if ranks_left % spread
            else str(path),
            expected="an ep that divides these ranks" if ranks_left % spread else "a file named config.json",
            hint=_EXAMPLE,
        )
    parallel: dict[str, Any] = {PARTS[name]: name for name in sizes}
    mesh: dict[str, Any] = {"dims": sizes, "device": "cuda"}
    if "tp" in sizes:
        parallel["options"] = {"sequence_parallel": True}
    if spread > 1:
        pair = {"edp": ranks_left // spread, "ep": spread}
        mesh["views"] = {"expert": expert_view(sizes, {*sizes} - {*fixed}, pair)}
        parallel["expert"] = "ep"
    copies = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    model: dict[str, Any] = {"pretrained": str(path.parent), "random_weights": True}
    if dropouts_of(str(path.parent)):
        model["dropout"] = 0.0
    return {
        "mesh": mesh,
        "topology": TOPOLOGY,
        "parallel": parallel,
        "model": model,
        "data": {"seq_len": 4096},
        "train": {
            "steps": 1,
            "global_batch_size": copies * 2 * sizes.get("pp", 1),
            "micro_batch_size": 1,
            "compute_dtype": "bfloat16",
            "activation_checkpointing": True,
        },
    }


def placed_on(path: Path, world: int) -> dict[str, Any]:
    """Return the configuration for which `tune` compares meshes of `world` ranks. Its dims are pp, fsdp, tp and, for
    experts, ep. Each step has two samples per rank. path: a config.json.
    """
    spread = ",ep=2" if world % 2 == 0 and sizes_of(path.parent).get("experts") else ""
    return training_of(path, f"pp=1,fsdp={world},tp=1{spread}")


def expert_view(dims: Mapping[str, int], block: Collection[str], pair: Mapping[str, int]) -> dict[str, int]:
    """Return the view that factors the ranks along the adjacent dims in `block` into `pair`: copies and experts."""
    inside = [dim for dim in block if dims.get(dim, 1) > 1]
    view: dict[str, int] = {}
    for dim, size in dims.items():
        if dim in inside:
            view |= pair
        elif dim not in block:
            view[dim] = size
    return view if inside else {**pair, **view}


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for pair in filter(None, (text_of_pair.strip() for text_of_pair in text.split(","))):
        name, _, size = pair.partition("=")
        if name not in (*PARTS, "ep") or not size.isdecimal() or not int(size) or name in sizes:
            raise ConfigError(
                f"{pair} is not a dim of a model's mesh",
                given=f"--dims {text}",
                expected=f"sizes of {', '.join((*PARTS, 'ep'))}, each once",
                hint=_EXAMPLE,
            )
        sizes[name] = int(size)
    return sizes or {"dp": 1}
