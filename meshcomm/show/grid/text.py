"""The rank grid on a terminal: coloured blocks with lines between nodes, or letters where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, final

from meshcomm.show.grid.borders import Borders
from meshcomm.show.grid.colours import PALETTE, fill
from meshcomm.show.grid.facts import headlines, legend, tag
from meshcomm.show.grid.frame import Frame, Slot, Units, frame

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

Facts = dict[str, Any]

# Lines of a picture, and groups in its legend, at most.
_LINES: Final = 40
_LEGEND: Final = 8

# By which of up, down, left, right have a line, as bits 1, 2, 4, 8.
_HEAVY: Final = " ┃┃┃━┛┓┫━┗┏┣━┻┳╋"
_ASCII: Final = " |||-+++-+++-+++"


@final
class GridText:
    """`grid_facts` for a rich console, as wide as that; long dims are folded.

    With colours a group is a colour; a letter too where there are more groups than colours, or no
    colours (NO_COLOR, TERM=dumb, no terminal).
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Headlines, the picture, what is not drawn, and a legend."""
        from rich.text import Text

        facts = self._facts
        coloured = console.color_system is not None and not console.no_color
        lettered = not coloured or facts["groups"] > len(PALETTE)
        for line in headlines(facts):
            yield Text(line)
        picture = _Picture(facts, options.max_width, options.ascii_only, coloured, lettered)
        for text in picture.lines():
            # A window of a few columns: cut rather than wrapped.
            text.truncate(options.max_width)
            text.no_wrap = True
            yield text
        for note in picture.frame.notes():
            yield Text(note)
        yield from self._legend(picture.frame, coloured, lettered)

    def _legend(self, drawn: Frame, coloured: bool, lettered: bool) -> Iterator[Text]:
        from rich.text import Text

        facts = self._facts
        first = legend(facts, drawn, _LEGEND)
        width = max(len(tag(group)) for group, _, _ in first) if lettered else 1
        for group, label, ranks in first:
            name = tag(group) if lettered else ""
            swatch = Text(f" {name:<{width}} ", style=_style(group) if coloured else "")
            yield swatch.append(f" {label} {ranks}", style="default on default")
        rest = facts["groups"] - len(first)
        if rest:
            yield Text(f"and {rest:,} more groups")
        if facts["rank"] is not None:
            yield Text(f"[ ] rank {facts['rank']}")


def _style(group: int) -> str:
    background, text = fill(group)
    return f"{text} on {background}"


class _Picture:
    """The grid as lines of text; what stands where follows from the frame."""

    def __init__(self, facts: Facts, width: int, ascii_only: bool, coloured: bool, lettered: bool) -> None:
        self._facts = facts
        self._coloured = coloured
        self._lettered = lettered
        self._chars = _ASCII if ascii_only else _HEAVY
        self._dots = ".." if ascii_only else "…"
        self._nodes = facts["node"] is not None
        self.frame = self._frame(width)
        self._borders = Borders(facts, self.frame)
        self._rows = self.frame.row_slots()
        self._columns = self.frame.column_slots()
        self._cell = self._cell_width(self.frame)
        self._margin = self._margin_width(self.frame)

    def _frame(self, width: int) -> Frame:
        """The frame that fits; the widths of cells and margin depend on what is drawn, and it on them."""
        room, inner = width, 1
        tall = Units(_LINES, 1, int(self._nodes), 1, 1, 16)
        found = frame(self._facts, Units(room, 4, inner, 3, 1, 256), tall)
        for _ in range(4):
            cell = self._cell_width(found)
            edges = 2 if self._nodes else 0
            room = width - self._margin_width(found) - edges
            again = frame(self._facts, Units(room, cell, inner, 3, 1, 256), tall)
            if again == found:
                break
            found = again
        while True:
            if self._width(found) <= width or found.across.drawn * found.columns.drawn == 1:
                return found
            # Wider numbers came into what fitted: leave out one more.
            cell += 1
            found = frame(self._facts, Units(room, cell, inner, 3, 1, 256), tall)

    def _width(self, found: Frame) -> int:
        cell = self._cell_width(found)
        slots = found.column_slots()
        total = sum(1 if slot.inner is None else cell for slot in slots)
        total += sum(3 if slot.starts_block else 1 for slot in slots[1:])
        return total + self._margin_width(found) + 2 * self._nodes

    def _cell_width(self, found: Frame) -> int:
        ranks, groups = self._facts["ranks"], self._facts["group"]
        places = list(found.places())
        letters = max(len(tag(groups[place])) for place in places) if self._lettered else 0
        digits = max(len(str(ranks[place])) for place in places)
        coords = max(
            (len(str(slot.inner)) for slot in found.column_slots() if slot.inner is not None), default=1
        )
        return max(digits + letters, coords) + 2

    def _margin_width(self, found: Frame) -> int:
        labels = [found.columns.name, found.across.name]
        labels += [found.rows.label(slot) for slot in found.rows.slots() if slot is not None]
        labels += [found.down.label(slot) for slot in found.down.slots() if slot is not None]
        return max(map(len, labels)) + 1

    # -- lines ----------------------------------------------------------------------------------

    def lines(self) -> Iterator[Text]:
        """Heads, then every row with the line above it, then the line below all."""
        yield from self._heads()
        for index, row in enumerate(self._rows):
            above = self._across(index)
            if above is not None:
                yield above
            yield self._row(index, row)
        below = self._across(len(self._rows))
        if below is not None:
            yield below

    def _heads(self) -> Iterator[Text]:
        from rich.text import Text

        found = self.frame
        if found.across.size > 1:
            text, at = "", 0
            labels = {}
            for number, slot in enumerate(self._columns):
                at = self._offset(number)
                if slot.starts_block:
                    labels[at] = self._dots if slot.outer is None else found.across.label(slot.outer)
            for at, label in labels.items():
                text = text.ljust(at) + label + " "
            head = found.across.name.ljust(self._margin) + text[self._margin :]
            yield Text(head.rstrip(), style="bold")
        if found.columns.size > 1:
            text = found.columns.name.ljust(self._margin)
            for number, slot in enumerate(self._columns):
                width = self._slot_width(slot)
                if slot.outer is None:
                    continue
                label = self._dots if slot.inner is None else str(slot.inner).center(width)
                text = text.ljust(self._offset(number)) + label
            yield Text(text.rstrip(), style="bold")

    def _row(self, index: int, row: Slot) -> Text:
        from rich.text import Text

        found = self.frame
        label = ""
        if row.inner is None or row.outer is None:
            label = ":" if self._dots == ".." else "⋮"
        elif found.rows.size > 1:
            label = found.rows.label(row.inner)
        elif found.down.size > 1:
            label = found.down.label(row.outer)
        text = Text(label.ljust(self._margin), style="bold")
        for number, column in enumerate(self._columns):
            text.append(self._separator(index, number), style="default not bold")
            text.append_text(self._cell_text(row, column))
        text.append(self._separator(index, len(self._columns)), style="default not bold")
        if not self._coloured:
            text.rstrip()
        return text

    def _cell_text(self, row: Slot, column: Slot) -> Text:
        from rich.text import Text

        width = self._slot_width(column)
        place = self.frame.place(row, column)
        if place is None:
            mark = self._dots if row.inner is not None else ""
            return Text(mark.center(width), style="default not bold")
        facts = self._facts
        rank, group = facts["ranks"][place], facts["group"][place]
        name = f"{rank}{tag(group) if self._lettered else ''}"
        text = (f"[{name}]" if rank == facts["rank"] else f"{name} ").rjust(width)
        bold = " bold" if rank == facts["rank"] else " not bold"
        return Text(text, style=(_style(group) if self._coloured else "default") + bold)

    # -- lines between nodes --------------------------------------------------------------------

    def _separator(self, row: int, column: int) -> str:
        width = self._separator_width(column)
        mark = self._chars[3] if self._borders.left_of(row, column) else " "
        return mark.center(width) if width else ""

    def _across(self, row: int) -> Text | None:
        """The line above a row, with the block's name; None where nothing is to be drawn there."""
        from rich.text import Text

        columns = range(len(self._columns))
        inside = 0 < row < len(self._rows)
        starts = row < len(self._rows) and self._rows[row].starts_block
        named = starts and self.frame.down.size > 1 and self.frame.rows.size > 1
        line = self._nodes and any(self._borders.above(row, column) for column in columns)
        if not line and not (starts and inside) and not named:
            return None
        label = ""
        if named and row < len(self._rows):
            outer = self._rows[row].outer
            label = "" if outer is None else self.frame.down.label(outer)
        text = label.ljust(self._margin)
        for column in range(len(self._columns) + 1):
            left, right = self._borders.above(row, column - 1), self._borders.above(row, column)
            bits = (
                self._borders.left_of(row - 1, column)
                + 2 * self._borders.left_of(row, column)
                + 4 * left
                + 8 * right
            )
            width = self._separator_width(column)
            if width:
                side = (width - 1) // 2
                text += self._chars[12 * left] * side + self._chars[bits] + self._chars[12 * right] * side
            if column < len(self._columns):
                text += self._chars[12 * right] * self._slot_width(self._columns[column])
        result = Text(text.rstrip())
        result.stylize("bold", 0, len(label))
        return result

    def _separator_width(self, column: int) -> int:
        if column in (0, len(self._columns)):
            return int(self._nodes)
        return 3 if self._columns[column].starts_block else 1

    def _slot_width(self, slot: Slot) -> int:
        return len(self._dots) if slot.inner is None else self._cell

    def _offset(self, number: int) -> int:
        """Where a column's cell begins."""
        at = self._margin
        for index in range(number):
            at += self._separator_width(index) + self._slot_width(self._columns[index])
        return at + self._separator_width(number)
