"""Print the reference page of all sections and keys: `python docs/tools/config_page.py > docs/reference/config.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from meshcomm.config.root import Config
from meshcomm.config.write import toml

# The key of a section inside another section, by the name of its model.
_INSIDE: Final = {
    "DimOptions": "options.NAME",
    "Links": "links",
    "Link": "NAME",
    "GroupConfig": "groups.PATTERN",
    "ParallelOptions": "options",
    "LoraConfig": "lora",
}
_KINDS: Final = {"integer": "integer", "number": "number", "string": "string", "boolean": "true or false"}

# Examples by section. Every key of a section appears in one of its examples. Each example is valid alone or in
# combination with configs/quickstart.toml.
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
# A mesh on four of the job's ranks, in a custom order.
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
comm_id = "p2p"
high_priority = true
min_ctas = 1
max_ctas = 8
cga_cluster_size = 2
split_share = true
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
    "elastic": (
        """\
# For configs/quickstart.toml: start up to three new processes, each one minute after a loss. Until then, one copy of
# the model may continue.
[elastic]
replace = 3
min = { dp = 1 }
patience_s = 10
delay_s = 60
copy_every = 10
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
memory_bandwidth_gbytes_s = 3350.0
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
pipeline = "pp"
options.schedule = "gpipe"
""",
        """\
[mesh]
dims = { dp = 2, fsdp = 2, cp = 2 }

[parallel]
data = "dp"
shard = "fsdp"
context = "cp"
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
    "parallel.options": (
        """\
[mesh]
dims = { pp = 2, dp = 2, tp = 2 }

[parallel]
data = "dp"
tensor = "tp"
pipeline = "pp"

[parallel.options]
sequence_parallel = true
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

[parallel.options]
reshard = true
reduce_dtype = "bfloat16"
attention = "ulysses"
""",
    ),
    "model": (
        """\
[model]
num_layers = 4
hidden_size = 128
num_heads = 8
num_kv_heads = 4
intermediate_size = 384
head_dim = 16
vocab_size = 256
rope_theta = 10000.0
norm_eps = 1e-5
tied_embeddings = true
dropout = 0.1
experts = 8
experts_per_token = 2
experts_every = 2
capacity_factor = 1.25
balance_loss = 0.01
bias_update_speed = 0.001
""",
        """\
[model]
pretrained = "Llama-3.2-1B"
random_weights = true
""",
        """\
[model]
build = "my_package.models:gpt"
args = { layers = 4 }
""",
    ),
    "model.lora": (
        """\
[model]
pretrained = "Llama-3.2-1B"

[model.lora]
rank = 8
alpha = 16.0
dropout = 0.05
targets = ["q_proj", "v_proj"]
""",
    ),
    "data": (
        """\
[data]
files = ["books/*.txt"]
seq_len = 128
max_bytes = 2_000_000
tokenizer = "tokenizer.json"
eos = "<|endoftext|>"
validation_files = ["held/*.txt"]

[train]
eval_every = 100
""",
        """\
[data]
files = ["web/*.parquet", "code.jsonl.zst"]
column = "content"
weights = [0.7, 0.3]
seq_len = 128
""",
        """\
[data]
tokens = ["web.bin", "code.npy"]
token_type = "uint16"
weights = [0.7, 0.3]
document_mask = true
eos_id = 2
seq_len = 128
validation = 0.01
""",
        """\
[data]
build = "my_package.data:loader"
args = { folder = "images" }
seq_len = 128
workers = 2
""",
        """\
[data]
chat = ["conversations.jsonl"]
answers_only = true
document_mask = true
seq_len = 512
""",
    ),
    "train": (
        """\
[data]
validation = 0.05

[train]
steps = 600
global_batch_size = 32
micro_batch_size = 4
lr = 6e-3
warmup_steps = 10
schedule = "linear"
min_lr_ratio = 0.05
weight_decay = 0.1
betas = [0.9, 0.95]
eps = 1e-8
clip_norm = 1.0
label_smoothing = 0.1
z_loss = 1e-4
check = false
frozen = ["embed*"]
on_nonfinite = "stop"
on_unused = "error"
ema = 0.999
seed = 1
dtype = "float32"
compute_dtype = "bfloat16"
float8 = "rowwise"
state_dtype = "bfloat16"
float32_matmul_precision = "high"
activation_checkpointing = "selective"
compile = false
out = "runs/books"
log_every = 10
trace_steps = [3, 5]
checkpoint_every = 100
checkpoint_async = true
keep = 3
resume = true
resume_changed = ["global_batch_size"]
eval_every = 100
eval_batches = 20
evaluate = "my_package.judge:accuracy"
patience = 3
evaluate_ema = true
min_delta = 0.01
target_loss = 1.2
log_to = ["tensorboard"]
peak_flops = 989.4e12
""",
        """\
[train]
steps = 600
global_batch_size = 32
micro_batch_size = 4
schedule = "wsd"
decay_steps = 100
optimizer = "sgd"
optimizer_args = { momentum = 0.9 }
groups = { "embed*" = { lr = 0.1 } }
compute_dtype = "float16"
loss_scale = 1024.0
init_from = "runs/base"
""",
    ),
    "train.groups.PATTERN": (
        """\
[train]
steps = 600
global_batch_size = 32
micro_batch_size = 4

[train.groups."embed*"]
lr = 0.1
weight_decay = 0.0
""",
        """\
[train]
steps = 600
global_batch_size = 32
micro_batch_size = 4

[train.groups."*.attn.w?.weight"]
lr = 2.0
optimizer = "muon"
optimizer_args = { adjust_lr_fn = "match_rms_adamw" }
""",
    ),
}


def page() -> str:
    """The page in Markdown, generated from the models that check a configuration."""
    lines = [
        "# Configuration",
        "",
        "This page lists every key of a configuration with its type, default and meaning. `python docs/tools/config_page.py` generates it from the models that check every configuration; a test compares them.",
        "",
        "A configuration is a TOML, JSON or YAML file, or a mapping in Python. On the command line, `--set KEY=VALUE` changes one key, and `--set KEY=` removes it.",
        "An unknown key is an error. A key that has no effect in combination with the others is an error too.",
        "The types, choices and ranges of all settings are checked first; if they are right, the rules between settings are. The problems of either check are reported at once. A default of `None` means that the key can be left out.",
        "",
        "| section | |",
        "|---|---|",
    ]
    # The schema comes from pydantic, so the page documents the same models that check configurations.
    schema = Config.model_json_schema()
    for name, field in schema["properties"].items():
        more = " Required." if name in schema["required"] else ""
        lines.append(f"| [`[{name}]`](#{name}) | {_cell(field['description'])}{more} |")
    for name, model in sections().items():
        lines += [
            "",
            f"## {name}",
            "",
            _opening(model),
            "",
            "| key | type | default | |",
            "|---|---|---|---|",
        ]
        needed = set(model.get("required", ()))
        for key, field in model["properties"].items():
            default = "required" if key in needed else f"`{_default(field)}`"
            lines.append(f"| `{key}` | {_type(field)} | {default} | {_cell(field['description'])} |")
        for example in EXAMPLES[name]:
            lines += ["", "```toml", example.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def sections() -> dict[str, dict[str, Any]]:
    """All sections by their path in a configuration, each with its JSON schema."""
    schema = Config.model_json_schema()
    found: dict[str, dict[str, Any]] = {}

    def visit(place: str, field: Any) -> None:
        for name in _models(field):
            below = place if place.count(".") == 0 and name not in _INSIDE else f"{place}.{_INSIDE[name]}"
            if below not in found:
                found[below] = schema["$defs"][name]
                for inner in schema["$defs"][name]["properties"].values():
                    visit(below, inner)

    for name, field in schema["properties"].items():
        visit(name, field)
    return found


def _models(field: Any) -> list[str]:
    """The names of the models that a field's schema refers to."""
    if isinstance(field, list):
        return [name for part in field for name in _models(part)]
    if not isinstance(field, dict):
        return []
    if "$ref" in field:
        return [field["$ref"].rsplit("/", 1)[1]]
    return [
        name for key, part in field.items() if key not in ("default", "examples") for name in _models(part)
    ]


def _opening(model: Mapping[str, Any]) -> str:
    first = str(model["description"]).split("\n\n")[0].replace("\n", " ")
    # "`[mesh]`: names, ..." repeats the heading.
    return _sentence(first.split(": ", 1)[1] if first.startswith("`[") else first)


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default", {} if "additionalProperties" in field else None)
    if isinstance(default, dict) or "$ref" in field:
        return "{}"
    return "None" if default is None else toml(default)


def _type(field: Mapping[str, Any]) -> str:
    return _cell(" or ".join(dict.fromkeys(_types(field))))


def _types(field: Mapping[str, Any]) -> list[str]:
    """The kinds of values that a field accepts. null is omitted, because TOML does not have it."""
    if "anyOf" in field:
        return [name for part in field["anyOf"] for name in _types(part)]
    if "$ref" in field:
        return [f"table `{_INSIDE[_models(field)[0]]}`"]
    if "enum" in field:
        return [f"`{toml(value)}`" for value in field["enum"]]
    if "const" in field:
        return [f"`{toml(field['const'])}`"]
    kind = str(field["type"])
    if kind == "null":
        return []
    if kind == "object":
        return [f"table of {_several(field['additionalProperties'])}"]
    if kind == "array":
        count = f"{field['minItems']} " if "prefixItems" in field else ""
        return [f"list of {count}{_several(field.get('items') or field['prefixItems'][0])}"]
    return [_KINDS[kind] + _bounds(field)]


def _several(field: Mapping[str, Any]) -> str:
    """The kind of the elements in a list or table, in the plural."""
    return re.sub(r"\b(integer|number|string|list|table)\b", r"\1s", " or ".join(_types(field)), count=1)


def _bounds(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    parts = [f"{low} or more"] if low is not None else [f"above {above}"] if above is not None else []
    parts += [f"{high} at most"] if high is not None else [f"below {below}"] if below is not None else []
    if field.get("minLength"):
        parts.append("not empty")
    return f" ({', '.join(parts)})" if parts else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")
