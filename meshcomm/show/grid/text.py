"""The rank grid on a terminal: coloured blocks with lines between nodes, or letters where there is no colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, final

from meshcomm.show.grid.facts import headlines, legend, tag
from meshcomm.show.grid.frame import PALETTE, Frame, Slot, Units, frame, middles
from meshcomm.show.page import Line, Part, as_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Facts = dict[str, Any]

# Lines of a picture at most.
_LINES: Final = 40

# By which of up, down, left, right have a line, as bits 1, 2, 4, 8.
_HEAVY: Final = " ┃┃┃━┛┓┫━┗┏┣━┻┳╋"
_ASCII: Final = " |||-+++-+++-+++"


@final
class GridText:
    """`grid_facts` for a rich console, as wide as that; long dims are folded.

    With colours a group is a colour; a letter too where there are more groups than colours, or no
    colours (NO_COLOR, TERM=dumb, no terminal).
    """

    def __init__(self, facts: Facts, groups: int = 8) -> None:
        """groups: listed in the legend at most."""
        self._facts = facts
        self._groups = groups

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Headlines, the picture, what is not drawn, and a legend."""
        from rich.text import Text

        facts = self._facts
        coloured = console.color_system is not None and not console.no_color
        lettered = not coloured or facts["groups"] > len(PALETTE)
        yield from map(Text, headlines(facts))
        dots, chars = ("..", _ASCII) if options.ascii_only else ("…", _HEAVY)
        drawn, wide, margin = _fitted(facts, options.max_width, lettered, len(dots))
        for text in self._picture(drawn, wide, margin, coloured, lettered, dots, chars):
            # A window of a few columns: cut rather than wrapped.
            text.truncate(options.max_width)
            text.no_wrap = True
            yield text
        yield from map(Text, drawn.notes())
        entries, rest = legend(facts, drawn, self._groups)
        width = max(len(tag(group)) for group, _, _ in entries) if lettered else 1
        for group, label, ranks in entries:
            swatch = Text(
                f" {tag(group) if lettered else '':<{width}} ", style=_style(group) if coloured else ""
            )
            yield swatch.append(f" {label} {ranks}", style="default on default")
        yield from map(Text, rest)
        if facts["rank"] is not None:
            yield Text(f"[ ] rank {facts['rank']}")

    def _picture(
        self, drawn: Frame, wide: Units, margin: int, coloured: bool, lettered: bool, dots: str, chars: str
    ) -> Iterator[Text]:
        """Heads, then every row with the line above it, then the line below all."""
        facts, edge = self._facts, self._facts["node"] is not None
        rows, columns = drawn.y(wide), drawn.x(wide, margin + edge)
        left, above = drawn.borders(facts)
        lines = middles(columns, 1)
        lines[-1] -= 1

        def cell(row: Slot, column: Slot) -> tuple[int, str, str]:
            place = drawn.place(row, column)
            if place is None:
                return column.at, "" if row.inner is None else dots.center(column.size), ""
            rank, group = facts["ranks"][place], facts["group"][place]
            name, marked = f"{rank}{tag(group) if lettered else ''}", rank == facts["rank"]
            style = (_style(group) if coloured else "default") + " bold" * marked
            return column.at, (f"[{name}]" if marked else f"{name} ").rjust(column.size), style

        across, within = [(0, drawn.across.name, "bold")], [(0, drawn.columns.name, "bold")]
        for slot in columns:
            if slot.starts_block:
                block = dots if slot.outer is None else drawn.across.label(slot.outer)
                across.append((slot.at, f"{block} ", "bold"))
            if slot.outer is not None:
                coord = dots if slot.inner is None else str(slot.inner).center(slot.size)
                within.append((slot.at, coord, "bold"))
        yield from [_line(across)] * (drawn.across.size > 1) + [_line(within)] * (drawn.columns.size > 1)
        named = drawn.down.size > 1 and drawn.rows.size > 1
        for number, row in enumerate(rows):
            block = (
                drawn.down.label(row.outer) if named and row.starts_block and row.outer is not None else ""
            )
            if above[number].any() or (row.starts_block and (named or number > 0)):
                yield _border(block, left[number : number + 2].tolist(), above[number].tolist(), lines, chars)
            label = ":" if dots == ".." else "⋮"
            if row.inner is not None and row.outer is not None:
                label = drawn.rows.label(row.inner) if drawn.rows.size > 1 else drawn.down.label(row.outer)
            bars = [(at, chars[3], "") for at, there in zip(lines, left[number + 1], strict=True) if there]
            yield _line([(0, label, "bold"), *sorted([*bars, *(cell(row, column) for column in columns)])])
        if above[-1].any():
            yield _border("", left[-2:].tolist(), above[-1].tolist(), lines, chars)


def grid_page(facts: Facts) -> list[Part]:
    """`grid_facts` for Markdown: what a console of 100 columns without colour shows, and more groups."""
    head, lines = headlines(facts)[0], as_text(GridText(facts, 32)).split("\n")
    return [Line(head, heading=True), Line("\n".join(lines[lines[0] == head :]), drawing=True)]


def _fitted(facts: Facts, width: int, lettered: bool, gap: int) -> tuple[Frame, Units, int]:
    """What is drawn, and how wide cells and margin are: that depends on what is drawn, and it on that."""
    ranks, groups, edges = facts["ranks"], facts["group"], int(facts["node"] is not None)
    tall = Units(_LINES, 1, edges, 1, 1, 16)
    cell = margin = 3
    while True:
        wide = Units(width - margin - 2 * edges, cell, 1, 3, gap, 256)
        drawn = frame(facts, wide, tall)
        places = list(drawn.places())
        letters = max(len(tag(groups[place])) for place in places) if lettered else 0
        digits = max(len(str(ranks[place])) for place in places)
        needed = max(digits + letters, len(str(drawn.columns.coords[-1]))) + 2
        labels = [drawn.columns.name, drawn.across.name, *drawn.rows.labels(), *drawn.down.labels()]
        beside = max(map(len, labels)) + 1
        if needed <= cell and beside <= margin:
            return drawn, wide._replace(cell=needed), beside
        cell, margin = max(cell, needed), max(margin, beside)


def _style(group: int) -> str:
    background, text = PALETTE[group % len(PALETTE)]
    return f"{text} on {background}"


def _line(pieces: Iterable[tuple[int, str, str]]) -> Text:
    """Texts at their columns, each in its style."""
    from rich.text import Text

    line = Text()
    for at, text, style in pieces:
        line.append(" " * (at - len(line)))
        line.append(text, style)
    return line


def _border(label: str, left: list[list[bool]], above: list[bool], lines: list[int], chars: str) -> Text:
    """The line above a row, behind its block's name. left: beside the row before, and beside this one."""
    drawn = [" "] * (lines[-1] + 1)
    for column, at in enumerate(lines):
        drawn[at] = chars[left[0][column] + 2 * left[1][column] + 4 * above[column] + 8 * above[column + 1]]
        if above[column + 1]:
            drawn[at + 1 : lines[column + 1]] = chars[12] * (lines[column + 1] - at - 1)
    return _line([(0, label, "bold"), (len(label), "".join(drawn)[len(label) :].rstrip(), "")])
