"""The estimates of a rank's memory and calls: by hand for published models, and close to a dry run of a step."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshcomm.config import Config, load_config
from meshcomm.dryrun.rank import RankStep, pretended_step
from meshcomm.models.hf import counts_of
from meshcomm.parallel.optimizer import KINDS
from meshcomm.predict.estimate import Memory, Sizes, expected, memory, state_bytes, weights, workload

# The page's model: the yardstick's width and eight layers.
SHOWN: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 8,
    "intermediate_size": 1024,
}
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "`data`": ("dp=4", {"data": "dp"}, {}),
    "`shard`": ("fs=4", {"shard": "fs"}, {}),
    "`data` 2, `shard` 2": ("dp=2 fs=2", {"data": "dp", "shard": "fs"}, {}),
    "`activation_checkpointing = true`": ("dp=4", {"data": "dp"}, {"activation_checkpointing": True}),
    '`activation_checkpointing = "selective"`': (
        "dp=4",
        {"data": "dp"},
        {"activation_checkpointing": "selective"},
    ),
    "`tensor`": ("tp=4", {"tensor": "tp"}, {}),
    "`tensor`, `sequence_parallel`": ("tp=4", {"tensor": "tp", "options": {"sequence_parallel": True}}, {}),
    "`pipeline`, `gpipe`": ("pp=4", {"pipeline": "pp", "options": {"schedule": "gpipe"}}, {}),
    "`pipeline`, `1f1b`": ("pp=4", {"pipeline": "pp", "options": {"schedule": "1f1b"}}, {}),
    "`shard`, `activation_checkpointing = true`": (
        "fs=4",
        {"shard": "fs"},
        {"activation_checkpointing": True},
    ),
}
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "performance.md"
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 192,
}
MICROBATCHES = 4
COLUMNS = ("weights", "gathered", "gradients", "optimizer", "activations", "rest")
VIEW = {"views": {"expert": {"edp": 2, "ep": 2}}}
SEVERAL = {"stages_per_rank": 2}
# The largest error of an estimate, for the peak and for the bytes along a dim.
OFF = 0.25
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: dims, [parallel], [train], further settings of [model]
    "data": ("dp=4", {"data": "dp"}, {}, {}),
    "bf16": ("dp=4", {"data": "dp"}, {"compute_dtype": "bfloat16"}, {}),
    "fsdp": ("fs=4", {"shard": "fs"}, {}, {}),
    "fsdp, one microbatch": ("fs=4", {"shard": "fs"}, {"global_batch_size": 8}, {}),
    "fsdp, kept gathered": ("fs=4", {"shard": "fs", "options": {"reshard": False}}, {}, {}),
    "hsdp": ("dp=2 fs=2", {"data": "dp", "shard": "fs"}, {}, {}),
    "fsdp, context": ("fs=2 cp=2", {"shard": "fs", "context": "cp"}, {}, {}),
    "tensor": ("tp=2", {"tensor": "tp"}, {}, {}),
    "tensor, sequence": ("tp=2", {"tensor": "tp", "options": {"sequence_parallel": True}}, {}, {}),
    "gpipe": ("pp=4", {"pipeline": "pp", "options": {"schedule": "gpipe"}}, {}, {}),
    "1f1b": ("pp=4", {"pipeline": "pp", "options": {"schedule": "1f1b"}}, {}, {}),
    "interleaved": (
        "pp=2",
        {"pipeline": "pp", "options": {"schedule": "interleaved_1f1b", **SEVERAL}},
        {},
        {},
    ),
    "zero bubble": ("pp=2", {"pipeline": "pp", "options": {"schedule": "zero_bubble", **SEVERAL}}, {}, {}),
    "1f1b, fsdp": ("pp=2 fs=2", {"pipeline": "pp", "shard": "fs"}, {}, {}),
    "ring": ("cp=4", {"context": "cp"}, {}, {}),
    "ulysses": ("cp=2", {"context": "cp", "options": {"attention": "ulysses"}}, {}, {}),
    "experts": ("dp=4", {"data": "dp", "expert": "ep"}, {}, {"experts": 4}),
    "experts, fsdp": ("dp=2 fs=2", {"data": "dp", "shard": "fs", "expert": "ep"}, {}, {"experts": 4}),
    "activation_checkpointing": ("dp=4", {"data": "dp"}, {"activation_checkpointing": True}, {}),
    "recompute every other": ("dp=4", {"data": "dp"}, {"activation_checkpointing": 2}, {}),
    "selective": ("dp=4", {"data": "dp"}, {"activation_checkpointing": "selective"}, {}),
    "tensor, recompute": ("tp=2", {"tensor": "tp"}, {"activation_checkpointing": True}, {}),
    "fsdp, recompute": ("fs=4", {"shard": "fs"}, {"activation_checkpointing": True}, {}),
    "1f1b, recompute": ("pp=4", {"pipeline": "pp"}, {"activation_checkpointing": True}, {}),
}
# The other cases belong to the deeper set.
OFTEN = ("fsdp, one microbatch", "tensor, sequence", "1f1b, recompute", "experts", "ring")


def config_of(
    dims: str, parallel: dict[str, Any], train: dict[str, Any], model: dict[str, Any], seq_len: int = 64
) -> Config:
    sizes = {name: int(size) for name, _, size in (each.partition("=") for each in dims.split())}
    mesh: dict[str, Any] = {"dims": sizes, "device": "cpu"}
    micro = train.get("micro_batch_size", 2)
    batch = micro * MICROBATCHES * sizes.get("dp", 1) * sizes.get("fs", 1)
    return load_config(
        {
            "mesh": mesh | (VIEW if "expert" in parallel else {}),
            "parallel": parallel,
            "model": model,
            "data": {"seq_len": seq_len},
            "train": {"steps": 1, "global_batch_size": batch, "micro_batch_size": micro, **train},
        }
    )


def estimated(config: Config) -> Memory:
    """The estimate for the sizes in the config."""
    part, train, dims = config.parallel, config.train, config.mesh.dims
    assert part is not None and train is not None
    played = {name: dims[dim] for name, dim in part.parts.items() if name != "expert"}
    if part.expert:
        played |= {"expert": 2, "expert_copies": 2 if part.shard is None else 1}
    number = train.global_batch_size // (part.copies(dims) * train.micro_batch_size)
    return memory(workload(config), Sizes(**played, microbatches=number))


def ran(config: Config) -> list[RankStep]:
    """Dry-run steps of the first rank and, with a pipeline, of a rank with two neighbours and of the last rank."""
    world = math.prod(config.mesh.dims.values())
    assert config.parallel is not None
    ranks = (0, world // 2, world - 1) if config.parallel.pipeline else (0,)
    return [pretended_step(config, rank, world) for rank in ranks]


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.parity) for case in CASES]
)
def test_the_estimate_is_near_a_step_that_is_run(case: str) -> None:
    if torch.__version__ < "2.12" and case == "1f1b, recompute":
        pytest.skip(f"torch {torch.__version__} keeps more of a pass that is computed again")
    dims, parallel, train, more = CASES[case]
    config = config_of(dims, parallel, train, {**SMALL, **more})
    steps = ran(config)
    said, peak = estimated(config), max((step.peak for step in steps), key=lambda peak: peak.nbytes)
    assert said.weights == pytest.approx(peak.parts["weights"], rel=0.1)
    assert said.optimizer == pytest.approx(peak.parts["optimizer"], rel=0.1)
    assert sum(said) == pytest.approx(peak.nbytes, rel=OFF), (said, peak.parts)
    world = math.prod(config.mesh.dims.values())
    plan = config.plan(world)
    # Torch's own calls count under the first name of a shared group.
    shared = {family.name: family.shares or family.name for family in plan.families}
    sent: Counter[str] = Counter()
    for flow in expected(config, world):
        sent["_".join(shared[dim] for dim in flow.along)] += round(flow.calls * flow.size_bytes)
    assert sent
    for dim, nbytes in sent.items():
        counted = max(
            sum(row.nbytes for row in step.rows if shared.get(row.dim, row.dim) == dim) for step in steps
        )
        assert nbytes == pytest.approx(counted, rel=OFF), dim


# By hand, for SMALL in float32 with 256 tokens. Each of the 4 layers has attention of 64 * 16 * (2 * 4 + 2 * 2), two norms of 64,
# and 3 * 64 * 192. Two tables of 64 * 256 and a norm of 64 follow. A micro-batch has 2 * 64 tokens, and a step four micro-batches.
WEIGHTS = 4 * (4 * (12_288 + 2 * 64 + 36_864) + 2 * 64 * 256 + 64)
PLAIN = WEIGHTS - 4 * 4 * 36_864 + 4 * 4 * 64 * 4
TOKENS = 4 * 2 * 64 * 64
CALLS: dict[str, list[tuple[str, str, int, float]]] = {
    # name of a case: the dim, the call, the number of calls in a step, and the bytes of each
    "data": [("dp", "all_reduce", 1, WEIGHTS)],
    # Four layers and the tables are gathered twice in each micro-batch and scattered once in a step.
    "fsdp": [("fs", "all_gather", 4 * 2 * 5, WEIGHTS / 5), ("fs", "reduce_scatter", 5, WEIGHTS / 5)],
    "hsdp": [
        ("fs", "all_gather", 4 * 2 * 5, WEIGHTS / 5),
        ("fs", "reduce_scatter", 5, WEIGHTS / 5),
        ("dp", "all_reduce", 5, WEIGHTS / 5 / 2),
    ],
    # Four calls in each layer, and one for each table.
    "tensor": [("tp", "all_reduce", 4 * (4 * 4 + 2), TOKENS)],
    "tensor, sequence": [
        ("tp", "all_gather", 4 * (4 * 4 + 2), TOKENS),
        ("tp", "reduce_scatter", 4 * (4 * 4 + 2), TOKENS),
    ],
    # An inner stage exchanges an activation and a gradient with each of two neighbours. With two ranks, each has one neighbour.
    "1f1b": [("pp", "sendrecv", 4 * 4, TOKENS)],
    "interleaved": [("pp", "sendrecv", 4 * (2 * 4 - 2), TOKENS)],
    # Keys and values of two heads of 16 go round the ring forward and backward. Their gradients take one more turn.
    "ring": [
        ("cp", "sendrecv", 4 * 4 * 2 * 3, TOKENS / 4),
        ("cp", "sendrecv", 4 * 4 * 4, TOKENS / 4),
        ("cp", "all_reduce", 1, WEIGHTS),
    ],
    # Four heads of q and two of k and v, then four of results.
    "ulysses": [
        ("cp", "all_to_all", 4 * 4 * 2, TOKENS / 2 * 2),
        ("cp", "all_to_all", 4 * 4 * 2, TOKENS / 2),
        ("cp", "all_reduce", 1, WEIGHTS),
    ],
    # Each token goes to two experts and back, forward and backward. A rank has half of the four experts.
    "experts": [
        ("ep", "all_to_all", 4 * 4 * 4, 2 * TOKENS),
        ("dp", "all_reduce", 1, PLAIN),
        ("edp", "all_reduce", 1, 4 * 4 * 2 * 36_864),
    ],
}


@pytest.mark.parametrize("case", CALLS)
def test_what_each_kind_of_parallelism_sends_along_which_dim(case: str) -> None:
    dims, parallel, train, more = CASES[case]
    config = config_of(dims, parallel, train, {**SMALL, **more})
    found = expected(config, math.prod(config.mesh.dims.values()))
    assert [(" ".join(f.along), f.operation, f.calls, f.size_bytes) for f in found] == CALLS[case]


# Sizes as published, and the published numbers of weights.
LLAMA = {
    "num_layers": 126,
    "hidden_size": 16384,
    "num_heads": 128,
    "num_kv_heads": 8,
    "intermediate_size": 53248,
}
MIXTRAL = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "intermediate_size": 14336,
} | {
    "experts": 8,
    "experts_per_token": 2,
}


def test_latent_attention_and_shared_experts_cost_what_transformers_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=64, intermediate_size=160, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2,
        topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
        architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(config.vocab_size, (1, 64))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    settings = config_of(
        "dp=1", {"data": "dp"}, {"micro_batch_size": 1, "global_batch_size": 1}, {"pretrained": str(folder)}
    )
    work = workload(settings, counts_of(folder))
    assert work.counts is not None and work.counts.values == config.v_head_dim / config.qk_head_dim < 1
    # Three passes; the estimate also counts the weights of norms, as one product each.
    assert work.flops(Sizes()) == pytest.approx(3 * counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("model", "vocab_size", "count"),
    [(LLAMA, 128_256, 405_853_388_800), (MIXTRAL, 32_000, 46_702_792_704)],
)
def test_one_rank_holds_a_published_model_s_weights_and_many_hold_them_once(
    model: dict[str, int], vocab_size: int, count: int
) -> None:
    work = workload(config_of("dp=1", {"data": "dp"}, {}, {**model, "vocab_size": vocab_size}))
    whole = weights(work, Sizes())
    assert whole.plain + whole.experts == count
    # Split along tensor and expert, all weights except norms and routers exist once.
    apart = weights(work, Sizes(tensor=8, expert=2 if "experts" in model else 1))
    width = model["hidden_size"]
    many = (2 * model["num_layers"] + 1) * width + work.expert_layers * width * model.get("experts", 0)
    assert apart.plain == many + (count - whole.experts - many) / 8
    assert apart.experts == whole.experts / 2 / 8


def figures(text: str) -> tuple[str, list[float]]:
    name, *cells = text.strip("| ").split(" | ")
    return name, [float(cell) for cell in cells]


@pytest.mark.parity
@pytest.mark.parametrize("row", ROWS)
def test_the_page_s_counts_are_those_of_a_step_that_is_run(row: str) -> None:
    table = PAGE.read_text().partition(f"| | {' | '.join(COLUMNS[:2])} |")[2].partition("\n\n")[0]
    rows = dict(figures(each) for each in table.splitlines() if each.startswith("| `"))
    assert list(rows) == list(ROWS)
    dims, parallel, train = ROWS[row]
    sizes = [int(each.partition("=")[2]) for each in dims.split()]
    batch = 4 * 8 * (math.prod(sizes) if parallel.keys() & {"data", "shard"} else 1)
    train = {"micro_batch_size": 4, "global_batch_size": batch, **train}
    steps = ran(config_of(dims, parallel, train, SHOWN, seq_len=256))
    peak = max((step.peak for step in steps), key=lambda peak: peak.nbytes)
    mine = [*(peak.parts[part] for part in COLUMNS), peak.nbytes]
    shown = f"| {row} | {' | '.join(f'{each / 1e6:.1f}' for each in mine)} |"
    # Other versions of torch may keep a little more or less.
    assert rows[row] == pytest.approx([each / 1e6 for each in mine], rel=0.05, abs=0.2), shown


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((name, {}) for name in KINDS),
        ("sgd", {"momentum": 0.9}),
        ("rmsprop", {"momentum": 0.9, "centered": True}),
        ("adam", {"amsgrad": True}),
        ("muon", {"momentum": 0.5}),
    ],
)
def test_the_optimizer_keeps_as_many_bytes_as_that_of_torch(name: str, args: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8))
    weight.grad = torch.ones(4, 8)
    optimizer = KINDS[name]([weight], lr=0.1, **args)
    optimizer.step()
    kept = [each for each in optimizer.state[weight].values() if torch.is_tensor(each) and each.ndim]
    settings: dict[str, Any] = {"optimizer": name, "optimizer_args": args}
    if name == "muon":
        settings = {"optimizer": "sgd", "groups": {"*": settings}}
    train = config_of("dp=4", {"data": "dp"}, settings, SHOWN).train
    assert train is not None
    assert state_bytes(train) * weight.numel() == sum(each.nbytes for each in kept)
    assert state_bytes(train.model_copy(update={"ema": 0.9})) == state_bytes(train) + 4
