"""Generated pages are up to date, and every public name is documented."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import meshcomm
from meshcomm import errors
from meshcomm.config import load_config
from meshcomm.errors import MeshMismatchError
from meshcomm.testing import Pool
from tests.documents import tool
from tests.documents.blocks import blocks, llama
from tests.documents.shown import differs
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


# -- the API -----------------------------------------------------------------------------------------


def test_every_public_name_has_an_entry() -> None:
    """`properdocs build` makes the entries, and refuses a name that does not exist."""
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "reference" / "api").glob("*.md")]
    listed = [name for page in pages for name in re.findall(r"^::: (meshcomm[\w.]*)$", page, re.MULTILINE)]
    assert len(listed) == len(set(listed)) > 150
    assert [name for name in listed if "._" in name] == []
    # The page of errors has all of the module.
    listed.remove("meshcomm.errors")
    listed += [f"meshcomm.{name}" for name, it in vars(errors).items() if inspect.isclass(it)]
    assert {f"meshcomm.{name}" for name in meshcomm.__all__} - set(listed) == set()
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
    entries = {name.rpartition(".")[2] for name in listed}
    for package in (*packages, "pattern", "algorithms", "doctor", "testing"):
        assert set(importlib.import_module(f"meshcomm.{package}").__all__) <= entries, package


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


@needs_group_hooks
def test_the_error_on_the_front_page_of_the_site_is_real(pool: Pool, tmp_path: Path) -> None:
    script, shown, *_ = blocks("docs/index.md")
    (tmp_path / "train.py").write_text(script.text)
    command, printed = shown.text.split("\n", 1)
    code, out, err = Job(pool, tmp_path, "-m", *command.removeprefix("$ ").split()).finish()
    assert code == 2 and differs(printed, out + err) is None, err


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
