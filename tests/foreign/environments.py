"""Environments for third-party programs, each with its own pins: `python -m tests.foreign.environments [NAME ...]`.

An environment takes unpinned packages, such as torch, from the interpreter that made it. Environments are made once, and
kept in MESHCOMM_FOREIGN or the user's cache, under a hash of the pins and the interpreter.
"""

from __future__ import annotations

import hashlib
import os
import site
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest

_OLDER: Final = "fsspec<=2026.2"  # required by datasets 4.7
PINS: Final = {
    "torchtitan": ("torchtitan==0.3.0", "huggingface-hub<2.0", _OLDER),
    "lightning": ("lightning==2.6.6",),
    # picotron's imports. Its tokenizer and model configuration need transformers 4.
    "picotron": ("transformers==4.57.6", "datasets==4.7.0", "wandb==0.31.0", _OLDER),
    "pytorch": ("expecttest==0.3.0",),
    # For tests/launchers.
    "accelerate": ("accelerate==1.15.0",),
    "ray": ("ray[train]==2.60.0",),
}


def kept() -> Path:
    """The folder of the environments, and of sources that users put there."""
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(os.environ.get("MESHCOMM_FOREIGN") or Path(cache) / "meshcomm" / "foreign")


def _folder(name: str) -> Path:
    facts = repr((PINS[name], sys.version, version("torch"), site.getsitepackages()))
    return kept() / f"{name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def python_of(name: str) -> Path:
    """The interpreter of an environment. Skips the test if the environment has not been made."""
    found = _folder(name) / "bin" / "python"
    if not (_folder(name) / "made").exists():
        pytest.skip(f"no environment of {name}: run python -m tests.foreign.environments {name} first")
    return found


def source_of(name: str) -> Path:
    """A folder with a project's source: MESHCOMM_<NAME>, or a folder in the cache. Skips the test without one."""
    variable = f"MESHCOMM_{name.upper()}"
    found = Path(os.environ.get(variable) or kept() / name)
    if not found.is_dir():
        pytest.skip(f"no source of {name}: set {variable} to a clone of it, or put one at {found}")
    return found


def make(name: str) -> Path:
    """Make the environment, unless it exists."""
    folder = _folder(name)
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        python = folder / "bin" / "python"
        (own,) = (folder / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({each!r})\n" for each in site.getsitepackages()]
        (own / "beneath.pth").write_text("".join(lines))
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *PINS[name]]
        subprocess.run(pip, check=True)
        (folder / "made").touch()
    return folder


if __name__ == "__main__":
    for each in sys.argv[1:] or PINS:
        print(f"{each}: {make(each)}")
