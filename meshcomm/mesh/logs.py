"""Log lines that begin with the rank and its coords."""

from __future__ import annotations

import logging
from typing import TextIO, final

from meshcomm.layout import Layout
from meshcomm.mesh.mesh import Mesh

_FORMAT = "%(levelname)s %(name)s: %(message)s"


def attach(mesh: Mesh, logger: logging.Logger | None = None) -> logging.StreamHandler[TextIO]:
    """Make `logger`, by default the root logger, also write lines like `[r5 pp1 dp0 tp1] WARNING mine: text` to stderr.

    A rank outside the mesh writes `[r9]`. Each call adds another handler and returns it, for `logger.removeHandler`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(CoordsFormatter(mesh.layout, mesh.rank))
    (logger or logging.getLogger()).addHandler(handler)
    return handler


def prefix(layout: Layout, rank: int) -> str:
    """Return the rank and its coords along the base dims, as in `[r5 pp1 dp0 tp1]`, or `[r9]` outside the layout.

    >>> prefix(Layout({"pp": 2, "dp": 2, "tp": 2}), 5), prefix(Layout({"dp": 2}), 9)
    ('[r5 pp1 dp0 tp1]', '[r9]')
    """
    coords = layout.coords(rank) if rank in layout else {}
    # The `=` separates a name that ends in a digit from its coord.
    parts = (f"{name}{'=' if name[-1].isdigit() else ''}{coord}" for name, coord in coords.items())
    return f"[{' '.join((f'r{rank}', *parts))}]"


@final
class CoordsFormatter(logging.Formatter):
    """A logging.Formatter that begins every line, including traceback lines, with `prefix`."""

    def __init__(self, layout: Layout, rank: int, fmt: str = _FORMAT) -> None:
        super().__init__(fmt)
        self._prefix = prefix(layout, rank)

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of the record, each with the prefix."""
        return "\n".join(f"{self._prefix} {line}".rstrip() for line in super().format(record).split("\n"))
