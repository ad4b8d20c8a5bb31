"""Generated pages are up to date, and the site is complete."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import yaml

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import MeshMismatchError
from meshcomm.testing import Pool
from tests.documents import tool
from tests.documents.blocks import llama
from tests.faults.rows import ROWS
from tests.forked_jobs import Job
from tests.group_hooks import needs_group_hooks
from tests.train.parity_bugs import BUGS
from tests.train.parity_cases import CASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


cli_page, config_page = tool("cli_page"), tool("config_page")

MADE: list[tuple[str, str, Callable[[], str]]] = [
    ("support.md", "python docs/tools/support.py", lambda: str(tool("support").page())),
    ("config.md", "python docs/tools/config_page.py > docs/reference/config.md", config_page.page),
    ("cli.md", "python docs/tools/cli_page.py > docs/reference/cli.md", cli_page.page),
]


@pytest.mark.parametrize(("name", "command", "made"), MADE, ids=[name for name, _, _ in MADE])
def test_a_page_that_is_made_is_what_is_made_now(name: str, command: str, made: Callable[[], str]) -> None:
    assert (DOCS / "reference" / name).read_text(encoding="utf-8") == made(), f"run: {command}"


@pytest.fixture(scope="module")
def api_pages() -> dict[str, str]:
    made: dict[str, str] = tool("api").pages()
    return made


def test_the_pages_of_the_api_are_what_is_made_now(api_pages: dict[str, str]) -> None:
    folder = DOCS / "reference"
    there = ["api.md", *(f"api/{path.name}" for path in (folder / "api").glob("*.md"))]
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in there}
    changed = sorted(
        name for name in texts.keys() | api_pages.keys() if texts.get(name) != api_pages.get(name)
    )
    assert changed == [], "run: python docs/tools/api.py"


def test_every_public_name_has_an_entry_and_a_line_of_the_index(api_pages: dict[str, str]) -> None:
    anchors = [one for text in api_pages.values() for one in re.findall(r'<a id="([^"]+)">', text)]
    assert len(anchors) == len(set(anchors))
    inner = [one for one in anchors if re.search(r"\._(?!_getitem__)", one)]
    assert inner == []
    listed = re.findall(r"^\| \[`([^`]+)`\]\((api/\w+\.md)#\1\)", api_pages["api.md"], re.MULTILINE)
    assert {name for name, _ in listed} <= set(anchors)
    assert all(f'<a id="{name}">' in api_pages[page] for name, page in listed)
    assert {f"meshcomm.{name}" for name in meshcomm.__all__} <= {name for name, _ in listed}
    packages = (
        "layout",
        "config",
        "parallel",
        "parallel.tensor",
        "parallel.context",
        "parallel.expert",
        "models",
        "train",
    )
    entries = {name.rpartition(".")[2] for name, _ in listed}
    for package in (*packages, "pattern", "algorithms", "doctor", "testing"):
        assert set(importlib.import_module(f"meshcomm.{package}").__all__) <= entries, package


def test_the_labels_of_docstrings_are_read(api_pages: dict[str, str]) -> None:
    """No label remains inside a paragraph."""
    for name, text in api_pages.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"(?<!\*\*)\b(?:Args|Shape|Called by|Gradient|Returns):", prose) == [], name
    step = api_pages["api/mesh.md"].partition('<a id="meshcomm.Mesh.all_gather">')[2].partition("<a id=")[0]
    assert "all_gather(\n    dims: Dims,\n    x: Tensor,\n" in step
    assert ") -> Tensor | Handle[Tensor]\n" in step
    assert "\n- **Shape:** (b, s, d) -> (b, n\\*s, d) for axis=1" in step
    assert "[`UnknownDim`](errors.md#meshcomm.errors.UnknownDim)" in step.partition("\n- **Raises:** ")[2]


def test_the_pictures_are_what_is_made_now() -> None:
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    for make in tool("pictures").PICTURES:
        name = f"images/{make.__name__}.svg"
        assert (DOCS / name).read_text(encoding="utf-8") == make(), "run: python docs/tools/pictures.py"
        assert f"]({name})" in page


@needs_group_hooks
def test_the_terminal_on_the_first_page_shows_what_is_printed_now(pool: Pool, tmp_path: Path) -> None:
    terminal = tool("terminal")
    (tmp_path / "train.py").write_text(terminal.script())
    code, out, err = Job(pool, tmp_path, "-m", *terminal.COMMAND).finish()
    assert code == 2 and terminal.PICTURE.read_text("utf-8") == terminal.picture(out + err), err
    assert "](docs/images/hang.svg)" in (ROOT / "README.md").read_text()


def open_another_mesh() -> str:
    wrong = os.environ["RANK"] == "5"
    with pytest.raises(MeshMismatchError) as caught:
        meshcomm.init(dims={"pp": 2, "dp": 4 if wrong else 2, "tp": 1 if wrong else 2}, device="cpu")
    return str(caught.value)


def test_the_error_on_the_first_page_is_real(pool: Pool) -> None:
    (text,) = {*pool.run(open_another_mesh, ranks=8)}
    assert f"\nMeshMismatchError: {text}\n" in (ROOT / "README.md").read_text()


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="one" />
<testcase classname="tests.test_a" name="two"><skipped message="torch 2.13 has no group hooks" /></testcase>
<testcase classname="tests.test_a" name="three"><skipped message="needs 2 GPUs" /></testcase>
<testcase classname="tests.test_a" name="four"><failure message="no" /></testcase>
<testcase classname="tests.test_a" name="five"><error message="at setup" /></testcase>
</testsuite></testsuites>"""


def test_the_table_of_torch_versions_has_a_row_for_each_that_was_tried() -> None:
    versions = tool("torch_versions")
    result = versions.counted(JUNIT, "2.9.0", False, "all")
    assert (result.passed, result.skipped, result.skipped_for_hooks) == (1, 2, 1)
    assert result.failed == ("tests.test_a::four", "tests.test_a::five")
    page = "before\n<!-- torch versions -->\n<!-- end of torch versions -->\nafter\n"
    for version in ("2.11.0", "2.9.0", "2.11.0"):
        page = versions.with_row(page, versions.counted(JUNIT, version, True, "all"))
    rows = [line.split(" | ")[:6] for line in page.splitlines() if line.startswith("| 2")]
    assert rows == [[f"| {version}", "yes", "1", "2", "1", "2"] for version in ("2.9.0", "2.11.0")]
    assert page.startswith("before\n<!-- torch versions -->\n| torch |") and page.endswith(
        "versions -->\nafter\n"
    )
    assert "torch==2.11.0" in versions.constraints("2.11.0").splitlines()


# -- the pages of configurations and commands --------------------------------------------------------


def test_a_number_that_stands_on_a_page_is_that_of_its_table() -> None:
    readme, parity = ((ROOT / page).read_text() for page in ("README.md", "docs/guide/parity.md"))
    assert re.findall(r"(\d+) meshes of 8", readme + parity) == [str(len(CASES))] * 2
    assert re.findall(r"plants (\d+) mistakes", parity) == [str(len(BUGS))]
    table = parity.partition("<!-- parity table -->")[2]
    assert re.findall(r"^\| (\w.*?) \|", table, re.M)[1:] == list(CASES)
    faults = (DOCS / "reference/faults.md").read_text()
    assert re.findall(r"^(\d+) rows", faults, re.M) == [str(len(ROWS))]


def test_every_public_name_of_torch_distributed_is_on_its_page() -> None:
    text = (DOCS / "reference/from_torch.md").read_text()
    names = {name for name, what in vars(dist).items() if type(what) is not ModuleType} | set(dir(dist.Work))
    # The file's imports, and helpers for TorchScript.
    names -= {"timedelta", "boxed", "unbox"}
    assert {name for name in names if not name.startswith("_")} - set(re.findall(r"\w+", text)) == set()
    assert set(map(int, re.findall(r"^\| (\d+) \|", text, re.M))) == set(range(1, 27))


def test_every_key_has_a_sentence() -> None:
    found = config_page.sections()
    assert {"mesh", "mesh.options.NAME", "topology.links.NAME", "train"} <= set(found)
    for place, section in found.items():
        for key, field in section["properties"].items():
            said = field.get("description", "")
            assert said.endswith(".") and len(said) > 10, f"{place}.{key}: no sentence"


def test_every_key_is_in_an_example_and_every_example_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
    llama(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert set(config_page.EXAMPLES) == set(config_page.sections())
    for place, section in config_page.sections().items():
        written = set()
        for example in config_page.EXAMPLES[place]:
            data = tomllib.loads(example)
            inner: Any = data
            for part in place.split("."):
                inner = next(iter(inner.values())) if part.isupper() else inner[part]
            written |= set(inner)
            whole = set(data) & {"parallel", "model", "data", "train"}
            load_config(_over(quickstart if whole else {"mesh": quickstart["mesh"]}, data))
        # [mesh.options] and [train.groups] are separate sections.
        assert set(section["properties"]) - written - {"options", "groups", "lora"} == set(), place


def _over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in data.items():
        both = key in ("model", "train", "data") and key in base
        merged[key] = {**base[key], **value} if both else value
    return merged


# -- the site ----------------------------------------------------------------------------------------


class Links(HTMLParser):
    """The files that a page of the site loads, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        kept = self.leads if tag == "a" else self.loads
        kept += [value for key in ("href", "src", "srcset", "data") if (value := given.get(key))]
        if given.get("id"):
            self.names.add(str(given["id"]))


class Warned(logging.Handler):
    """Collects the warnings of the build."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture(scope="module")
def warned() -> Iterator[Warned]:
    handler = Warned()
    logging.getLogger("properdocs").addHandler(handler)
    yield handler
    logging.getLogger("properdocs").removeHandler(handler)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, warned: Warned) -> Path:
    from properdocs.commands.build import build
    from properdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "properdocs.yml"), site_dir=str(folder), strict=False)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_the_site_is_built_without_a_warning(site: Path, warned: Warned) -> None:
    assert warned.said == []
    assert yaml.safe_load((ROOT / "properdocs.yml").read_text())["strict"] is True


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        outside = [url for url in links.loads if re.match(r"(https?:)?//", url)]
        assert outside == [], page
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\(|fetch\(|src\s*=)\s*['\"(]?\s*(https?:)?//", text), path


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    found: dict[Path, Links] = {}
    for page in site.rglob("*.html"):
        found[page] = Links()
        found[page].feed(page.read_text(encoding="utf-8"))
    nowhere = set()
    for page, links in found.items():
        for link in {*links.leads, *links.loads}:
            if re.match(r"[a-z]+:", link) or link.startswith("/"):
                continue
            path, _, name = link.partition("#")
            target = Path(os.path.normpath(page.parent / path)) if path else page
            there = target in found or target.exists()
            if not there or (name and target in found and name not in found[target].names):
                nowhere.add(f"{page.relative_to(site)} leads to {link}")
    assert nowhere == set()


def test_every_page_is_reached_from_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "properdocs.yml").read_text())["nav"]

    def leaves(item: Any) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        else:
            for inner in item.values() if isinstance(item, dict) else item:
                yield from leaves(inner)

    listed = list(leaves(nav))
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(there)
    assert listed[0] == "index.md"


def test_the_search_has_every_section_of_every_page(site: Path) -> None:
    text = (site / "js" / "sections.js").read_text(encoding="utf-8")
    sections = json.loads(text.removeprefix("window.sections = ").removesuffix(";\n"))
    found = {location: (page, title) for page, title, location, _ in sections}
    assert found["reference/api/mesh.html#meshcomm.Mesh.all_reduce"] == ("Mesh", "meshcomm.Mesh.all_reduce")
    assert found["reference/api/mesh.html#meshcomm.Mesh.rank"] == ("Mesh", "meshcomm.Mesh.rank")
    assert ["Configuration › mesh", "timeout_s", "reference/config.html#mesh"] in [
        each[:3] for each in sections
    ]
    assert {path.relative_to(site).as_posix() for path in site.rglob("*.html")} <= {
        location.partition("#")[0] for location in found
    }
    front = (site / "index.html").read_text(encoding="utf-8")
    assert meshcomm.__version__ in front.partition("</header>")[0]
    assert "/edit/main/docs/index.md" in front
    api = (site / "reference" / "api" / "mesh.html").read_text(encoding="utf-8")
    assert "/edit/main/docs/tools/api.py" in api and api.count('id="meshcomm.Mesh.all_reduce"') == 1


def test_a_link_into_the_repository_becomes_a_page(site: Path) -> None:
    """README links to files in the repository and pages link to examples. On the site, these files are pages too."""
    hooks = tool("hooks")
    assert hooks._inside(Path("docs/guide/tensor.md"), "../../examples/hello_mesh.py") == Path(
        "examples/hello_mesh.py"
    )
    assert hooks._inside(Path("docs/index.md"), "../../elsewhere.md") is None
    assert hooks._inside(Path("docs/index.md"), "https://example.org/x") is None
    text = "`[a](b.py)` [c](d.py)\n```\n[e](f.py)\n```\n"
    assert hooks._targets(Path("docs/index.md"), text.replace("d.py", "../d.py")) == [Path("d.py")]
    example = (site / "repository" / "examples" / "hello_mesh.py.html").read_text(encoding="utf-8")
    assert "examples/hello_mesh.py" in example
