"""What a simulated program sent, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


def traffic_view(facts: Mapping[str, Any]) -> Group:
    """Calls and bytes by dim and operation; bytes by link class where the topology is known.

    facts: as `Ledger.facts` gives them, with `world` and `schedules`.
    """
    schedules = facts["schedules"]
    tried = "" if schedules == 1 else f", {schedules} schedules tried, traffic of the first"
    title = f"{facts['world']} ranks simulated, no deadlock{tried}"
    headline = Text(title)
    calls = _table("", ("dim", "operation"), ("calls", "bytes", "largest rank", "its bytes"))
    for row in facts["dims"]:
        calls.add_row(
            row["dim"],
            row["operation"],
            f"{row['calls']:,}",
            f"{row['bytes']:,}",
            str(row["largest_rank"]),
            f"{row['largest_bytes']:,}",
        )
    if facts["links"] is None:
        return Group(headline, calls)
    links = _table(
        "on links, collectives as rings in coord order",
        ("dim", "link"),
        ("bytes", "largest rank", "its bytes"),
    )
    for row in facts["links"]:
        links.add_row(
            row["dim"],
            row["link"],
            f"{row['bytes']:,}",
            str(row["largest_rank"]),
            f"{row['largest_bytes']:,}",
        )
    return Group(headline, calls, links)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table
