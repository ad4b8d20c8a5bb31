"""The documentation as a site. SITE: the folder of a site that is built; without it, the tests build one."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documents import done

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = yaml.load((ROOT / "properdocs.yml").read_text(), yaml.BaseLoader)
# A build takes ten seconds. .ci/run builds the site, a warning being an error, and then runs these tests on it.
built = pytest.mark.deep


class Links(HTMLParser):
    """The files that a page of the site loads, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        told = tag == "link" and given.get("rel") in ("canonical", "prev", "next")
        kept = self.leads if tag == "a" or told else self.loads
        kept += [value for key in ("href", "src", "srcset", "data") if (value := given.get(key))]
        if given.get("id"):
            self.names.add(str(given["id"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("SITE") or tmp_path_factory.mktemp("site"))
    if "SITE" not in os.environ:
        done([sys.executable, "-m", "properdocs", "build", "--site-dir", str(folder)], ROOT)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    found = {page: Links() for page in sorted(site.rglob("*.html"))}
    for page, links in found.items():
        links.feed(page.read_text(encoding="utf-8"))
    assert len(found) > 60
    return found


@built
def test_the_site_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Links]) -> None:
    for page, links in pages.items():
        outside = [url for url in links.loads if re.match(r"(https?:)?//", url)]
        assert outside == [], page
        # With it, the theme asks GitHub's API for stars.
        assert 'data-md-component="source"' not in page.read_text(encoding="utf-8"), page
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\(|src\s*=)\s*['\"(]?\s*(https?:)?//", text), path


@built
def test_every_link_of_the_site_leads_somewhere(site: Path, pages: dict[Path, Links]) -> None:
    """Also those of the API, of notebooks and of the 404 page, which begin with the address of the site."""
    assert len(pages) > 60
    nowhere = set()
    for page, links in pages.items():
        for link in {*links.leads, *links.loads}:
            link = link.removeprefix(
                CONFIG["site_url"].removesuffix("/") if page.name != "404.html" else "/meshcomm"
            )
            if re.match(r"[a-z]+:", link):
                continue
            path, _, name = link.partition("#")
            folder = site if path.startswith("/") else page.parent
            target = Path(os.path.normpath(folder / path.partition("?")[0].lstrip("/"))) if path else page
            target = target / "index.html" if target.is_dir() else target
            there = target in pages or target.exists()
            if not there or (name and target in pages and name not in pages[target].names | {"__top"}):
                nowhere.add(f"{page.relative_to(site)} leads to {link}")
    assert nowhere == set()


def test_every_page_is_reached_from_the_navigation() -> None:
    def leaves(item: Any) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        else:
            for inner in item.values() if isinstance(item, dict) else item:
                yield from leaves(inner)

    listed = list(leaves(CONFIG["nav"]))
    there = [
        path.relative_to(DOCS).as_posix() for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")
    ]
    assert sorted(listed) == sorted(there)
    assert listed[0] == "index.md"
    assert CONFIG["strict"] == "true"


@built
def test_the_search_has_every_section_of_every_page(site: Path, pages: dict[Path, Links]) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {each["location"]: each for each in index["docs"]}
    assert found["reference/api/mesh.html#meshcomm.Mesh.all_reduce"]["title"].startswith("all_reduce")
    assert "timeout_s" in found["reference/config.html#mesh"]["text"]
    assert "hang" in found["guide/hangs.html"]["title"]
    searched = {location.partition("#")[0] for location in found}
    assert {page.relative_to(site).as_posix() for page in pages} - searched == {"404.html"}
    # Pages that are opened from files have the index as a script.
    assert (site / "search" / "search_index.js").stat().st_size > 500_000
    assert "/edit/main/docs/index.md" in (site / "index.html").read_text(encoding="utf-8")
    assert 'name="description"' in (site / "index.html").read_text(encoding="utf-8")


@built
def test_the_docstrings_are_read(site: Path) -> None:
    """Arguments are tables with types, labels are lists, and the names of entries are links."""
    for page in (site / "reference" / "api").glob("*.html"):
        prose = re.sub(r"<pre.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert (
            re.findall(
                r"(?<!<strong>)\b(?:Args|Shape|Called by|Gradient|Returns|Attributes):(?!</span>)", prose
            )
            == []
        ), page
    text = (site / "reference" / "api" / "mesh.html").read_text(encoding="utf-8")
    assert text.count('id="meshcomm.Mesh.all_reduce"') == 1
    entry = text.partition('id="meshcomm.Mesh.all_reduce"')[2].partition('<h3 id="')[0]
    plain = unescape(" ".join(re.sub(r"<[^>]+>", "", entry).split()))
    assert 'algorithm: Algorithm = "flat", factor: float | None = None, ) -> Tensor | Handle[Tensor]' in plain
    rows = [re.sub(r"<[^>]+>", "", row).split() for row in re.findall(r"<tr.*?</tr>", entry, re.DOTALL)]
    assert [row[0] for row in rows] == ["Name", "op", "async_op", "algorithm"]
    assert rows[3][1] == "Literal[&#39;flat&#39;," and "Literal[&#39;ring&#39;," in rows[3]
    assert "<strong>Called by:</strong> every rank along <code>dims</code>" in entry
    raises = entry.partition("<strong>Raises:</strong>")[2]
    assert 'href="errors.html#meshcomm.errors.UnknownDim">UnknownDim</a>' in raises
    assert 'href="handle.html#meshcomm.Handle">Handle</a>' in entry.partition("</pre>")[0]
    # An attribute with a docstring in its class, and a property.
    assert 'id="meshcomm.mesh.mesh.Mesh.rank"' in text and 'id="meshcomm.mesh.mesh.Mesh.data_rank"' in text
    index = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert 'href="api/mesh.html#meshcomm.Mesh"' in index and 'href="api/debug.html' in index


@built
def test_a_link_into_the_repository_leads_to_its_host(site: Path) -> None:
    """Pages link to examples by their paths, which work in a clone. On the site, they lead to the host, if the file is there."""
    text = (site / "index.html").read_text(encoding="utf-8")
    assert f'href="{CONFIG["repo_url"]}/blob/main/examples/hello_mesh.py"' in text
    assert '<td class="part">part</td>' in (site / "coming_from" / "others.html").read_text(encoding="utf-8")
