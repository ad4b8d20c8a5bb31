"""The section "Two hosts" of docs/benchmarks.md, from what one run of the tests has measured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import torch

from tests.two_hosts.hosts import Link

PAGE: Final = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_BEGIN, _END = "<!-- two hosts -->\n", "<!-- end of two hosts -->\n"


@dataclass(frozen=True)
class Way:
    """An all_reduce: seconds of each round, of the rank that took longest; bytes over the cable each way."""

    name: str
    seconds: tuple[float, ...]
    sent_bytes: int


@dataclass(frozen=True)
class Step:
    """The communication of a step with the dims in one order: predicted, and measured round by round."""

    traffic: str
    order: tuple[str, ...]
    predicted_s: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Loss:
    """What one rank raised after the cable was cut. seconds: since then."""

    rank: int
    host: str
    kind: str
    missing: tuple[int, ...]
    seconds: float


def section(
    link: Link, size_bytes: int, ways: list[Way], steps: list[Step], losses: list[Loss], timeout_s: float
) -> str:
    """The whole text, without its marks."""
    return "\n".join(
        [
            "## Two hosts",
            "",
            "Made by `pytest -m netns`: two hosts on one machine, each with network, host name, processes and mounts of",
            f"its own, joined by a cable of {link} (a token bucket, in each direction). torchrun starts the same",
            f"line on both. torch {torch.__version__}, Gloo, {os.cpu_count()} cores for all ranks together.",
            "",
            f"### all_reduce of {size_bytes / 1e6:g} MB, 2 x 4 ranks",
            "",
            'Mesh `{ dp = 2, tp = 4 }`: dp crosses the cable, tp does not. `mesh.all_reduce(("dp", "tp"), x)` on a group',
            'of all eight, and with `algorithm="hierarchical"`.',
            "",
            "| algorithm | seconds, median | all rounds | over the cable, each way |",
            "|---|---|---|---|",
            *(
                f"| {way.name} | {median(way.seconds):.2f} | {_rounds(way.seconds)} | {way.sent_bytes / 1e6:.1f} MB |"
                for way in ways
            ),
            "",
            f"Hierarchical is {median(ways[0].seconds) / median(ways[1].seconds):.2f} times as fast.",
            "",
            "### Order of dims, 2 x 4 ranks",
            "",
            "The calls of a step as `meshcomm tune` counts them for two trainings on `pp = 2, dp = 2, tp = 2`, without",
            "computation: *activations* has long sequences and few weights, *weights* the reverse. Predicted by the same",
            "model, from what is stated in `tests/two_hosts/traffic.py`; orders whose outermost dim is the same cross the",
            "cable with the same dim, and are the same to it.",
            "",
            "| traffic | dims, outermost first | predicted s | measured s, median | all rounds |",
            "|---|---|---|---|---|",
            *(
                f"| {step.traffic} | {' '.join(step.order)} | {step.predicted_s:.2f} "
                f"| {median(step.seconds):.2f} | {_rounds(step.seconds)} |"
                for step in sorted(steps, key=lambda step: (step.traffic, step.predicted_s))
            ),
            "",
            f"### The cable is cut, 2 x 2 ranks, timeout {timeout_s:g} s",
            "",
            "While an all_reduce over all ranks is under way. The job's store is on node0.",
            "",
            "| rank | host | raised | names | seconds after the cut |",
            "|---|---|---|---|---|",
            *(
                f"| {loss.rank} | {loss.host} | {loss.kind} | {' '.join(map(str, loss.missing))} | {loss.seconds:.1f} |"
                for loss in losses
            ),
            "",
        ]
    )


def write(text: str) -> None:
    """Put a new section in the place of the old one."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + text + _END + rest.partition(_END)[2], encoding="utf-8")


def _rounds(seconds: tuple[float, ...]) -> str:
    return " ".join(f"{each:.2f}" for each in sorted(seconds))
