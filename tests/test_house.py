"""Allowed imports between modules, modules that must not be loaded, and the places of test files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import meshcomm

ROOT, TESTS = Path(meshcomm.__file__).parent, Path(__file__).parent

# A file imports only from its own folder and from folders above it in this list: see docs/design/house.md.
ORDER = [
    "lines",
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
    "watching",
    "comm",
    "pattern",
    "rendezvous",
    "mesh",
    "job",
    "doctor",
    "simulator",
    "transfer",
    "parallel",
    "transfer",
    "models",
    "train",
    "dryrun",
    "testing",
    "commands",
    "__main__",
]
WITHOUT_TORCH = {
    "lines", "errors", "collectives", "reductions", "layout", "algorithms", "config", "predict", "show", "view", "__main__", "__init__",
}  # fmt: skip
PRIVATE_FILES = ("torch_private.py", "torch_changes.py")
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(node: ast.AST, annotations: bool) -> Iterator[str]:
    """The modules imported below `node`, also in functions. annotations: include imports only for annotations."""
    guard = node.test if isinstance(node, ast.If) else None
    if isinstance(guard, ast.Name) and guard.id == "TYPE_CHECKING" and not annotations:
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child, annotations)


def misplaced(path: Path) -> Iterator[str]:
    own = room(path)
    for name in imported(ast.parse(path.read_text()), annotations=True):
        first, *rest = name.split(".")
        if first == "meshcomm" and rest and rest[0] in ORDER and ORDER.index(rest[0]) > ORDER.index(own):
            yield f"{own} must not import {name}"
        if first == "torch" and own in WITHOUT_TORCH:
            yield f"{own} must not import torch"
        if first == "torch" and path.name not in PRIVATE_FILES and any(part.startswith("_") for part in rest):
            yield f"{name} is private to torch; wrap it in {PRIVATE_FILES[0]}"


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines or sets as attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def private_torch_names(text: str, own: set[str]) -> Iterator[str]:
    """Private attributes that a file reads, except attributes of Python's modules or in `own`, and torch's operators."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            name = ast.unparse(node)
            if node.attr not in own and not name.startswith(
                ("torch.ops.", "sys.", "os.", "pickle.", "random.")
            ):
                yield name


def test_imports_point_upwards_and_torch_stays_where_it_belongs() -> None:
    assert {room(path) for path in FILES} <= {*ORDER}
    assert [f"{path.relative_to(ROOT)}: {wrong}" for path in FILES for wrong in misplaced(path)] == []


def test_only_files_made_for_it_use_private_names_of_torch() -> None:
    planted = (
        "import torch\nad._level, torch._C.f, x._mine, torch.__file__, sys._getframe(), x.storage()._cdata"
    )
    assert sorted(private_torch_names(planted, {"_mine"})) == ["ad._level", "torch._C", "x.storage()._cdata"]
    # NamedTuple's methods.
    own = {"_replace", "_asdict"}.union(*(own_names(ast.parse(f.read_text())) for f in FILES))
    found = {path.relative_to(ROOT): list(private_torch_names(path.read_text(), own)) for path in FILES}
    assert {path: names for path, names in found.items() if names and path.name not in PRIVATE_FILES} == {}


def test_the_class_of_an_object_changes_in_one_place() -> None:
    found = [path.relative_to(ROOT).as_posix() for path in FILES if ".__class__ = " in path.read_text()]
    assert found == ["parallel/become.py"]


def test_a_test_file_with_the_name_of_a_module_has_its_path() -> None:
    modules = {path.relative_to(ROOT) for path in FILES}
    tested = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    tested = [path.with_name(path.name.removeprefix("test_")) for path in tested if path.parts[0] in ORDER]
    assert len({*tested} & modules) > 190
    assert {path.name for path in {*tested} - modules} & {path.name for path in modules} == set()


def test_where_a_call_was_made_is_said_in_one_place() -> None:
    """So that all errors and reports tell a fact that somebody adds to `origin` and `made_at`, or to the simulator's Callsite."""
    said = {room(path): re.compile(r"""callsite["']?\]|get\(["']callsite""") for path in FILES}
    said["simulator"] = re.compile(r"\.line}")
    found = {path.relative_to(ROOT).as_posix(): said[room(path)].findall(path.read_text()) for path in FILES}
    assert {path: each for path, each in found.items() if each} == {"watching/words.py": ["callsite']"]}


def test_a_line_of_the_program_is_written_in_one_place() -> None:
    """So that all errors and reports name the cells of a notebook, see `source_line`."""
    written = re.compile(r"file(?:name)?\}:\{")
    assert [path.name for path in FILES if written.search(path.read_text())] == ["lines.py"]


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    modules = {}
    for name, path in names.items():
        targets = {each.removeprefix("meshcomm.") for each in imported(ast.parse(path.read_text()), False)}
        modules[name] = {each if each in names else each.rpartition(".")[0] for each in targets} & {
            *names
        } - {name}
    TopologicalSorter(modules).prepare()
    with pytest.raises(CycleError, match=r"mesh\.mesh"):
        TopologicalSorter({**modules, "errors": {"mesh.mesh"}}).prepare()


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
    # torch.distributed.tensor loads a library of symbols, which takes half a second on each rank of every job.
    program = """
import logging, sys, torch.distributed
before, handlers = set(sys.modules), logging.getLogger().handlers[:]
import meshcomm, torch
mesh = meshcomm.init(dims={"dp": 1, "tp": 1}, device="cpu")
mesh.all_reduce("dp", torch.ones(1))
mesh.barrier(), mesh.coords, repr(mesh)
new = sorted(set(sys.modules) - before)
unneeded = ("torch.distributed.elastic", "torch.distributed.launcher", "rich", "pdb", "xml", "meshcomm.show",
    "meshcomm.commands", "meshcomm.doctor", "meshcomm.train", "meshcomm.parallel",
    "meshcomm.simulator", "meshcomm.testing", "meshcomm.predict", "meshcomm.pattern", "meshcomm.config.root", "meshcomm.config.train",
    "meshcomm.job", "meshcomm.mesh.tracing", "meshcomm.mesh.stats")
loaded = [name for name in new if name.startswith(tuple(f"{each}." for each in unneeded)) or name in unneeded]
assert not loaded, loaded
assert str(mesh) and "rich" in sys.modules  # what prints loads it
import meshcomm.mesh.logs, meshcomm.comm.functional, meshcomm.simulator
assert logging.getLogger().handlers == handlers == [] and logging.getLogger().level == logging.WARNING
assert not {"torch.distributed.tensor", "sympy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_are_listed_once() -> None:
    assert sorted(meshcomm.__all__) == meshcomm.__all__ == sorted(meshcomm._PUBLIC)
    assert meshcomm.__all__ == [name for name in dir(meshcomm) if not name.startswith("_")]
    for name in meshcomm.__all__:
        assert getattr(meshcomm, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = meshcomm.nothing
