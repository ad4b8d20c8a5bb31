"""Measured training as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from meshcomm.layout.sizes import coords_text
from meshcomm.show.page import Cells, Line, Part, page_view
from meshcomm.show.plot import MARK
from meshcomm.show.units import count, seconds_text

if TYPE_CHECKING:
    from rich.console import Group

Facts = Mapping[str, Any]

_NOTE = """\
tokens/s: the median of the rounds, each of its slowest rank; ratio: the median of
the rounds' ratios of meshcomm's tokens/s to this way's; CPU: processor time of all
ranks' threads for 1,000 tokens, those that serve communication in brackets"""
_STEP_NOTE = """\
a step of meshcomm, the mean over ranks: along a dim the time in which the program
stood still in its calls, of it late until the last rank came to the call; bubble:
between a pipeline's first pass and its last; what FSDP2 waits for is in the passes.
predicted: calls along a dim, each as long as it takes by itself, which is seconds
less late; a bubble by the order of the schedule's passes, each as long as measured"""
_WIDTH, _ROW, _NAME = 720, 26, 290
_STYLE = """\
  svg { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
  .paper { fill: #ffffff } text { fill: #1f2430 } .quiet { fill: #596170 } .title { font-size: 16px; font-weight: 600 }
  .bar { fill: #0072b2 } .other { fill: #9aa3b2 } .part { fill: #d55e00 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #12161d } text { fill: #e8ebf0 } .quiet { fill: #a5adba } .bar { fill: #56b4f0 }
  .other { fill: #5b6576 } .part { fill: #ff8a3d }
}
"""


def training_view(facts: Facts) -> Group:
    """What `meshcomm bench --train` measured, for a rich console."""
    machine = facts["machine"]
    head = (
        f"mesh {coords_text(facts['mesh'])}, {machine['device']}, torch {machine['torch']}\n"
        f"{facts['model']}\n"
        f"{count(machine['cpus'], 'core')} on rank 0's host, load {machine['load']:.1f} before it began; "
        f"{count(facts['rounds'], 'round')} of {count(facts['steps'], 'step')}"
    )
    table = Cells.of(
        facts["ways"],
        {
            "way": lambda row: row["way"],
            ">tokens/s": lambda row: f"{row['tokens_s']:,.0f}",
            ">a step": lambda row: seconds_text(row["seconds"]),
            ">ratio": lambda row: f"{row['ratio']:.2f}",
            ">CPU": lambda row: (
                f"{row['cpu_s'] / row['tokens'] * 1e3:.3f} s ({(row['cpu_s'] - row['main_threads_s']) / row['tokens'] * 1e3:.3f})"
            ),
        },
    )
    parts: list[Part] = [Line(head), table]
    parts.append(
        Line("\n".join([*(f"not measured: {e['name']}: {e['why']}" for e in facts["without"]), _NOTE]))
    )
    if "step" in facts:
        whole = sum(facts["step"].values())
        said, late = _by_row(facts, "predicted"), _by_row(facts, "late")
        columns = {
            "in a step": lambda each: each[0],
            ">seconds": lambda each: seconds_text(max(each[1], 0.0)),
            ">share": lambda each: f"{each[1] / whole:.1%}",
            ">late": lambda each: seconds_text(late[each[0]]) if each[0] in late else "",
            ">predicted": lambda each: seconds_text(said[each[0]]) if each[0] in said else "",
        }
        parts += [Cells.of(_named(facts).items(), columns), Line(_STEP_NOTE)]
    return page_view(parts)


def training_svg(facts: Facts) -> str:
    """The same as bars: tokens a second of each way, and below where a step goes."""
    rows = [(each["way"], each["tokens_s"], f"{each['tokens_s']:,.0f} tokens/s") for each in facts["ways"]]
    step = _named(facts)
    whole = sum(step.values()) or 1.0
    shares = [
        (name, value, f"{seconds_text(max(value, 0.0))}, {value / whole:.0%}") for name, value in step.items()
    ]
    height = 96 + _ROW * (len(rows) + len(shares)) + 44
    title = f"Training on {coords_text(facts['mesh'])}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title">',
        MARK,
        f"<style>\n{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text id="title" class="title" x="16" y="28">{escape(title)}</text>',
        f'<text class="quiet" x="16" y="48">{escape(facts["model"])}</text>',
        *_bars(rows, 70, "other"),
    ]
    if shares:
        top = 70 + _ROW * len(rows) + 30
        parts.append(f'<text class="quiet" x="16" y="{top - 8}">a step of meshcomm</text>')
        parts += _bars(shares, top, "part")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _named(facts: Facts) -> dict[str, float]:
    """The parts of a step; dims as such."""
    return _by_row(facts, "step")


def _by_row(facts: Facts, key: str) -> dict[str, float]:
    found = facts.get(key, {})
    return {f"along {name}" if name in facts["lanes"] else name: value for name, value in found.items()}


def _bars(rows: list[tuple[str, float, str]], top: int, kind: str) -> Iterator[str]:
    room = _WIDTH - _NAME - 150
    most = max(value for _, value, _ in rows) or 1.0
    for number, (name, value, text) in enumerate(rows):
        y = top + number * _ROW
        long = max(value, 0.0) / most * room
        own = "bar" if number == 0 and kind == "other" else kind
        yield f'<text x="16" y="{y + 14}">{escape(name)}</text>'
        yield f'<rect class="{own}" x="{_NAME}" y="{y}" width="{long:.1f}" height="18" data-value="{value!r}"/>'
        yield f'<text class="quiet" x="{_NAME + long + 8:.1f}" y="{y + 14}">{escape(text)}</text>'
