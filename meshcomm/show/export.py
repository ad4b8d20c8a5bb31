"""What is shown, as a file: which kind its ending means, and writing it whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from meshcomm.config.write import write_whole
from meshcomm.errors import ConfigError
from meshcomm.show.grid.page import grid_page
from meshcomm.show.grid.svg import grid_svg
from meshcomm.show.page import Part, as_text, page_markdown, page_view
from meshcomm.show.plan import plan_page
from meshcomm.show.text_svg import text_svg
from meshcomm.show.tree import headline, tree_page, tree_view

KINDS: Final = (".svg", ".md", ".json")


def check_kind(path: Path) -> None:
    """Raises ConfigError where no file is made of this ending; before any work is done for it."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError(
            f"{path}: not a kind of file that can be exported",
            given=f"the ending {path.suffix}" if path.suffix else "no ending",
            expected="one of " + ", ".join(KINDS),
            hint=f"--export {path.with_suffix('.svg') if path.name else 'topo.svg'}",
        )


def export(
    path: Path, facts: Mapping[str, Any], page: Callable[[], Sequence[Part]], svg: Callable[[], str]
) -> None:
    """Write the facts as JSON, the page as Markdown, or the picture, by the ending of `path`.

    Raises ConfigError for another ending, or where the file cannot be written; then it is as it was.
    """
    check_kind(path)
    kind = path.suffix.lower()
    if kind == ".json":
        text = json.dumps(facts, indent=2) + "\n"
    else:
        text = page_markdown(page()) if kind == ".md" else svg()
    write_whole(path, text)


def page_file(path: Path, facts: Mapping[str, Any], page: Sequence[Part], title: str) -> None:
    """Write what is lines and tables; as a picture they are what a terminal shows. As `export`."""
    export(path, facts, lambda: page, lambda: text_svg(as_text(page_view(page)), title))


def plan_file(path: Path, facts: Mapping[str, Any]) -> None:
    """Write `plan_facts` with the facts of a grid; the picture is the grid alone. As `export`."""
    grid = facts["grid"]
    export(path, facts, lambda: [*plan_page(dict(facts)), *grid_page(grid)], lambda: grid_svg(grid))


def tree_file(path: Path, facts: Mapping[str, Any]) -> None:
    """Write `tree_facts`; the picture is the folded tree. As `export`."""
    whole = dict(facts)
    export(
        path, facts, lambda: tree_page(whole), lambda: text_svg(as_text(tree_view(whole)), headline(whole))
    )
