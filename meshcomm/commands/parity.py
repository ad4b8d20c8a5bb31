"""A table that shows whether a mesh computes the same values as a single process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcomm.layout.sizes import coords_text
from meshcomm.show.page import Cells, Line, View, page_view

_ROWS = 10


def parity_view(facts: Mapping[str, Any]) -> View:
    """Return the worst value of each quantity, the ten worst parameters, and the verdict. facts: see `Parity.facts`."""
    worst = sorted(facts["differences"], key=_size, reverse=True)
    rows = [next(one for one in worst if one["kind"] == kind) for kind in ("loss", "gradient norm")]
    # Show each parameter once, with its weight or its gradient, whichever differs more.
    of: dict[str, Mapping[str, Any]] = {}
    for one in worst:
        if one["kind"] in ("weight", "gradient"):
            of.setdefault(one["name"], one)
    rows += [*of.values()][:_ROWS]
    if len(of) > _ROWS:
        rest = f"{len(of) - _ROWS} more parameters, none worse"
        rows.append({**[*of.values()][_ROWS], "kind": "others", "name": rest, "rank": ""})
    table = Cells.of(
        rows,
        {
            "quantity": "kind",
            ">absolute": lambda one: None if one["relative"] is None else f"{one['absolute']:.1e}",
            ">relative": ("relative", "{:.1e}".format),
            "step or parameter": lambda one: (
                one["name"] + (f": {one['note']}" if one["relative"] is None else "")
            ),
            ">rank": ("rank", str),
        },
    )
    head = (
        f"{coords_text(facts['dims'])} compared with one process: the first {facts['steps']} steps, float64"
    )
    notes = [f"changed for the comparison: {note}" for note in facts["notes"]]
    notes += [f"the model: {facts['original']}"] if facts["original"] else []
    verdict = [_verdict(facts)] + ([] if facts["blame"] is None else [facts["blame"]["words"]])
    return page_view([Line("\n".join([head, *notes])), table, Line("\n".join(verdict))])


def _verdict(facts: Mapping[str, Any]) -> str:
    tolerance = f"{facts['tolerance']:g}"
    found = facts["differences"]
    if facts["agrees"]:
        return f"agrees: all differences are within {tolerance} (worst: {max(map(_size, found)):.1e})"
    over = sum(_size(one) > facts["tolerance"] for one in found)
    one = facts["first"]
    return (
        f"differs: {over} of {len(found)} quantities by more than {tolerance}; "
        f"first the {one['kind']} of {one['name']}"
    )


def _size(one: Mapping[str, Any]) -> float:
    return float("inf") if one["relative"] is None else float(one["relative"])
