"""Hook of the site's build: adds a page for each file of the repository that a page links to.

On the repository's host the same links lead to the files themselves.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from properdocs.structure.files import File
from pygments.formatters import HtmlFormatter

_LOG: Final = logging.getLogger("properdocs.hooks.links")
_ROOT: Final = Path(__file__).parents[2]
# The folder of repository files on the site.
_FOLDER: Final = "repository"
_LANGUAGES: Final = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json"}
_CODE: Final = re.compile(r"(^(```+).*?^\2`*\s*$|(?<!`)(`+)(?!`).*?(?<!`)\3(?!`))", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file of the repository that a page links to, including links from added pages."""
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
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    copied = here.startswith(f"{_FOLDER}/")
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

    return _outside_code(markdown, lambda text: _LINK.sub(rewritten, text))


def _outside_code(markdown: str, change: Any) -> str:
    """Apply `change` to `markdown` outside blocks and spans of code."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _targets(source: Path, markdown: str) -> list[Path]:
    """Files outside of docs/ that a text links to."""
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
    """The target of a link, relative to the repository's root; None if it is outside."""
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
