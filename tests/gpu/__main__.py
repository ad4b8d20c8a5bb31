"""Every experiment on one machine with a GPU, in ten minutes at most, with one report.

python -m tests.gpu --out DIR                            # on the machine
python -m tests.gpu --out DIR --backend emulated_nccl --device cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

WHOLE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="an empty folder for report.md, report.json and logs"
    )
    parser.add_argument("--only", default="", help="experiments whose names contain this")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=float, default=WHOLE_S, help="for all experiments together")
    given = parser.parse_args()
    if given.out.exists() and any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty")
    return try_all(given, time.monotonic())


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


if __name__ == "__main__":
    raise SystemExit(main())
