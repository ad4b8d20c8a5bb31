"""What a simulated program sent, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshcomm.show.page import Cells, Line, Part, page_view

if TYPE_CHECKING:
    from rich.console import Group


def traffic_view(facts: Mapping[str, Any]) -> Group:
    """Calls and bytes by dim and operation; bytes by link class where the topology is known.

    facts: as `Ledger.facts` gives them, with `world` and `schedules`.
    """
    schedules = facts["schedules"]
    tried = "" if schedules == 1 else f", {schedules} schedules tried, traffic of the first"
    parts: list[Part] = [Line(f"{facts['world']} ranks simulated, no deadlock{tried}")]
    if not facts["dims"]:
        return page_view([*parts, Line("nothing was sent along a dim of two ranks or more")])
    calls = tuple((row["dim"], row["operation"], f"{row['calls']:,}", *_bytes(row)) for row in facts["dims"])
    numbers = ("bytes", "largest rank", "its bytes")
    right = frozenset(("calls", *numbers))
    parts.append(Cells(("dim", "operation", "calls", *numbers), calls, right, once=1))
    if facts["links"] is not None:
        rows = tuple((row["dim"], row["link"], *_bytes(row)) for row in facts["links"])
        parts.append(Line("on links, collectives as rings in coord order", heading=True))
        parts.append(Cells(("dim", "link", *numbers), rows, right, once=1))
    return page_view(parts)


def _bytes(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{row['bytes']:,}", str(row["largest_rank"]), f"{row['largest_bytes']:,}"
