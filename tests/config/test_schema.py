"""The JSON schema accepts and refuses the same configs as the models. The package is typed for its users."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import meshcomm
from meshcomm.config import load_config
from meshcomm.config.schema import DIALECT, schema
from meshcomm.errors import ConfigError
from meshcomm.models import step_check
from tests.train.every_setting import EVERY

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

TRAINING: dict[str, Any] = {
    "parallel": {"data": "dp"},
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64},
    "data": {"seq_len": 16},
    "train": {"steps": 2, "global_batch_size": 8, "micro_batch_size": 2},
}
MESH: dict[str, Any] = {"mesh": {"dims": {"dp": 2}}}


def problems(data: object) -> list[str]:
    """The paths of the values that the schema refuses."""
    return sorted("/".join(map(str, error.path)) for error in VALIDATOR.iter_errors(data))


def test_the_schema_is_one_of_its_dialect() -> None:
    assert SCHEMA["$schema"] == DIALECT == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_of_the_repository_is_valid(path: Path) -> None:
    assert problems(tomllib.loads(path.read_text(encoding="utf-8"))) == []


VALID: dict[str, dict[str, Any]] = {
    "only dims": MESH,
    "lists and tables": {
        "mesh": {
            "dims": {"dp": 2, "tp": 2},
            "merge": {"all": ["dp", "tp"]},
            "views": {"expert": {"edp": 1, "ep": -1}},
            "rank_order": [3, 2, 1, 0],
            "options": {"dp": {"timeout_s": 3, "comm_id": "x"}},
            "validate_calls": "always",
        }
    },
    "device_id as a word and as a truth value": {**MESH, "process": {"device_id": False}},
    "training": {**MESH, **TRAINING},
    "nothing, written down": {**MESH, "train": None, "topology": {"ranks_per_node": None}},
    "a schema's place": {"$schema": "./meshcomm.schema.json", **MESH},
}
BROKEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no mesh": ({}, [""]),
    "no dims": ({"mesh": {}}, ["mesh"]),
    "a size in words": ({"mesh": {"dims": {"dp": "two"}}}, ["mesh/dims/dp"]),
    "an unknown section": ({**MESH, "meshh": {}}, [""]),
    "an unknown key": ({"mesh": {"dims": {"dp": 2}, "timeout": 3}}, ["mesh"]),
    "an unknown key deep inside": (
        {"mesh": {"dims": {"dp": 2}, "options": {"dp": {"timeout": 3}}}},
        ["mesh/options/dp"],
    ),
    "a timeout of 0": ({"mesh": {"dims": {"dp": 2}, "timeout_s": 0}}, ["mesh/timeout_s"]),
    "a number as text": ({"mesh": {"dims": {"dp": 2}, "timeout_s": "60"}}, ["mesh/timeout_s"]),
    "no choice": ({**MESH, "process": {"init": "mpi"}}, ["process/init"]),
    "a number in place of a truth value": ({**MESH, "process": {"device_id": 1}}, ["process/device_id"]),
    "out of range": ({**MESH, **TRAINING, "model": {**TRAINING["model"], "dropout": 1.0}}, ["model"]),
    "one beta": ({**MESH, **TRAINING, "train": {**TRAINING["train"], "betas": [0.9]}}, ["train"]),
}


@pytest.mark.parametrize("name", VALID)
def test_what_is_valid_is_valid_to_both(name: str, tmp_path: Path) -> None:
    data = VALID[name]
    assert problems(data) == []
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    load_config(path)


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_broken_to_both(name: str) -> None:
    data, paths = BROKEN[name]
    assert problems(data) == paths
    with pytest.raises(ConfigError):
        load_config(data)


def test_what_is_missing_is_told_by_its_key() -> None:
    (error,) = VALIDATOR.iter_errors({})
    assert "'mesh' is a required property" in error.message


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    for part, model in (("", SCHEMA), *SCHEMA["$defs"].items()):
        for name, setting in model["properties"].items():
            yield f"{part}.{name}", {**setting, "required": name in model.get("required", [])}


@pytest.mark.parametrize("name", [name for name, _ in settings()])
def test_every_setting_has_its_sentence(name: str) -> None:
    setting = dict(settings())[name]
    said = setting["description"]
    assert said.endswith(".") and len(said.split()) > 1
    # The sentence explains an omitted value. The schema itself has the other defaults.
    if {"type": "null"} in setting.get("anyOf", []):
        assert re.search("[Oo]mit|required", said)


def test_every_setting_is_read() -> None:
    """A setting that no code reads would silently have no effect."""
    trees = [ast.parse(file.read_text()) for file in (ROOT / "meshcomm").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    # Some are read by name, such as the options of a backend.
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    unread = {name for name, _ in settings() if name.rpartition(".")[2] not in read}
    assert not unread


def training_settings_read(*files: Path) -> set[str]:
    """The settings of [train] that these files read, by name or as an attribute of a section called `train`."""
    found = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value).rpartition(".")[2].strip("_") == "train"
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & set(SCHEMA["$defs"]["TrainConfig"]["properties"])


def test_every_setting_of_training_is_read_by_more_than_its_rules() -> None:
    """A rule, or an attribute of the same name elsewhere, gives a setting no effect, so neither counts."""
    files = [file for file in (ROOT / "meshcomm").rglob("*.py") if file.parent.name != "config"]
    assert set(SCHEMA["$defs"]["TrainConfig"]["properties"]) == training_settings_read(*files)


# Settings that the split program reads and the plain one does not need, and why.
ONLY_SPLIT = {
    "check": "it decides whether the check runs",
    "compute_dtype": "the check computes in one dtype",
    "dtype": "the check computes in one dtype",
    "float8": "the check computes in one dtype",
    "global_batch_size": "the check has a batch of its own",
    "loss_scale": "the check computes in one dtype",
    "micro_batch_size": "the check has a batch of its own",
    "ema": "the averages follow from the weights",
    "on_nonfinite": "the check stops at once",
}


def test_a_setting_of_a_step_is_read_by_the_split_program_and_by_the_plain_one() -> None:
    """`one_step.py` is a step in plain torch that checks each run's first step. Both programs make the same optimizer."""
    package = ROOT / "meshcomm"
    split = training_settings_read(*(package / "parallel").rglob("*.py"))
    plain = training_settings_read(package / "models/one_step.py", package / "parallel/optimizer.py")
    assert {"clip_norm", "z_loss", "betas", "groups"} < split
    assert split - plain == set(ONLY_SPLIT) and plain <= split
    # Moments in bfloat16 differ with the order of sums.
    assert plain - {*step_check._SETTINGS} == {"seed", "state_dtype"}
    # Otherwise, no test would see a setting that some path of a step leaves out.
    # With parameters that are not used: tests/parallel/test_unused.py.
    assert plain - {*EVERY} == {"state_dtype", "on_unused"} and EVERY.keys() <= plain


def test_every_section_has_its_sentence_and_nothing_for_readers_of_the_code() -> None:
    for part in SCHEMA["$defs"].values():
        assert part["description"].endswith(".")
        assert "Raises" not in part["description"] and ">>>" not in part["description"]


# -- the key of editors -------------------------------------------------------------------------------


def test_a_json_file_may_say_where_its_schema_is(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    path.write_text('{"$schema": "./meshcomm.schema.json", "mesh": {"dims": {"dp": 2}}}', encoding="utf-8")
    assert load_config(path) == load_config(MESH)
    path.write_text('{"$schema": 3, "mesh": {"dims": {"dp": 2}}}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown key"):
        load_config(path)


def test_a_toml_file_says_it_in_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("#:schema ./meshcomm.schema.json\n[mesh]\ndims = { dp = 2 }\n", encoding="utf-8")
    assert load_config(path) == load_config(MESH)
    path.write_text('"$schema" = "./meshcomm.schema.json"\n[mesh]\ndims = { dp = 2 }\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r'"\$schema": unknown key'):
        load_config(path)


# -- types --------------------------------------------------------------------------------------------

PROGRAM = """\
from __future__ import annotations

import torch

import meshcomm
from meshcomm import Config, GroupOptions, Handle, Layout, Mesh, MeshConfig, MeshcommError, Plan


def laid_out(world: int) -> Plan:
    config: Config = meshcomm.load_config("mesh.toml", ["mesh.dims.tp=2"])
    layout: Layout = config.layout(world)
    reveal_type(layout.groups("tp"))
    return meshcomm.plan(MeshConfig(dims={"dp": -1}), world)


def step(mesh: Mesh) -> float:
    x = torch.ones(4)
    mesh.all_reduce("dp", x)
    coords: dict[str, int] = mesh.coords
    reveal_type(mesh.show(by="dp").svg())
    reveal_type(mesh.ranks("dp"))
    return coords["dp"] + float(x.sum())


def waited(handle: Handle[None]) -> None:
    handle.wait()


try:
    with meshcomm.init(dims={"dp": 2, "tp": 2}) as mesh:
        step(mesh)
except MeshcommError as error:
    reveal_type(error.hint)
meshcomm.simulate(step, dims={"dp": 2, "tp": 2})
meshcomm.Plan(Layout({"dp": 2}), GroupOptions(timeout_s=3.0))
step(mesh, "tp")
"""
# mypy skips torch: its sources take a minute to read and tell nothing about this package.
SETTINGS = """\
[mypy]
strict = True
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""


@pytest.mark.deep
def test_a_program_that_uses_the_package_is_checked_strictly(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    cache = getattr(pytestconfig, "cache", None)  # -p no:cacheprovider leaves none
    kept = str(cache.mkdir("mypy")) if cache is not None else str(tmp_path / "cache")
    package = Path(meshcomm.__file__).parent
    assert (package / "py.typed").is_file()
    # mypy finds an installed package by its py.typed, and needs a path to find a checkout.
    place = {} if package.parent.name == "site-packages" else {"MYPYPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", kept, "program.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **place},
        timeout=200,
    )
    said = done.stdout.splitlines()
    assert [line for line in said if "error" in line] == [
        'program.py:36: error: Too many arguments for "step"  [call-arg]',
        "Found 1 error in 1 file (checked 1 source file)",
    ], done.stdout + done.stderr
    revealed = [line.partition('"')[2].rstrip('"') for line in said if "Revealed" in line]
    assert revealed[0].startswith("numpy.ndarray")
    assert revealed[1:] == ["str", "list[int]", "str | None"]


def public_functions() -> Iterator[tuple[str, Any]]:
    for name in meshcomm.__all__:
        thing = getattr(meshcomm, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            # pydantic makes the models' constructors from annotated fields.
            for key, member in inspect.getmembers(thing, inspect.isfunction):
                if (not key.startswith("_") or key == "__init__") and member.__module__.startswith(
                    "meshcomm"
                ):
                    yield f"{name}.{key}", member


def test_every_public_function_is_annotated() -> None:
    bare = []
    for name, function in public_functions():
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        if "." in name and parameters and parameters[0].name in ("self", "cls"):
            parameters = parameters[1:]
        bare += [f"{name}({p.name})" for p in parameters if p.annotation is p.empty]
        if signature.return_annotation is signature.empty:
            bare.append(f"{name} -> ")
    assert bare == []
