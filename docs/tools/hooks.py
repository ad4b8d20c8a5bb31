"""Hooks for building the site: pages for repository files, anchors in the API reference, and the search index.

Files of the repository that pages link to become pages. The same links work on the repository's host, where they lead to the
files themselves. Entries of the API have the anchors of their names. The search index is a script, which works from files too.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

from markdown.extensions.toc import slugify
from properdocs.structure.files import File
from pygments.formatters import HtmlFormatter

import meshcomm

_LOG: Final = logging.getLogger("properdocs.hooks.meshcomm")
_ROOT: Final = Path(__file__).parents[2]
# The folder for repository files on the site.
_FOLDER: Final = "repository"
_LANGUAGES: Final = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json"}
_CODE: Final = re.compile(r"(^(```+).*?^\2`*\s*$|(?<!`)(`+)(?!`).*?(?<!`)\3(?!`))", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
# The search entries of all pages.
_FOUND: Final[list[tuple[str, str, str, str]]] = []
_NAME: Final = re.compile(r"(meshcomm|mesh\.(debug|elastic|functional|objects|store))(\.\w+)*")
# The tool that generates a page. The edit link leads to the tool instead of the page.
_TOOL: Final = re.compile(r"Made by `python (docs/tools/\w+\.py)")
# The anchor of an API entry. The repository's host uses this anchor, and the site uses that of the heading below.
_ANCHOR: Final = re.compile(r'^<a id="[\w.]+"></a>\n+(?=#)', re.MULTILINE)


def on_config(config: Any) -> Any:
    """If a heading is a public name, use the name as its anchor."""

    def anchor(title: str, separator: str) -> str:
        return title if _NAME.fullmatch(title) else str(slugify(title, separator))

    config.mdx_configs["toc"]["slugify"] = anchor
    config.extra["version"] = meshcomm.__version__
    _FOUND.clear()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every repository file that a page links to, including links on added pages."""
    added: list[dict[str, str]] = []
    waiting = [(Path("docs", file.src_uri), file.content_string) for file in files.documentation_pages()]
    while waiting:
        source, text = waiting.pop()
        for target in _targets(source, text):
            uri = _uri(target)
            if (_ROOT / target).is_file() and files.get_file_from_path(uri) is None:
                made = _page(target)
                files.append(File.generated(config, uri, content=made))
                added.append({target.as_posix(): uri})
                if target.suffix == ".md":
                    waiting.append((target, made))
    config.nav.append({"Files of the repository": sorted(added, key=str)})
    style = HtmlFormatter(style="xcode").get_style_defs(".codehilite")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".codehilite")
    colours = f"{style}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    files.append(File.generated(config, "css/code.css", content=colours))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to repository files with links to their pages."""
    here = page.file.src_uri
    copied = here.startswith(f"{_FOLDER}/")
    if page.edit_url and (tool := _TOOL.search(markdown)):
        page.edit_url = page.edit_url.replace(f"docs/{here}", tool[1])
    source = Path(here.removeprefix(f"{_FOLDER}/").removesuffix(".md")) if copied else Path("docs", here)

    def rewritten(match: re.Match[str]) -> str:
        target = _inside(source, match.group(1))
        if target is None or (not copied and target.parts[0] == "docs"):
            return match.group(0)
        if not (_ROOT / target).exists():
            _LOG.warning(f"{source} links to {match.group(1)}, which is not in the repository")
            return match.group(0)
        if target.parts[0] == "docs":
            to = posixpath.join(*target.parts[1:]) if len(target.parts) > 1 else "index.md"
            to = "design/house.md" if to == "design" else to
        else:
            to = _uri(target)
        return posixpath.relpath(to, posixpath.dirname(here) or ".") + (match.group(2) or "")

    return _outside_code(markdown, lambda text: _ANCHOR.sub("", _LINK.sub(rewritten, text)))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put each table in a scrolling box, remove backslashes before bars in its cells, and collect the search entries."""
    html = html.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    html = re.sub(r"<td>.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)
    read = _Sections()
    read.feed(html)
    # In the API reference, rows are arguments, so they are not indexed. Repository files are indexed by name only.
    rows = [] if page.url.startswith("reference/api") else read.rows
    for title, anchor, text, section in [*((*each, "") for each in read.sections), *rows]:
        place = f"{page.title} › {section}" if section else page.title
        text = "" if page.url.startswith(_FOLDER) else " ".join(text.split())
        _FOUND.append((place, title.strip(), f"{page.url}#{anchor}", text))
    return html


def on_post_build(config: Any) -> None:
    """Write the search index: page, title, location and text of each section and of each table row with a name."""
    made = json.dumps(_FOUND, ensure_ascii=False, separators=(",", ":"))
    path = Path(config.site_dir, "js", "sections.js")
    path.write_text(f"window.sections = {made};\n", encoding="utf-8")


class _Sections(HTMLParser):
    """A parser for a page's sections (title, anchor, text), and for table rows that begin with code."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[list[str]] = []
        self.rows: list[tuple[str, str, str, str]] = []
        # The part of the section to which text is added: 0 is the title, 2 is the body, and 1 discards the text.
        self._to = 2
        self._cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.sections.append(["", given["id"] or "", ""])
            self._to = 0
        elif tag == "a" and given.get("id"):
            # An attribute of a class in a table.
            self.sections.append([given["id"] or "", given["id"] or "", ""])
        elif tag == "a" and given.get("class") == "headerlink":
            self._to = 1
        elif tag == "tr":
            self._cells = []
        elif tag in ("td", "th"):
            self._cells.append(tag)
        elif tag == "code" and self._cells == ["td"]:
            self._cells = [""]

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch("h[1-6]", tag):
            self._to = 2
        elif tag == "tr" and self._cells and not self._cells[0].startswith(("td", "th")):
            title, anchor, _ = self.sections[-1]
            self.rows.append((self._cells[0], anchor, " ".join(cell[2:] for cell in self._cells[1:]), title))
        if tag not in ("code", "span", "a", "em", "strong") and self.sections:
            self.sections[-1][2] += " "

    def handle_data(self, data: str) -> None:
        if self.sections and self._to != 1:
            self.sections[-1][self._to] += data
        if self._cells:
            self._cells[-1] += data


def _outside_code(markdown: str, change: Any) -> str:
    """Apply `change` to the parts of `markdown` outside code blocks and code spans."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _targets(source: Path, markdown: str) -> list[Path]:
    """The files outside docs/ that a text links to."""
    found = []

    def seen(text: str) -> str:
        for match in _LINK.finditer(text):
            target = _inside(source, match.group(1))
            if target is not None and target.parts[0] != "docs":
                found.append(target)
        return text

    _outside_code(markdown, seen)
    return found


def _inside(source: Path, link: str) -> Path | None:
    """The target of a link, relative to the root of the repository. None if the target is outside the repository."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link) or link.startswith("/"):
        return None
    target = Path(posixpath.normpath(posixpath.join(source.parent.as_posix(), link)))
    return None if target.parts[:1] in ((), ("..",)) else target


def _uri(target: Path) -> str:
    return f"{_FOLDER}/{target.as_posix()}.md"


def _page(target: Path) -> str:
    text = (_ROOT / target).read_text(encoding="utf-8")
    if target.suffix == ".md":
        return text
    fence = "`" * 4
    return (
        f"# {target.as_posix()}\n\n{fence}{_LANGUAGES.get(target.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
    )
