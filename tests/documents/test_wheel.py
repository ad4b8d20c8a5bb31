"""The built wheel, installed by itself outside the repository: complete, and it works from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools leaves its build folder beside the source.
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "meshcomm", source / "meshcomm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), "."]
    done = subprocess.run(
        [sys.executable, "-m", *build], cwd=source, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # A path file that is found through another one is not read: the editable meshcomm stays out of sight.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    install = ["pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([sys.executable, "-m", *install], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def call(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(installed / words[0]), *words[1:]],
        cwd=cwd,
        # Unbuffered, two ranks' lines would run into each other, did ranks not write whole ones.
        env=environment | {"RES_OPTIONS": "timeout:1 attempts:1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    package = ROOT / "meshcomm"
    files = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == files
    assert "meshcomm/py.typed" in inside


def test_it_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = call(installed, tmp_path, "python", "-c", "import meshcomm; print(meshcomm.__file__)")
    assert where.stdout.startswith(str(installed.parent)), where.stdout + where.stderr
    (tmp_path / "mesh.toml").write_text("[mesh]\ndims = { dp = 1 }\n")
    (tmp_path / "job.py").write_text(
        "import meshcomm, torch\n"
        "with meshcomm.init() as mesh:\n"
        "    x = mesh.all_reduce('dp', torch.tensor([mesh.rank + 1]))\n"
        "    print(f'rank {mesh.rank}: {x.item()}')\n"
    )
    planned = call(installed, tmp_path, "meshcomm", "plan", "mesh.toml", "--json")
    assert json.loads(planned.stdout)["world_size"] == 1, planned.stderr
    ran = call(installed, tmp_path, "meshcomm", "run", "mesh.toml", "job.py")
    assert ran.stdout == "rank 0: 1\n", ran.stderr


def test_its_pytest_plugin_is_found(installed: Path, tmp_path: Path) -> None:
    done = call(installed, tmp_path, "python", "-m", "pytest", "--markers")
    assert "@pytest.mark.mesh(via=" in done.stdout, done.stdout + done.stderr
