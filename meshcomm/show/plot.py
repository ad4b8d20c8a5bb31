"""Bandwidth over size as an SVG: one panel for each dim, a line for each operation, torch's dashed.

The picture needs nothing beside itself, and follows the reader's light or dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from meshcomm.layout.sizes import coords_text
from meshcomm.show.units import count, size_text

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
_LEFT, _RIGHT, _GAP, _TOP, _BELOW = 62, 18, 22, 66, 54
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
    rows, machine, mesh = facts["rows"], facts["machine"], facts["mesh"]
    dims = [dim for dim in facts["dims"] if any(row["dim"] == dim["dim"] for row in rows)]
    operations = [name for name in _COLOURS if any(row["operation"] == name for row in rows)]
    # One panel alone has the whole picture.
    columns = min(2, len(dims))
    plot_width, plot_height = (720, 360) if columns == 1 else (420, 250)
    cell_width, cell_height = _LEFT + plot_width + _RIGHT, plot_height + _BELOW + _GAP
    width = columns * cell_width
    legend, top = _legend(operations, width)
    height = top + -(-len(dims) // columns) * cell_height
    title = f"Bandwidth along each dim of {coords_text(mesh['dims'])}"
    about = (
        f"bus bandwidth as nccl-tests counts it; {machine['device']}, {count(machine['hosts'], 'host')}, "
        f"torch {machine['torch']}, {machine['date'][:10]}, medians of {facts['rounds']} rounds"
    )
    light, dark = (
        "".join(
            f"  .line.{name} {{ stroke: {_COLOURS[name][mode]} }} circle.{name} {{ fill: {_COLOURS[name][mode]} }}\n"
            for name in operations
        )
        for mode in (0, 1)
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="title">',
        MARK,
        f"<style>\n{_STYLE}{light}@media (prefers-color-scheme: dark) {{\n{_DARK}{dark}}}\n</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text id="title" class="title" x="{_LEFT}" y="28">{escape(title)}</text>',
        f'<text class="quiet" x="{_LEFT}" y="48">{escape(about)}</text>',
        *legend,
    ]
    # The same axes in all panels: dims are there to be compared.
    sizes = sorted({row["bytes"] for row in rows})
    size_range = _around(sizes)
    speed_range = _around([row[who]["busbw_gbytes_s"] for row in rows for who in ("meshcomm", "torch")])
    for number, dim in enumerate(dims):
        left = number % columns * cell_width + _LEFT
        at = top + number // columns * cell_height + _GAP
        x = Scale(*size_range, left, left + plot_width)
        y = Scale(*speed_range, at + plot_height, at)
        parts += _panel(dim, [row for row in rows if row["dim"] == dim["dim"]], x, y, sizes)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(operations: Sequence[str], width: int) -> tuple[list[str], int]:
    """Lines with their names, and where they end."""
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
    return parts, y + 6


def _panel(
    dim: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], x: Scale, y: Scale, sizes: Sequence[int]
) -> Iterator[str]:
    top, bottom, middle = y.end, y.start, 'text-anchor="middle"'
    link = f", {dim['link']}" if dim["link"] else ""
    name = f"{dim['dim']}: {count(dim['groups'], 'group')} of {dim['size']:,} ranks, {dim['backend']}{link}"
    size = f'width="{x.end - x.start:g}" height="{bottom - top:g}"'
    yield f'<rect class="panel" x="{x.start:g}" y="{top:g}" {size}/>'
    yield f'<text class="name" x="{x.start:g}" y="{top - 7:g}">{escape(name)}</text>'
    for speed in _speed_ticks(y.low, y.high):
        at = y.at(speed)
        place = f'x="{x.start - 8:g}" y="{at + 4:.2f}" text-anchor="end"'
        yield f'<line class="grid" x1="{x.start:g}" y1="{at:.2f}" x2="{x.end:g}" y2="{at:.2f}"/>'
        yield f'<text class="quiet y" data-value="{speed:g}" {place}>{speed:g}</text>'
    for value in _size_ticks(sizes, x):
        at = x.at(value)
        place = f'x="{at:.2f}" y="{bottom + 18:g}" {middle}'
        yield f'<line class="grid" x1="{at:.2f}" y1="{top:g}" x2="{at:.2f}" y2="{bottom:g}"/>'
        yield f'<text class="quiet x" data-value="{value}" {place}>{size_text(value)}</text>'
    turned = f'transform="translate({x.start - 46:g} {(top + bottom) / 2:g}) rotate(-90)"'
    yield f'<text class="quiet" {turned} {middle}>busbw, GB/s</text>'
    yield f'<text class="quiet" x="{(x.start + x.end) / 2:g}" y="{bottom + 37:g}" {middle}>size</text>'
    for operation in dict.fromkeys(row["operation"] for row in rows):
        for who, radius in (("torch", 1.8), ("meshcomm", 3)):
            mine = [row for row in rows if row["operation"] == operation]
            points = [(row["bytes"], row[who]["busbw_gbytes_s"]) for row in mine]
            if len(points) > 1:
                path = " ".join(f"{x.at(size):.2f},{y.at(speed):.2f}" for size, speed in points)
                yield f'<polyline class="line {who} {operation}" points="{path}"/>'
            for size, speed in points:
                label = f"{who} {operation}, {size_text(size)}: {speed:.3g} GB/s"
                yield (
                    f'<circle class="{who} {operation}" cx="{x.at(size):.2f}" cy="{y.at(speed):.2f}" r="{radius}" '
                    f'data-bytes="{size}" data-gbytes-s="{speed!r}"><title>{label}</title></circle>'
                )


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
