"""How many groups a rank creates, on 64 real processes; the time is printed, not judged."""

from __future__ import annotations

from collections.abc import Callable

from meshcomm.bench.startup import slowest, startup
from meshcomm.testing import Pool

# For figures to be shown to others: 5, on an idle machine.
ROUNDS = 2


def test_64_ranks_create_three_groups_each(figures: Callable[[str], None]) -> None:
    ranks = Pool()
    try:
        found = slowest(ranks.run(startup, {"pp": 4, "dp": 4, "tp": 4}, ROUNDS, ranks=64, timeout_s=250))
    finally:
        ranks.close()
    ours, theirs = found["meshcomm"], found["init_device_mesh"]
    figures(f"(4,4,4) on 64 forked Gloo processes, slowest rank, median of {ROUNDS} rounds in one run:")
    for name, each in found.items():
        figures(
            f"  {name:<25} {each.groups} groups per rank, created in {each.alone_s * 1e3:.0f} ms, "
            f"with agreement {each.created_s * 1e3:.0f} ms, used along every dim after {each.used_s * 1e3:.0f} ms"
        )
    figures(
        f"  meshcomm is {theirs.alone_s / ours.alone_s:.1f} times as fast to create, "
        f"{theirs.created_s / ours.created_s:.1f} times with agreement, "
        f"{theirs.used_s / ours.used_s:.1f} times until used"
    )
    assert ours.groups == 3
