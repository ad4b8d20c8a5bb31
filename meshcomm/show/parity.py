"""Whether a mesh computes what one process computes, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

_ROWS = 10


def parity_view(facts: Mapping[str, Any]) -> Group:
    """The worst of each quantity, the ten worst parameters, the verdict. facts: as of `Parity.facts`."""
    dims = " ".join(f"{dim}={size}" for dim, size in facts["dims"].items())
    lines: list[Any] = [
        Text(f"{dims} beside one process: the first {facts['steps']} steps, float64"),
        *(Text(f"changed for it: {note}") for note in facts["notes"]),
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("quantity", no_wrap=True)
    table.add_column("absolute", justify="right")
    table.add_column("relative", justify="right")
    table.add_column("step or parameter", overflow="fold")
    table.add_column("rank", justify="right")
    found: Sequence[Mapping[str, Any]] = facts["differences"]
    for kind in ("loss", "gradient norm"):
        _row(table, kind, max((one for one in found if one["kind"] == kind), key=_size))
    table.add_section()
    parameters = sorted(
        (one for one in found if one["kind"] in ("weight", "gradient")), key=_size, reverse=True
    )
    # Each parameter once, by the worse of its weight and its gradient.
    of: dict[str, Mapping[str, Any]] = {}
    for one in parameters:
        of.setdefault(one["name"], one)
    worst = list(of.values())
    for one in worst[:_ROWS]:
        _row(table, str(one["kind"]), one)
    if worst[_ROWS:]:
        rest = f"{len(worst) - _ROWS} more parameters, none worse"
        _row(table, "others", {**worst[_ROWS], "name": rest, "rank": ""})
    lines.append(table)
    lines.append(Text(_verdict(facts)))
    if facts["blame"] is not None:
        lines.append(Text(facts["blame"]["words"]))
    return Group(*lines)


def _verdict(facts: Mapping[str, Any]) -> str:
    tolerance = f"{facts['tolerance']:g}"
    found = facts["differences"]
    if facts["agrees"]:
        return f"agrees: nothing differs by more than {tolerance} (worst: {max(map(_size, found)):.1e})"
    over = sum(_size(one) > facts["tolerance"] for one in found)
    one = facts["first"]
    return (
        f"differs: {over} of {len(found)} quantities by more than {tolerance}; "
        f"first the {one['kind']} of {one['name']}"
    )


def _size(one: Mapping[str, Any]) -> float:
    return float("inf") if one["relative"] is None else float(one["relative"])


def _row(table: Table, quantity: str, one: Mapping[str, Any]) -> None:
    if one["relative"] is None:
        table.add_row(quantity, "-", "-", f"{one['name']}: {one['note']}", str(one["rank"]))
        return
    table.add_row(quantity, f"{one['absolute']:.1e}", f"{one['relative']:.1e}", one["name"], str(one["rank"]))
