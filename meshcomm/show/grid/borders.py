"""Between which neighbours of a picture does a node end?"""

from __future__ import annotations

from typing import Any, Final, final

from meshcomm.show.grid.frame import Frame

Facts = dict[str, Any]

_OUTSIDE: Final = -1


@final
class Borders:
    """Lines between ranks of different nodes, and around all of them; none where nodes are not known.

    Rows and columns count the slots of the frame. Where something is left out nothing is known, so a line
    is there only at the edge of the picture.
    """

    def __init__(self, facts: Facts, frame: Frame) -> None:
        self.known: bool = facts["node"] is not None
        self._rows, self._columns = frame.row_slots(), frame.column_slots()
        self._nodes = [
            [self._of(facts, frame.place(row, column)) for column in self._columns] for row in self._rows
        ]

    def _of(self, facts: Facts, place: int | None) -> int | None:
        return None if place is None or not self.known else int(facts["node"][place])

    def left_of(self, row: int, column: int) -> bool:
        """Whether a line stands left of a slot; one column further is the right edge."""
        inside = self.known and 0 <= row < len(self._rows)
        return inside and _parted(self._node(row, column - 1), self._node(row, column))

    def above(self, row: int, column: int) -> bool:
        """Whether a line lies above a slot; one row further is the lower edge."""
        inside = self.known and 0 <= column < len(self._columns)
        return inside and _parted(self._node(row - 1, column), self._node(row, column))

    def _node(self, row: int, column: int) -> int | None:
        if 0 <= row < len(self._rows) and 0 <= column < len(self._columns):
            return self._nodes[row][column]
        return _OUTSIDE


def _parted(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return _OUTSIDE in (one, other)
    return one != other
