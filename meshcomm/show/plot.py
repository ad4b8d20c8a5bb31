"""Bandwidth over size as an SVG: one panel for each dim, a line for each operation, torch's dashed.

The picture needs nothing beside itself, and follows the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from meshcomm.show.units import size_text

# The first words after the XML's own: a file that may be written over.
MARK: Final = "<!-- meshcomm bench -->"

# Okabe and Ito's colours, which most readers can tell apart, darkened or lightened for each mode.
_COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "all_reduce": ("#0072b2", "#56b4f0"),
    "all_gather": ("#d55e00", "#ff8a3d"),
    "reduce_scatter": ("#008f68", "#2fd0a5"),
    "all_to_all": ("#b3478f", "#e58fc5"),
    "broadcast": ("#8a6d00", "#e6c229"),
    "reduce": ("#6b4fbb", "#b39ddb"),
    "sendrecv": ("#4d4d4d", "#c8c8c8"),
}
_LEFT, _RIGHT, _GAP = 62, 18, 22
# Width and height of a panel: one alone has the whole picture.
_ONE, _SEVERAL = (720, 360), (420, 250)
_TOP, _BELOW = 66, 54
_COLUMNS = 2
_STYLE = """\
  svg { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .paper { fill: #ffffff } .panel { fill: #f7f8fa; stroke: #c9ced6 }
  text { fill: #1f2430 } .quiet { fill: #596170 } .grid { stroke: #e1e4ea }
  .title { font-size: 16px; font-weight: 600 } .name { font-weight: 600 }
  .line { fill: none; stroke-width: 2 } .torch { stroke-dasharray: 5 4; stroke-width: 1.6 }
  .key { stroke: #1f2430 }
"""
_DARK = """\
  .paper { fill: #12161d } .panel { fill: #1a1f28; stroke: #3a4250 }
  text { fill: #e8ebf0 } .quiet { fill: #a5adba } .grid { stroke: #2a313c }
  .key { stroke: #e8ebf0 }
"""


class Scale(NamedTuple):
    """A logarithmic axis: the values `low` and `high` lie at `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value lies."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def bandwidth_svg(facts: Mapping[str, Any]) -> str:
    """The picture of what `meshcomm bench` measured: bus bandwidth in GB/s over bytes, both logarithmic.

    facts: as `bench_view` takes them. Every point, of class `meshcomm` or `torch`, carries `data-bytes`
    and `data-gbytes-s`; every tick of an axis `data-value`.
    """
    rows = facts["rows"]
    panels = [dim for dim in facts["dims"] if any(row["dim"] == dim["dim"] for row in rows)]
    operations = [name for name in _COLOURS if any(row["operation"] == name for row in rows)]
    columns = min(_COLUMNS, len(panels))
    plot_width, plot_height = _ONE if columns == 1 else _SEVERAL
    cell_width = _LEFT + plot_width + _RIGHT
    cell_height = plot_height + _BELOW + _GAP
    width = columns * cell_width
    legend = _legend(operations, width)
    top = _TOP + legend.height
    height = top + math.ceil(len(panels) / columns) * cell_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="title">',
        MARK,
        f"<style>\n{_STYLE}{_colours(operations, 0)}"
        f"@media (prefers-color-scheme: dark) {{\n{_DARK}{_colours(operations, 1)}}}\n</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text id="title" class="title" x="{_LEFT}" y="28">{escape(_title(facts))}</text>',
        f'<text class="quiet" x="{_LEFT}" y="48">{escape(_subtitle(facts))}</text>',
        *legend.parts,
    ]
    sizes = [row["bytes"] for row in rows]
    speeds = [row[who]["busbw_gbytes_s"] for row in rows for who in ("meshcomm", "torch")]
    # The same axes in all panels: dims are there to be compared.
    for number, dim in enumerate(panels):
        x = (number % columns) * cell_width + _LEFT
        y = top + (number // columns) * cell_height + _GAP
        across = Scale(*_around(sizes), x, x + plot_width)
        up = Scale(*_around(speeds), y + plot_height, y)
        parts += _panel(
            dim, [row for row in rows if row["dim"] == dim["dim"]], across, up, sorted(set(sizes))
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(facts: Mapping[str, Any]) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in facts["mesh"]["dims"].items())
    return f"Bandwidth along each dim of {sizes}"


def _subtitle(facts: Mapping[str, Any]) -> str:
    machine = facts["machine"]
    hosts = f"{machine['hosts']} host{'s' * (machine['hosts'] > 1)}"
    return (
        f"bus bandwidth as nccl-tests counts it; {machine['device']}, {hosts}, torch {machine['torch']}, "
        f"{machine['date'][:10]}, medians of {facts['rounds']} rounds"
    )


def _colours(operations: Sequence[str], mode: int) -> str:
    return "".join(
        f"  .line.{name} {{ stroke: {_COLOURS[name][mode]} }} circle.{name} {{ fill: {_COLOURS[name][mode]} }}\n"
        for name in operations
    )


class _Legend(NamedTuple):
    parts: list[str]
    height: int


def _legend(operations: Sequence[str], width: int) -> _Legend:
    entries = [(f"line {name}", name) for name in operations]
    entries += [("line key", "meshcomm"), ("line torch key", "torch.distributed")]
    parts = []
    x, y = float(_LEFT), _TOP + 4
    for kind, label in entries:
        needed = 30 + 7.6 * len(label) + 24
        if x + needed > width - _RIGHT or label == "meshcomm":
            x, y = float(_LEFT), y + 20
        parts.append(f'<line class="{kind}" x1="{x:g}" y1="{y - 4}" x2="{x + 24:g}" y2="{y - 4}"/>')
        parts.append(f'<text x="{x + 30:g}" y="{y}">{label}</text>')
        x += needed
    return _Legend(parts, y - _TOP + 6)


def _panel(
    dim: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], x: Scale, y: Scale, sizes: Sequence[int]
) -> list[str]:
    top, bottom = y.end, y.start
    parts = [
        f'<rect class="panel" x="{x.start:g}" y="{top:g}" width="{x.end - x.start:g}" '
        f'height="{bottom - top:g}"/>',
        f'<text class="name" x="{x.start:g}" y="{top - 7:g}">{escape(_name(dim))}</text>',
    ]
    for value in _speed_ticks(y.low, y.high):
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{x.start:g}" y1="{at:.2f}" x2="{x.end:g}" y2="{at:.2f}"/>')
        parts.append(
            f'<text class="quiet y" data-value="{value:g}" x="{x.start - 8:g}" y="{at + 4:.2f}" '
            f'text-anchor="end">{value:g}</text>'
        )
    for value in _size_ticks(sizes, x):
        at = x.at(value)
        parts.append(f'<line class="grid" x1="{at:.2f}" y1="{top:g}" x2="{at:.2f}" y2="{bottom:g}"/>')
        parts.append(
            f'<text class="quiet x" data-value="{value}" x="{at:.2f}" y="{bottom + 18:g}" '
            f'text-anchor="middle">{size_text(value)}</text>'
        )
    middle = (top + bottom) / 2
    parts.append(
        f'<text class="quiet" transform="translate({x.start - 46:g} {middle:g}) rotate(-90)" '
        'text-anchor="middle">busbw, GB/s</text>'
    )
    parts.append(
        f'<text class="quiet" x="{(x.start + x.end) / 2:g}" y="{bottom + 37:g}" '
        'text-anchor="middle">size</text>'
    )
    for name in dict.fromkeys(row["operation"] for row in rows):
        for who in ("torch", "meshcomm"):
            points = [(row["bytes"], row[who]["busbw_gbytes_s"]) for row in rows if row["operation"] == name]
            parts += _curve(f"{who} {name}", points, x, y)
    return parts


def _curve(kind: str, points: Sequence[tuple[int, float]], x: Scale, y: Scale) -> list[str]:
    places = [(x.at(size), y.at(speed)) for size, speed in points]
    radius = 3 if kind.startswith("meshcomm") else 1.8
    parts = []
    if len(places) > 1:
        path = " ".join(f"{a:.2f},{b:.2f}" for a, b in places)
        parts.append(f'<polyline class="line {kind}" points="{path}"/>')
    for (size, speed), (a, b) in zip(points, places, strict=True):
        label = f"{kind}, {size_text(size)}: {speed:.3g} GB/s"
        parts.append(
            f'<circle class="{kind}" cx="{a:.2f}" cy="{b:.2f}" r="{radius}" data-bytes="{size}" '
            f'data-gbytes-s="{speed!r}"><title>{label}</title></circle>'
        )
    return parts


def _name(dim: Mapping[str, Any]) -> str:
    groups = f"{dim['groups']} group{'s' * (dim['groups'] > 1)} of {dim['size']:,} ranks"
    link = f", {dim['link']}" if dim["link"] else ""
    return f"{dim['dim']}: {groups}, {dim['backend']}{link}"


def _around(values: Sequence[float]) -> tuple[float, float]:
    """The values' range with some room; more where they are all the same."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.05, 1.15)
    return low / room, high * room


def _speed_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten; powers of ten alone where these would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if math.log10(high / low) <= 3 else (1,)
    found = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return [value for value in found if low <= value <= high]


def _size_ticks(sizes: Sequence[int], x: Scale) -> list[int]:
    """Measured sizes, from the largest down, those left out that would touch the one before."""
    found: list[int] = []
    for size in reversed(sizes):
        if not found or x.at(found[-1]) - x.at(size) >= 54:
            found.append(size)
    return found
