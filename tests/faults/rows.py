"""All rows, by name, in the order of the table."""

from __future__ import annotations

from typing import Final

from tests.faults import (
    bare_rows,
    call_rows,
    death_rows,
    ending_rows,
    message_rows,
    opening_rows,
    past_rows,
    step_rows,
    unequal_rows,
)
from tests.faults.row import Row

_ALL: Final = [
    *opening_rows.ROWS,
    *call_rows.ROWS,
    *death_rows.ROWS,
    *message_rows.ROWS,
    *ending_rows.ROWS,
    *step_rows.ROWS,
    *past_rows.ROWS,
    *bare_rows.ROWS,
    *unequal_rows.ROWS,
]

ROWS: Final[dict[str, Row]] = {row.name: row for row in _ALL}
assert len(ROWS) == len(_ALL), "two rows of one name"
