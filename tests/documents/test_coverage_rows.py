"""Every row of the table of what torch.distributed has names tests and lines that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from tests.documents.coverage_rows import PAGE, ROWS

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# What a test on processes uses: the pool, or processes of its own.
_PROCESSES = re.compile(r"\bpool\b|on_ranks\(|@GRID|\bmesh_pool\b|subprocess|\bjob\(|via=\(?.*\"gloo\"")


@cache
def functions(file: str) -> dict[str, str]:
    """The test functions of a file of tests/, with their source and decorators."""
    text = (TESTS / file).read_text()
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min(each.lineno for each in (node, *node.decorator_list))
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


@cache
def headings(page: str) -> tuple[str, ...]:
    """The anchors of a page, as the site and most forges make them of its headings."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return tuple(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in found)


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_and_the_lines_of_a_row_are_there(number: int) -> None:
    row = ROWS[number]
    sources = []
    for each in row.tests:
        file, _, name = each.partition("::")
        assert name in functions(file), f"row {number}: there is no test {each}"
        sources.append(functions(file)[name])
    assert any(_PROCESSES.search(source) for source in sources), f"row {number}: no test on processes"
    for line in row.lines:
        page, _, heading = line.partition("#")
        assert (ROOT / page).exists(), f"row {number}: there is no page {page}"
        assert not heading or heading in headings(page), f"row {number}: {page} has no heading #{heading}"


def test_the_page_has_exactly_these_rows() -> None:
    areas = re.split(r"^## (.*)$", (ROOT / PAGE).read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for title, body in zip(areas[::2], areas[1::2], strict=True):
        # Each area has lines that run.
        assert "```" in body
        anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).lower())
        found |= {int(number): anchor for number in re.findall(r"^\| (\d+) \|", body, re.MULTILINE)}
    assert sorted(found) == list(ROWS) == list(range(1, 27))
    assert [number for number, row in ROWS.items() if f"{PAGE}#{found[number]}" not in row.lines] == []


def test_every_public_name_of_torch_distributed_is_on_the_page() -> None:
    page = set(re.findall(r"\w+", (ROOT / PAGE).read_text()))
    names = {name for name, what in vars(dist).items() if type(what) is not ModuleType} | set(dir(dist.Work))
    # Imports of torch's own file, and what TorchScript needs.
    names -= {"timedelta", "boxed", "unbox"}
    assert {name for name in names if not name.startswith("_")} - page == set()


def test_what_is_missing_is_seen() -> None:
    assert "test_nothing" not in functions("test_house.py")
    assert "collectives" in headings(PAGE)
    assert "collective" not in headings(PAGE)
