"""Start-up measured on this machine, beside torch: `python -m meshcomm.jobs.startup --worlds 8,16,32`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from meshcomm.bench.startup import Startup, slowest, startup
from meshcomm.testing import Pool

_DIMS = ("pp", "dp", "tp")


def main(words: Sequence[str] | None = None) -> int:
    """Fork so many processes, make their groups both ways in turn, print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m meshcomm.jobs.startup", description=__doc__)
    parser.add_argument("--worlds", default="8,16,32,64,128", help="numbers of processes, by commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count; one before is left out")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="seconds for each number of processes")
    given = parser.parse_args(words)
    ranks = Pool()
    print(
        "| processes | | groups per rank | created | with agreement | one all_reduce along every dim done |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    try:
        for world in map(int, given.worlds.split(",")):
            dims = three_dims(world)
            found = slowest(ranks.run(startup, dims, given.rounds, ranks=world, timeout_s=given.timeout_s))
            print("\n".join(_rows(world, dims, found)), flush=True)
    finally:
        ranks.close()
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{os.cpu_count()} cores; load of the last 1, 5 and 15 minutes at the end: {load}")
    return 0


def three_dims(world: int) -> dict[str, int]:
    """`world` as three sizes as equal as its factors allow, the largest first.

    >>> three_dims(128), three_dims(12), three_dims(7)
    ({'pp': 8, 'dp': 4, 'tp': 4}, {'pp': 3, 'dp': 2, 'tp': 2}, {'pp': 7, 'dp': 1, 'tp': 1})
    """
    sizes, left, factor = [1, 1, 1], world, 2
    factors = []
    while left > 1:
        while left % factor == 0:
            factors.append(factor)
            left //= factor
        factor += 1
    for each in reversed(factors):
        sizes.sort()
        sizes[0] *= each
    return dict(zip(_DIMS, sorted(sizes, reverse=True), strict=True))


def _rows(world: int, dims: dict[str, int], found: dict[str, Startup]) -> list[str]:
    label = f"{world}: ({', '.join(map(str, dims.values()))})"
    rows = []
    for name, each in found.items():
        times = (each.alone_s, each.created_s, each.used_s)
        rows.append(
            f"| {label} | {name} | {each.groups} | "
            + " | ".join(f"{time * 1e3:.0f} ms" for time in times)
            + " |"
        )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
