"""Run every experiment on one machine with a GPU, in ten minutes at most, and write one report.

python -m tests.gpu --out DIR                            # on the machine
python -m tests.gpu --out DIR --backend emulated_nccl --device cpu
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WHOLE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="an empty folder for report.md, report.json and logs"
    )
    parser.add_argument("--only", default="", help="experiments whose names contain one of these: a,b")
    parser.add_argument(
        "--at-once",
        type=int,
        default=0,
        help="how many experiments without figures run together; 0: one for each five cores",
    )
    parser.add_argument(
        "--share", choices=("hostid", "multi", "none"), help="how ranks share a GPU; not tried out"
    )
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=float, default=WHOLE_S, help="for all experiments together")
    given = parser.parse_args()
    if given.out.exists() and any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty")
    return try_all(given, time.monotonic())


def try_all(given: argparse.Namespace, began: float) -> int:
    """Run the chosen experiments. Return 0 if all of them went right."""
    import torch

    from tests.gpu.experiments import EXPERIMENTS, Experiment, Setting, machine, run, shared, write_report

    chosen = [each for each in EXPERIMENTS if any(word in each.name for word in given.only.split(","))]
    wrong = "" if chosen else f"no experiment has {given.only} in its name"
    if given.device == "cuda" and not torch.cuda.is_available():
        wrong = "needs a GPU; this host has none. Try --backend emulated_nccl --device cpu"
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setting, outcomes = Setting(given.backend, given.device, given.share or "own"), []
    if given.share is None:
        setting, outcomes = shared(setting, folder)
    for probe in outcomes:
        print(f"{probe.name:15} {probe.ended:12} {probe.cases[:1]} {probe.said}", flush=True)
    facts: dict[str, str] = {**machine(), "ranks share a GPU": setting.share}
    probes = len(outcomes)

    def one(experiment: Experiment) -> None:
        last = run(experiment, setting, folder, given.limit_s - (time.monotonic() - began))
        with writing:
            outcomes.append(last)
            print(f"{last.name:15} {last.ended:12} {last.seconds:6} s", flush=True)
            facts["seconds in all"] = f"{time.monotonic() - began:.0f}"
            write_report(folder, facts, outcomes)

    writing, at_once = threading.Lock(), given.at_once or max(1, (os.cpu_count() or 1) // 5)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, (each for each in chosen if not each.alone)))
    for experiment in chosen:
        if experiment.alone:
            one(experiment)
    print(folder / "report.md")
    # How NCCL lets ranks share a device is a finding, not a failure.
    return int(any(each.ended not in ("right", "skipped") for each in outcomes[probes:]))


if __name__ == "__main__":
    raise SystemExit(main())
