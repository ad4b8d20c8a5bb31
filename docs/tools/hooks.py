"""Hooks for building the site: links to files of the repository, the index of the API, and the colours of answers in tables."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any, Final

_LOG: Final = logging.getLogger("properdocs.hooks.meshcomm")
_ROOT: Final = Path(__file__).parents[2]
_CODE: Final = re.compile(r"(^(```+).*?^\2`*\s*$|(?<!`)(`+)(?!`).*?(?<!`)\3(?!`))", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(?<=\]\()(\.\.?/[^)\s#]+)(?=[)#])")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside docs/ with links to the repository, where the files must exist. Fill the index of the API."""
    if page.file.src_uri == "reference/api.md":
        for each in page.parent.children:
            names = re.findall(
                r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", each.file.content_string, re.MULTILINE
            )
            shown = " · ".join(f"[`{heading or name}`][{name}]" for name, heading in names)
            markdown += f"\n## [{each.title}](api/{each.file.name}.md)\n\n{shown}\n" if names else ""

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[0]))
        if target.startswith(("docs", "..")):
            return link[0]
        if not (_ROOT / target).exists():
            _LOG.warning(f"{page.file.src_uri} links to {link[0]}, which is not in the repository")
        return f"{config.repo_url}/blob/main/{target}"

    return _outside_code(markdown, lambda text: _LINK.sub(rewritten, text))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Give cells that begin with an answer its class, drop backslashes before bars, and make the links of notebooks those of the site."""
    html = re.sub(r"(<td>(?:(?!</td>).)*?<code>[^<]*)\\\|", r"\1|", html)
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r'(href="(?!\w+:)[^"#]+)\.md(?=[#"])', r"\1.html", html)
    return re.sub(r"<td>(?=(yes|part|no)(?: /|[:,(<]))", r'<td class="\1">', html)


def _outside_code(markdown: str, change: Any) -> str:
    """Apply `change` to the parts of `markdown` outside code blocks and code spans."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
