"""Lines and tables as values, and what becomes of them: text of any width, or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.table import Table

# A table that would be folded to less than its width over this is shown as records instead.
_SQUEEZE = 1.4


@dataclass(frozen=True, slots=True)
class Line:
    """One paragraph; a heading where it says what follows."""

    text: str
    heading: bool = False


@final
@dataclass(frozen=True, slots=True)
class Cells:
    """A table: columns' names, rows of as many texts, and which columns hold numbers.

    For a rich console it is a table where it fits without breaking a word, and a record for each row
    where it does not: the first column as the record's name, then the others, without those that say "-".
    once: how many of the first columns a table leaves blank where they say what the row above says.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    once: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table or the records, as wide as the console."""
        from rich.padding import Padding
        from rich.text import Text

        if sum(self._words()) + self._gaps() <= options.max_width and (
            self.width() <= options.max_width * _SQUEEZE
        ):
            yield self.table(options.max_width)
            return
        for row in self.rows:
            yield Text(row[0])
            items = [
                f"{name} {cell}" for name, cell in zip(self.columns[1:], row[1:], strict=True) if cell != "-"
            ]
            for line in _packed(items, options.max_width - 2):
                yield Padding(Text(line), (0, 0, 0, 2), expand=False)

    def width(self) -> int:
        """Columns of the table where nothing is folded."""
        return sum(self._widths()) + self._gaps()

    def _gaps(self) -> int:
        return 2 * (len(self.columns) - 1)

    def _widths(self) -> list[int]:
        from rich.cells import cell_len

        return [max(map(cell_len, texts)) for texts in zip(self.columns, *self.rows, strict=True)]

    def _words(self) -> list[int]:
        """Columns of the longest word of each column; numbers are not parted from their units."""
        from rich.cells import cell_len

        found = []
        for name, texts in zip(self.columns, zip(self.columns, *self.rows, strict=True), strict=True):
            parts = texts if name in self.right else [word for text in texts for word in text.split()]
            found.append(max(map(cell_len, parts), default=0))
        return found

    def table(self, room: int) -> Table:
        """As rich's table, folded into `room` columns: the widest first, none below its longest word."""
        from rich import box
        from rich.table import Table

        widths, least = self._widths(), self._words()
        for _ in range(sum(widths) + self._gaps() - room):
            foldable = [i for i, width in enumerate(widths) if width > least[i]]
            if not foldable:
                break
            widths[max(foldable, key=widths.__getitem__)] -= 1
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
        for column, width in zip(self.columns, widths, strict=True):
            table.add_column(column, justify="right" if column in self.right else "left", width=width)
        above: tuple[str, ...] = ()
        for row in self.rows:
            same = next((i for i in range(self.once) if row[i] != above[i]), self.once) if above else 0
            table.add_row(*("",) * same, *row[same:])
            above = row
        return table

    def markdown(self) -> str:
        """As a GitHub table."""
        rule = ("---:" if column in self.right else "---" for column in self.columns)
        lines = [self.columns, tuple(rule), *self.rows]
        return "\n".join("| " + " | ".join(map(_escaped, cells)) + " |" for cells in lines)


def _packed(items: Sequence[str], width: int) -> list[str]:
    """Items on as few lines as hold them; one that is longer than a line has one of its own."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += "; " + item
        else:
            lines.append(item)
    return lines


Part: TypeAlias = Line | Cells


def page_view(parts: Sequence[Part]) -> Group:
    """For a rich console."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text(part.text) if isinstance(part, Line) else part for part in parts))


def as_text(what: RenderableType, width: int = 100) -> str:
    """What a console of `width` columns without colour would show, without blanks at the ends of lines."""
    from rich.console import Console

    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def page_markdown(parts: Sequence[Part]) -> str:
    """For GitHub: headings, paragraphs, tables."""
    blocks = []
    for part in parts:
        if isinstance(part, Cells):
            blocks.append(part.markdown())
        else:
            blocks.append(("## " if part.heading else "") + _escaped(part.text, in_table=False))
    return "\n\n".join(blocks) + "\n"


def _escaped(text: str, in_table: bool = True) -> str:
    """What Markdown would read as its own, as text."""
    for mark in "\\`*_<[]" + "|" * in_table:
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", "<br>" if in_table else "  \n") or " "
