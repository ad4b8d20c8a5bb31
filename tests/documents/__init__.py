"""Shared by the tests of the documentation: a page's blocks, how each kind runs, the tools, and the files in git."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
TOOLS = _ROOT / "docs" / "tools"


def tool(name: str) -> Any:
    """Load a module of docs/tools, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look the module up in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def done(words: list[str], cwd: Path) -> str:
    """Run a command, which must succeed, and return its output."""
    ended = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def files_of_the_repository() -> list[str]:
    """All files that are in git, or would be after `git add`."""
    if not (_ROOT / ".git").exists():
        pytest.skip("needs a clone: git says which files belong to the repository")
    listed = done(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], _ROOT)
    return sorted(name for name in set(listed.split("\0")) if name and (_ROOT / name).exists())


def copy_of_the_repository(folder: Path) -> Path:
    """Create `folder` with every file of the repository and nothing else."""
    for name in files_of_the_repository():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, folder / name, follow_symlinks=False)
    return folder
