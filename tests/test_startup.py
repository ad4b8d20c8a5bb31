"""How many groups a rank creates, on 64 real processes; the time is printed, not judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshcomm.bench.startup import slowest, startup
from meshcomm.testing import Pool


@pytest.mark.timeout(180)
def test_64_ranks_create_three_groups_each(figures: Callable[[str], None]) -> None:
    ranks = Pool()
    try:
        found = slowest(ranks.run(startup, {"pp": 4, "dp": 4, "tp": 4}, 5, ranks=64, timeout_s=150))
    finally:
        ranks.close()
    ours, theirs = found["meshcomm"], found["init_device_mesh"]
    figures("(4,4,4) on 64 forked Gloo processes, slowest rank, median of 5 rounds in one run:")
    for name, each in found.items():
        figures(
            f"  {name:<17} {each.groups} groups per rank, created after {each.created_s * 1e3:.0f} ms"
            + (f", {each.agreed_s * 1e3:.0f} of them to agree on the plan" if each.agreed_s else "")
            + f", used along every dim after {each.used_s * 1e3:.0f} ms"
        )
    alone = ours.created_s - ours.agreed_s
    figures(
        f"  creation alone {theirs.created_s / alone:.1f} times as fast, with agreement "
        f"{theirs.created_s / ours.created_s:.1f} times, until used {theirs.used_s / ours.used_s:.1f} times"
    )
    assert ours.groups == 3
