"""Prepare a release: `python docs/tools/release.py VERSION [--check]`.

It works in a copy of the last commit. It writes the version to meshcomm/__init__.py and CITATION.cff, and moves the entries
under Unreleased in CHANGELOG.md to a dated section. It builds the sdist and the wheel, and checks both with twine if twine is
installed. Then it copies the three files and dist/ back, and prints the remaining commands. With --check, it copies nothing
back. It does not commit, tag or push.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[2]
VERSION: Final = Path("meshcomm", "__init__.py")
CITATION: Final = Path("CITATION.cff")
CHANGELOG: Final = Path("CHANGELOG.md")


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    """Prepare a release of the clone `root`. If there is a problem, raise SystemExit before any file is changed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args(words)
    version, day = given.version, date.today().isoformat()
    if changed := output(root, "git", "status", "--porcelain"):
        raise SystemExit(f"the tree is not clean; commit or remove\n{changed}")
    if output(root, "git", "tag", "--list", f"v{version}"):
        raise SystemExit(f"the tag v{version} exists; choose a later version")
    with TemporaryDirectory() as folder:
        copy = Path(folder, "meshcomm")
        output(root, "git", "clone", "--quiet", str(root), str(copy))
        for path, change in ((VERSION, in_module), (CITATION, in_citation), (CHANGELOG, in_changelog)):
            text = (copy / path).read_text(encoding="utf-8")
            (copy / path).write_text(change(text, version, day), encoding="utf-8")
        built = build(copy)
        if not given.check:
            for path in (VERSION, CITATION, CHANGELOG):
                shutil.copy(copy / path, root / path)
            (root / "dist").mkdir(exist_ok=True)
            for file in built:
                shutil.copy(file, root / "dist")
        print(f"{version}: {' and '.join(file.name for file in built)}")
    if not given.check:
        print(f"git commit -am 'Release {version}' && git tag v{version} && git push origin HEAD v{version}")
    return 0


def in_module(text: str, version: str, day: str) -> str:
    """The text of the module with the new version, which must not be older than the current version."""
    (old,) = re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.M)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version} is not a version of three numbers, such as {old}")
    if [int(part) for part in version.split(".")] < [int(part) for part in old.split(".")]:
        raise SystemExit(f"{version} is older than {old}")
    return text.replace(f'__version__ = "{old}"', f'__version__ = "{version}"')


def in_citation(text: str, version: str, day: str) -> str:
    """The text of CITATION.cff with the version and date of the release."""
    text = re.sub(r"^version: .*$", f"version: {version}", text, flags=re.M)
    return re.sub(r"^date-released: .*$", f"date-released: {day}", text, flags=re.M)


def in_changelog(text: str, version: str, day: str) -> str:
    """The text of CHANGELOG.md with the entries under Unreleased moved to a section for the version."""
    head, found, rest = text.partition("## Unreleased\n")
    lines = rest.partition("\n## ")[0].strip()
    if not found or not lines:
        raise SystemExit("CHANGELOG.md has nothing under Unreleased")
    if f"\n## {version} " in text:
        raise SystemExit(f"CHANGELOG.md has a section {version} already")
    return f"{head}{found}\n## {version} - {day}\n{rest}"


def build(source: Path) -> list[Path]:
    """Build the sdist of `source`, and the wheel from that sdist."""
    dist = source / "dist"
    backend = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    output(source, sys.executable, "-c", backend)
    (sdist,) = dist.glob("*.tar.gz")
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(dist), str(sdist)]
    output(source, sys.executable, "-m", "pip", *wheel)
    built = sorted(dist.iterdir())
    if find_spec("twine") is None:
        print("twine is not installed: the description is not checked")
    else:
        output(source, sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    return built


def output(folder: Path, *command: str) -> str:
    """The output of a command. If the command fails, raises SystemExit with its full output."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())
