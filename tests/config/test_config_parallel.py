"""Parallelism in a configuration: what cannot be had on which sizes, and what follows from what can."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshcomm.config import Config, load
from meshcomm.config.overrides import apply
from meshcomm.config.parallel import PARTS, PipelineSchedule
from meshcomm.config.pipeline_checks import runs
from meshcomm.errors import ConfigError
from tests.config.test_config_errors import TRAIN, Case, made, report_of, still_wrong, ways_out

ROOT = Path(__file__).parents[2]

TP = made(TRAIN, ["mesh.dims={ dp = 4, tp = 2 }", "parallel.pipeline="])
CP = made(
    TRAIN,
    [
        "mesh.dims={ cp = 2, dp = 2, tp = 2 }",
        "parallel={ data = 'dp', tensor = 'tp', context = 'cp', sequence_parallel = true }",
    ],
)
PP = made(
    TRAIN,
    [
        "mesh.dims={ pp = 4, dp = 2 }",
        "parallel={ data = 'dp', pipeline = 'pp', schedule = 'interleaved_1f1b', stages_per_rank = 2 }",
        "model.layers=8",
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

CASES = [
    Case(
        "ring tokens",
        CP,
        ["data.sequence=126", "mesh.dims.tp=4"],
        ["data.sequence=124", "parallel.sequence_parallel=false"],
        """\
config: 1 problem
  data.sequence: not divisible by 2*cp: 126 % 4 = 2
    given:    sequence = 126, mesh.dims.cp = 2, attention = "ring"
    expected: two chunks of equal length for each rank, one early and one late: zig-zag
    try:      data.sequence = 128, or
              data.sequence = 120
""",
    ),
    Case(
        "ulysses tokens",
        CP,
        ["data.sequence=127", "parallel.attention='ulysses'", "parallel.sequence_parallel=false"],
        ["data.sequence=126", "parallel.attention='ulysses'", "parallel.sequence_parallel=false"],
        """\
config: 1 problem
  data.sequence: not divisible by cp: 127 % 2 = 1
    given:    sequence = 127, mesh.dims.cp = 2, attention = "ulysses"
    expected: equally many tokens for each of the 2 ranks along cp
    try:      data.sequence = 128, or
              data.sequence = 126, or
              mesh.dims.cp = 1
""",
    ),
    Case(
        "a rank's tokens and tp",
        CP,
        ["data.sequence=132", "mesh.dims.tp=4"],
        ["data.sequence=136", "mesh.dims.tp=4"],
        """\
config: 1 problem
  data.sequence: a rank's tokens are not divisible by tp: 132/2 = 66, 66 % 4 = 2
    given:    sequence = 132, mesh.dims.cp = 2, mesh.dims.tp = 4, sequence_parallel = true
    expected: equally many tokens for each of the 4 ranks along tp
    try:      data.sequence = 136, or
              data.sequence = 128, or
              parallel.sequence_parallel = false
""",
    ),
    Case(
        "tokens and tp without context",
        TP,
        ["data.sequence=127", "parallel.sequence_parallel=true"],
        ["data.sequence=127"],
        """\
config: 1 problem
  data.sequence: a rank's tokens are not divisible by tp: 127 % 2 = 1
    given:    sequence = 127, mesh.dims.tp = 2, sequence_parallel = true
    expected: equally many tokens for each of the 2 ranks along tp
    try:      data.sequence = 128, or
              data.sequence = 126, or
              parallel.sequence_parallel = false
""",
    ),
    Case(
        "ulysses heads",
        CP,
        ["parallel.attention='ulysses'", "mesh.dims.cp=8", "mesh.dims.tp=2"],
        ["parallel.attention='ulysses'", "mesh.dims.cp=4"],
        """\
config: 1 problem
  model.heads: a rank's heads are not divisible by cp: 8/2 = 4, 4 % 8 = 4
    given:    heads = 8, kv_heads = 4, mesh.dims.tp = 2, mesh.dims.cp = 8, attention = "ulysses"
    expected: equally many heads for each of the 8 ranks along cp, which exchange tokens for heads
    try:      model.heads = 16, or
              mesh.dims.cp = 4, or
              parallel.attention = "ring"
""",
    ),
    Case(
        "ulysses kv_heads",
        CP,
        [
            "parallel.attention='ulysses'",
            "mesh.dims={ cp = 3, dp = 2, tp = 1 }",
            "model.heads=12",
            "model.kv_heads=4",
            "model.width=144",
            "data.sequence=144",
        ],
        [
            "parallel.attention='ulysses'",
            "mesh.dims={ cp = 3, dp = 2, tp = 1 }",
            "model.heads=12",
            "model.kv_heads=6",
            "model.width=144",
            "data.sequence=144",
        ],
        """\
config: 1 problem
  model.kv_heads: neither a rank's kv_heads nor cp divides the other: 4 % 3 = 1, 3 % 4 = 3
    given:    heads = 12, kv_heads = 4, mesh.dims.tp = 1, mesh.dims.cp = 3, attention = "ulysses"
    expected: equally many for each of the 3 ranks along cp, or each on equally many of them
    try:      model.kv_heads = 3, or
              mesh.dims.cp = 4, or
              parallel.attention = "ring"
""",
    ),
    Case(
        "attention without context",
        TP,
        ["parallel.attention='ring'"],
        ["parallel.context='cp'", "mesh.dims.cp=2", "parallel.attention='ring'"],
        """\
config: 1 problem
  parallel.attention: no effect without parallel.context
    given:    attention = "ring", no context
    expected: a dim that plays context
    try:      remove parallel.attention, or
              name a dim in parallel.context
""",
    ),
    Case(
        "sequence parallel without tensor",
        MOE,
        ["parallel.sequence_parallel=true"],
        ["parallel.sequence_parallel=false"],
        """\
config: 1 problem
  parallel.sequence_parallel: no effect without parallel.tensor
    given:    sequence_parallel = true, no tensor
    expected: a dim that plays tensor
    try:      remove parallel.sequence_parallel, or
              name a dim in parallel.tensor
""",
    ),
    Case(
        "many stages without a pipeline",
        MOE,
        ["parallel.stages_per_rank=2"],
        ["parallel.stages_per_rank=1"],
        """\
config: 1 problem
  parallel.stages_per_rank: no effect without parallel.pipeline
    given:    stages_per_rank = 2, no pipeline
    expected: a dim that plays pipeline
    try:      remove parallel.stages_per_rank, or
              name a dim in parallel.pipeline
""",
    ),
    Case(
        "many stages of 1f1b",
        PP,
        ["parallel.schedule='1f1b'"],
        ["parallel.schedule='1f1b'", "parallel.stages_per_rank=1"],
        """\
config: 1 problem
  parallel.stages_per_rank: no effect with schedule = "1f1b", which runs one stage on each rank
    given:    stages_per_rank = 2, schedule = "1f1b"
    expected: one of "interleaved_1f1b", "zero_bubble" beside it
    try:      parallel.schedule = "interleaved_1f1b", or
              parallel.schedule = "zero_bubble", or
              parallel.stages_per_rank = 1
""",
    ),
    Case(
        "one stage interleaved",
        PP,
        ["parallel.stages_per_rank=1"],
        ["parallel.stages_per_rank=2"],
        """\
config: 1 problem
  parallel.stages_per_rank: interleaved_1f1b needs several stages on each rank
    given:    stages_per_rank = 1, schedule = "interleaved_1f1b"
    expected: 2 or more
    try:      parallel.stages_per_rank = 2, or
              parallel.schedule = "1f1b"
""",
    ),
    Case(
        "layers and many stages",
        PP,
        ["model.layers=7"],
        ["model.layers=8"],
        """\
config: 1 problem
  model.layers: fewer layers than stages: 7 < 4*2 = 8
    given:    layers = 7, mesh.dims.pp = 4, stages_per_rank = 2
    expected: at least one layer for each stage
    try:      model.layers = 8, or
              mesh.dims.pp = 3
""",
    ),
    Case(
        "too few micro-batches for ranks",
        PP,
        ["train.global_batch=8"],
        ["train.global_batch=8", "train.microbatch=1"],
        """\
config: 1 problem
  train.microbatch: fewer micro-batches than ranks along pp: 8/2/4 = 1 < 4
    given:    global_batch = 8, microbatch = 4, mesh.dims.pp = 4, schedule = "interleaved_1f1b"
    expected: at least one micro-batch for each rank of interleaved_1f1b
    try:      train.microbatch = 1, or
              train.global_batch = 32, or
              parallel.schedule = "gpipe" and parallel.stages_per_rank = 1
""",
    ),
    Case(
        "micro-batches of an interleaved pipeline",
        PP,
        ["train.global_batch=48"],
        ["train.global_batch=64"],
        """\
config: 1 problem
  train.microbatch: micro-batches are not a multiple of pp: 48/2/4 = 6, 6 % 4 = 2
    given:    global_batch = 48, microbatch = 4, mesh.dims.pp = 4, schedule = "interleaved_1f1b"
    expected: whole rounds of 4 micro-batches, one for each rank along pp
    try:      train.microbatch = 3, or
              train.global_batch = 64, or
              parallel.schedule = "gpipe" and parallel.stages_per_rank = 1
""",
    ),
    Case(
        "micro-batches of zero bubbles",
        PP,
        ["parallel.schedule='zero_bubble'", "train.global_batch=72"],
        ["parallel.schedule='zero_bubble'", "train.global_batch=80"],
        """\
config: 1 problem
  train.microbatch: micro-batches do not fall into 2 equal rounds: 72/2/4 = 9, 9 // 4 = 2, 9 % 2 = 1
    given:    global_batch = 72, microbatch = 4, mesh.dims.pp = 4, schedule = "zero_bubble"
    expected: as many micro-batches in each round of zero_bubble, at least one for each rank along pp
    try:      train.microbatch = 3, or
              train.global_batch = 80, or
              parallel.schedule = "gpipe" and parallel.stages_per_rank = 1
""",
    ),
    Case(
        "batch of a hybrid",
        HSDP,
        ["train.global_batch=34"],
        ["train.global_batch=36", "train.microbatch=3"],
        """\
config: 1 problem
  train.global_batch: not divisible by dp*fsdp: 34 % 4 = 2
    given:    global_batch = 34, mesh.dims.dp = 2, mesh.dims.fsdp = 2
    expected: equally many samples for each of the 4 ranks along dp and fsdp
    try:      train.global_batch = 32, or
              train.global_batch = 48
""",
    ),
    Case(
        "micro-batch of a hybrid",
        HSDP,
        ["train.microbatch=3"],
        ["train.microbatch=2"],
        """\
config: 1 problem
  train.microbatch: does not divide a rank's samples: 32/4 = 8, 8 % 3 = 2
    given:    global_batch = 32, microbatch = 3, mesh.dims.dp = 2, mesh.dims.fsdp = 2
    expected: a divisor of 8
    try:      train.microbatch = 4, or
              train.microbatch = 2, or
              train.global_batch = 36
""",
    ),
    Case(
        "buckets of shards",
        HSDP,
        ["parallel.bucket_mb=5"],
        ["parallel.shard=", "mesh.dims.fsdp=1", "parallel.bucket_mb=5"],
        """\
config: 1 problem
  parallel.bucket_mb: no effect with parallel.shard: sharded gradients are reduced block by block
    given:    bucket_mb = 5.0, shard = "fsdp"
    expected: bucket_mb only where gradients are whole
    try:      remove parallel.bucket_mb
""",
    ),
    Case(
        "buckets of shards whose tokens are split",
        HSDP,
        ["parallel.context='cp'", "mesh.dims.cp=2", "parallel.bucket_mb=5"],
        ["parallel.context='cp'", "mesh.dims.cp=2"],
        """\
config: 1 problem
  parallel.bucket_mb: no effect with parallel.shard: sharded gradients are reduced block by block
    given:    bucket_mb = 5.0, shard = "fsdp"
    expected: bucket_mb only where gradients are whole
    try:      remove parallel.bucket_mb
""",
    ),
    Case(
        "shards outside copies",
        HSDP,
        ["mesh.dims={ fsdp = 2, dp = 2, tp = 2 }"],
        ["mesh.dims={ fsdp = 2, dp = 2 }", "parallel.tensor="],
        """\
config: 1 problem
  parallel.shard: fsdp stands before dp in mesh.dims: torch takes copies of shards with tensor parallelism only from dims in the mesh's own order, copies first
    given:    mesh.dims = { fsdp = 2, dp = 2, tp = 2 }, data = "dp", shard = "fsdp"
    expected: dp before fsdp
    try:      mesh.dims = { dp = 2, fsdp = 2, tp = 2 }, or
              parallel.data = "fsdp" and parallel.shard = "dp"
""",
    ),
    Case(
        "shard and data on one dim",
        HSDP,
        ["parallel.shard='dp'", "mesh.dims.fsdp=1"],
        ["parallel.shard=", "mesh.dims.fsdp=1"],
        """\
config: 1 problem
  parallel.shard: the dim dp plays data already
    given:    data = "dp", shard = "dp"
    expected: a dim of its own for every part
    try:      remove parallel.shard, or give it another dim
""",
    ),
    Case(
        "shard beside experts",
        MOE,
        ["parallel.shard='dp'", "parallel.data="],
        ["parallel.shard='dp'", "parallel.data=", "parallel.expert="],
        """\
config: 1 problem
  parallel.shard: cannot shard beside parallel.expert: experts lie along the dims of another view and would need one of those to shard along
    given:    shard = "dp", expert = "ep"
    expected: one of them
    try:      name dp in parallel.data, not in parallel.shard, or
              remove parallel.expert: all experts on every rank, sharded as all weights
""",
    ),
    Case(
        "hybrid beside experts",
        MOE,
        ["parallel.shard='fsdp'", "mesh.dims={ dp = 4, fsdp = 2 }"],
        ["mesh.dims={ dp = 8, fsdp = 1 }"],
        """\
config: 1 problem
  parallel.shard: cannot shard beside parallel.expert: experts lie along the dims of another view and would need one of those to shard along
    given:    shard = "fsdp", expert = "ep"
    expected: one of them
    try:      one dim for the ranks of dp and fsdp, in parallel.data, or
              remove parallel.expert: all experts on every rank, sharded as all weights
""",
    ),
    Case(
        "expert's dim that is none",
        MOE,
        ["parallel.expert='eb'"],
        ["parallel.expert='ep'"],
        """\
config: 1 problem
  parallel.expert: no dim eb in a view
    given:    expert = "eb", mesh.dims = { dp = 8 }, mesh.views = { expert = { edp = 2, ep = 4 } }
    expected: a dim of one of mesh.views that is no dim of mesh.dims: edp, ep
    try:      parallel.expert = "ep", or
              remove parallel.expert
""",
    ),
    Case(
        "expert's dim without a view",
        MOE,
        ["mesh.views=", "model.experts=4"],
        ["mesh.views={ experts = { edp = 1, ep = 8 } }"],
        """\
config: 1 problem
  parallel.expert: no dim ep in a view
    given:    expert = "ep", mesh.dims = { dp = 8 }, mesh.views = {}
    expected: a dim of one of mesh.views that is no dim of mesh.dims, such as ep
    try:      mesh.views.expert = { edp = 2, ep = 4 }, or
              remove parallel.expert
""",
    ),
    Case(
        "expert's dim in the base",
        MOE,
        ["mesh.views=", "mesh.dims={ dp = 2, ep = 4 }"],
        [
            "mesh.views={ expert = { edp = 2, ep = 4 } }",
            "mesh.dims={ dp = 2, cp = 4 }",
            "parallel.context='cp'",
        ],
        """\
config: 2 problems
  mesh.dims.ep: no part of the training uses ep: its 4 ranks would all do the same
    given:    dims.ep = 4; parallel has data = "dp", expert = "ep"
    expected: size 1, or a part that ep plays
    try:      mesh.dims.ep = 1, or
              parallel.tensor = "ep", or
              parallel.pipeline = "ep", or
              parallel.context = "ep"
  parallel.expert: ep is one of mesh.dims, along which all weights would be split
    given:    expert = "ep", mesh.dims = { dp = 2, ep = 4 }, mesh.views = {}
    expected: a dim of one of mesh.views that is no dim of mesh.dims, such as ep
    try:      mesh.views.expert = { edp = 1, ep2 = 8 } and parallel.expert = "ep2", or
              remove parallel.expert
""",
    ),
    Case(
        "expert's dim in the base and a view",
        MOE,
        ["mesh.dims={ dp = 2, ep = 4 }"],
        ["mesh.dims={ dp = 2, cp = 4 }", "parallel.context='cp'"],
        """\
config: 2 problems
  mesh.dims.ep: no part of the training uses ep: its 4 ranks would all do the same
    given:    dims.ep = 4; parallel has data = "dp", expert = "ep"
    expected: size 1, or a part that ep plays
    try:      mesh.dims.ep = 1, or
              parallel.tensor = "ep", or
              parallel.pipeline = "ep", or
              parallel.context = "ep"
  parallel.expert: ep is one of mesh.dims, along which all weights would be split
    given:    expert = "ep", mesh.dims = { dp = 2, ep = 4 }, mesh.views = { expert = { edp = 2, ep = 4 } }
    expected: a dim of one of mesh.views that is no dim of mesh.dims: edp
    try:      remove parallel.expert
""",
    ),
    Case(
        "expert's dim in two views",
        MOE,
        ["mesh.views.other={ xdp = 2, ep = 4 }"],
        ["mesh.views.other={ xdp = 2, xp = 4 }"],
        """\
config: 1 problem
  parallel.expert: ep is in 2 views: expert, other
    given:    expert = "ep", mesh.dims = { dp = 8 }, mesh.views = { expert = { edp = 2, ep = 4 }, other = { xdp = 2, ep = 4 } }
    expected: a dim of one of mesh.views that is no dim of mesh.dims: edp, xdp
    try:      remove parallel.expert
""",
    ),
    Case(
        "expert's dim merged",
        MOE,
        ["parallel.expert='all'", "mesh.merge.all=['edp', 'ep']"],
        ["mesh.merge.all=['edp', 'ep']"],
        """\
config: 1 problem
  parallel.expert: all is a merged dim
    given:    expert = "all", mesh.dims = { dp = 8 }, mesh.views = { expert = { edp = 2, ep = 4 } }
    expected: a dim of one of mesh.views that is no dim of mesh.dims: edp, ep
    try:      parallel.expert = "edp", or
              parallel.expert = "ep", or
              remove parallel.expert
""",
    ),
    Case(
        "expert's view without tensor",
        MOE,
        ["mesh.dims={ dp = 4, tp = 2 }", "parallel.tensor='tp'"],
        ["mesh.dims={ dp = 4, tp = 2 }", "mesh.views.expert={ ep = 4, tp = 2 }", "parallel.tensor='tp'"],
        """\
config: 1 problem
  mesh.views.expert: does not hold tp, which plays tensor
    given:    views.expert = { edp = 2, ep = 4 }, mesh.dims = { dp = 4, tp = 2 }, tensor = "tp"
    expected: tp = 2 in its place: experts lie along tensor as all weights do
    try:      mesh.views.expert = { edp = 1, ep = 4, tp = 2 }
""",
    ),
    Case(
        "a view's dim for data",
        MOE,
        ["parallel.data='edp'"],
        ["parallel.data='dp'"],
        """\
config: 1 problem
  parallel.data: edp is a view's dim
    given:    data = "edp", mesh.dims = { dp = 8 }
    expected: one of mesh.dims: dp
    try:      parallel.data = "dp", or
              remove parallel.data
""",
    ),
    Case(
        "dim of the base beside experts",
        MOE,
        ["parallel.data="],
        ["parallel.context='dp'", "parallel.data="],
        """\
config: 1 problem
  mesh.dims.dp: no part of the training uses dp: its 8 ranks would all do the same
    given:    dims.dp = 8; parallel has expert = "ep"
    expected: size 1, or a part that dp plays
    try:      mesh.dims.dp = 1, or
              parallel.data = "dp", or
              parallel.tensor = "dp", or
              parallel.pipeline = "dp", or
              parallel.context = "dp"
""",
    ),
    Case(
        "experts and ep",
        MOE,
        ["model.experts=6"],
        ["model.experts=12"],
        """\
config: 1 problem
  model.experts: experts is not divisible by ep: 6 % 4 = 2
    given:    experts = 6, mesh.views.expert.ep = 4
    expected: equally many experts for each of the 4 ranks along ep
    try:      model.experts = 8, or
              model.experts = 4
""",
    ),
    Case(
        "expert's dim of a dense model",
        MOE,
        ["model.experts="],
        ["model.experts=4"],
        """\
config: 1 problem
  parallel.expert: no effect: the model has no experts
    given:    expert = "ep", experts = 0
    expected: model.experts of 1 or more
    try:      model.experts = 8, or
              remove parallel.expert
""",
    ),
    Case(
        "settings of experts in a dense model",
        TP,
        [
            "model.experts_per_token=1",
            "model.experts_every=2",
            "model.capacity_factor=1.25",
            "model.balance_loss=0.0",
        ],
        [
            "model.experts=4",
            "model.experts_per_token=1",
            "model.experts_every=2",
            "model.capacity_factor=1.25",
            "model.balance_loss=0.0",
        ],
        """\
config: 4 problems
  model.experts_per_token: no effect without model.experts
    given:    experts_per_token = 1, experts = 0
    expected: experts of 1 or more
    try:      remove model.experts_per_token, or
              model.experts = 8
  model.experts_every: no effect without model.experts
    given:    experts_every = 2, experts = 0
    expected: experts of 1 or more
    try:      remove model.experts_every, or
              model.experts = 8
  model.capacity_factor: no effect without model.experts
    given:    capacity_factor = 1.25, experts = 0
    expected: experts of 1 or more
    try:      remove model.capacity_factor, or
              model.experts = 8
  model.balance_loss: no effect without model.experts
    given:    balance_loss = 0.0, experts = 0
    expected: experts of 1 or more
    try:      remove model.balance_loss, or
              model.experts = 8
""",
    ),
    Case(
        "fewer experts than a token's",
        TP,
        ["model.experts=1"],
        ["model.experts=1", "model.experts_per_token=1"],
        """\
config: 1 problem
  model.experts_per_token: more than there are experts: 2 > 1
    given:    experts_per_token = 2, experts = 1
    expected: 1 to 1
    try:      model.experts_per_token = 1, or
              model.experts = 2
""",
    ),
    Case(
        "no layer with experts",
        TP,
        ["model.experts=4", "model.experts_every=5"],
        ["model.experts=4", "model.experts_every=4"],
        """\
config: 1 problem
  model.experts_every: no layer has experts: 5 > 4
    given:    experts_every = 5, layers = 4
    expected: 1 to 4
    try:      model.experts_every = 4, or
              model.layers = 5
""",
    ),
    Case(
        "compiled halves of a backward pass",
        PP,
        ["parallel.schedule='zero_bubble'", "train.compile=true"],
        ["train.compile=true"],
        """\
config: 1 problem
  train.compile: cannot compile for zero_bubble: a compiled block's backward pass is one piece, and this schedule runs the halves for inputs and weights at different times
    given:    compile = true, schedule = "zero_bubble"
    expected: one of them
    try:      train.compile = false, or
              parallel.schedule = "interleaved_1f1b"
""",
    ),
    Case(
        "constant to a lower rate",
        TP,
        ["train.schedule='constant'", "train.min_lr_ratio=0.2"],
        ["train.schedule='linear'", "train.min_lr_ratio=0.2"],
        """\
config: 1 problem
  train.min_lr_ratio: no effect with schedule = "constant"
    given:    min_lr_ratio = 0.2, schedule = "constant"
    expected: a schedule that falls
    try:      train.schedule = "cosine", or
              remove train.min_lr_ratio
""",
    ),
    Case(
        "bfloat16 beside float64",
        TP,
        ["train.compute_dtype='bfloat16'", "train.dtype='float64'"],
        ["train.compute_dtype='bfloat16'"],
        """\
config: 1 problem
  train.compute_dtype: no effect with dtype = "float64", which autocast leaves as it is
    given:    compute_dtype = "bfloat16", dtype = "float64"
    expected: dtype = "float32" beside it
    try:      train.dtype = "float32", or
              remove train.compute_dtype
""",
    ),
    Case(
        "checkpoints in the background of none",
        TP,
        ["train.checkpoint_async=true"],
        ["train.checkpoint_async=true", "train.checkpoint_every=5"],
        """\
config: 1 problem
  train.checkpoint_async: no effect: no checkpoints are saved
    given:    checkpoint_async = true, checkpoint_every = 0
    expected: checkpoint_every of 1 or more
    try:      train.checkpoint_every = 100, or
              remove train.checkpoint_async
""",
    ),
    Case(
        "norm clipped to nothing",
        TP,
        ["train.clip_norm=0.0"],
        ["train.clip_norm=1.0"],
        """\
config: 1 problem
  train.clip_norm: 0.0 is out of range
    given:    clip_norm = 0.0
    expected: a number above 0
    try:      remove train.clip_norm
""",
    ),
    Case(
        "all of a sample dropped",
        TP,
        ["model.dropout=1.0"],
        ["model.dropout=0.9"],
        """\
config: 1 problem
  model.dropout: 1.0 is out of range
    given:    dropout = 1.0
    expected: a number from 0 to below 1
    try:      model.dropout = 0.0
""",
    ),
    Case(
        "a part twice",
        MOE,
        ["parallel.expert='dp'"],
        [],
        """\
config: 1 problem
  parallel.expert: the dim dp plays data already
    given:    data = "dp", expert = "dp"
    expected: a dim of its own for every part
    try:      remove parallel.expert, or give it another dim
""",
    ),
    Case(
        "everything at once",
        CP,
        ["mesh.dims={ cp = 3, dp = 3, tp = 2, xp = 2 }", "train.compile=true", "train.keep=3"],
        [],
        """\
config: 4 problems
  mesh.dims.xp: no part of the training uses xp: its 2 ranks would all do the same
    given:    dims.xp = 2; parallel has data = "dp", tensor = "tp", context = "cp"
    expected: size 1, or a part that xp plays
    try:      mesh.dims.xp = 1, or
              parallel.shard = "xp", or
              parallel.pipeline = "xp"
  data.sequence: not divisible by 2*cp: 128 % 6 = 2
    given:    sequence = 128, mesh.dims.cp = 3, attention = "ring"
    expected: two chunks of equal length for each rank, one early and one late: zig-zag
    try:      data.sequence = 126, or
              data.sequence = 132, or
              mesh.dims.cp = 4
  train.keep: no effect: no checkpoints are saved
    given:    keep = 3, checkpoint_every = 0
    expected: checkpoint_every of 1 or more
    try:      train.checkpoint_every = 100, or
              remove train.keep
  train.global_batch: not divisible by dp: 32 % 3 = 2
    given:    global_batch = 32, mesh.dims.dp = 3
    expected: equally many samples for each of the 3 ranks along dp
    try:      train.global_batch = 36, or
              train.global_batch = 24, or
              mesh.dims.dp = 4
""",
    ),
]

by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@by_name
def test_the_report_on_a_bad_config(case: Case) -> None:
    assert report_of(made(case.base, case.bad)) + "\n" == case.report


@by_name
def test_the_good_one_beside_it(case: Case) -> None:
    assert isinstance(load(made(case.base, case.good)), Config)


@by_name
def test_what_a_report_suggests_helps(case: Case) -> None:
    for problem, settings in ways_out(case.report):
        data = made(case.base, case.bad)
        for setting in settings:
            key, _, value = setting.partition(" = ")
            assert apply(data, [f"{key}={value}"]) == []
        assert problem not in still_wrong(data).splitlines(), f"{settings} leave {problem}"


def test_open_sizes_are_checked_when_they_are_known() -> None:
    config = load(made(CP, ["mesh.dims.cp=-1"]))
    assert config.resolved(8).mesh.dims["cp"] == 2
    with pytest.raises(ConfigError, match=r"data\.sequence: not divisible by 2\*cp: 128 % 6 = 2\n"):
        config.resolved(12)
    config = load(made(MOE, ["mesh.dims.dp=-1", "mesh.views.expert={ edp = 1, ep = -1 }"]))
    assert config.resolved(8).expert_gradient_dims == ("edp",)
    with pytest.raises(ConfigError, match=r"model\.experts: experts is not divisible by ep: 8 % 6 = 2\n"):
        config.resolved(6)


def test_a_dim_of_size_1_costs_nothing_and_splits_nothing() -> None:
    odd = ["data.sequence=127", "mesh.dims={ cp = 1, dp = 2, tp = 1 }"]
    load(made(CP, odd))
    config = load(
        made(PP, ["mesh.dims.pp=1", "model.layers=1", "train.global_batch=2", "train.microbatch=1"])
    )
    assert config.parallel is not None
    assert config.parallel.stages({"pp": 1, "dp": 2}) == 1


def test_the_settings_of_before_mean_what_they_meant() -> None:
    config = load(ROOT / "configs/quickstart.toml")
    assert config.parallel is not None
    assert config.model is not None
    assert config.train is not None
    assert config.parallel.parts == {"data": "dp", "tensor": "tp", "pipeline": "pp"}
    assert config.parallel.model_dump(exclude=set(PARTS)) == {
        "sequence_parallel": False,
        "schedule": "1f1b",
        "stages_per_rank": 1,
        "attention": "ring",
        "bucket_mb": 25.0,
    }
    model, train = config.model, config.train
    assert (model.tied_embeddings, model.dropout, model.experts, model.capacity_factor) == (
        False,
        0.0,
        0,
        None,
    )
    assert not any(model.has_experts(layer) for layer in range(model.layers))
    assert (train.schedule, train.min_lr_ratio, train.clip_norm, train.compute_dtype) == (
        "cosine",
        0.1,
        None,
        None,
    )
    assert not (train.recompute or train.compile or train.checkpoint_async)


def test_missing_sections_do_not_hide_what_the_others_say() -> None:
    report = report_of(made(CP, ["data=", "model.ff=385"]))
    assert "  data: missing\n" in report
    assert "  model.ff: ff is not divisible by tp: 385 % 2 = 1\n" in report


# -- what follows from the parts --------------------------------------------------------------------


def members(config: Config, dims: tuple[str, ...], rank: int) -> set[int]:
    """All ranks that `rank` reaches by going along these dims, one after the other."""
    layout, found = config.layout(8), {rank}
    for dim in dims:
        found |= {int(other) for one in found for other in layout.group_of(one, dim)}
    return found


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
    config = load(base)
    parallel, sizes = config.parallel, config.mesh.sizes(8)
    assert parallel is not None
    assert parallel.data_dims == data
    assert parallel.gradient_dims == gradients
    assert config.microbatches(sizes) == microbatches
    assert parallel.stages(sizes) == stages
    # Gradients of one weight come from all ranks that hold it: those with equal coords along the rest.
    layout = config.layout(8)
    for rank in range(8):
        held = [
            other
            for other in range(8)
            if all(
                layout.coord(other, dim) == layout.coord(rank, dim) for dim in sizes if dim not in gradients
            )
        ]
        assert members(config, gradients, rank) == set(held)


def test_gradients_of_experts_are_summed_where_the_same_experts_lie() -> None:
    changes = [
        "mesh.dims={ pp = 2, cp = 2, tp = 2 }",
        "mesh.views.expert={ pp = 2, edp = 1, ep = 2, tp = 2 }",
        "parallel={ pipeline = 'pp', tensor = 'tp', context = 'cp', expert = 'ep' }",
    ]
    for base, expected in ((MOE, ("edp",)), (made(MOE, changes), ("edp",)), (CP, ("dp", "cp"))):
        config = load(base)
        assert config.parallel is not None
        assert config.expert_gradient_dims == expected
        own = {dim for part, dim in config.parallel.parts.items() if part in ("pipeline", "tensor", "expert")}
        layout = config.layout(8)
        for rank in range(8):
            same = {
                other
                for other in range(8)
                if all(layout.coord(other, dim) == layout.coord(rank, dim) for dim in own)
            }
            assert members(config, config.expert_gradient_dims, rank) == same
    assert load(MOE).expert_view == "expert"
    assert load(CP).expert_view is None
    assert load({"mesh": {"dims": {"dp": 2}}}).expert_gradient_dims == ()


def test_which_layers_have_experts() -> None:
    model = load(made(MOE, ["model.experts_every=2", "model.layers=5"])).model
    assert model is not None
    assert [layer for layer in range(5) if model.has_experts(layer)] == [1, 3]


def test_the_examples_use_every_dim() -> None:
    for name in ("cp2_dp2_tp2", "pp2_cp2_tp2", "hsdp2x2_tp2", "ep4_edp2", "quickstart"):
        config = load(ROOT / f"configs/{name}.toml").resolved(8)
        assert config.parallel is not None
        assert config.plan(8).layout.world_size == 8
        own = set(config.parallel.parts.values()) - {config.parallel.expert}
        assert own == set(config.mesh.dims)
        assert config.microbatches(config.mesh.sizes(8)) >= 1


# -- against torch ----------------------------------------------------------------------------------


class StageOfRank:
    """What torch's schedules read of a stage while they work out their order."""

    submod = None

    def __init__(self, rank: int, ranks: int, index: int, count: int) -> None:
        self.group_rank, self.group_size = rank, ranks
        self.stage_index, self.num_stages = index, count


def order_of(kind: Any, ranks: int, each: int, microbatches: int) -> Counter[tuple[int, str, int]] | None:
    """How often a schedule of torch does what: (stage, pass, micro-batch); None where it refuses."""
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
        # Every stage does each micro-batch once, forwards and backwards, in one piece or in two.
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
