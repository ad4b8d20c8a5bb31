"""An example of every section of a configuration, for its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By section; every key of a section is in one of its examples, and each example is right by itself
# or beside configs/quickstart.toml.
EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "mesh": (
        """\
[mesh]
dims = { pp = 2, dp = -1, tp = 2 }
merge = { model = ["pp", "tp"] }
views.expert = { pp = 2, edp = 1, ep = 4 }
device = "cpu"
backend = "gloo"
timeout_s = 120
validate_calls = "always"
warm_up = true
reports = "reports/hang"
""",
        """\
# A mesh on four of the job's ranks, in an order of its own.
[mesh]
dims = { dp = 2, tp = 2 }
ranks = [4, 5, 6, 7]
rank_order = [4, 6, 5, 7]
""",
    ),
    "mesh.options.NAME": (
        """\
[mesh]
dims = { pp = 2, dp = 4 }
device = "cuda"

[mesh.options.pp]
timeout_s = 60
backend = "nccl"
lane = "p2p"
high_priority = true
""",
    ),
    "process": (
        """\
[process]
init = "tcp"
address = "10.0.0.1:29500"
rank = 0
world_size = 8
device_id = false
""",
        """\
[process]
init = "file"
path = "/shared/rendezvous"
""",
    ),
    "network": (
        """\
[mesh]
dims = { dp = 8 }
device = "cuda"

[network]
interfaces = ["eth0"]
nccl_debug = "INFO"
nccl_debug_subsys = ["INIT", "^P2P"]
nccl_socket_nthreads = 4
nccl_nsocks_perthread = 2
""",
    ),
    "topology": (
        """\
[topology]
ranks_per_node = 8
nodes_per_rack = 4
call_us = 0.0
devices_per_node = 8
memory_gbytes = 80.0
tflops = 400.0
links.network = { latency_us = 10.0, bandwidth_gbytes_s = 50.0 }
""",
    ),
    "topology.links": (
        """\
[topology]
ranks_per_node = 8
nodes_per_rack = 4

[topology.links]
node = { latency_us = 2.0, bandwidth_gbytes_s = 300.0 }
rack = { latency_us = 6.0, bandwidth_gbytes_s = 50.0 }
network = { latency_us = 10.0, bandwidth_gbytes_s = 25.0 }
""",
    ),
    "topology.links.NAME": (
        """\
[topology]
ranks_per_node = 8

[topology.links.network]
latency_us = 10.0
bandwidth_gbytes_s = 25.0
""",
    ),
    "parallel": (
        """\
[mesh]
dims = { pp = 2, dp = 2, tp = 2 }

[parallel]
data = "dp"
tensor = "tp"
sequence_parallel = true
pipeline = "pp"
schedule = "interleaved_1f1b"
stages_per_rank = 2
bucket_mb = 10.0
""",
        """\
[mesh]
dims = { dp = 2, fsdp = 2, cp = 2 }

[parallel]
data = "dp"
shard = "fsdp"
context = "cp"
attention = "ulysses"
""",
        """\
[mesh]
dims = { dp = 8 }
views.expert = { edp = 2, ep = 4 }

[parallel]
data = "dp"
expert = "ep"

[model]
experts = 8
""",
    ),
    "model": (
        """\
[model]
layers = 4
width = 128
heads = 8
kv_heads = 4
ff = 384
rope_theta = 10000.0
norm_eps = 1e-5
tied_embeddings = true
dropout = 0.1
experts = 8
experts_per_token = 2
experts_every = 2
capacity_factor = 1.25
balance_loss = 0.01
""",
    ),
    "data": (
        """\
[data]
files = ["books/*.txt"]
sequence = 128
max_bytes = 2_000_000
""",
    ),
    "train": (
        """\
[train]
steps = 600
global_batch = 32
microbatch = 4
lr = 6e-3
warmup_steps = 10
schedule = "linear"
min_lr_ratio = 0.05
weight_decay = 0.1
betas = [0.9, 0.95]
eps = 1e-8
clip_norm = 1.0
nonfinite = "stop"
seed = 1
dtype = "float32"
compute_dtype = "bfloat16"
recompute = true
compile = false
out = "runs/books"
log_every = 10
trace_steps = [3, 5]
checkpoint_every = 100
checkpoint_async = true
keep = 3
resume = true
""",
    ),
}
