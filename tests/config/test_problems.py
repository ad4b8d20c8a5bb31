"""Reports on bad configurations: the settings and numbers that they name, and their suggestions. Similar good ones load."""

from __future__ import annotations

import copy
import os
import random
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshcomm.config import Config, DimOptions, MeshConfig, TrainConfig, load_config
from meshcomm.config.problems import RENAMED
from meshcomm.config.read import apply, near_file
from meshcomm.errors import ConfigError, LayoutError
from tests.models.families import folder_of

MESH: dict[str, Any] = {"mesh": {"dims": {"pp": 2, "dp": 2, "tp": 2}}}
TRAIN: dict[str, Any] = {
    "mesh": {"dims": {"pp": 2, "dp": 2, "tp": 2}, "device": "cpu"},
    "parallel": {"data": "dp", "tensor": "tp", "pipeline": "pp"},
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 384,
    },
    "data": {"seq_len": 128},
    "train": {"steps": 60, "global_batch_size": 32, "micro_batch_size": 4},
}


class Case(NamedTuple):
    """Changes that make a good config bad, similar changes that keep it good, and the report."""

    name: str
    base: dict[str, Any]
    bad: list[str]
    good: list[str]
    report: str


class Bad(NamedTuple):
    """A Case without the full report. problems: each named setting, with the numbers in its line. tries: all suggestions."""

    name: str
    base: dict[str, Any]
    bad: list[str]
    good: list[str]
    problems: dict[str, str]
    tries: list[str]


CASES = [
    Case(
        "micro-batch and a rank's batch",
        TRAIN,
        ["train.micro_batch_size=3"],
        ["train.micro_batch_size=8"],
        """\
config: 1 problem
  train.micro_batch_size: does not divide a rank's samples: 32/2 = 16, 16 % 3 = 1
    given:    global_batch_size = 32, micro_batch_size = 3, mesh.dims.dp = 2
    expected: a divisor of 16
    try:      train.micro_batch_size = 4, or
              train.micro_batch_size = 2, or
              train.global_batch_size = 30
""",
    ),
    Case(
        "nothing follows from what is wrong",
        TRAIN,
        [
            "mesh.dims.tp='two'",
            "mesh.backnd='gloo'",
            "model.num_heads=2.5",
            "train.lr=-1.0",
            "process.init='tpc'",
        ],
        ["mesh.dims.tp=2"],
        """\
config: 5 problems
  mesh.backnd: unknown key
    given:    backnd = "gloo"
    expected: one of dims, merge, views, rank_order, ranks, device, backend, timeout_s, validate_calls, warm_up, reports, options
    try:      did you mean "mesh.backend"?
  mesh.dims.tp: "two" is not an integer
    given:    tp = "two"
    expected: an integer
    try:      mesh.dims.tp = 1
  process.init: "tpc" is not one of the choices
    given:    init = "tpc"
    expected: "env", "tcp" or "file"
    try:      process.init = "tcp"
  model.num_heads: 2.5 is not an integer
    given:    num_heads = 2.5
    expected: an integer
    try:      model.num_heads = 2
  train.lr: -1.0 is out of range
    given:    lr = -1.0
    expected: greater than 0
    try:      train.lr = 0.003
""",
    ),
]

# fmt: off
TABLE = [
    Bad("unknown key beside the known one", MESH, ["mesh.dimz={ dp = 8 }"], ["mesh.dims={ dp = 8 }"], {"mesh.dimz": ""},
        ["move its settings to mesh.dims"]),
    Bad("no mesh", MESH, ["mesh="], [], {"mesh": ""}, ["mesh = { dims = { dp = 8 } }"]),
    Bad("half a link", MESH, ["topology={ ranks_per_node = 8, links.node = { latency_us = 2.0 } }"],
        ["topology={ ranks_per_node = 8, links.node = { latency_us = 2.0, bandwidth_gbytes_s = 3.0 } }"],
        {"topology.links.node.bandwidth_gbytes_s": ""}, ["topology.links.node.bandwidth_gbytes_s = 50.0"]),
    Bad("size in quotes", MESH, ["mesh.dims.tp='2'"], ["mesh.dims.tp=2"], {"mesh.dims.tp": "2"},
        ["mesh.dims.tp = 2"]),
    *(
        Bad(f"a time that no timer can hold: {key}", MESH, [f"{key}=1e300", *more], [f"{key}=1e6", *more],
            {key: "1e+300"}, [f"{key} = 1000000.0"])
        for key, more in (("mesh.timeout_s", []), ("mesh.options.dp.timeout_s", []),
            ("elastic.delay_s", ["elastic.replace=3"]), ("elastic.patience_s", ["elastic.replace=3", "elastic.min={ dp = 1 }"]))
    ),
    Bad("zero where above zero", MESH, ["mesh.timeout_s=0"], ["mesh.timeout_s=0.5"], {"mesh.timeout_s": "0"},
        ["mesh.timeout_s = 600.0"]),
    Bad("wrong choice", TRAIN, ["train.dtype='float23'"], ["train.dtype='float64'"], {"train.dtype": "23"},
        ['train.dtype = "float32"']),
    Bad("arguments of a group without an optimizer", TRAIN, ['train.groups."*w1*".optimizer_args={ momentum = 0.9 }'],
        ['train.groups."*w1*".optimizer_args={ momentum = 0.9 }', 'train.groups."*w1*".optimizer="sgd"'],
        {'train.groups."*w1*".optimizer_args': "no optimizer of its own"},
        ['train.groups."*w1*".optimizer = "adamw"', 'remove train.groups."*w1*".optimizer_args']),
    *(
        Bad(f"{key} that no optimizer reads", TRAIN,
            ['train.optimizer="rprop"', f"train.{key}={value}", 'train.groups.w1.optimizer="rprop"'],
            ['train.optimizer="rprop"', f"train.{key}={value}", 'train.groups.w1.optimizer="adam"'],
            {f"train.{key}": "rprop"}, ['train.optimizer = "adamw"', f"remove train.{key}"])
        for key, value in {"betas": "[0.8, 0.9]", "eps": "1e-4", "weight_decay": "0.1", "state_dtype": '"bfloat16"'}.items()
    ),
    Bad("list too short", TRAIN, ["train.betas=[0.9]"], ["train.betas=[0.9, 0.99]"], {"train.betas": "1"},
        ["train.betas = [0.9, 0.95]"]),
    Bad("size of a view in quotes", MESH, ["mesh.views.expert={ edp = 2, ep = '4' }"], ["mesh.views.expert={ edp = 2, ep = 4 }"],
        {"mesh.views.expert.ep": "4"}, ["mesh.views.expert.ep = 4"]),
    Bad("number in quotes that is out of range", TRAIN, ["train.steps='0'"], ["train.steps=1"], {"train.steps": "0"},
        []),
    Bad("number where a list of text is", MESH, ["network.interfaces=3"], ["network.interfaces=['3']"],
        {"network.interfaces": "3"}, ["remove network.interfaces"]),
    Bad("two sizes of -1", MESH, ["mesh.dims={ pp = -1, dp = 2, tp = -1 }"],
        ["mesh.dims={ pp = -1, dp = 2, tp = 2 }"], {"mesh.dims": "2"},
        ["mesh.dims = { pp = -1, dp = 2, tp = 1 }"]),
    Bad("rank twice", MESH, ["mesh.rank_order=[0, 1, 2, 3, 4, 5, 6, 6]"],
        ["mesh.rank_order=[0, 1, 2, 3, 4, 5, 7, 6]"], {"mesh.rank_order": "6"},
        ["remove mesh.rank_order: the ranks are then in ascending order"]),
    Bad("dims do not fit the ranks", MESH, ["mesh.ranks=[4, 5, 6, 7]"],
        ["mesh.ranks=[4, 5, 6, 7]", "mesh.dims.dp=1"], {"mesh.dims": "2*2*2 = 8"},
        ["mesh.dims = { pp = 1, dp = 2, tp = 2 }", "mesh.dims = { pp = 2, dp = 1, tp = 2 }", "mesh.dims = { pp = 2, dp = 2, tp = 1 }"]),
    Bad("thread blocks on gloo", MESH, ["mesh.backend='gloo'", "mesh.options.pp.max_ctas=4"],
        ["mesh.backend='nccl'", "mesh.options.pp.max_ctas=4"], {"mesh.options.pp.max_ctas": ""},
        ["remove mesh.options.pp.max_ctas", 'mesh.options.pp.backend = "nccl" and mesh.device = "cuda"']),
    Bad("more thread blocks at least than at most", MESH, ["mesh.options.pp={ min_ctas = 8, max_ctas = 4 }"],
        ["mesh.options.pp={ min_ctas = 4, max_ctas = 4 }"], {"mesh.options.pp.min_ctas": "at least 8 thread blocks, and at most 4"},
        ["mesh.options.pp.min_ctas = 4", "mesh.options.pp.max_ctas = 8"]),
    Bad("num_heads, num_kv_heads and tp", TRAIN, ["mesh.dims.tp=4", "model.num_heads=6", "model.num_kv_heads=6", "model.hidden_size=132"],
        ["mesh.dims.tp=2", "model.num_heads=6", "model.num_kv_heads=6", "model.hidden_size=132"],
        {"model.num_heads": "6 % 4 = 2", "model.num_kv_heads": "6 % 4 = 2"},
        ["mesh.dims.tp = 3", "mesh.dims.tp = 6", "mesh.dims.tp = 3", "mesh.dims.tp = 6"]),
    Bad("hidden_size and num_heads", TRAIN, ["model.hidden_size=100"], ["model.hidden_size=112"], {"model.hidden_size": "100 % 8 = 4"},
        ["model.hidden_size = 96", "model.hidden_size = 112"]),
    Bad("arithmetic of three settings", TRAIN,
        ["mesh.dims.tp=3", "mesh.merge.grad=['dp', 'cp']", "train.micro_batch_size=5"], ["mesh.dims.tp=1"],
        {"mesh.merge.grad": "", "model.num_heads": "8 % 3 = 2", "model.num_kv_heads": "4 % 3 = 1", "train.micro_batch_size": "32/2 = 16"},
        ["one of these, or a tuple of them", "remove mesh.merge.grad", "mesh.dims.tp = 4", "mesh.dims.tp = 2", "mesh.dims.tp = 4", "mesh.dims.tp = 2", "train.micro_batch_size = 4", "train.micro_batch_size = 8", "train.global_batch_size = 30"]),
    Bad("rules wait for an unknown key", MESH, ["mesh.dimz=3", "mesh.merge.grad=['dp', 'cp']"],
        ["mesh.merge.grad=['dp', 'tp']"], {"mesh.dimz": ""}, ['remove mesh.dimz: mesh.dims is set']),
    Bad("an unknown key hides no wrong type", MESH, ["mesh.dimz=3", "mesh.warm_up='yes'"], ["mesh.warm_up=true"],
        {"mesh.dimz": "", "mesh.warm_up": "yes"}, ['remove mesh.dimz: mesh.dims is set', "mesh.warm_up = true"]),
    Bad("unknown key in place of a needed one", MESH, ["mesh={ dimz = { dp = 8 } }"],
        ["mesh={ dims = { dp = 8 } }"], {"mesh.dimz": ""}, ['did you mean "mesh.dims"?']),
    Bad("key of another section", MESH, ["mesh.ranks_per_node=8"], ["topology.ranks_per_node=8"],
        {"mesh.ranks_per_node": ""}, ["move it to topology.ranks_per_node"]),
    Bad("unknown section", MESH, ["netwrok.interfaces=['eth0']"], ["network.interfaces=['eth0']"],
        {"netwrok": ""}, ['did you mean "network"?']),
    *(
        Bad(f"another name of parallel.{name}", TRAIN, [f"parallel={{ {other} = 'dp' }}"], ["train.steps=1"], {f"parallel.{other}": ""},
            [f'did you mean "parallel.{name}"?'])
        for other, name in {"fsdp": "shard", "zero": "shard", "ddp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}.items()
    ),
    Bad("unknown key like none", TRAIN, ["parallel.x='dp'"], ["parallel.options.bucket_mb=1"], {"parallel.x": ""},
        ["remove parallel.x"]),
    Bad("schedule without a pipeline", TRAIN,
        ["parallel={ data = 'dp', tensor = 'tp', options = { schedule = 'gpipe' } }", "mesh.dims.pp=1"],
        ["parallel={ data = 'dp', tensor = 'tp' }", "mesh.dims.pp=1"], {"parallel.options.schedule": ""},
        ["name a dim in parallel.pipeline", "remove parallel.options.schedule"]),
    Bad("no dims", MESH, ["mesh.dims="], ["mesh.dims.pp=1"], {"mesh.dims": ""}, ["mesh.dims = { dp = 8 }"]),
    Bad("size with a fraction", MESH, ["mesh.dims.tp=2.5"], ["mesh.dims.tp=3"], {"mesh.dims.tp": "2.5"},
        ["mesh.dims.tp = 2"]),
    Bad("dims as a list", MESH, ["mesh.dims=['dp']"], ["mesh.dims={ dp = 1 }"], {"mesh.dims": ""},
        ["mesh.dims = { dp = 8 }"]),
    *(
        Bad(f"a character that no path can have: {key}", config, [f"{key}=\"a\\u0000b\""], [f'{key}="a"'],
            {key: "is not text without the character U+0000"}, [way])
        for key, config, way in (("mesh.reports", MESH, 'mesh.reports = "meshcomm-reports"'), ("train.out", TRAIN, 'train.out = "runs/train"'))
    ),
    Bad("text for a list", MESH, ["network.interfaces='eth0'"], ["network.interfaces=['eth0', 'eth1']"],
        {"network.interfaces": ""}, ['network.interfaces = ["eth0"]']),
    Bad("negative timeout of a dim", MESH, ["mesh.options.pp.timeout_s=-1"], ["mesh.options.pp.timeout_s=1"],
        {"mesh.options.pp.timeout_s": "-1"}, ["remove mesh.options.pp.timeout_s"]),
    Bad("number for a choice", MESH, ["process.device_id=1"], ["process.device_id=true"],
        {"process.device_id": "1"}, ["process.device_id = true"]),
    Bad("entry of the wrong type", TRAIN, ["data.files=['a.txt', 3]"], ["data.files=['a.txt', '3']"],
        {"data.files[1]": "3"}, ['data.files[1] = "3"']),
    Bad("empty text", TRAIN, ["train.out=''"], ["train.out='runs/x'"], {"train.out": ""},
        ['train.out = "runs/train"']),
    Bad("date for a number", TRAIN, ["model.norm_eps=1979-05-27"], ["model.norm_eps=1e-6"],
        {"model.norm_eps": "1979-05-27"}, ["model.norm_eps = 1e-05"]),
    Bad("neither a number nor the word", MESH, ["mesh.validate_calls=1.5"], ["mesh.validate_calls='always'"],
        {"mesh.validate_calls": "1.5"}, ["mesh.validate_calls = 2"]),
    Bad("nothing follows from a size that is none", MESH, ["mesh.dims.tp=0", "mesh.rank_order=[0]"],
        ["mesh.dims={ dp = 1 }", "mesh.rank_order=[0]"], {"mesh.dims.tp": "0"}, ["mesh.dims.tp = 1"]),
    Bad("nothing follows from a number that is none", TRAIN, ["train.checkpoint_every='all'", "train.keep=3"],
        ["train.checkpoint_every=1", "train.keep=3"], {"train.checkpoint_every": ""}, ["train.checkpoint_every = 0"]),
    Bad("unknown dims beside an unknown expert's", TRAIN, ["parallel.tensor='edp'", "parallel.expert='xx'"], ["mesh.dims.pp=2"],
        {"parallel.tensor": "", "parallel.expert": ""},
        ['parallel.tensor = "tp"', "remove parallel.expert"]),
    Bad("bad name", MESH, ["mesh.dims._pp=2"], ["mesh.dims.p_p=2"], {"mesh.dims._pp": ""}, ["rename the dim"]),
    Bad("too many ranks", MESH, ["mesh.dims={ pp = 65536, dp = 65536 }"],
        ["mesh.dims={ pp = 4096, dp = 4096 }"], {"mesh.dims": "65536*65536 = 4294967296"}, ["smaller sizes"]),
    Bad("view that keeps the base's size of a dim", MESH, ["mesh.views.expert={ pp = 2, edp = 1, ep = 2 }"],
        ["mesh.views.expert={ pp = 2, edp = 2, ep = 2 }"], {"mesh.views.expert": "2*1*2 = 4"},
        ["mesh.views.expert = { pp = 2, edp = 2, ep = 2 }", "mesh.views.expert = { pp = 2, edp = 1, ep = 4 }"]),
    Bad("view's dim means other groups", MESH, ["mesh.views.expert={ tp = 4, ep = 2 }"],
        ["mesh.views.expert={ ep = 4, tp = 2 }"], {"mesh.views.expert": ""},
        ["rename it in views.expert, or place and size it as in dims"]),
    Bad("two views' dims mean other groups", MESH, ["mesh.views={ a = { ep = 8 }, b = { ep = 4, x = 2 } }"],
        ["mesh.views={ a = { ep = 8 }, b = { y = 4, x = 2 } }"], {"mesh.views": ""},
        ["rename it in views.b, or place and size it as in a"]),
    Bad("rank order that the dims do not divide", MESH,
        ["mesh.dims.dp=-1", "mesh.rank_order=[0, 1, 2, 3, 4, 5]"],
        ["mesh.dims.dp=-1", "mesh.rank_order=[1, 0, 3, 2]"], {"mesh.dims": "2*2 = 4"},
        ["mesh.dims = { pp = 3, dp = -1, tp = 2 }", "mesh.dims = { pp = 2, dp = -1, tp = 3 }", "mesh.dims = { pp = 1, dp = -1, tp = 2 }"]),
    Bad("ranks not ascending", MESH, ["mesh.dims={ tp = 2 }", "mesh.ranks=[3, 2]"],
        ["mesh.dims={ tp = 2 }", "mesh.ranks=[2, 3]", "mesh.rank_order=[3, 2]"], {"mesh.ranks": ""},
        ["mesh.ranks = [2, 3]"]),
    Bad("rank order outside the ranks", MESH,
        ["mesh.dims={ tp = 2 }", "mesh.ranks=[4, 5]", "mesh.rank_order=[0, 1]"],
        ["mesh.dims={ tp = 2 }", "mesh.ranks=[4, 5]", "mesh.rank_order=[5, 4]"], {"mesh.rank_order": "0"},
        ["remove mesh.rank_order: the ranks are then in ascending order"]),
    Bad("merge over no dim", MESH, ["mesh.merge.grad=['dp', 'ttp']"], ["mesh.merge.grad=['dp', 'tp']"],
        {"mesh.merge.grad": "ttp"}, ['did you mean "tp"?', "remove mesh.merge.grad"]),
    Bad("merge with a dim's name", MESH, ["mesh.merge.tp=['dp', 'pp']"], ["mesh.merge.dp_pp=['dp', 'pp']"],
        {"mesh.merge.tp": ""}, ["merge.tp_dp_pp", "remove mesh.merge.tp"]),
    Bad("view with a dim's name", MESH, ["mesh.views.dp={ ep = 8 }"], ["mesh.views.expert={ ep = 8 }"],
        {"mesh.views.dp": ""}, ["rename it, as in mesh.views.dp_view"]),
    Bad("options for no dim", MESH, ["mesh.options.ttp.timeout_s=60"], ["mesh.options.tp.timeout_s=60"],
        {"mesh.options.ttp": ""}, ['did you mean "mesh.options.tp"?']),
    Bad("device that torch calls otherwise", MESH, ["mesh.device='gpu'"], ["mesh.device='cuda'"],
        {"mesh.device": "gpu"}, ['mesh.device = "cuda"']),
    Bad("backend in capitals", MESH, ["mesh.backend='GLOO'"], ["mesh.backend='gloo'"], {"mesh.backend": ""},
        ['mesh.backend = "gloo"']),
    Bad("nccl on cpu for one dim", MESH, ["mesh.device='cpu'", "mesh.options.tp.backend='nccl'"],
        ["mesh.device='cpu'", "mesh.options.tp.backend='gloo'"], {"mesh.options.tp.backend": ""},
        ['mesh.options.tp.backend = "gloo"', 'mesh.device = "cuda"']),
    Bad("no backend for the device", MESH, ["mesh.device='cpu'", "mesh.backend='cuda:nccl'"],
        ["mesh.device='cpu'", "mesh.backend='cpu:gloo,cuda:nccl'"], {"mesh.backend": ""},
        ['mesh.backend = "cpu:gloo,cuda:nccl"']),
    Bad("device to bind on cpu", MESH, ["mesh.device='cpu'", "process.device_id=true"],
        ["mesh.device='cpu'", "process.device_id=false"], {"process.device_id": ""},
        ['process.device_id = "auto"', 'mesh.device = "cuda"']),
    Bad("tcp without address", MESH, ["process.init='tcp'"],
        ["process={ init = 'tcp', address = '10.0.0.1:29500' }"], {"process.address": ""},
        ['process.address = "127.0.0.1:29500"']),
    Bad("address without port", MESH, ["process={ init = 'tcp', address = 'host' }"],
        ["process={ init = 'tcp', address = '[::1]:29500' }"], {"process.address": ""},
        ['process.address = "127.0.0.1:29500"']),
    Bad("address with env", MESH, ["process.address='host:29500'"],
        ["process={ init = 'tcp', address = 'host:29500' }"], {"process.address": ""},
        ['process.init = "tcp"', "remove process.address"]),
    Bad("parts of a log that is off", MESH, ["network={ nccl_debug = 'WARN', nccl_debug_subsys = ['INIT'] }"],
        ["network={ nccl_debug = 'INFO', nccl_debug_subsys = ['INIT'] }"], {"network.nccl_debug_subsys": ""},
        ['network.nccl_debug = "INFO"', "remove network.nccl_debug_subsys"]),
    Bad("unknown part of the log", MESH, ["network={ nccl_debug = 'INFO', nccl_debug_subsys = ['^INTI'] }"],
        ["network={ nccl_debug = 'INFO', nccl_debug_subsys = ['^INIT', 'NET'] }"],
        {"network.nccl_debug_subsys[0]": ""}, ['network.nccl_debug_subsys[0] = "^INIT"']),
    Bad("NCCL's log without NCCL", MESH, ["mesh.backend='gloo'", "network.nccl_debug='INFO'"],
        ["mesh.backend='nccl'", "network.nccl_debug='INFO'"], {"network.nccl_debug": ""},
        ["remove network.nccl_debug", 'mesh.device = "cuda" and mesh.backend = "nccl"']),
    Bad("more sockets than NCCL opens", MESH,
        ["network={ nccl_socket_nthreads = 8, nccl_nsocks_perthread = 16 }"],
        ["network={ nccl_socket_nthreads = 8, nccl_nsocks_perthread = 8 }"],
        {"network.nccl_nsocks_perthread": "8*16 = 128"}, ["network.nccl_nsocks_perthread = 8"]),
    Bad("links without nodes", MESH, ["topology.links.node={ latency_us = 2, bandwidth_gbytes_s = 300 }"],
        ["topology={ ranks_per_node = 8, links.node = { latency_us = 2, bandwidth_gbytes_s = 300 } }"],
        {"topology.links": ""}, ["topology.ranks_per_node = 8", "remove topology.links"]),
    Bad("one training section missing", TRAIN, ["data="], [], {"data": ""},
        ["add [data]", "remove [parallel] [model] [train]"]),
    Bad("one training section only", MESH, ["data.seq_len=128"], ["mesh.device='cpu'"], {"parallel, train": "2"},
        ["add [parallel] [train]", "remove [data]"]),
    Bad("part on no dim", TRAIN, ["parallel.data='ddp'"], ["parallel.data='dp'"], {"parallel.data": ""},
        ['parallel.data = "dp"']),
    Bad("part on a merged dim", TRAIN, ["mesh.merge.both=['dp', 'pp']", "parallel.data='both'"],
        ["mesh.merge.both=['dp', 'pp']"], {"parallel.data": ""}, ['parallel.data = "dp"']),
    Bad("dim with two parts", TRAIN, ["parallel.pipeline='tp'", "mesh.dims.pp=1"],
        ["parallel.pipeline=", "mesh.dims.pp=1"], {"parallel.pipeline": ""},
        ["remove parallel.pipeline, or give it another dim"]),
    Bad("dim without a part", TRAIN, ["mesh.dims.cp=2"], ["mesh.dims.cp=1"], {"mesh.dims.cp": "2"},
        ["mesh.dims.cp = 1", 'parallel.shard = "cp"', 'parallel.context = "cp"']),
    Bad("ff and tp", TRAIN, ["model.intermediate_size=385"], ["model.intermediate_size=386"], {"model.intermediate_size": "385 % 2 = 1"},
        ["mesh.dims.tp = 1", "model.intermediate_size = 386"]),
    Bad("heads and num_kv_heads", TRAIN, ["model.num_kv_heads=6"], ["model.num_kv_heads=8"],
        {"model.num_kv_heads": "8 % 6 = 2"}, ["model.num_kv_heads = 8", "model.num_kv_heads = 4", "model.num_heads = 6"]),
    Bad("odd heads", TRAIN, ["model.hidden_size=120"], ["model.hidden_size=128"], {"model.hidden_size": "120 / 8 = 15"},
        ["model.hidden_size = 128", "model.hidden_size = 112"]),
    Bad("global batch and dp", TRAIN, ["mesh.dims.dp=3"], ["mesh.dims.dp=3", "train.global_batch_size=36"],
        {"train.global_batch_size": "32 % 3 = 2"},
        ["train.global_batch_size = 36", "train.global_batch_size = 24", "mesh.dims.dp = 4"]),
    Bad("micro-batches and stages", TRAIN, ["train.micro_batch_size=16"],
        ["train.micro_batch_size=16", "parallel.options.schedule='gpipe'"], {"train.micro_batch_size": "32/2/16 = 1 < 2"},
        ["train.global_batch_size = 64", 'parallel.options.schedule = "gpipe"']),
    Bad("warm-up and steps", TRAIN, ["train.warmup_steps=100"], ["train.warmup_steps=60"],
        {"train.warmup_steps": "100 > 60"}, ["train.warmup_steps = 60", "train.steps = 100"]),
]
# fmt: on


def made(base: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """`base` with changes, as plain data."""
    data = copy.deepcopy(base)
    assert apply(data, changes) == []
    return data


def report_of(source: Any, overrides: list[str] | None = None) -> str:
    """The report on a configuration that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides or [])
    return str(caught.value)


def suggestions(report: str) -> list[tuple[str, list[str]]]:
    """(problem, suggestions in its report), for each problem."""
    found: list[tuple[str, list[str]]] = []
    trying = False
    for line in report.splitlines()[1:]:
        if not line.startswith("   "):
            found.append((line, []))
            trying = False
        trying = trying or line.startswith("    try:")
        if trying:
            found[-1][1].append(line[14:].removesuffix(", or"))
    return found


def ways_out(report: str) -> list[tuple[str, list[str]]]:
    """(problem, suggested changes) for each suggestion in the report that sets a value."""
    parts = [(problem, each.split(" and ")) for problem, tries in suggestions(report) for each in tries]
    return [each for each in parts if all(re.match(r"[a-z_]+(\.\w+)+ = ", setting) for setting in each[1])]


def check(case: Case | Bad) -> None:
    """Check that the report is right and its suggestions help, and load the similar good configuration."""
    report = report_of(made(case.base, case.bad))
    if isinstance(case, Case):
        assert report + "\n" == case.report
    else:
        found = suggestions(report)
        assert [problem.split(": ")[0].strip() for problem, _ in found] == list(case.problems), report
        assert all(
            numbers in problem for (problem, _), numbers in zip(found, case.problems.values(), strict=True)
        )
        assert [each for _, tries in found for each in tries] == case.tries
    for problem, settings in ways_out(report):
        data = made(case.base, case.bad)
        for setting in settings:
            key, _, value = setting.partition(" = ")
            assert apply(data, [f"{key}={value}"]) == []
        assert problem not in still_wrong(data).splitlines(), f"{settings} leave {problem}"
    assert isinstance(load_config(made(case.base, case.good)), Config)


def still_wrong(data: dict[str, Any], worlds: Sequence[int | None] = (None,)) -> str:
    """The report on a configuration, or "" if it is accepted."""
    try:
        for world in worlds:
            config = load_config(data)
            if world is not None:
                config.resolved(world)
    except (ConfigError, LayoutError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [*CASES, *TABLE], ids=lambda case: case.name)
def test_the_report_on_a_bad_config(case: Case | Bad) -> None:
    check(case)


# -- what was probably meant ------------------------------------------------------------------------

_NO_STEPS = ["train.steps="]
# Changes, and the report's only suggestion, or None.
# fmt: off
MEANT: list[tuple[list[str], str | None]] = [
    # Settings: names that are close in letters are proposed only for a typo, and other tools' names for our meaning.
    (["train.epochs=3"], "set train.steps: epochs * samples / train.global_batch_size"),
    ([*_NO_STEPS, "train.stpes=3"], 'did you mean "train.steps"?'),
    ([*_NO_STEPS, "train.Steps=3"], 'did you mean "train.steps"?'),
    ([*_NO_STEPS, "train.maxSteps=3"], 'did you mean "train.steps"?'),
    ([*_NO_STEPS, "train.stpes='3'"], "train.steps = 3"),
    ([*_NO_STEPS, "train.stpes=few"], 'did you mean "train.steps"? It takes an integer'),
    (["train.max_steps=3"], "remove train.max_steps: train.steps is set"),
    (["train.eval_steps=3"], 'did you mean "train.eval_every"?'),
    (["train.max_delta=0.1"], "remove train.max_delta"),
    (["train.learning_rate=0.1"], 'did you mean "train.lr"?'),
    (["train.learning_rate='1e-3'"], "train.lr = 0.001"),
    (["model.learning_rate=0.1"], "move it to train.lr"),
    (["train.grad_clip=1"], 'did you mean "train.clip_norm"?'),
    (["train.batch_size=4"], "set train.global_batch_size (samples of all ranks), or train.micro_batch_size (of one rank's pass)"),
    (["train.min_lr=1e-5"], "set train.min_lr_ratio: the final learning rate, divided by train.lr"),
    (["train.bf16=true"], 'train.compute_dtype = "bfloat16"'),
    (["train.precision='bf16-mixed'"], 'train.compute_dtype = "bfloat16"'),
    (["data.path='x.txt'"], 'data.files = ["x.txt"]'),
    (["model.init='normal'"], "remove model.init"),
    (["topology.node={ latency_us = 2, bandwidth_gbytes_s = 1 }"], "move it to topology.links.node"),
    (["train.groups.w.lr_mult=0.1"], 'did you mean "train.groups.w.lr"?'),
    # Choices: letters say nothing about a dtype or an optimizer.
    (["train.compute_dtype='fp16'"], 'train.compute_dtype = "float16"'),
    (["train.compute_dtype='torch.bfloat16'"], 'train.compute_dtype = "bfloat16"'),
    (["train.compute_dtype='float32'"], None),
    (["train.compute_dtype='none'"], "remove train.compute_dtype"),
    (["train.dtype='bfloat16'"], None),
    (["data.token_type='int16'"], None),
    (["train.optimizer='AdamW'"], 'train.optimizer = "adamw"'),
    (["train.optimizer='lion'"], None),
    (["train.log_to=['tensorbord']"], 'train.log_to[0] = "tensorboard"'),
    (["train.log_to=['mlflow']"], None),
    (["parallel.options.schedule='1F1B'"], 'parallel.options.schedule = "1f1b"'),
    # Values: a switch is no number, and a share no number of steps.
    (["mesh.validate_calls=true"], 'mesh.validate_calls = "always"'),
    (["mesh.validate_calls=false"], "mesh.validate_calls = 0"),
    (["train.steps=true"], None),
    (["train.warmup_steps=0.1"], None),
    (["train.peak_flops='312T'"], None),
    (["train.resume='latest'"], "train.resume = true"),
    (["train.clip_norm=false"], "remove train.clip_norm"),
    (["model.build='a:b'", "model.lora=true"], "model.lora = {}"),
    (["train.out=['runs/x']"], 'train.out = "runs/x"'),
    # Dims and roles.
    (["parallel.data='dpp'"], 'parallel.data = "dp"'),
    (["parallel.data='copies'"], 'parallel.data = "dp"'),
    (["parallel.tensor=2"], 'parallel.tensor = "tp"'),
    (["parallel.tensor=4"], 'parallel.tensor = "tp" and mesh.dims.tp = 4'),
    (["parallel.tensor=", "parallel.tp_size=2"], 'parallel.tensor = "tp"'),
    (["mesh.dims="], "mesh.dims = { dp = 2, tp = 2, pp = 2 }"),
    (["mesh="], "mesh = { dims = { dp = 2, tp = 2, pp = 2 } }"),
    (["mesh.dims='pp=2,dp=4,tp=1'"], "mesh.dims = { pp = 2, dp = 4, tp = 1 }"),
    (["mesh.merge.d='tp'"], 'name two or more dims, as in mesh.merge.d = ["dp", "tp"]'),
    (["mesh.merge.d='dp,tp'"], 'mesh.merge.d = ["dp", "tp"]'),
    (["elastic.min.q=2"], "elastic.min = { dp = 2 }"),
    (["elastic.min=1"], "elastic.min = { dp = 1 }"),
    (["mesh.device='no'"], 'mesh.device = "auto"'),
    (["mesh.device='cudda'"], 'mesh.device = "cuda"'),
]
# fmt: on


@pytest.mark.parametrize(
    ("changes", "way"), MEANT, ids=lambda value: " ".join(value or ()) if isinstance(value, list) else ""
)
def test_a_suggestion_is_what_was_meant_or_there_is_none(changes: list[str], way: str | None) -> None:
    report = report_of(made(TRAIN, changes))
    assert [each for _, tries in suggestions(report) for each in tries] == ([way] if way else []), report
    key, _, value = changes[-1].partition("=")
    if way is None or way.startswith(("set ", "name ")) or " It takes " in way:
        return
    data = made(TRAIN, changes)
    named = re.match(r'(?:did you mean "|move it to )([\w.]+)', way)
    if named or key not in way.split(" and ")[0].split(" = ")[0]:
        assert apply(data, [f"{key}="]) == []
    ours = [f"{named[1]}={value}"] if named else [each.replace(" = ", "=", 1) for each in way.split(" and ")]
    if not way.startswith("remove "):
        # A place in a list is no path.
        assert apply(data, [re.sub(r"\[0\]=(.*)", r"=[\1]", each) for each in ours]) == []
    elif key in way.partition(":")[0]:
        with suppress(KeyError):
            apply(data, [f"{key}="])
    left = still_wrong(data)
    # What is right in itself may need another setting, which the next report names.
    assert f"{key}: " not in left and not re.search("unknown key|not one of|missing|is not a", left), left


def test_sizes_of_batches_that_are_suggested_fit_the_pipeline() -> None:
    for changes in (
        ["train.micro_batch_size=32"],
        ["train.global_batch_size=6"],
        ["train.global_batch_size=33", "mesh.dims.pp=4", "model.num_layers=8"],
        [
            "train.micro_batch_size=5",
            "parallel.options={ schedule = 'interleaved_1f1b', stages_per_rank = 2 }",
        ],
    ):
        tried = ways_out(report_of(made(TRAIN, changes)))
        assert tried
        for _, settings in tried:
            data = made(TRAIN, [*changes, *(each.replace(" = ", "=", 1) for each in settings)])
            assert still_wrong(data) == "", settings


# -- files ------------------------------------------------------------------------------------------

# Python's json reports a trailing comma at the comma since 3.13, and after the comma before.
_COMMA = 28 if sys.version_info >= (3, 13) else 29

# A file's content, the place of the error in the report, and texts in the report.
# fmt: off
FILES: dict[str, tuple[str, bytes, str, list[str]]] = {
    "no equals sign": ("mesh.toml", b"[mesh]\ndims { dp = 2 }\n", "line 2, column 6", ["not TOML: Expected '='", "try:      correct it, as in  mesh.dims = {", "\n                   ^\n"]),
    "open bracket at the end": ("mesh.toml", b"[mesh]\ndims = {\n", "line 2, column 9", ["not TOML"]),
    "key twice": ("mesh.toml", b"[mesh]\ntimeout_s = 1\n\ttimeout_s = 2\n", "line 3, column 15", ["given:     timeout_s = 2", "try:      write the key once"]),
    "nothing after the equals sign": ("mesh.toml", b"[mesh]\ndims =", "line 2, column 7", ["not TOML: Invalid value"]),
    "JSON with a comma too many": ("mesh.json", b'{\n  "mesh": {"dims": {"dp": 2,}}\n}', f"line 2, column {_COMMA}", ["not JSON", "try:      remove the trailing comma"]),
    "JSON with a key twice": ("mesh.json", b'{"mesh": {"dims": {"dp": 2, "dp": 4}}}', "dp", ["twice", "dp = 2, dp = 4", "remove one"]),
    "YAML with a key twice": ("mesh.yaml", b"mesh:\n  dims: {dp: 2}\n  dims: {dp: 4}\n", "line 3, column 3", ["the key dims occurs twice"]),
    "YAML that ends early": ("mesh.yml", b"mesh: {dims: {dp: 2}\nprocess: 3\n", "line 2, column 1", ["not YAML", "given:    process: 3\n"]),
    "YAML with a number for a key": ("mesh.yaml", b"mesh:\n  dims: {dp: 2}\n  options: {1: {timeout_s: 2}}\n", "mesh.options.1", ["given:    the key 1\n", 'in quotes: "1"']),
    "YAML with a tab": ("mesh.yaml", b"mesh:\n\tdims: {dp: 2}\n", "line 2, column 1", ["not YAML", "try:      use spaces instead of the tab"]),
    "YAML with a list for a key": ("mesh.yaml", b"? [1]\n: 2\n", "line 1, column 3", ["not YAML"]),
    "empty file": ("mesh.toml", b"", "mesh", ["missing", "try:      mesh = { dims = { dp = 8 } }"]),
    "not UTF-8": ("mesh.toml", b"[mesh]\n# caf\xe9\n", "line 2", ["not UTF-8", "the byte 0xe9 at offset 12"]),
    "number without end": ("mesh.toml", b"[mesh]\ntimeout_s = " + b"1" * 5000, "the file", ["not TOML", "5000 digits"]),
}
# fmt: on


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content, place, said = FILES[name]
    (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    report = report_of(file) + "\n"
    assert report.startswith(f"{file}: 1 problem\n  {place}: ")
    assert [words for words in said if words not in report] == [], report


def test_a_file_that_holds_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {"mesh.json": "[1, 2]", "mesh.yaml": "- 1\n- 2\n"}.items():
        Path(name).write_text(content)
        assert report_of(name).startswith(f"{name}: contains no table\n  given:    [1, 2]\n")
    expected = "  expected: one of .toml, .json, .yaml, .yml\n  try:      "
    assert f"{expected}a path to a file" in report_of("mesh.ini")
    Path("mesh.ini").touch()
    assert f"{expected}mesh.toml" in report_of("mesh.ini")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "a: &a [x]\nb: *a", "aliases are not read"),
        ("a.yaml", "a: &a [*a]", "aliases are not read"),
        ("a.yaml", "[" * 40 + "]" * 40, "deep"),
        ("a.yaml", "[" * 100_000, "deep"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", '{"mesh":' * 900 + "1" + "}" * 900, "deep"),
        ("a.toml", "mesh." * 3000 + "a = 1", "deep"),
        ("a.toml", "a = " + "[" * 100_000, "not TOML"),
    ],
)
def test_a_file_that_is_too_deep_or_stands_for_a_larger_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    report = report_of(name)
    assert said in report and report.startswith(f"{name}: 1 problem\n")
    assert all(f"\n    {word}" in report for word in ("given:    ", "expected: ", "try:      "))


def test_a_pipe_is_no_file_and_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("mesh.toml")
    assert report_of("mesh.toml").startswith(
        "mesh.toml: cannot be read: not a file\n  given:    mesh.toml, a pipe"
    )
    # A pipe is not read either to propose a name for a missing file.
    assert report_of("mesh2.toml").endswith("  try:      a path to a file")


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/quickstart.toml").write_text("[mesh]\n")
    assert report_of("configs/quikstart.toml") == (
        "configs/quikstart.toml: cannot be read: no such file or directory\n"
        "  given:    configs/quikstart.toml\n"
        "  expected: a TOML, JSON or YAML file\n"
        "  try:      did you mean configs/quickstart.toml?"
    )
    # Names are compared without their suffixes, because all configs have the same ones.
    Path("pyproject.toml").touch()
    assert report_of("nope.toml").endswith("  try:      a path to a file")
    # Only suitable files are proposed: a config with a mesh or of a model, and a script for a script.
    Path("nop.toml").write_text('[project]\ndescription = "mesh"\n')
    Path("nope.py").touch()
    assert report_of("nope.toml").endswith("  try:      a path to a file")
    assert near_file(Path("nop"), script=True) == "did you mean nope.py?"
    for text in (
        "mesh: { dims: { dp: 8 } }",
        '{"train": {}, "mesh": {}}',
        '{"model_type": "llama"}',
        "[mesh.dims]",
    ):
        Path("nap.json").write_text(text)
        assert report_of("nope.toml").endswith("did you mean nap.json?"), text
    assert report_of("configs/quikstart.yaml").endswith("did you mean configs/quickstart.toml?")
    Path("configs/quickstart.yaml").write_text("mesh:\n")
    assert report_of("configs/quikstart.yaml").endswith("did you mean configs/quickstart.yaml?")
    Path("folder.toml").mkdir()
    assert report_of("folder.toml").startswith("folder.toml: cannot be read: is a directory\n")
    assert report_of("").startswith(": not a configuration file type\n")


def test_what_is_no_configuration() -> None:
    assert report_of(3) == (
        "no configuration can be read from int\n"
        "  given:    3\n"
        "  expected: a file's path, a mapping, or a Config\n"
        '  try:      meshcomm.config.load_config("configs/mesh.toml")'
    )


def test_yaml_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("mesh.yaml").write_text("mesh: {dims: {dp: 2}}")
    assert report_of("mesh.yaml") == (
        "mesh.yaml: YAML files need PyYAML, which is not installed\n"
        "  given:    mesh.yaml\n"
        "  expected: PyYAML; TOML and JSON files need no additional package\n"
        "  try:      pip install 'meshcomm[yaml]'"
    )


# -- overrides --------------------------------------------------------------------------------------

# An override, the error in the report, and the suggestion.
OVERRIDES = {
    "mesh.dims={ dp: 8 }": ("{ dp: 8 } is not a TOML", "--set 'mesh.dims={ dp = 8 }'"),
    "mesh.dims={dp=2": ("{dp=2 is not a TOML", "close every quote and bracket, and write key = value"),
    "data.files=[a,b/*.txt]": ("[a,b/*.txt] is not a TOML", """--set 'data.files=["a","b/*.txt"]'"""),
    "train.groups.embed*.lr=0.1": ("not KEY=VALUE", """--set 'train.groups."embed*".lr=0.1'"""),
    "train.betas[0]=0.8": ("not KEY=VALUE", "--set 'train.betas=[...]', with the whole list"),
    "mesh.dims.tp": ("not KEY=VALUE", "--set mesh.dims.tp=..."),
    "mesh.dims.tp.size=4": ("mesh.dims.tp is not a table", "--set 'mesh.dims.tp={ size = 4 }'"),
    "parallel.data=": ("there is no parallel.data to remove", "--set parallel.data=..."),
    "mesh.dims.tp=2\nbackend=3": (r"2\nbackend=3 is not a TOML", r"""--set 'mesh.dims.tp="2\nbackend=3"'"""),
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_bad_override(override: str) -> None:
    what, way = OVERRIDES[override]
    shown = "--set " + override.replace("\n", "\\n")
    first, problem, *_, last = report_of(MESH, [override]).splitlines()
    assert first == f"config {shown}: 1 problem" and problem.startswith(f"  {shown}: {what}")
    assert last == f"    try:      {way}"


# -- the world --------------------------------------------------------------------------------------


# Dims and ranks, a world that fits, one that does not, the setting in the report, its arithmetic, and the suggestions.
WORLDS: list[tuple[dict[str, Any], int, int | None, str, str, list[str]]] = [
    ({"dims": {"pp": 2, "dp": 2, "tp": 3}}, 12, 8, "dims", "2*2*3 = 12, world is 8",
     ["mesh.dims = { pp = 2, dp = 2, tp = 2 }", "12 processes"]),
    ({"dims": {"pp": 2, "dp": -1, "tp": 2}}, 12, 10, "dims", "2*2 = 4, world is 10",
     ["mesh.dims = { pp = 1, dp = -1, tp = 2 }", "mesh.dims = { pp = 2, dp = -1, tp = 1 }",
      "mesh.dims = { pp = 5, dp = -1, tp = 2 }", "8 processes"]),
    ({"dims": {"pp": 2, "dp": -1, "tp": 2}}, 12, None, "dims", "the mesh leaves dp = -1 open",
     ["--world-size 8, or --set mesh.dims.dp=2"]),
    ({"dims": {"tp": 2}, "ranks": [2, 5]}, 6, 4, "ranks", "rank 5 is not in a world of 4",
     ["6 processes"]),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "fits", "world", "key", "said", "tries"), WORLDS)
def test_a_world_that_does_not_fit(
    mesh: dict[str, Any], fits: int, world: int | None, key: str, said: str, tries: list[str]
) -> None:
    config = load_config({"mesh": mesh})
    assert set(config.plan(fits).layout.ranks.tolist()) == set(mesh.get("ranks", range(fits)))
    for ask in (config.plan, config.layout, config.resolved):
        with pytest.raises(ConfigError) as caught:
            ask(world)
        ((problem, ways),) = suggestions(str(caught.value))
        assert problem.startswith(f"  mesh.{key}: ") and said in problem and ways == tries


def test_a_world_of_nobody() -> None:
    with pytest.raises(LayoutError, match=r"^0 is not a number of processes\n"):
        load_config(MESH).plan(0)


def test_training_is_checked_when_the_open_size_is_known() -> None:
    config = load_config(made(TRAIN, ["mesh.dims.tp=-1"]))
    assert config.resolved(8).mesh.dims == {"pp": 2, "dp": 2, "tp": 2}
    with pytest.raises(ConfigError) as caught:
        config.resolved(48)
    ((problem, ways),) = suggestions(str(caught.value))
    assert problem == "  model.num_heads: num_heads is not divisible by tp: 8 % 12 = 8"
    assert ways == ["mesh.dims.tp = 8", "mesh.dims.tp = 4"]


# -- made in Python ---------------------------------------------------------------------------------


def test_a_section_made_in_python_is_checked_the_same_way() -> None:
    assert MeshConfig(dims={"dp": 2}, options={"dp": DimOptions(timeout_s=5)}).timeout_s == 600.0
    with pytest.raises(ConfigError) as caught:
        MeshConfig(dims={"dp": 0}, merge={"m": ("dp", "x")}, timeout_s="1")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "MeshConfig: 1 problem\n"
        '  timeout_s: "1" is not a number\n'
        '    given:    timeout_s = "1"\n'
        "    expected: a number\n"
        "    try:      timeout_s = 1.0"
    )
    with pytest.raises(ConfigError) as caught:
        MeshConfig(dims={"dp": 0}, merge={"m": ("dp", "x")})
    assert str(caught.value) == (
        "MeshConfig: 2 problems\n"
        "  dims.dp: 0 is not a size\n"
        "    given:    dp = 0\n"
        "    expected: an integer of 1 or more, or -1 on one dim\n"
        "    try:      mesh.dims.dp = 1\n"
        "  merge.m: the mesh has no dim 'x'\n"
        '    given:    m = ["dp", "x"]\n'
        "    expected: one of dp\n"
        "    try:      one of these, or a tuple of them, or\n"
        "              remove mesh.merge.m"
    )


WORDS = ["pp", "dp", "cp", "dims", "dimz", "", "a.b", "x y", "gloo", "nccl", "cpu", "tcp", "\n", '"', "_x"]


def anything(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9)
    if kind == 0 and depth < 3:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 1 and depth < 3:
        return {chance.choice(WORDS): anything(chance, depth + 1) for _ in range(chance.randrange(4))}
    if kind == 2:
        return chance.choice([0.5, -3.5, float("inf"), float("nan"), 10**30, 10**400, date(2020, 1, 1)])
    if kind == 3:
        return chance.choice([True, False, None])
    return chance.choice(WORDS) if kind == 4 else chance.choice([-1, 0, 1, 2, 3, 4, 6, 8])


def tables(data: Any) -> list[dict[Any, Any]]:
    inner = [data] if isinstance(data, dict) else []
    return inner + [table for value in (inner[0].values() if inner else ()) for table in tables(value)]


def test_no_config_whatever_ends_in_another_error_than_ours() -> None:
    chance = random.Random(0)
    everything = made(
        TRAIN,
        [
            "mesh.merge.grad=['dp', 'tp']",
            "mesh.views.expert={ pp = 2, edp = 1, ep = 4 }",
            "mesh.rank_order=[7, 6, 5, 4, 3, 2, 1, 0]",
            "mesh.options.pp={ timeout_s = 3, comm_id = 'x' }",
            "process={ init = 'tcp', address = 'host:1', rank = 0, world_size = 8 }",
            "topology={ ranks_per_node = 8, links.node = { latency_us = 1, bandwidth_gbytes_s = 2 } }",
        ],
    )
    load_config(everything)
    refused = 0
    for _ in range(2000):
        data = copy.deepcopy(everything)
        for _ in range(chance.randrange(1, 4)):
            table = chance.choice(tables(data))
            key = chance.choice([*table, *WORDS, 5])
            if chance.random() < 0.3:
                table.pop(key, None)
            else:
                table[key] = anything(chance)
        report = still_wrong(data, [None, 8, 12])
        refused += bool(report)
        assert not re.search("Input should|pydantic|https?:", report)
    assert refused > 1000


def test_rules_wait_until_every_type_is_right() -> None:
    broken = ["mesh.views.v={ pp = 2, dp = 2, tp = 3 }", "train.global_batch_size=31"]
    assert re.findall(r"(?m)^  (\S+): ", report_of(made(TRAIN, [*broken, "mesh.dims=8"]))) == ["mesh.dims"]
    both = report_of(made(TRAIN, broken))
    assert re.findall(r"(?m)^  (\S+): ", both) == ["mesh.views.v", "train.global_batch_size"]


def test_a_folder_that_is_not_known_is_only_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "newest"}')
    ring = ["mesh.dims.cp=2", "parallel.context='cp'", f"model={{ pretrained = '{tmp_path}' }}"]
    assert "transformers does not understand its config.json" in report_of(made(TRAIN, ring))


@pytest.mark.parametrize("count", [100, 400])
def test_many_problems_of_one_kind_are_counted(count: int) -> None:
    """The report on 400 problems of one kind is as short as on 100, and still has the problems of other kinds."""
    unknown = {f"key{number}": 1 for number in range(count)}
    sizes = {f"dim{number}": 0 for number in range(count)}
    kinds: list[tuple[str, dict[str, Any], str]] = [
        ("mesh.key", {"dims": {"dp": 1}, **unknown, "backend": 3}, "mesh.backend"),
        ("mesh.dims.dim", {"dims": {"dp": 1, **sizes}, "backend": "B"}, "mesh.backend"),
    ]
    for key, mesh, other in kinds:
        lines = report_of({"mesh": mesh}).splitlines()
        assert lines[0].endswith(f": {count + 1} problems") and len(lines) < 60
        assert f"  {key}8 .. {key}{count - 1}: {count - 8} more problems like those of {key}0" in lines
        assert [line for line in lines if line.startswith(f"  {other}: ")]


def test_a_key_that_was_renamed_is_refused_with_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED, "train.iterations", "steps")
    raw = {"mesh": {"dims": {"dp": 2}}, "parallel": {"data": "dp"}, "train": {"iterations": 9}}
    with pytest.raises(ConfigError) as caught:
        load_config(raw, ["train.global_batch_size=2", "train.micro_batch_size=1"])
    assert str(caught.value).splitlines()[1:] == [
        "  train.iterations: was renamed",
        "    given:    iterations = 9",
        "    expected: train.steps",
        "    try:      train.steps = 9",
    ]
    with pytest.raises(ConfigError, match=r"^TrainConfig: 1 problem\n  iterations: was renamed\n"):
        TrainConfig(iterations=9, global_batch_size=2, micro_batch_size=1)  # type: ignore[call-arg]


def test_sizes_of_a_folder_are_no_way_out(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "family")
    with pytest.raises(ConfigError) as caught:
        load_config(
            {
                "mesh": {"dims": {"tp": 3}, "device": "cpu"},
                "parallel": {"tensor": "tp"},
                "model": {"pretrained": str(folder)},
                "data": {"seq_len": 8},
                "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1},
            }
        )
    text = str(caught.value)
    assert "intermediate_size is not divisible by tp" in text and "mesh.dims.tp = 4" in text
    assert "model.intermediate_size =" not in text and "model.num_heads =" not in text
