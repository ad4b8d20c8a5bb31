"""Compare a page's text with the real output."""

from __future__ import annotations

import re


def differs(shown: str, got: str, order: str = "") -> str | None:
    """The difference as a text, or None if the page is right.

    shown: lines of the page. A line `...` matches any number of lines, also none. Places in a file (train.py:4),
        blank lines and spaces at the ends of lines are not compared.
    order: "any order": every shown line must appear, in any order. "sample": not compared.
    """
    if order == "sample":
        return None
    if order not in ("", "any order"):
        return f"no such order: {order}"
    wanted, came = _lines(shown), _lines(got)
    if order == "any order":
        missing = [line for line in wanted if line != "..." and line not in came]
        return None if not missing else _told("missing: " + "; ".join(missing), came)
    pattern = "".join("(?:.*\n)*" if line.strip() == "..." else f"{re.escape(line)}\n" for line in wanted)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in came)):
        return None
    return _told("the page shows:\n  " + "\n  ".join(wanted), came)


def _lines(text: str) -> list[str]:
    return [
        re.sub(r"[\w./-]+\.(py|md):\d+", "FILE", line.rstrip()) for line in text.splitlines() if line.strip()
    ]


def _told(what: str, came: list[str]) -> str:
    return what + "\n\nwhat came:\n  " + "\n  ".join(came)
