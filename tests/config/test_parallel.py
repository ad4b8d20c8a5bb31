"""Parallelism in a configuration: combinations that are refused, and quantities that follow from valid ones."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, load_config
from meshcomm.config.parallel import PipelineSchedule, runs
from meshcomm.errors import ConfigError
from tests.config.test_problems import TRAIN, Bad, check, made, report_of

ROOT = Path(__file__).parents[2]

TP = made(TRAIN, ["mesh.dims={ dp = 4, tp = 2 }", "parallel.pipeline="])
CP = made(
    TRAIN,
    [
        "mesh.dims={ cp = 2, dp = 2, tp = 2 }",
        "parallel={ data = 'dp', tensor = 'tp', context = 'cp', options = { sequence_parallel = true } }",
    ],
)
PP = made(
    TRAIN,
    [
        "mesh.dims={ pp = 4, dp = 2 }",
        "parallel={ data = 'dp', pipeline = 'pp', options = { schedule = 'interleaved_1f1b', stages_per_rank = 2 } }",
        "model.num_layers=8",
    ],
)
HSDP = made(
    TRAIN,
    [
        "mesh.dims={ dp = 2, fsdp = 2, tp = 2 }",
        "parallel={ data = 'dp', shard = 'fsdp', tensor = 'tp' }",
    ],
)
MOE = made(
    TRAIN,
    [
        "mesh.dims={ dp = 8 }",
        "mesh.views.expert={ edp = 2, ep = 4 }",
        "parallel={ data = 'dp', expert = 'ep' }",
        "model.experts=8",
    ],
)

# fmt: off
TABLE = [
    Bad("expert's dim in the base", MOE, ["mesh.views=", "mesh.dims={ dp = 2, ep = 4 }"],
        ["mesh.views={ expert = { edp = 2, ep = 4 } }", "mesh.dims={ dp = 2, cp = 4 }", "parallel.context='cp'"],
        {"mesh.dims.ep": "4", "parallel.expert": ""},
        ["mesh.dims.ep = 1", 'parallel.shard = "ep"', 'parallel.tensor = "ep"', 'parallel.pipeline = "ep"', 'parallel.context = "ep"', "remove parallel.expert"]),
    Bad("ring tokens", CP, ["data.seq_len=126", "mesh.dims.tp=4"],
        ["data.seq_len=124", "parallel.options.sequence_parallel=false"], {"data.seq_len": "126 % 4 = 2"},
        ["data.seq_len = 128", "data.seq_len = 120"]),
    Bad("settings of experts in a dense model", TP,
        ["model.experts_per_token=1", "model.experts_every=2", "model.capacity_factor=1.25", "model.balance_loss=0.0"],
        ["model.experts=4", "model.experts_per_token=1", "model.experts_every=2", "model.capacity_factor=1.25", "model.balance_loss=0.0"],
        {"model.experts_per_token": "", "model.experts_every": "", "model.capacity_factor": "", "model.balance_loss": ""},
        ["model.experts = 8", "remove model.experts_per_token", "model.experts = 8", "remove model.experts_every", "model.experts = 8", "remove model.capacity_factor", "model.experts = 8", "remove model.balance_loss"]),
    Bad("ulysses tokens", CP,
        ["data.seq_len=127", "parallel.options.attention='ulysses'", "parallel.options.sequence_parallel=false"],
        ["data.seq_len=126", "parallel.options.attention='ulysses'", "parallel.options.sequence_parallel=false"],
        {"data.seq_len": "127 % 2 = 1"}, ["data.seq_len = 128", "data.seq_len = 126", "mesh.dims.cp = 1"]),
    Bad("a rank's tokens and tp", CP, ["data.seq_len=132", "mesh.dims.tp=4"],
        ["data.seq_len=136", "mesh.dims.tp=4"], {"data.seq_len": "132/2 = 66"},
        ["data.seq_len = 136", "data.seq_len = 128", "parallel.options.sequence_parallel = false"]),
    Bad("ulysses num_heads", CP, ["parallel.options.attention='ulysses'", "mesh.dims.cp=8", "mesh.dims.tp=2"],
        ["parallel.options.attention='ulysses'", "mesh.dims.cp=4"], {"model.num_heads": "4 % 8 = 4"},
        ["mesh.dims.cp = 4", 'parallel.options.attention = "ring"']),
    Bad("ulysses num_kv_heads", CP,
        ["parallel.options.attention='ulysses'", "mesh.dims={ cp = 3, dp = 2, tp = 1 }", "model.num_heads=12", "model.num_kv_heads=4", "model.hidden_size=144", "data.seq_len=144"],
        ["parallel.options.attention='ulysses'", "mesh.dims={ cp = 3, dp = 2, tp = 1 }", "model.num_heads=12", "model.num_kv_heads=6", "model.hidden_size=144", "data.seq_len=144"],
        {"model.num_kv_heads": "4 % 3 = 1"},
        ["mesh.dims.cp = 4", 'parallel.options.attention = "ring"']),
    Bad("attention without context", TP, ["parallel.options.attention='ring'"],
        ["parallel.context='cp'", "mesh.dims.cp=2", "parallel.options.attention='ring'"], {"parallel.options.attention": ""},
        ["name a dim in parallel.context", "remove parallel.options.attention"]),
    Bad("sequence parallel without tensor", MOE, ["parallel.options.sequence_parallel=true"],
        ["parallel.options.sequence_parallel=false"], {"parallel.options.sequence_parallel": ""},
        ["name a dim in parallel.tensor", "remove parallel.options.sequence_parallel"]),
    Bad("gradients of no shards in bfloat16", TP, ["parallel.options.reduce_dtype='bfloat16'"],
        ["parallel.shard='dp'", "parallel.data=", "parallel.options.reduce_dtype='bfloat16'"], {"parallel.options.reduce_dtype": ""},
        ["name a dim in parallel.shard", "remove parallel.options.reduce_dtype"]),
    Bad("no shards to let go", TP, ["parallel.options.reshard=true"],
        ["parallel.shard='dp'", "parallel.data=", "parallel.options.reshard=true"], {"parallel.options.reshard": ""},
        ["name a dim in parallel.shard", "remove parallel.options.reshard"]),
    Bad("one stage interleaved", PP, ["parallel.options.stages_per_rank=1"], ["parallel.options.stages_per_rank=2"],
        {"parallel.options.stages_per_rank": ""}, ["parallel.options.stages_per_rank = 2", 'parallel.options.schedule = "1f1b"']),
    Bad("bfloat16 beside float64", TP, ["train.compute_dtype='bfloat16'", "train.dtype='float64'"],
        ["train.compute_dtype='bfloat16'"], {"train.compute_dtype": ""},
        ['train.dtype = "float32"', "remove train.compute_dtype"]),
    Bad("tf32 of no float32", TP, ["train.float32_matmul_precision='high'", "train.dtype='float64'"],
        ["train.float32_matmul_precision='high'"],
        {"train.float32_matmul_precision": ""},
        ['train.dtype = "float32"', "remove train.float32_matmul_precision"]),
    Bad("many stages without a pipeline", MOE, ["parallel.options.stages_per_rank=2"], ["parallel.options.stages_per_rank=1"],
        {"parallel.options.stages_per_rank": ""},
        ["name a dim in parallel.pipeline", "remove parallel.options.stages_per_rank"]),
    Bad("many stages of 1f1b", PP, ["parallel.options.schedule='1f1b'"],
        ["parallel.options.schedule='1f1b'", "parallel.options.stages_per_rank=1"], {"parallel.options.stages_per_rank": "1"},
        ['parallel.options.schedule = "interleaved_1f1b"', 'parallel.options.schedule = "zero_bubble"', "parallel.options.stages_per_rank = 1"]),
    Bad("layers and many stages", PP, ["model.num_layers=7"], ["model.num_layers=8"], {"model.num_layers": "7 < 4*2 = 8"},
        ["model.num_layers = 8", "mesh.dims.pp = 2"]),
    Bad("too few micro-batches for ranks", PP, ["train.global_batch_size=8"],
        ["train.global_batch_size=8", "train.micro_batch_size=1"], {"train.micro_batch_size": "8/2/4 = 1 < 4"},
        ["train.global_batch_size = 32", 'parallel.options.schedule = "gpipe" and parallel.options.stages_per_rank = 1']),
    Bad("micro-batches of an interleaved pipeline", PP, ["train.global_batch_size=48"], ["train.global_batch_size=64"],
        {"train.micro_batch_size": "48/2/4 = 6"},
        ["train.global_batch_size = 64", 'parallel.options.schedule = "gpipe" and parallel.options.stages_per_rank = 1']),
    Bad("micro-batches of zero bubbles", PP, ["parallel.options.schedule='zero_bubble'", "train.global_batch_size=72"],
        ["parallel.options.schedule='zero_bubble'", "train.global_batch_size=80"], {"train.micro_batch_size": "72/2/4 = 9"},
        ["train.global_batch_size = 96", 'parallel.options.schedule = "gpipe" and parallel.options.stages_per_rank = 1']),
    Bad("batch of a hybrid", HSDP, ["train.global_batch_size=34"], ["train.global_batch_size=36", "train.micro_batch_size=3"],
        {"train.global_batch_size": "34 % 4 = 2"}, ["train.global_batch_size = 32", "train.global_batch_size = 48"]),
    Bad("buckets of shards", HSDP, ["parallel.options.bucket_mb=5"],
        ["parallel.shard=", "mesh.dims.fsdp=1", "parallel.options.bucket_mb=5"], {"parallel.options.bucket_mb": ""},
        ["remove parallel.options.bucket_mb"]),
    Bad("shards of experts along three dims", MOE,
        ["parallel.shard='fsdp'", "mesh.dims={ dp = 4, fsdp = 2 }", "mesh.views.expert={ a = 2, b = 2, c = 2, ep = 1 }"],
        ["parallel.shard='fsdp'", "mesh.dims={ dp = 4, fsdp = 2 }", "mesh.views.expert={ a = 2, b = 1, c = 2, ep = 2 }"],
        {"mesh.views.expert": ""}, ["a view with the pipeline and tensor dims unchanged, and two dims for the rest: copies and experts", "remove parallel.shard"]),
    Bad("expert's dim that is none", MOE, ["parallel.expert='eb'"], ["parallel.expert='ep'"],
        {"parallel.expert": ""}, ['parallel.expert = "ep"', "remove parallel.expert"]),
    Bad("expert's dim without a view", MOE, ["mesh.views=", "model.experts=4"],
        ["mesh.views={ experts = { edp = 1, ep = 8 } }"], {"parallel.expert": ""},
        ["remove parallel.expert"]),
    Bad("expert's dim in two views", MOE, ["mesh.views.other={ xdp = 2, ep = 4 }"],
        ["mesh.views.other={ xdp = 2, xp = 4 }"], {"parallel.expert": "2"}, ["remove parallel.expert"]),
    Bad("expert's dim merged", MOE, ["parallel.expert='all'", "mesh.merge.all=['edp', 'ep']"],
        ["mesh.merge.all=['edp', 'ep']"], {"parallel.expert": ""},
        ['parallel.expert = "edp"', 'parallel.expert = "ep"', "remove parallel.expert"]),
    Bad("expert's view without tensor", MOE, ["mesh.dims={ dp = 4, tp = 2 }", "parallel.tensor='tp'"],
        ["mesh.dims={ dp = 4, tp = 2 }", "mesh.views.expert={ ep = 4, tp = 2 }", "parallel.tensor='tp'"],
        {"mesh.views.expert": ""},
        ["a view with the pipeline and tensor dims unchanged, and two dims for the rest: copies and experts"]),
    Bad("experts and ep", MOE, ["model.experts=6"], ["model.experts=12"], {"model.experts": "6 % 4 = 2"},
        ["model.experts = 8", "model.experts = 4"]),
    Bad("expert's dim of a dense model", MOE, ["model.experts="], ["model.experts=4"], {"parallel.expert": ""},
        ["model.experts = 8", "remove parallel.expert"]),
    Bad("fewer experts than a token's", TP, ["model.experts=1"],
        ["model.experts=1", "model.experts_per_token=1"], {"model.experts_per_token": "2 > 1"},
        ["model.experts_per_token = 1", "model.experts = 2"]),
    Bad("no layer with experts", TP, ["model.experts=4", "model.experts_every=5"],
        ["model.experts=4", "model.experts_every=4"], {"model.experts_every": "5 > 4"},
        ["model.experts_every = 4", "model.num_layers = 5"]),
    Bad("compiled halves of a backward pass", PP, ["parallel.options.schedule='zero_bubble'", "train.compile=true"],
        ["train.compile=true"], {"train.compile": ""},
        ["train.compile = false", 'parallel.options.schedule = "interleaved_1f1b"']),
    Bad("constant to a lower rate", TP, ["train.schedule='constant'", "train.min_lr_ratio=0.2"],
        ["train.schedule='linear'", "train.min_lr_ratio=0.2"], {"train.min_lr_ratio": ""},
        ['train.schedule = "cosine"', "remove train.min_lr_ratio"]),
    Bad("everything at once", CP,
        ["mesh.dims={ cp = 3, dp = 3, tp = 2, xp = 2 }", "train.compile=true", "train.keep=3"], [],
        {"mesh.dims.xp": "2", "data.seq_len": "128 % 6 = 2", "train.keep": "", "train.global_batch_size": "32 % 3 = 2"},
        ["mesh.dims.xp = 1", 'parallel.shard = "xp"', 'parallel.pipeline = "xp"', "data.seq_len = 126", "data.seq_len = 132", "mesh.dims.cp = 4", "train.checkpoint_every = 100", "remove train.keep", "train.global_batch_size = 36", "train.global_batch_size = 24", "mesh.dims.dp = 4"]),
]
# fmt: on


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_the_report_on_a_bad_config(case: Bad) -> None:
    check(case)


def test_open_sizes_are_checked_when_they_are_known() -> None:
    config = load_config(made(CP, ["mesh.dims.cp=-1"]))
    assert config.resolved(8).mesh.dims["cp"] == 2
    with pytest.raises(ConfigError, match=r"data\.seq_len: not divisible by 2\*cp: 128 % 6 = 2\n"):
        config.resolved(12)
    config = load_config(made(MOE, ["mesh.dims.dp=-1", "mesh.views.expert={ edp = 1, ep = -1 }"]))
    assert config.resolved(8).expert_gradient_dims == ("edp",)
    with pytest.raises(ConfigError, match=r"model\.experts: experts is not divisible by ep: 8 % 6 = 2\n"):
        config.resolved(6)
    # Views are checked once the size of the mesh is known.
    config = load_config({"mesh": {"dims": {"dp": -1, "tp": 4}, "views": {"expert": {"ep": 6}}}})
    with pytest.raises(
        ConfigError, match=r"mesh\.views\.expert: does not fit the mesh: 6, the mesh has 8 ranks\n"
    ):
        config.resolved(8)


def test_a_dim_of_size_1_costs_nothing_and_splits_nothing() -> None:
    load_config(made(CP, ["data.seq_len=127", "mesh.dims={ cp = 1, dp = 2, tp = 1 }"]))
    small = ["mesh.dims.pp=1", "model.num_layers=1", "train.global_batch_size=2", "train.micro_batch_size=1"]
    config = load_config(made(PP, small))
    assert config.parallel is not None and config.parallel.stages({"pp": 1, "dp": 2}) == 1


def test_missing_sections_do_not_hide_what_the_others_say() -> None:
    report = report_of(made(CP, ["data=", "model.intermediate_size=385"]))
    assert "  data: missing\n" in report
    assert "  model.intermediate_size: intermediate_size is not divisible by tp: 385 % 2 = 1\n" in report


# -- what follows from the parts --------------------------------------------------------------------


def members(config: Config, dims: tuple[str, ...], rank: int) -> set[int]:
    """All ranks that `rank` reaches along these dims, one dim after the other."""
    layout, found = config.layout(8), {rank}
    for dim in dims:
        found |= {int(other) for one in found for other in layout.group_of(one, dim)}
    return found


def sharing(config: Config, rank: int, dims: list[str]) -> set[int]:
    """The ranks with the same coords as `rank` along `dims`."""
    layout = config.layout(8)
    return {n for n in range(8) if all(layout.coord(n, dim) == layout.coord(rank, dim) for dim in dims)}


BASES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], int, int]] = {
    # data dims, gradient dims, micro-batches, stages
    "TP": (TP, ("dp",), ("dp",), 32 // 4 // 4, 1),
    "CP": (CP, ("dp",), ("dp", "cp"), 32 // 2 // 4, 1),
    "PP": (PP, ("dp",), ("dp",), 32 // 2 // 4, 8),
    "HSDP": (HSDP, ("dp", "fsdp"), ("dp", "fsdp"), 32 // 4 // 4, 1),
    "MOE": (MOE, ("dp",), ("dp",), 32 // 8 // 4, 1),
}


@pytest.mark.parametrize("name", BASES)
def test_what_follows_from_the_parts(name: str) -> None:
    base, data, gradients, microbatches, stages = BASES[name]
    config = load_config(base)
    parallel, sizes = config.parallel, config.mesh.sizes(8)
    assert parallel is not None
    assert parallel.data_dims == data
    assert parallel.gradient_dims == gradients
    assert config.microbatches(sizes) == microbatches
    assert parallel.stages(sizes) == stages
    # All ranks that hold a weight contribute to its gradient: they have equal coords along the other dims.
    for rank in range(8):
        assert members(config, gradients, rank) == sharing(
            config, rank, [dim for dim in sizes if dim not in gradients]
        )


def test_gradients_of_experts_are_summed_where_the_same_experts_lie() -> None:
    changes = [
        "mesh.dims={ pp = 2, cp = 2, tp = 2 }",
        "mesh.views.expert={ pp = 2, edp = 1, ep = 2, tp = 2 }",
        "parallel={ pipeline = 'pp', tensor = 'tp', context = 'cp', expert = 'ep' }",
    ]
    for base, expected in ((MOE, ("edp",)), (made(MOE, changes), ("edp",)), (CP, ("dp", "cp"))):
        config = load_config(base)
        assert config.parallel is not None
        assert config.expert_gradient_dims == expected
        own = [dim for part, dim in config.parallel.parts.items() if part in ("pipeline", "tensor", "expert")]
        for rank in range(8):
            assert members(config, config.expert_gradient_dims, rank) == sharing(config, rank, own)
    assert load_config(MOE).expert_view == "expert"
    assert load_config(CP).expert_view is None
    assert load_config({"mesh": {"dims": {"dp": 2}}}).expert_gradient_dims == ()


def test_which_layers_have_experts() -> None:
    model = load_config(made(MOE, ["model.experts_every=2", "model.num_layers=5"])).model
    assert model is not None
    assert [layer for layer in range(5) if model.has_experts(layer)] == [1, 3]


def test_the_examples_use_every_dim() -> None:
    for name in ("cp2_dp2_tp2", "pp2_cp2_tp2", "hsdp2x2_tp2", "ep4_edp2", "quickstart"):
        config = load_config(ROOT / f"configs/{name}.toml").resolved(8)
        assert config.parallel is not None
        assert config.plan(8).layout.world_size == 8
        own = set(config.parallel.parts.values()) - {config.parallel.expert}
        assert own == set(config.mesh.dims)
        assert config.microbatches(config.mesh.sizes(8)) >= 1


# -- against torch ----------------------------------------------------------------------------------


class StageOfRank:
    """The attributes of a stage that torch's schedules read to compute their order."""

    submod = None

    def __init__(self, rank: int, ranks: int, index: int, count: int) -> None:
        self.group_rank, self.group_size = rank, ranks
        self.stage_index, self.num_stages = index, count


def order_of(kind: Any, ranks: int, each: int, microbatches: int) -> Counter[tuple[int, str, int]] | None:
    """How often torch's schedule runs each (stage, pass, micro-batch), or None if torch refuses the numbers."""
    stages = [StageOfRank(0, ranks, index * ranks, ranks * each) for index in range(each)]
    try:
        schedule = kind(stages, microbatches, loss_fn=lambda output, target: output)
    except ValueError:
        return None
    return Counter(
        (action.stage_index, action.computation_type.name, action.microbatch_index)
        for actions in schedule.pipeline_order.values()
        for action in actions
        if action is not None
    )


def test_torch_runs_the_numbers_of_microbatches_that_are_let_through() -> None:
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
    )

    kinds: list[tuple[PipelineSchedule, Any, int]] = [
        ("interleaved_1f1b", ScheduleInterleaved1F1B, 3),
        ("zero_bubble", ScheduleInterleavedZeroBubble, 3),
        ("zero_bubble", ScheduleZBVZeroBubble, 2),
    ]
    for (name, kind, each), ranks, number in itertools.product(kinds, (2, 3, 4), range(1, 13)):
        done = order_of(kind, ranks, each, number)
        if kind is ScheduleInterleavedZeroBubble and number >= ranks:
            assert runs(name, number, ranks) == (done is not None), (kind, ranks, number)
        if not runs(name, number, ranks):
            continue
        assert done is not None, (kind, ranks, number)
        # Every stage runs each micro-batch once, forward and backward. The backward has one part or two.
        assert set(done.values()) == {1}
        for stage, index in itertools.product(range(ranks * each), range(number)):
            passes = {what for at, what, n in done if (at, n) == (stage, index)}
            assert passes in (
                {"FORWARD", "FULL_BACKWARD"},
                {"FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"},
            )
    assert [n for n in range(1, 13) if runs("interleaved_1f1b", n, 4)] == [4, 8, 12]
    assert [n for n in range(1, 13) if runs("zero_bubble", n, 4)] == [4, 5, 6, 7, 8, 10, 12]
    assert [n for n in range(1, 5) if runs("1f1b", n, 3)] == [3, 4]
    assert [n for n in range(1, 5) if runs("gpipe", n, 3)] == [1, 2, 3, 4]


def test_weights_that_are_sharded_along_two_dims_have_a_merged_one() -> None:
    def merged(*changes: str) -> dict[str, tuple[str, ...]]:
        raw = made(
            HSDP, ["parallel.context='cp'", "mesh.dims={ dp = 2, cp = 2, tp = 2, fsdp = 2 }", *changes]
        )
        return dict(load_config(raw).plan(None).layout.merge)

    # The order is the mesh's, wherever the dims are in it.
    assert merged() == {"cp_fsdp": ("cp", "fsdp")}
    assert merged("mesh.merge.mine=['cp', 'fsdp']") == {"mine": ("cp", "fsdp")}
    assert merged("mesh.merge.cp_fsdp=['fsdp', 'cp']") == {
        "cp_fsdp": ("fsdp", "cp"),
        "cp_fsdp_all": ("cp", "fsdp"),
    }
    assert merged("mesh.dims.cp=1") == merged("mesh.dims.fsdp=1") == {}
    assert merged("parallel.data='fsdp'", "parallel.shard='dp'") == {"dp_cp": ("dp", "cp")}
    config = load_config(
        made(HSDP, ["parallel.context='cp'", "mesh.dims={ dp = 2, cp = -1, tp = 2, fsdp = 2 }"])
    )
    assert config.plan(16).family("cp_fsdp").size == 4
    assert "cp_fsdp" not in config.plan(8).layout.names
