"""Lines of text as an SVG file: what a terminal would show, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

_CHAR: Final = 7.8
_LINE: Final = 19
_EDGE: Final = 20

_STYLE: Final = """
.mc-text text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 13px; fill: #1f2328; white-space: pre; }
.mc-text .paper { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  .mc-text text { fill: #e6edf3; }
  .mc-text .paper { fill: #0d1117; }
}
"""


def text_svg(text: str, title: str) -> str:
    """`text` line by line, every character equally wide whatever the font. title: for screen readers."""
    lines = [line.rstrip() for line in text.rstrip("\n").split("\n")]
    width = 2 * _EDGE + _CHAR * max(map(len, lines))
    height = 2 * _EDGE + _LINE * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mc-text" role="img" aria-label={quoteattr(title)} '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        *_lines(lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lines(lines: Sequence[str]) -> list[str]:
    return [
        f'<text x="{_EDGE}" y="{_EDGE + 14 + _LINE * number}" xml:space="preserve" '
        f'textLength="{_CHAR * len(line):.1f}" lengthAdjust="spacingAndGlyphs">{escape(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]
