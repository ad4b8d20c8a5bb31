"""What may import what, and what must stay unimported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshcomm
from tests.conftest import LONGEST

ROOT = Path(meshcomm.__file__).parent

# A file imports from its own folder or from those before it. docs/design/house.md says why.
ORDER = [
    "errors",
    "collectives",
    "reductions",
    "layout",
    "algorithms",
    "config",
    "predict",
    "show",
    "view",
    "transport",
    "comm",
    "pattern",
    "mesh",
    "launch",
    "doctor",
    "parallel",
    "models",
    "train",
    "bench",
    "simulator",
    "dryrun",
    "testing",
    "jobs",
    "cli",
    "__main__",
]
WITHOUT_TORCH = {
    "errors", "collectives", "reductions", "layout", "algorithms", "config", "predict", "show", "view", "cli",
    "__main__", "__init__",
}  # fmt: skip
PRIVATE_FILE = ROOT / "transport" / "torch_private.py"
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path, everywhere: bool = True) -> list[str]:
    """Modules that a file names in imports; without `everywhere`, only those run on import."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def misplaced(path: Path) -> Iterator[str]:
    own = room(path)
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "meshcomm" and rest and rest[0] in ORDER and ORDER.index(rest[0]) > ORDER.index(own):
            yield f"{own} must not import {name}"
        if first == "torch" and own in WITHOUT_TORCH:
            yield f"{own} must not import torch"
        if first == "torch" and path != PRIVATE_FILE and any(part.startswith("_") for part in rest):
            yield f"{name} is private to torch; wrap it in {PRIVATE_FILE.name}"


def test_imports_point_upwards_and_torch_stays_where_it_belongs() -> None:
    assert {room(path) for path in FILES} <= {*ORDER}
    assert [f"{path.relative_to(ROOT)}: {wrong}" for path in FILES for wrong in misplaced(path)] == []


def test_a_fresh_import_loads_neither_torch_nor_reads_the_environment() -> None:
    program = """
import os, sys
class Watched(dict):
    def __getitem__(self, key): raise SystemExit(f"read {key}")
    def get(self, key, default=None): raise SystemExit(f"read {key}")
import meshcomm, meshcomm.layout
plan = meshcomm.Plan(meshcomm.Layout({"dp": 4, "tp": 2}))
assert plan.for_rank(5).coords == {"dp": 2, "tp": 1}
assert "torch" not in sys.modules and "pydantic" not in sys.modules
meshcomm.plan({"mesh": {"dims": {"dp": -1}}}, 8)
recipe = meshcomm.explain_pattern("b h -> b (tp h)", {"tp": 131072})
assert str(recipe.steps[0]) == "all_gather along tp, axis 1" and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_mesh_is_made_and_used_without_what_only_commands_need() -> None:
    # With torch.distributed.tensor comes a library of symbols: half a second for each rank of every job.
    program = """
import logging, sys, torch.distributed
before, handlers = set(sys.modules), logging.getLogger().handlers[:]
import meshcomm, torch
mesh = meshcomm.init(dims={"dp": 1, "tp": 1}, device="cpu")
mesh.all_reduce("dp", torch.ones(1))
mesh.barrier(), mesh.coords, repr(mesh)
new = sorted(set(sys.modules) - before)
unneeded = ("torch.distributed.elastic", "torch.distributed.launcher", "rich", "pdb", "xml", "meshcomm.show",
    "meshcomm.cli", "meshcomm.jobs", "meshcomm.bench", "meshcomm.doctor", "meshcomm.train", "meshcomm.parallel",
    "meshcomm.simulator", "meshcomm.testing", "meshcomm.predict", "meshcomm.pattern", "meshcomm.config.root", "meshcomm.config.train",
    "meshcomm.launch", "meshcomm.mesh.tracing", "meshcomm.mesh.stats")
loaded = [name for name in new if name.startswith(tuple(f"{each}." for each in unneeded)) or name in unneeded]
assert not loaded, loaded
assert str(mesh) and "rich" in sys.modules  # what prints loads it
import meshcomm.mesh.logs, meshcomm.comm.functional, meshcomm.simulator
assert logging.getLogger().handlers == handlers == [] and logging.getLogger().level == logging.WARNING
assert not {"torch.distributed.tensor", "sympy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_files_that_come_first_exist() -> None:
    assert [file for file in LONGEST if not (Path(__file__).parent / file).is_file()] == []


def test_public_names_exist_and_are_listed_once() -> None:
    assert sorted(meshcomm.__all__) == meshcomm.__all__ == sorted(meshcomm._PUBLIC)
    assert meshcomm.__all__ == [name for name in dir(meshcomm) if not name.startswith("_")]
    for name in meshcomm.__all__:
        assert getattr(meshcomm, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = meshcomm.nothing
