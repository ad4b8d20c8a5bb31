"""Builds one self-contained HTML document from the page's files. An exported document needs no server."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

from meshcomm.config.write import write_whole
from meshcomm.errors import ViewError
from meshcomm.view.run import run_news

# The scripts in the order in which they are concatenated. All of them share one scope.
_SCRIPTS: Final = ("dom", "mesh", "turn", "lens", "picture", "panel", "traffic", "chart", "run", "main")


class Document(NamedTuple):
    """html: the complete page. policy: its Content-Security-Policy, which allows only the page's own style and script."""

    html: str
    policy: str


def document(facts: dict[str, Any] | None = None, run: dict[str, Any] | None = None) -> Document:
    """Return the page.

    facts: the result of `page_facts`, which is embedded in the page, so that it needs no server. If None, the page requests
        facts.json and run.json from its server. run: the result of `run_news`; used only with facts.
    """
    folder = files("meshcomm.view")
    style = (folder / "page.css").read_text(encoding="utf-8")
    parts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"
    connect = "'self'" if facts is None else "'none'"
    # frame-ancestors has no effect in a meta element, so only the server's header contains it.
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    data = "" if facts is None else _embedded({"facts": facts, "run": run})
    html = (folder / "page.html").read_text(encoding="utf-8")
    for mark, text in (("POLICY", policy), ("STYLE", style), ("DATA", data), ("SCRIPT", script)):
        assert html.count(f"@@{mark}@@") == 1
        html = html.replace(f"@@{mark}@@", text)
    return Document(html, f"{policy}; frame-ancestors 'none'")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON that cannot close the HTML element in which it is embedded."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def export_page(path: Path, facts: dict[str, Any], folder: Path | None) -> str:
    """Write the page to `path`, with the facts and everything that the run in `folder` has written so far.

    Return a line with the page's path and size. Raises ViewError if the page cannot be written.
    """
    html = document(facts, run_news(folder, most_bytes=-1)).html
    write_whole(path, html, given=f"--export {path}", kind=ViewError)
    return f"written: {path} ({len(html.encode()):,} bytes)"
