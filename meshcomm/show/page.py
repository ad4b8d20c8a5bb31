"""Lines and tables as values that can be rendered as text of any width or as a picture."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from io import StringIO
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

# The width of output that does not go to a terminal, and the maximum width of a picture.
_WIDTH: Final = 100
_PICTURE: Final = 150
# A table is shown as records if its width would have to shrink by more than this factor.
_SQUEEZE = 1.4
# A template for rich's SVG of a console, without a window frame, and light or dark like the reader's system.
_SVG: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" class="{unique_id}" role="img" width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}">
<style>
.{unique_id} {{ --ink: #1f2328; --paper: #ffffff; }}
@media (prefers-color-scheme: dark) {{ .{unique_id} {{ --ink: #e6edf3; --paper: #0d1117; }} }}
.{unique_id} text {{ font: {char_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
{styles}
</style>
<rect width="100%" height="100%" fill="var(--paper)"/>
<g transform="translate({terminal_x}, 22)">{backgrounds}{matrix}</g>
</svg>
"""

# JSON-serializable data to show.
Facts: TypeAlias = dict[str, Any]
# How to get a column's cell from an item: by a key ("a.b" is the key "b" inside "a"), a template with keys in braces, a
# key with a formatter, or a function from the item to the cell.
Column: TypeAlias = str | tuple[str, Callable[[Any], str]] | Callable[[Any], object]
# The prefix of a line in an error message.
_LABEL: Final = re.compile(r" *(?:(?:given|expected|try): +)?")


@final
@dataclass(frozen=True, slots=True)
class Line:
    """Text that is wrapped between words on a narrow console. Continuation lines keep the indentation.

    drawing: if True, the text is not wrapped, and its spaces and line breaks are kept.
    """

    text: str
    drawing: bool = False
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines. No line is wider than the console, unless it contains a word that is."""
        from textwrap import wrap

        from rich.text import Text

        if self.drawing:
            yield Text(self.text)
            return
        for line in self.text.split("\n"):
            label = _LABEL.match(line)
            indent = " " * (0 if label is None else label.end())
            room = max(options.max_width, 2 * len(indent))
            lines = wrap(line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            yield Text("\n".join(lines), style=self.style, overflow="ignore", no_wrap=True)


@final
@dataclass(frozen=True, slots=True)
class Cells:
    """A table: the column names, the rows with one text per column, and the columns that contain numbers.

    A rich console shows a table if it fits without breaking words. Otherwise it shows a record for each row: the
    first column as the record's name, then the other columns except those with "-".
    once: how many of the first columns are left blank if they repeat the row above.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: Collection[str] = ()
    once: int = 0

    @classmethod
    def of(cls, items: Iterable[Any], columns: Mapping[str, Column], once: int = 0) -> Self:
        """Return a table with a row for each item. columns: see `Column`; ">name" is a column of numbers.

        None is shown as "-", and an int with thousands separators.
        """
        names = tuple(name.removeprefix(">") for name in columns)
        rows = tuple(tuple(_cell(column, item) for column in columns.values()) for item in items)
        return cls(names, rows, tuple(name[1:] for name in columns if name.startswith(">")), once)

    def records(self, without: Collection[str] = ()) -> list[list[str]]:
        """Return each row as texts, "column cell", without the first column, the named columns and cells with "-"."""
        return [
            [
                f"{name} {cell}"
                for name, cell in zip(self.columns[1:], row[1:], strict=True)
                if cell != "-" and name not in without
            ]
            for row in self.rows
        ]

    def shown_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table, see `once`."""
        above: tuple[str, ...] = ()
        for row in self.rows:
            same = next((i for i in range(self.once) if row[i] != above[i]), self.once) if above else 0
            yield ("",) * same + row[same:]
            above = row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table or the records, fitted to the width of the console."""
        from rich.box import SIMPLE_HEAD
        from rich.cells import cell_len
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        columns = list(zip(self.columns, *self.rows, strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        # Numbers must not be separated from their units.
        words = [texts if texts[0] in self.right else " ".join(texts).split() for texts in columns]
        least = [max(map(cell_len, column), default=0) for column in words]
        gaps = 2 * (len(columns) - 1)
        room = options.max_width - gaps
        if sum(least) > room or sum(widths) + gaps > options.max_width * _SQUEEZE:
            for row, record in zip(self.rows, self.records(), strict=True):
                yield Text(row[0])
                for line in _packed(record, options.max_width - 2):
                    yield Padding(Text(line), (0, 0, 0, 2), expand=False)
            return
        # Narrow the widest columns first, but make no column narrower than its longest word.
        for _ in range(sum(widths) - room):
            widths[max((i for i, w in enumerate(widths) if w > least[i]), key=widths.__getitem__)] -= 1
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(name, justify="right" if name in self.right else "left", width=width)
        for row in self.shown_rows():
            table.add_row(*row)
        yield table


PagePart: TypeAlias = Line | Cells
# The result of views, for a rich console.
View: TypeAlias = "Group"


def _cell(column: Column, item: Any) -> str:
    if isinstance(column, tuple):
        value = _value(column[0], item)
        return "-" if value is None else column[1](value)
    value = _value(column, item) if isinstance(column, str) else column(item)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _value(column: str, item: Any) -> Any:
    return column.format_map(item) if "{" in column else reduce(getitem, column.split("."), item)


def _packed(items: Sequence[str], width: int) -> list[str]:
    """Return the items packed into as few lines as possible. An item that is longer than a line gets a separate line."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += "; " + item
        else:
            lines.append(item)
    return lines


def page_view(parts: Sequence[PagePart]) -> View:
    """Return a view that shows the parts one below the other."""
    from rich.console import Group

    return Group(*parts)


def terminal(width: int = _WIDTH, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr. It is as wide as the terminal or COLUMNS, or else has `width` columns."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=width, stderr=stderr)


def as_text(what: RenderableType, width: int = _WIDTH) -> str:
    """Return what a console of `width` columns without color would show, without trailing spaces."""
    from rich.console import Console

    # In a notebook, rich displays additional output at the end of a capture.
    console = Console(width=width, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(what, crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def svg_of(what: RenderableType) -> str:
    """Return the output of a wide color console as a self-contained SVG with a light and a dark style."""
    from html import escape

    from rich.cells import cell_len
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME

    lines = as_text(what, _PICTURE).splitlines()
    widest = max(map(cell_len, lines))
    # The picture has colors regardless of the environment.
    options: dict[str, Any] = {"color_system": "truecolor", "no_color": False, "force_jupyter": False}
    console = Console(width=widest, file=StringIO(), record=True, **options)
    console.print(what)
    # Every style rule and id begins with rich's hash of the content, so several pictures on a page do not conflict.
    picture = console.export_svg(code_format=_SVG, theme=SVG_EXPORT_THEME)
    picture = picture.replace(f"fill: {SVG_EXPORT_THEME.foreground_color.hex}", "fill: var(--ink)")
    # No content is wider than the picture, so clipping is not needed.
    picture = re.sub(r' clip-path="[^"]*"', "", picture)
    return picture.replace("<style>", f"<title>{escape(lines[0], quote=False)}</title>\n<style>", 1)
