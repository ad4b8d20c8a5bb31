"""Helpers that several tests share: configurations by their dims, training runs, and the files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

import meshcomm
from meshcomm.config import Config, ParallelOptions, load_config
from meshcomm.errors import MeshcommError
from meshcomm.train import Callback, Summary, run

_ROLES = {"data": "dp", "shard": "fsdp", "tensor": "tp", "pipeline": "pp", "context": "cp"}


def sizes_of(dims: str) -> dict[str, int]:
    """The sizes of dims from text such as "dp=2 tp=4"."""
    return {name: int(size) for name, size in (pair.split("=") for pair in dims.split())}


def roles_of(dims: Iterable[str]) -> dict[str, str]:
    """The roles in [parallel] for dims that are named after their roles; other dims have none."""
    return {role: dim for role, dim in _ROLES.items() if dim in dims}


def parallel_of(**settings: Any) -> dict[str, Any]:
    """[parallel] from roles and options by their names."""
    options = {key: value for key, value in settings.items() if key in ParallelOptions.model_fields}
    roles = {key: value for key, value in settings.items() if key not in options}
    return roles | ({"options": options} if options else {})


def config_on(base: dict[str, Any], dims: str, *overrides: str, **parallel: Any) -> Config:
    """`base` on other dims, such as "pp=2 dp=4", each with its role. parallel: more settings of [parallel]."""
    sizes = sizes_of(dims)
    mesh = {**base["mesh"], "dims": sizes}
    return load_config(
        {**base, "mesh": mesh, "parallel": parallel_of(**roles_of(sizes), **parallel)}, overrides
    )


def trained(config: Config, callback: Callback | None = None) -> Summary:
    """Run a training on this rank."""
    with meshcomm.init(config) as mesh:
        return run(mesh, config, callback or Callback())


def gradient_node(parameter: nn.Parameter) -> Any:
    """Return the node of autograd that receives the gradient of a parameter. Keep the node for as long as it has hooks."""
    function: Any = parameter.expand_as(parameter).grad_fn
    return function.next_functions[0][0]


def losses_or_error(config: Config) -> Any:
    """The losses of a run, or the text of its error."""
    try:
        return trained(config).losses
    except MeshcommError as error:
        return str(error)


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run_json(out: Path) -> Any:
    """The contents of run.json."""
    return json.loads((out / "run.json").read_text())
