"""Configurations: files, overrides, and the plan that follows."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcomm.config import Config, DimOptions, Link, MeshConfig, TrainConfig, load_config, plan
from meshcomm.config.read import apply
from meshcomm.config.section import Table
from meshcomm.errors import ConfigError
from meshcomm.layout import GroupOptions, Layout, Plan

ROOT = Path(__file__).parents[2]

TOML = """
[mesh]
dims = { pp = 2, dp = -1, tp = 2 }
merge = { grad = ["dp", "tp"] }
views.expert = { pp = 2, edp = 1, ep = -1 }
device = "cpu"
timeout_s = 30

[mesh.options.pp]
timeout_s = 60
comm_id = "p2p"

[process]
init = "tcp"
address = "127.0.0.1:29500"
rank = 3
world_size = 8
device_id = false

[network]
interfaces = ["eth0", "eth1"]

[topology]
ranks_per_node = 4
links.node = { latency_us = 2, bandwidth_gbytes_s = 300.0 }

[parallel]
data = "dp"
tensor = "tp"
pipeline = "pp"

[parallel.options]
schedule = "gpipe"

[model]
num_layers = 4
hidden_size = 128
num_heads = 8
num_kv_heads = 4
intermediate_size = 384
norm_eps = 1e-5

[data]
seq_len = 128
files = ["*.txt", "/elsewhere/x"]

[train]
steps = 60
global_batch_size = 32
micro_batch_size = 4
betas = [0.9, 0.99]
lr = 3e-3
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The same configuration in every file format."""
    data = tomllib.loads(TOML)
    texts = {"toml": TOML, "json": json.dumps(data), "yaml": yaml.safe_dump(data, sort_keys=False)}
    paths = {ending: tmp_path / f"mesh.{ending}" for ending in texts}
    for ending, text in texts.items():
        paths[ending].write_text(text, encoding="utf-8")
    return paths


def test_all_languages_say_the_same(files: dict[str, Path]) -> None:
    configs = [load_config(path) for path in files.values()]
    assert all(config == configs[0] for config in configs)
    assert len({hash(config) for config in configs}) == 1
    config = configs[0]
    assert list(config.mesh.dims.items()) == [("pp", 2), ("dp", -1), ("tp", 2)]
    assert config.mesh.options == {"pp": DimOptions(timeout_s=60, comm_id="p2p")}
    assert config.mesh.merge == {"grad": ("dp", "tp")}
    assert config.topology.links.node == Link(latency_us=2.0, bandwidth_gbytes_s=300.0)
    assert config.train is not None and config.model is not None
    assert (config.train.betas, config.train.lr) == ((0.9, 0.99), 3e-3)
    assert (config.model.norm_eps, config.model.head_size, config.model.vocab_size) == (1e-5, 16, 256)


def test_data_files_start_at_the_folder_of_the_config(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files["toml"].parent
    for path in (files["toml"], str(files["toml"])):
        config = load_config(path)
        assert config.data is not None
        assert config.data.files == (str(folder / "*.txt"), "/elsewhere/x")
    monkeypatch.chdir(folder.parent)
    config = load_config(f"{folder.name}/mesh.toml", ["data.files=['a/b.txt']"])
    assert config.data is not None
    assert config.data.files == (str(folder / "a/b.txt"),)
    odd = folder / "[odd]"
    odd.mkdir()
    (odd / "mesh.toml").write_text(TOML)
    (odd / "one.txt").write_text("x")
    config = load_config(odd / "mesh.toml")
    assert config.data is not None
    import glob

    assert glob.glob(config.data.files[0]) == [str(odd / "one.txt")]


def test_defaults() -> None:
    config = load_config({"mesh": {"dims": {"dp": 2}}})
    assert config == Config(mesh=MeshConfig(dims={"dp": 2}))
    mesh = config.mesh
    assert (mesh.device, mesh.backend, mesh.timeout_s) == ("auto", "auto", 600.0)
    assert (mesh.merge, mesh.views, mesh.options, mesh.rank_order, mesh.ranks) == ({}, {}, {}, None, None)
    assert (config.process.init, config.process.device_id) == ("env", "auto")
    assert (config.network.interfaces, config.topology.ranks_per_node) == ((), None)
    assert (config.parallel, config.model, config.data, config.train) == (None, None, None, None)
    train = TrainConfig(steps=1, global_batch_size=1, micro_batch_size=1)
    assert (train.lr, train.weight_decay, train.betas, train.eps) == (3e-3, 0.1, (0.9, 0.95), 1e-8)
    assert (train.dtype, train.seed, train.warmup_steps, train.log_every) == ("float32", 0, 0, 1)


# -- overrides --------------------------------------------------------------------------------------


def test_overrides_change_values_and_keep_the_order_of_the_dims(files: dict[str, Path]) -> None:
    config = load_config(
        files["toml"],
        [
            "mesh.dims.dp=3",
            "mesh.dims.dp = 4",
            "mesh.options.tp={ comm_id = 'x' }",
            "train.lr=1e-3",
            "mesh.device='cpu'",
        ],
    )
    assert list(config.mesh.dims.items()) == [("pp", 2), ("dp", 4), ("tp", 2)]
    assert set(config.mesh.options) == {"pp", "tp"}
    assert config.train is not None
    assert config.train.lr == 1e-3
    assert config.source.startswith(f"{files['toml']} --set mesh.dims.dp=3 --set mesh.dims.dp = 4 ")
    whole = load_config(files["toml"], ["mesh.views=", "mesh.dims={ tp = 2, dp = 1, pp = 2 }"])
    assert list(whole.mesh.dims) == ["tp", "dp", "pp"]


def test_an_override_makes_tables_and_removes_keys() -> None:
    data: dict[str, Any] = {"mesh": {"dims": {"dp": 2}}, "process": None}
    assert (
        apply(data, ["mesh.options.dp.comm_id='a'", "process.init='env'", "mesh.dims=", "x.y.z=[1, 2]"]) == []
    )
    assert data == {
        "mesh": {"options": {"dp": {"comm_id": "a"}}},
        "process": {"init": "env"},
        "x": {"y": {"z": [1, 2]}},
    }
    # A wrong override changes nothing, and does not remove a key of the same name elsewhere.
    before = deepcopy(data)
    problems = apply(data, ["a.b=[c", "a.mesh=", "mesh.dims="])
    assert [problem.key for problem in problems] == ["--set a.b=[c", "--set a.mesh=", "--set mesh.dims="]
    assert data == before


def test_an_override_that_is_a_bare_word_is_text() -> None:
    data: dict[str, Any] = {}
    words = [
        "train.out=runs/x",
        "mesh.device=cpu",
        "process.address=[::1]:29500",
        "mesh.timeout_s=5",
        "a.b=true",
    ]
    problems = apply(data, words)
    assert [problem.key for problem in problems] == ["--set process.address=[::1]:29500"]
    assert data == {
        "train": {"out": "runs/x"},
        "mesh": {"device": "cpu", "timeout_s": 5},
        "a": {"b": True},
    }


def test_a_config_can_be_loaded_with_changes(files: dict[str, Path]) -> None:
    config = load_config(files["toml"])
    changed = load_config(config, ["mesh.dims.dp=4"])
    assert (config.mesh.dims["dp"], changed.mesh.dims["dp"]) == (-1, 4)
    assert load_config(config) == config == load_config(config.model_dump(exclude_unset=True))
    assert load_config(config.resolved(8), ["mesh.dims.dp=-1", "mesh.views.expert.ep=-1"]) == config


def test_configs_travel_between_processes(files: dict[str, Path]) -> None:
    config = load_config(files["toml"], ["train.seed=1"])
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config == deepcopy(config) and hash(copy) == hash(config)
    assert copy.source == config.source and isinstance(copy.mesh.dims, Table)
    with pytest.raises(ConfigError):
        copy.mesh.dims["pp"] = 3


# -- the plan that follows --------------------------------------------------------------------------


def test_a_config_is_its_plan(files: dict[str, Path]) -> None:
    config = load_config(files["toml"])
    layout = Layout(
        {"pp": 2, "dp": 4, "tp": 2},
        views={"expert": {"pp": 2, "edp": 1, "ep": 8}},
        merge={"grad": ("dp", "tp")},
    )
    expected = Plan(
        layout,
        defaults=GroupOptions("auto", 30.0),
        options={"pp": GroupOptions("auto", 60.0, "p2p")},
        device="cpu",
    )
    assert config.plan(16) == expected == config.mesh.plan(16) == plan(config, 16) == plan(config.mesh, 16)
    assert config.layout(16) == layout
    assert config.mesh.sizes(16) == {"pp": 2, "dp": 4, "tp": 2}
    assert config.plan(16).fingerprint == plan(files["json"], 16).fingerprint


def test_resolved_fills_in_every_open_size(files: dict[str, Path]) -> None:
    config = load_config(files["toml"]).resolved(16)
    assert config.mesh.dims == {"pp": 2, "dp": 4, "tp": 2}
    assert config.mesh.views == {"expert": {"pp": 2, "edp": 1, "ep": 8}}
    assert config.plan(None) == load_config(files["toml"]).plan(16)
    assert config.resolved(16) == config == config.resolved(None)
    assert config.microbatches(config.mesh.sizes(16)) == 32 // 4 // 4
    assert config.parallel is not None
    assert config.parallel.parts == {"data": "dp", "tensor": "tp", "pipeline": "pp"}
    assert config.parallel.size("data", config.mesh.sizes(16)) == 4


def test_a_mesh_alone_has_no_microbatches() -> None:
    with pytest.raises(ConfigError, match=r"^a configuration without training has no micro-batches\n"):
        load_config({"mesh": {"dims": {"dp": 2}}}).microbatches({"dp": 2})


def test_the_example_configs() -> None:
    for path in sorted((ROOT / "configs").glob("*.toml")):
        world = {"gpt_1024": 1024, "llama_405b": 16_384}.get(path.stem, 8)
        assert load_config(path).resolved(world).plan(world).layout.world_size == world
    big = load_config(ROOT / "configs/gpt_1024.toml")
    assert big.mesh.sizes(1024) == {"pp": 8, "dp": 16, "tp": 8}
    assert big.mesh.sizes(131_072) == {"pp": 8, "dp": 2048, "tp": 8}


def test_loading_imports_no_torch_and_reads_no_environment(files: dict[str, Path]) -> None:
    program = """
import os, sys
from meshcomm.config import load_config
from meshcomm.errors import ConfigError

class Poison:
    def refuse(self, *args):
        raise AssertionError("the environment was read")
    __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = refuse

os.environ = os.environb = Poison()
os.getenv = os.getenvb = Poison().refuse
try:
    os.environ["PATH"]
except AssertionError:
    pass
else:
    raise SystemExit("the poison does not work")
for path in sys.argv[1:]:
    load_config(path, ["mesh.dims.pp=2"]).resolved(8).plan(8).for_rank(3)
    try:
        load_config(path, ["mesh.dims.pp='x'", "mesh.dimz=3", "train.lr=0"])
    except ConfigError as error:
        assert "3 problems" in str(error), error
    else:
        raise SystemExit("no error")
assert "torch" not in sys.modules and "rich" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", program, *map(str, files.values())], check=True, cwd=ROOT, timeout=200
    )
