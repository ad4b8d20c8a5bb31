"""The rank grid: who sits where, in which group of one dim, as facts, text, picture or page."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from meshcomm.config import TopologyConfig
from meshcomm.layout import Dims, Plan
from meshcomm.show.grid.facts import grid_facts
from meshcomm.show.grid.svg import grid_svg
from meshcomm.show.grid.text import GridText, grid_page
from meshcomm.show.page import as_text, export, page_markdown

if TYPE_CHECKING:
    from rich.console import RenderableType

Facts = dict[str, Any]


@final
class RankGrid:
    """Ranks as coloured blocks, a colour for each group along a dim, lines between nodes.

    Prints as text of 100 columns without colour, on a rich console in colour and as wide as that; in a
    notebook it is a picture. `facts` is what all forms show, see `meshcomm.show.grid.facts.grid_facts`.
    """

    def __init__(
        self,
        plan: Plan,
        by: Dims | None = None,
        topology: TopologyConfig | None = None,
        rank: int | None = None,
    ) -> None:
        self.facts: Facts = grid_facts(plan, by, topology, rank)

    def __rich__(self) -> RenderableType:
        """What rich prints."""
        return GridText(self.facts)

    def __str__(self) -> str:
        return as_text(GridText(self.facts))

    def svg(self) -> str:
        """As one self-contained SVG file."""
        return grid_svg(self.facts)

    # What notebooks ask for.
    _repr_svg_ = svg

    def markdown(self) -> str:
        """As text in a block."""
        return page_markdown(grid_page(self.facts))

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as .svg, .md or .json. Raises ConfigError for another ending or an unwritable path."""
        export(Path(fspath(path)), self.facts, lambda: grid_page(self.facts), self.svg)
