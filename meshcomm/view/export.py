"""The page as one file that needs no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshcomm.config.write import write_whole
from meshcomm.errors import ViewError
from meshcomm.view.page import document
from meshcomm.view.run import run_news


def check_page(path: Path) -> None:
    """Raises ViewError where `path` does not end as a page of HTML does; before any work is done for it."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ViewError(
            f"{path}: not a kind of file that a page is written to",
            given=f"the ending {path.suffix}" if path.suffix else "no ending",
            expected=".html; meshcomm plan --export writes .svg, .md and .json",
            hint=f"--export {path.with_suffix('.html') if path.name else 'mesh.html'}",
        )


def export_page(path: Path, facts: dict[str, Any], folder: Path | None) -> str:
    """Write the page into `path`, with the facts, and with all that the run in `folder` has written so far.

    Returns a line that says so. Raises ViewError where it cannot be written.
    """
    run = run_news(folder)
    while run["more"]:
        more = run_news(folder, run["id"], run["offset"])
        if more["reset"]:
            run = more
            continue
        columns = {key: run["columns"][key] + values for key, values in more["columns"].items()}
        run = {**more, "reset": True, "columns": columns}
    html = document(facts, run).html
    write_whole(path, html, given=f"--export {path}", kind=ViewError)
    return f"written: {path} ({len(html.encode()):,} bytes)"
