"""Ranked meshes, predicted step times and written configs, against plain counting."""

from __future__ import annotations

from itertools import permutations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, TopologyConfig, load_config
from meshcomm.config.parallel import ParallelRole
from meshcomm.errors import ConfigError
from meshcomm.layout import Layout
from meshcomm.layout.sizes import divisors
from meshcomm.predict.estimate import BASE, Sizes, workload
from meshcomm.predict.links import known_machine, span
from meshcomm.predict.place import (
    orders,
    place_config,
    placed_data,
    rank_placements,
    strides,
    trainable,
    write_placement,
)
from meshcomm.predict.times import fastest
from tests.train.runs import parallel_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(100)

# Sizes with many divisors, so that many meshes are legal and some are not.
TRAIN: dict[str, Any] = {
    "model": {
        "num_layers": 6,
        "hidden_size": 96,
        "num_heads": 12,
        "num_kv_heads": 6,
        "intermediate_size": 96,
    },
    "data": {"seq_len": 48},
    "train": {"steps": 1, "global_batch_size": 24, "micro_batch_size": 2},
}
DIMS = {"pipeline": "pp", "data": "dp", "shard": "fs", "context": "cp", "tensor": "tp"}
BLOCK = ("data", "shard", "context")
KINDS: dict[str, dict[str, Any]] = {
    "3-D": {"parts": ["pipeline", "data", "tensor"]},
    "sharded": {"parts": ["data", "shard", "tensor"], "sequence_parallel": True},
    "ring": {"parts": ["data", "context", "tensor"], "sequence_parallel": True},
    "ulysses": {"parts": ["pipeline", "context", "tensor"], "attention": "ulysses"},
    "interleaved": {"parts": ["pipeline", "data"], "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "all five": {"parts": ["pipeline", "data", "shard", "context", "tensor"]},
    "experts": {"parts": ["pipeline", "data", "tensor"], "experts": 8},
    "experts and context": {"parts": ["data", "context", "tensor"], "experts": 4},
    "sharded experts": {"parts": ["data", "shard", "tensor"], "experts": 8},
}


def config(
    kind: str, dims: dict[str, int] | None = None, view: dict[str, int] | None = None, **more: Any
) -> Config:
    """A training on these dims, or on dims of size 1."""
    about = dict(KINDS[kind])
    parts = about.pop("parts")
    experts = about.pop("experts", 0)
    parallel = parallel_of(**{part: DIMS[part] for part in parts}, **about)
    dims = dims or {DIMS[part]: 1 for part in parts}
    data = {
        **TRAIN,
        "mesh": {"dims": dims},
        "parallel": parallel,
        "model": dict(TRAIN["model"]),
    }
    if experts:
        data["parallel"]["expert"] = "ep"
        data["model"] |= {"experts": experts}
        kept = {DIMS[part]: dims[DIMS[part]] for part in parts if part in ("pipeline", "tensor")}
        data["mesh"]["views"] = {"expert": view or {"edp": 1, "ep": 1, **kept}}
    return load_config(data | more)


def topology_of(per_node: int, **more: Any) -> TopologyConfig:
    return load_config(
        {"mesh": {"dims": {"a": 1}}, "topology": {"ranks_per_node": per_node, **more}}
    ).topology


def world_of(kind: str) -> int:
    """A world size on which this kind has several meshes."""
    return 4 if kind == "interleaved" else 24


# -- which meshes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_are_those_that_the_checks_of_a_config_let_pass(kind: str, world: int) -> None:
    parts = KINDS[kind]["parts"]
    legal = []
    for choice in product(divisors(world), repeat=len(parts)):
        if prod(choice) != world:
            continue
        chosen = dict(zip(parts, choice, strict=True))
        # The order is BASE's. Another test covers the rules about orders.
        dims = {DIMS[part]: chosen[part] for part in BASE if part in chosen}
        block = prod(chosen.get(part, 1) for part in BLOCK)
        for expert in divisors(block) if KINDS[kind].get("experts") else [1]:
            view: dict[str, int] | None = None
            if KINDS[kind].get("experts"):
                pp = {"pp": chosen["pipeline"]} if "pipeline" in chosen else {}
                view = {**pp, "edp": block // expert, "ep": expert, "tp": chosen["tensor"]}
            try:
                config(kind, dims, view).resolved(world)
            except ConfigError:
                continue
            number = 24 // (chosen.get("data", 1) * chosen.get("shard", 1) * 2)
            legal.append(Sizes(**chosen, expert=expert, microbatches=number))
    assert sorted(trainable(workload(config(kind)), world)) == sorted(legal)


def test_a_rank_s_tokens_and_not_the_sample_s_are_split_along_tensor() -> None:
    wide = {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 8,
            "intermediate_size": 64,
        },
        "data": {"seq_len": 8},
    }
    with pytest.raises(ConfigError, match="a rank's tokens are not divisible by tp"):
        config("ring", {"dp": 1, "cp": 2, "tp": 8}, **wide)
    found = [(each.context, each.tensor) for each in trainable(workload(config("ring", **wide)), 16)]
    assert (2, 4) in found and (1, 8) in found and (2, 8) not in found


def by_stride(size: int, step: int, world: int) -> list[list[int]]:
    starts = [rank for rank in range(world) if rank // step % size == 0]
    return [[start + step * i for i in range(size)] for start in starts]


@pytest.mark.parametrize("kind", ["all five", "experts and context", "experts", "sharded experts"])
def test_the_orders_are_all_meshes_each_once(kind: str) -> None:
    """Write out every order of the dims as groups: the listed orders give the same meshes, each once."""
    # Heads, tokens and samples allow all sizes of 12 ranks for every part.
    free = {
        "num_heads": 12,
        "num_kv_heads": 12,
        "hidden_size": 24,
        "intermediate_size": 12,
        "vocab_size": 12,
        "num_layers": 12,
    }
    free |= {"experts": 12} if KINDS[kind].get("experts") else {}
    train = {"steps": 1, "global_batch_size": 12 * 12, "micro_batch_size": 1}
    work = workload(config(kind, model=free, data={"seq_len": 12 * 12 * 2}, train=train))
    parts = [part for part in BASE if part in work.parts]
    every = sorted(trainable(work, 12))
    assert len(every) > 20
    for sizes in every[:: 1 if len(parts) < 5 else 7]:
        chosen = {part: getattr(sizes, part) for part in parts}
        meshes = set()
        for order in permutations(parts):
            base = {DIMS[part]: chosen[part] for part in order}
            split = [part for part in order if chosen[part] > 1]
            inside = [i for i, part in enumerate(split) if part in BLOCK]
            view: dict[str, int] = {}
            if "expert" in work.parts:
                if inside and inside[-1] - inside[0] + 1 != len(inside):
                    continue
                first = inside[0] if inside else 0
                outer = {DIMS[p]: chosen[p] for p in split[:first]}
                inner = {DIMS[p]: chosen[p] for p in split[first + len(inside) :]}
                copies = prod(chosen.get(part, 1) for part in BLOCK) // sizes.expert
                view = {**outer, "edp": copies, "ep": sizes.expert, **inner}
            layout = Layout(base, views={"v": view} if view else None)
            names = [*(DIMS[p] for p in parts), *(["ep", "edp"] if view else [])]
            meshes.add(tuple(str(sorted(layout.groups(name).tolist())) for name in names))
        listed = []
        for each in orders(work, sizes):
            dims = strides(work, sizes, each)
            beside = "expert shard" if "shard" in parts else "replica"
            names = [*parts, *(["expert", beside] if "expert" in work.parts else [])]
            listed.append(tuple(str(sorted(by_stride(*dims[name], 12))) for name in names))
        assert sorted(listed) == sorted(meshes), sizes


# -- how long ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranking_is_of_all_meshes_in_order_adds_up_and_is_that_of_groups_written_out(kind: str) -> None:
    topology = {"ranks_per_node": 4, "nodes_per_rack": 2, "call_us": 3.0, "tflops": 0.01}
    settings = config(kind, topology=topology)
    world = world_of(kind)
    work, where = workload(settings), known_machine(settings.topology, "here")
    ranking = rank_placements(work, world, settings.topology, top=10_000)
    steps = [each.step_s for each in ranking.placements]
    assert steps == sorted(steps)
    assert sum(1 + each.also for each in ranking.placements) == ranking.meshes
    assert ranking.meshes == sum(len([*orders(work, sizes)]) for sizes in trainable(work, world))
    for each in ranking.placements:
        calls = sum(share.seconds for share in each.shares)
        assert each.step_s == pytest.approx(each.compute_s + each.bubble_s + calls, rel=1e-9)
    # Each is a config that loads, and its groups cross the links in the reasons.
    for each in ranking.placements[:: max(1, len(ranking.placements) // 12)]:
        placed = load_config(placed_data(settings, each)).resolved(world)
        assert placed.parallel is not None
        layout = placed.layout(world)
        names: dict[str, str] = {**placed.parallel.parts, "replica": "edp", "expert shard": "edp"}
        for share in each.shares:
            found, flow = (
                span(layout.groups(tuple(names[part] for part in share.flow.along)), where),
                share.flow,
            )
            assert (found.size, found.slowest) == (share.ranks, share.link), share
            line = fastest(flow.operation, found.route, flow.size_bytes)
            assert line.name == share.algorithm
            # A third of a microbatch's compute is its forward pass.
            call, compute = line.seconds(flow.size_bytes), each.compute_s / each.microbatches
            seconds = flow.calls * call
            exposed = {
                "": seconds,
                "forward": max(call, seconds - compute / 3),
                "backward": max(call, seconds - compute * 2 / 3),
                "both": max(call, seconds / 2 - compute / 3) + max(0, seconds / 2 - compute * 2 / 3),
            }[flow.behind]
            times = each.microbatches if flow.each_microbatch else 1
            assert share.seconds == pytest.approx(times * exposed, rel=1e-12)
            overlaps = flow.part == "shard" or (flow.part in ("data", "context") and flow.what == "gradients")
            piped = each.dims.get("pipeline", 1) > 1
            assert bool(flow.behind) == (
                flow.operation == "all_gather" or not piped
                if overlaps or flow.what == "experts' gradients"
                else False
            ), flow


def test_one_step_by_hand() -> None:
    """pp=2 dp=2 tp=4 on two nodes of eight: every number of the model, by plain arithmetic."""
    model = TRAIN["model"] | {
        "num_heads": 8,
        "num_kv_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 6,
    }
    settings = config("3-D", {"pp": 2, "dp": 2, "tp": 4}, model=model)
    links = {
        "node": {"latency_us": 2.0, "bandwidth_gbytes_s": 100.0},
        "network": {"latency_us": 10.0, "bandwidth_gbytes_s": 10.0},
    }
    where = topology_of(8, links=links, tflops=0.001)
    keep: dict[ParallelRole, int] = {"pipeline": 2, "data": 2, "tensor": 4}
    ranking = rank_placements(workload(settings), 16, where, keep)
    first = next(each for each in ranking.placements if list(each.dims) == ["pipeline", "data", "tensor"])
    microbatches = 24 // 2 // 2
    tokens, layers = 2 * 48, 3
    # Multiply-adds per token: q, k, v, o; scores and values; gate, up, down; the head.
    attention = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 48 * 64
    macs = (layers * (attention + 3 * 64 * 128) + 64 * 256) / 4
    compute = 2 * 3 * tokens * macs / 1e9
    activation = tokens * 64 * 4
    # Four calls in each layer, and one of the embedding or the head.
    tensor = (layers * 4 + 1) * min(6 * 2e-6 + 1.5 * activation / 100e9, *(
        (4 + k - 1) * 2e-6 + max((4 + k - 1) / (2 * k), 2) * activation / 100e9 for k in (1, 2, 4, 8)
    ))  # fmt: skip
    boundary = 2 * (10e-6 + activation / 10e9)
    # A rank of the first or last stage has three layers, norms, one of the tables, and the last norm.
    weights = layers * ((64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) / 4 + 2 * 64) + 64 * 256 / 4 + 64
    gradients = 2 * 2e-6 + weights * 4 / 100e9
    step = (compute + tensor + boundary) * (microbatches + 1) + gradients
    assert first.microbatches == microbatches
    assert first.compute_s == pytest.approx(compute * microbatches)
    assert first.bubble_s == pytest.approx(compute + tensor + boundary)
    assert first.step_s == pytest.approx(step)
    assert [(s.flow.part, s.link, s.calls, s.flow.size_bytes) for s in first.shares] == [
        ("tensor", "node", 13 * microbatches, activation),
        ("pipeline", "network", 2 * microbatches, activation),
        ("data", "node", 1, weights * 4),
    ]
    # Here, gradients are fewer bytes than all boundaries, so a mesh with dp across the nodes is faster.
    assert list(ranking.placements[0].dims) == ["data", "pipeline", "tensor"]
    # Nodes of four have six orders. The order of the two inner dims makes no difference, so there are three rows of two.
    keep = {"pipeline": 2, "data": 2, "tensor": 2}
    found = rank_placements(workload(config("3-D")), 8, topology_of(4), keep).placements
    assert [each.also for each in found] == [1, 1, 1]
    outermost = [next(iter(each.dims)) for each in found]
    assert sorted(outermost) == ["data", "pipeline", "tensor"] and outermost[-1] == "tensor"


def test_what_memory_does_not_hold_is_left_out() -> None:
    work, where = workload(config("3-D")), topology_of(8)
    everything = rank_placements(work, 24, where, top=1000)
    held_bytes = [sum(each.memory_bytes.values()) for each in everything.placements]
    limit = sorted(held_bytes)[len(held_bytes) // 2]
    less = rank_placements(work, 24, topology_of(8, memory_gbytes=limit / 1e9), top=1000, margin=0)
    kept = [each for each, size in zip(everything.placements, held_bytes, strict=True) if size <= limit]
    assert [each.dims for each in less.placements] == [each.dims for each in kept]
    assert less.too_large > 0 and less.sizes == everything.sizes
    # A tenth of the memory stays free by default.
    with_margin = rank_placements(work, 24, topology_of(8, memory_gbytes=limit / 1e9), top=1000)
    kept = [each for each, size in zip(everything.placements, held_bytes, strict=True) if size <= 0.9 * limit]
    assert [each.dims for each in with_margin.placements] == [each.dims for each in kept]
    assert with_margin.too_large > less.too_large


# -- refusals, files, the command -------------------------------------------------------------------


def test_what_cannot_be_placed(tmp_path: Path) -> None:
    work, where = workload(config("3-D")), topology_of(8)
    ordered = load_config(config("3-D", {"pp": 1, "dp": 2, "tp": 1}), ["mesh.rank_order=[1, 0]"])
    ranking = rank_placements(work, 8, where)
    for call, text in (
        (lambda: rank_placements(work, 7, where), r"no sizes that multiply to 7 can train this\n.*7 ranks along"),
        (lambda: rank_placements(work, 8, topology_of(8, memory_gbytes=1e-5)), r"no mesh of 8 ranks holds this in 1e-05 GB"),
        (lambda: workload(load_config({"mesh": {"dims": {"dp": 2}}})), "does not describe training"),
        (lambda: workload(ordered), r"mesh.rank_order applies only to the configured mesh(.*\n)*.*--set mesh.rank_order="),
        (lambda: place_config(config("3-D"), 8, where, ["dpp"]), r"no part .* a dim dpp\n(.*\n)*.*did you mean \"dp\"\?"),
        (lambda: place_config(config("3-D"), 8, config("3-D").topology), "not known which ranks share a node"),
        (lambda: write_placement(config("3-D"), ranking, tmp_path / "o.yaml"), r"not a file type that --write writes\n(.*\n)*.*--write .*o.toml"),
        (lambda: write_placement(config("3-D"), ranking, tmp_path / "no" / "o.toml"), "cannot be written: no such file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_mesh_is_written_and_loads(kind: str, tmp_path: Path) -> None:
    settings = load_config(
        config(kind, topology={"ranks_per_node": 4}), ["mesh.timeout_s=77.0", "train.lr=1e-5"]
    )
    world = world_of(kind)
    ranking = place_config(settings, world, settings.topology)
    assert settings.parallel is not None
    names = settings.parallel.parts
    for chosen in (ranking.placements[0], ranking.placements[-1]):
        first = ranking._replace(placements=(chosen,))
        written = write_placement(settings, first, tmp_path / "out.toml")
        assert written.parallel == settings.parallel and written.train == settings.train
        assert (written.mesh.timeout_s, written.topology) == (77.0, settings.topology)
        expected = [(names[part], size) for part, size in chosen.dims.items()]
        assert list(written.mesh.dims.items()) == expected
        assert written.plan(world).layout.world_size == world
        if "expert" in names:
            assert written.plan(world).layout.size("ep") == chosen.expert


@pytest.mark.parity
def test_large_worlds_are_ranked() -> None:
    """Five dims on 131,072 ranks give tens of thousands of meshes."""
    world = 131_072
    dims = "mesh.dims={ rep = 1, dp = 8, pp = 16, cp = 16, tp = 8 }"
    wide = ["parallel.data='rep'", dims, "model.num_kv_heads=128", f"train.global_batch_size={world}"]
    settings = load_config(ROOT / "configs/llama_405b.toml", wide)
    assert place_config(settings, world, settings.topology).meshes > 50_000
