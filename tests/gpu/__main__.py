"""Every experiment on one machine with a GPU, in ten minutes at most, with one report.

python -m tests.gpu --out DIR                            # on the machine
python -m tests.gpu --out DIR --find-links WHEELS        # what is missing is installed first, offline
python -m tests.gpu --wheels WHEELS                      # elsewhere, with a package index
python -m tests.gpu --out DIR --backend emulated_nccl --device cpu
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHOLE_S = 600.0
PYTHONS = ("3.11", "3.12", "3.13")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="an empty folder for report.md, report.json and logs")
    parser.add_argument("--only", default="", help="experiments whose names contain this")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=float, default=WHOLE_S, help="for all experiments together")
    parser.add_argument("--wheels", type=Path, help="download what torch's image may lack, and stop")
    parser.add_argument(
        "--python", action="append", help=f"with --wheels: for these, not {', '.join(PYTHONS)}"
    )
    parser.add_argument("--find-links", type=Path, help="install what is missing from this folder first")
    given = parser.parse_args()
    if given.wheels is not None:
        return download(given.wheels, given.python or PYTHONS)
    if given.out is None:
        parser.error("--out or --wheels is needed")
    if given.out.exists() and any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty")
    began = time.monotonic()
    if given.find_links is not None:
        install(given.find_links)
    return try_all(given, began)


def try_all(given: argparse.Namespace, began: float) -> int:
    """Run what was asked for; 0 where all of it went right."""
    import torch

    from tests.gpu.experiments import EXPERIMENTS, Setting, machine, run, shared, write_report

    chosen = [each for each in EXPERIMENTS if given.only in each.name]
    wrong = "" if chosen else f"no experiment has {given.only} in its name"
    if given.device == "cuda" and not torch.cuda.is_available():
        wrong = "needs a GPU; this host has none. Try --backend emulated_nccl --device cpu"
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setting, outcomes = shared(Setting(given.backend, given.device), folder)
    facts, probes = {**machine(), "ranks share a GPU": setting.share}, len(outcomes)
    for experiment in chosen:
        last = run(experiment, setting, folder, given.limit_s - (time.monotonic() - began))
        outcomes.append(last)
        print(f"{last.name:15} {last.ended:12} {last.seconds:6} s", flush=True)
        facts["seconds in all"] = f"{time.monotonic() - began:.0f}"
        write_report(folder, facts, outcomes)
    print(folder / "report.md")
    # How NCCL lets ranks share a device is a finding, not a failure.
    return int(any(each.ended not in ("right", "skipped") for each in outcomes[probes:]))


def wanted() -> dict[str, str]:
    """meshcomm's requirements but torch, and those of its tests, by name, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]
    found = [*project["dependencies"], *extra["yaml"], *(each for each in extra["dev"] if "pytest" in each)]
    return {re.split(r"[^\w.-]", each)[0]: each for each in found if not each.startswith("torch")}


def download(folder: Path, pythons: list[str] | tuple[str, ...]) -> int:
    """Wheels for Linux on x86-64, from the package index that pip is set up for."""
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 17)]
    for python in pythons:
        own = [f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", str(folder), *own]
        done = subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *wanted().values()], check=False)
        if done.returncode:
            return done.returncode
    files = list(folder.glob("*.whl"))
    print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB in {folder}")
    return 0


def install(folder: Path) -> None:
    """From the folder alone, what this Python does not have in any version."""
    have = {each.metadata["Name"].lower() for each in distributions()}
    if missing := [each for name, each in wanted().items() if name not in have]:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(folder)]
        subprocess.run([*pip, *missing], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
