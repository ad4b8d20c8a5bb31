"""The sdist and its wheel are complete, and the wheel works outside the repository."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import meshcomm
from tests.documents import copy_of_the_repository, done, files_of_the_repository

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist. It is built from a copy, because setuptools leaves its build folder in the source folder."""
    folder = tmp_path_factory.mktemp("sdist")
    copied = copy_of_the_repository(folder / "copy")
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    done([sys.executable, "-c", build], copied)
    (packed,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(packed, folder, filter="data")
    return folder / packed.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as pip builds it."""
    out, built = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("build") / "source"
    shutil.copytree(source, built)
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), "."]
    done([sys.executable, "-m", *build], built)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and this environment's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # Python does not follow path files in a folder that a path file adds, so the editable meshcomm stays hidden.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    install = ["pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    done([sys.executable, "-m", *install], folder)
    return folder / "bin"


def call(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(installed / words[0]), *words[1:]],
        cwd=cwd,
        # Without buffering, lines of two ranks would mix if ranks did not write whole lines.
        env=environment | {"RES_OPTIONS": "timeout:1 attempts:1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_sdist_has_every_file_of_the_repository(source: Path) -> None:
    inside = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in inside if name.startswith("meshcomm.egg-info/")}
    assert inside - made == set(files_of_the_repository())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    assert inside == {name for name in files_of_the_repository() if name.startswith("meshcomm/")}
    assert {"meshcomm/py.typed", "meshcomm/commands/starter/config.toml"} <= inside


def test_the_page_of_the_package_stands_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        page = email.message_from_string(file.read(name).decode())
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert page["Version"] == meshcomm.__version__ and f"Repository, {address}" in page.get_all(
        "Project-URL", []
    )
    assert page["Description-Content-Type"] == "text/markdown"
    shown, readme = page.get_payload(), (ROOT / "README.md").read_text()
    assert isinstance(shown, str)
    links = re.findall(r"(!?)\[[^\]\n]*\]\(([^)\s]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\([^)\s]+\)", readme)) > 15
    for image, link in links:
        if f"]({link})" in readme:
            assert link.startswith("https://pytorch.org/"), link
            continue
        start = f"{address}/{'raw' if image else 'blob'}/v{meshcomm.__version__}/"
        assert link.startswith(start), link
        assert (ROOT / link.removeprefix(start).partition("#")[0]).is_file(), link
    # Apart from links, the text equals the clone's.
    assert re.sub(r"\]\(\S+?\)", "", shown) == re.sub(r"\]\(\S+?\)", "", readme)


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
    shown = call(installed, tmp_path, "python", "-m", "pytest", "--markers")
    assert "@pytest.mark.mesh(via=" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.deep
def test_a_project_begins_away_from_the_clone(installed: Path, tmp_path: Path) -> None:
    made = call(installed, tmp_path, "meshcomm", "new", "demo")
    assert made.stdout == "meshcomm train demo/config.toml\nmeshcomm run --world-size 8 demo/hello.py\n", (
        made.stderr
    )
    # README's tests run both files.
    planned = call(installed, tmp_path, "meshcomm", "plan", "demo/config.toml", "--json")
    assert json.loads(planned.stdout)["world_size"] == 8, planned.stderr
    run = call(installed, tmp_path, "meshcomm", "simulate", "--world-size", "8", "demo/hello.py")
    assert "rank 5 (pp=1 dp=0 tp=1): sum over dp 12, tp ring 4\n" in run.stdout, run.stderr
