"""Random training configurations by seed: valid ones, and ones with some settings changed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

from tests.train.runs import parallel_of

Raw = dict[str, Any]

SIMULATED = ("data", "tensor", "context")
PARTS = ("data", "shard", "tensor", "pipeline", "context")
# Names of other parts, names that einops patterns use, letters beyond ASCII, and a name that joins
# two others.
_NAMES = ("dp", "fsdp", "tp", "pp", "cp", "data", "b", "h", "s", "d", "x", "model", "rank", "a1")
_ODD_NAMES = ("größe", "δ", "T", "expert", "one", "two", "one_two")


def right(seed: int, parts: Iterable[str] = PARTS, *, must: Iterable[str] = (), most: int = 8) -> Raw:
    """A configuration that trains for a few steps in float64 on a mesh of 2 to `most` ranks.

    parts: the parts that it may play. must: the parts that it plays, each along 2 ranks or more.
    """
    chance = random.Random(f"right {seed}")
    needed, all_parts = list(must), list(parts)
    drawn = chance.sample(all_parts, chance.randint(1, min(4, len(all_parts))))
    played = list(dict.fromkeys([*needed, *drawn]))
    size = _sizes(chance, played, needed, most)
    names = chance.sample([*_NAMES, *_ODD_NAMES], len(played) + 1)
    dim = dict(zip(played, names, strict=False))
    order = chance.sample(played, len(played))
    dims = [(dim[part], size[part]) for part in order]
    if chance.random() < 0.2:
        dims.insert(chance.randint(0, len(dims)), (names[-1], 1))
    mesh: Raw = {"dims": dict(dims), "device": "cpu", "timeout_s": 60.0, "reports": ""}
    parallel: Raw = {part: dim[part] for part in played}
    of = {part: size.get(part, 1) for part in PARTS}
    _attention(chance, parallel, of)
    micro = _pipeline(chance, parallel, of)
    model = _model(chance, parallel, of)
    _experts(chance, mesh, parallel, model)
    _names(chance, mesh)
    sequence = _sequence(chance, parallel, of)
    each = chance.choice([1, 1, 2, 3])
    train = _train(chance)
    train |= {"global_batch_size": of["data"] * of["shard"] * micro * each, "micro_batch_size": each}
    if {"data", "context"} & set(played) and "shard" not in played and chance.random() < 0.3:
        parallel["bucket_mb"] = chance.choice([1e-5, 1e-3, 0.01, 100])
    data: Raw = {"seq_len": sequence, "max_bytes": chance.choice([sequence + 1, sequence + 500, 20_000])}
    return {"mesh": mesh, "parallel": parallel_of(**parallel), "model": model, "data": data, "train": train}


def changed(seed: int) -> Raw:
    """`right`, with some settings changed to values that may or may not fit."""
    chance = random.Random(f"changed {seed}")
    raw = right(seed)
    dims, mesh, parallel = raw["mesh"]["dims"], raw["mesh"], raw["parallel"]
    options = parallel.setdefault("options", {})
    small = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        match chance.randrange(14):
            case 0:
                dims[chance.choice(list(dims))] = chance.choice([-2, -1, *small])
            case 1 | 2:
                numbers = [
                    "num_layers",
                    "hidden_size",
                    "num_heads",
                    "num_kv_heads",
                    "intermediate_size",
                    "experts",
                    "experts_per_token",
                ]
                raw["model"][chance.choice([*numbers, "experts_every"])] = chance.choice(small)
            case 3:
                numbers = ["steps", "global_batch_size", "micro_batch_size", "warmup_steps"]
                raw["train"][chance.choice(numbers)] = chance.choice([*small, 100])
            case 4:
                raw["data"]["seq_len"] = chance.randint(1, 40)
            case 5:
                named = [*dims, *_NAMES, *_ODD_NAMES, "merged", "flat", "v0", "v1"]
                parallel[chance.choice([*PARTS, "expert"])] = chance.choice(named)
            case 6:
                parallel.pop(chance.choice([*PARTS, "expert"]), None)
            case 7:
                orders = ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv"]
                options["schedule"] = chance.choice(orders)
            case 8:
                options["stages_per_rank"] = chance.choice([0, 1, 2, 3, 4])
            case 9:
                options["attention"] = chance.choice(["ring", "ulysses"])
            case 10:
                raw["train"]["compile"] = options["sequence_parallel"] = True
            case 11:
                mesh["rank_order"] = [chance.randint(-1, 8) for _ in range(chance.randint(0, 9))]
            case 12:
                parts = chance.choices([*dims, "v0", "zz"], k=chance.randint(0, 3))
                mesh["merge"] = {chance.choice(["m", "merged", chance.choice(list(dims))]): parts}
            case 13:
                views = mesh.setdefault("views", {"flat": {}})
                view = views[chance.choice(list(views))]
                if view and chance.random() < 0.5:
                    view.pop(chance.choice(list(view)))
                elif view:
                    view[chance.choice(list(view))] = chance.choice([-1, *small])
    return raw


def _sizes(chance: random.Random, played: list[str], needed: list[str], most: int) -> dict[str, int]:
    while True:
        found = {part: chance.choice([1, 2, 2, 3, 4]) for part in played}
        # tensor splits the 256 bytes of the vocabulary.
        if found.get("tensor") == 3 or any(found[part] == 1 for part in needed):
            continue
        if 2 <= math.prod(found.values()) <= most:
            return found


def _attention(chance: random.Random, parallel: Raw, of: Mapping[str, int]) -> None:
    if "tensor" in parallel and chance.random() < 0.5:
        parallel["sequence_parallel"] = chance.random() < 0.8
    if "context" in parallel and chance.random() < 0.6:
        parallel["attention"] = chance.choice(["ring", "ulysses"])


def _pipeline(chance: random.Random, parallel: Raw, of: Mapping[str, int]) -> int:
    """Draw the schedule, and return its number of microbatches."""
    ranks = of["pipeline"]
    if "pipeline" not in parallel:
        return chance.choice([1, 1, 2, 3, 4])
    schedule = chance.choice(["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"])
    parallel["schedule"] = schedule
    if schedule in ("interleaved_1f1b", "zero_bubble"):
        parallel["stages_per_rank"] = chance.choice([2, 2, 3])
    fits = {
        "1f1b": range(ranks, ranks + 4),
        "gpipe": range(1, 5),
        "interleaved_1f1b": range(ranks, 3 * ranks + 1, ranks),
        "zero_bubble": [n for n in range(ranks, 4 * ranks) if n % (n // ranks) == 0],
    }
    return chance.choice(list(fits[schedule]))


def _model(chance: random.Random, parallel: Raw, of: Mapping[str, int]) -> Raw:
    tensor, context = of["tensor"], of["context"]
    num_kv_heads = tensor * chance.choice([1, 1, 2])
    heads = num_kv_heads * chance.choice([1, 1, 2, 3])
    if parallel.get("attention") == "ulysses":
        mine = num_kv_heads // tensor
        if mine % context and context % mine:
            num_kv_heads = tensor
        heads = math.lcm(num_kv_heads, tensor * context) * chance.choice([1, 2])
    stages = of["pipeline"] * parallel.get("stages_per_rank", 1)
    model: Raw = {
        "num_layers": stages + chance.choice([0, 0, 1, 2]),
        "hidden_size": heads * chance.choice([2, 2, 4, 6]),
        "num_heads": heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": tensor * chance.choice([1, 3, 5, 8]),
    }
    for key, share, values in (
        ("tied_embeddings", 0.3, [True]),
        ("dropout", 0.4, [0.1, 0.5, 0.9]),
        ("rope_theta", 0.2, [1.0, 100.0, 5e5]),
        ("norm_eps", 0.2, [1e-8, 1e-3]),
    ):
        if chance.random() < share:
            model[key] = chance.choice(values)
    return model


def _experts(chance: random.Random, mesh: Raw, parallel: Raw, model: Raw) -> None:
    if chance.random() < 0.55:
        return
    model["experts"] = experts = chance.choice([1, 2, 3, 4, 6, 8])
    model["experts_per_token"] = chance.randint(1, min(3, experts))
    if chance.random() < 0.5:
        model["experts_every"] = chance.randint(1, min(2, model["num_layers"]))
    if chance.random() < 0.5:
        model["capacity_factor"] = chance.choice([0.1, 0.5, 1.0, 1.3, 8.0])
    if chance.random() < 0.5:
        model["balance_loss"] = chance.choice([0, 0.02, 1.0])
    if chance.random() < 0.25:
        return
    kept = {parallel.get("pipeline"), parallel.get("tensor")}
    view: dict[str, int] = {}
    beside = 1
    for name, size in [*mesh["dims"].items(), (None, 1)]:
        if name is not None and name not in kept:
            beside *= size
            continue
        if beside > 1 or name is None:
            for factor in _factors(chance, beside):
                view[f"v{len(view)}"] = factor
        beside = 1
        if name is not None:
            view[name] = size
    fits = [name for name, size in view.items() if name not in kept and experts % size == 0]
    if fits:
        expert = chance.choice([name for name in fits if view[name] > 1] or fits)
        left = [name for name, size in view.items() if size > 1 and name not in (*kept, expert)]
        # The shards of experts need one dim, and their copies need another.
        if "shard" not in parallel or len(left) <= 2:
            parallel["expert"] = expert
            mesh["views"] = {"expert_view": view}


def _factors(chance: random.Random, number: int) -> list[int]:
    first = chance.choice([n for n in range(1, number + 1) if number % n == 0])
    return chance.choice([[number], [first, number // first], [1, first, number // first]])


def _names(chance: random.Random, mesh: Raw) -> None:
    """Merged dims, another view and a rank order, none of which changes the training."""
    dims = mesh["dims"]
    ranks = math.prod(dims.values())
    if chance.random() < 0.3 and len(dims) > 1:
        mesh["merge"] = {"merged": chance.sample(list(dims), chance.randint(2, len(dims)))}
    if chance.random() < 0.3:
        mesh.setdefault("views", {})["flat_view"] = {"flat": ranks}
    if chance.random() < 0.4:
        mesh["rank_order"] = chance.sample(range(ranks), ranks)
    if chance.random() < 0.2:
        mesh["validate_calls"] = chance.choice([0, 1, "always"])


def _sequence(chance: random.Random, parallel: Raw, of: Mapping[str, int]) -> int:
    context = of["context"]
    chunks = context if parallel.get("attention") == "ulysses" or context == 1 else 2 * context
    unit = math.lcm(chunks, context * (of["tensor"] if parallel.get("sequence_parallel") else 1))
    return unit * chance.choice([n for n in (1, 2, 3, 4, 5, 8) if n * unit <= 48] or [1])


def _train(chance: random.Random) -> Raw:
    steps = chance.choice([1, 2, 3, 4])
    train: Raw = {"steps": steps, "dtype": "float64", "seed": chance.choice([0, 7, 2**31, 2**40])}
    schedule = chance.choice(["cosine", "linear", "constant"])
    for key, share, values in (
        ("lr", 0.7, [1e-3, 1e-2]),
        ("clip_norm", 0.5, [1e-3, 0.3, 1.0, 1e6]),
        ("warmup_steps", 0.5, list(range(steps + 1))),
        ("schedule", 0.5, [schedule]),
        ("weight_decay", 0.3, [0.0, 0.5]),
        ("betas", 0.3, [[0.0, 0.9], [0.5, 0.99]]),
        ("eps", 0.3, [1e-6, 1e-3]),
        ("activation_checkpointing", 0.3, [True]),
    ):
        if chance.random() < share:
            train[key] = chance.choice(values)
    if train.get("schedule") != "constant" and chance.random() < 0.3:
        train["min_lr_ratio"] = chance.choice([0, 0.5, 1.0])
    return train
