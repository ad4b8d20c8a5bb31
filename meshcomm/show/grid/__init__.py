"""The rank grid: who sits where, in which group of one dim. As text on a terminal, and in every other form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from meshcomm.show.grid.cells import PALETTE, Cell, Grid, Room, between, colours, headlines, tag, widest_label
from meshcomm.show.grid.cells import grid_facts as grid_facts
from meshcomm.show.grid.svg import grid_svg
from meshcomm.show.page import Line, Part, as_text, export, page_markdown

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Facts = dict[str, Any]

# By which of up, down, left, right have a line, as bits 1, 2, 4, 8.
_NODE_LINES: Final = " ┃┃┃━┛┓┫━┗┏┣━┻┳╋"
_ASCII: Final = str.maketrans(_NODE_LINES + "…⋮", " |||-+++-+++-+++.:")


@final
class RankGrid:
    """Ranks as coloured blocks, a colour for each group along a dim, lines between nodes.

    Prints as text of 100 columns without colour, on a rich console in colour and as wide as that, with long dims
    folded; in a notebook it is a picture. A group has a letter too where there are more groups than colours, or no
    colours (NO_COLOR, TERM=dumb, no terminal). `facts` is what all forms show, see `grid_facts`.
    """

    def __init__(self, facts: Facts, groups: int = 8) -> None:
        """groups: listed in the legend at most."""
        self.facts = facts
        self._groups = groups

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Headlines, the picture, a legend, and what is not drawn."""
        from rich.text import Text

        coloured = console.color_system is not None and not console.no_color
        picture = _Text(self.facts, options.max_width, coloured)
        yield from map(Text, headlines(self.facts))
        for line in picture.lines():
            if options.ascii_only:
                line.plain = line.plain.translate(_ASCII)
            # A window of a few columns: cut rather than wrapped.
            line.truncate(options.max_width)
            line.no_wrap = True
            yield line
        entries, notes = picture.grid.legend(self._groups)
        width = max(len(picture.letters(group)) for group, _ in entries)
        for group, text in entries:
            swatch = Text(f" {picture.letters(group):<{max(width, 1)}} ", picture.style(group))
            yield swatch.append(f" {text}", "default on default")
        yield from map(Text, notes)
        if self.facts["rank"] is not None:
            yield Text(f"[ ] rank {self.facts['rank']}")

    def __str__(self) -> str:
        return as_text(self)

    def svg(self) -> str:
        """As one self-contained SVG file."""
        return grid_svg(self.facts)

    # What notebooks ask for.
    _repr_svg_ = svg

    def page(self) -> list[Part]:
        """For Markdown: what a console of 100 columns without colour shows, and more groups."""
        head, lines = headlines(self.facts)[0], as_text(RankGrid(self.facts, 32)).split("\n")
        return [Line(head, heading=True), Line("\n".join(lines[lines[0] == head :]), drawing=True)]

    def markdown(self) -> str:
        """As text in a block."""
        return page_markdown(self.page())

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as .svg, .md or .json. Raises ConfigError for another ending or an unwritable path."""
        export(Path(fspath(path)), self.facts, self.page, self.svg)


class _Text:
    """The picture as lines of text: labels in the margin, cells, and lines between nodes."""

    def __init__(self, facts: Facts, width: int, coloured: bool) -> None:
        self.coloured = coloured
        self.lettered = not coloured or facts["groups"] > len(PALETTE)
        edge = int(facts["node"] is not None)
        self.left = 1 + widest_label(facts) + edge
        letters = len(self.letters(facts["groups"] - 1))
        # A bracket or a blank before and behind.
        cell = len(str(max(facts["ranks"]))) + letters + 2
        across = Room(width - self.left - edge, cell, inner=1, outer=3, gap=1)
        self.grid = Grid(facts, across, Room(40, 1, inner=edge, outer=1, gap=1))
        # A cell ends with a blank: there the last line is.
        self.bars = between(self.grid.columns, 1)
        self.bars[-1] -= 1

    def letters(self, group: int) -> str:
        """A group's letters, where colours alone do not tell groups apart."""
        return tag(group) if self.lettered else ""

    def style(self, group: int) -> str:
        """A group's colours."""
        colour, ink = colours(group)
        return f"{ink} on {colour}" if self.coloured else "default"

    def lines(self) -> Iterator[Text]:
        """Heads, then every row with the line above it, then the line below all."""
        grid = self.grid
        if grid.across.size > 1:
            blocks = [(slot.at, f"{slot.block} ", "bold") for slot in grid.columns if slot.starts_block]
            yield self._line(grid.across.name, blocks)
        if grid.inside_columns.size > 1:
            coords = [(slot.at, slot.coord.center(slot.size), "bold") for slot in grid.columns]
            yield self._line(grid.inside_columns.name, coords)
        left, above = grid.node_lines()
        for number, (row, cells) in enumerate(zip(grid.rows, grid.cells, strict=True)):
            block, label = grid.row_labels(row)
            if block or above[number].any() or (row.starts_block and number > 0):
                yield self._border(block, left[number : number + 2].tolist(), above[number].tolist())
            bars = [
                (at, _NODE_LINES[3], "") for at, bar in zip(self.bars, left[number + 1], strict=True) if bar
            ]
            yield self._line(label, sorted([*bars, *map(self._cell, cells)]))
        if above[-1].any():
            yield self._border("", left[-2:].tolist(), above[-1].tolist())

    def _cell(self, cell: Cell) -> tuple[int, str, str]:
        at, width = cell.column.at, cell.column.size
        if cell.rank is None:
            return at, "…".center(width), ""
        name = f"{cell.rank}{self.letters(cell.group)}"
        if cell.rank == self.grid.facts["rank"]:
            return at, f"[{name}]".rjust(width), f"{self.style(cell.group)} bold"
        return at, f"{name} ".rjust(width), self.style(cell.group)

    def _border(self, label: str, left: list[list[bool]], above: list[bool]) -> Text:
        """The line above a row. left: next to the row before it, and next to the row."""
        drawn = ""
        for column, at in enumerate(self.bars):
            drawn = drawn.ljust(at - self.bars[0], _NODE_LINES[12 * above[column]])
            drawn += _NODE_LINES[
                left[0][column] + 2 * left[1][column] + 4 * above[column] + 8 * above[column + 1]
            ]
        return self._line(label, [(self.bars[0], drawn.rstrip(), "")])

    def _line(self, label: str, pieces: Iterable[tuple[int, str, str]]) -> Text:
        """A label in the margin, and texts at their columns, each in its style."""
        from rich.text import Text

        line = Text().append(label, "bold")
        for at, text, style in pieces:
            line.append(" " * (self.left + at - len(line)))
            line.append(text, style)
        return line
