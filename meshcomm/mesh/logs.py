"""Whose log line is this? Lines that begin with rank and coords, and only from the ranks that are asked for."""

from __future__ import annotations

import logging
from typing import TextIO, final

from meshcomm.layout import Layout
from meshcomm.mesh.mesh import Mesh
from meshcomm.mesh.where import Where

_FORMAT = "%(levelname)s %(name)s: %(message)s"


def attach(
    mesh: Mesh,
    logger: logging.Logger | None = None,
    where: str | None = None,
    stream: TextIO | None = None,
) -> logging.Handler:
    """Let `logger` also write lines like `[r5 pp1 dp0 tp1] WARNING mine: text`.

    Args:
        logger: default the root logger, which gets the records of all others. Its level stays.
        where: which ranks write, as in `"tp==0 and dp==0"`; see `Where`. Default: all.
        stream: default sys.stderr.

    Called by: any rank that wants to, alone; nothing is communicated. A rank outside the mesh has no
        coords: it writes `[r9]`, and a condition on a dim does not hold for it.
    Returns: the handler, for `logger.removeHandler` or another formatter. Each call adds one.
    Raises: WhereError, on all ranks alike, for a condition that cannot be meant.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(CoordsFormatter(mesh.layout, mesh.rank))
    if where is not None:
        handler.addFilter(CoordsFilter(mesh.layout, mesh.rank, where))
    (logger or logging.getLogger()).addHandler(handler)
    return handler


def prefix(layout: Layout, rank: int) -> str:
    """`[r5 pp1 dp0 tp1]`: the rank and its coords in the base dims; `[r9]` outside the layout.

    >>> prefix(Layout({"pp": 2, "dp": 2, "tp": 2}), 5), prefix(Layout({"dp": 2}), 9)
    ('[r5 pp1 dp0 tp1]', '[r9]')
    """
    coords = layout.coords(rank) if rank in layout else {}
    # A name that ends in a digit would run into its coord.
    parts = (f"{name}{'=' if name[-1].isdigit() else ''}{coord}" for name, coord in coords.items())
    return f"[{' '.join((f'r{rank}', *parts))}]"


@final
class CoordsFormatter(logging.Formatter):
    """logging.Formatter whose every line, those of a traceback too, begins with `prefix`."""

    def __init__(self, layout: Layout, rank: int, fmt: str = _FORMAT) -> None:
        super().__init__(fmt)
        self._prefix = prefix(layout, rank)

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, each with the prefix."""
        return "\n".join(f"{self._prefix} {line}".rstrip() for line in super().format(record).split("\n"))


@final
class CoordsFilter(logging.Filter):
    """Lets everything through on ranks where `where` holds, else nothing. Raises WhereError, on every rank alike."""

    def __init__(self, layout: Layout, rank: int, where: str) -> None:
        super().__init__()
        # A rank's coords never change, so the answer is known before the first record.
        self._speaks = Where(where, layout).holds(rank)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this rank writes the record."""
        return self._speaks
