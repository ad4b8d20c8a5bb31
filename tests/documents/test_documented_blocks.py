"""Every code block of README and docs/ runs and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshcomm.mesh import watched
from meshcomm.testing import Pool
from tests.documents.blocks import ROOT, blocks, llama, pages
from tests.documents.commands import NOT_RUN as COMMANDS_NOT_RUN
from tests.documents.commands import all_commands, command_lines, read, wrong_in_text
from tests.documents.running import Page, Wrong
from tests.documents.shown import differs
from tests.documents.tables import NOT_RUN, OWN_TESTS

pytestmark = pytest.mark.long

ALL = {page: blocks(page) for page in pages()}


# This page trains eight models.
LONG = ("docs/guide/models.md",)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.parity] * (page in LONG)) for page, found in ALL.items() if found],
)
def test_every_block_of_the_page_runs(
    page: str, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "LOCAL_WORLD_SIZE", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    llama(tmp_path)
    state = Page(page, tmp_path, pool)
    wrong = []
    for block in ALL[page]:
        try:
            state.run(block, only_read=page in OWN_TESTS or block.name in NOT_RUN)
        except Exception as error:
            wrong.append(f"{block}: {'' if isinstance(error, Wrong) else type(error).__name__ + ': '}{error}")
        finally:
            # Otherwise a block that calls meshcomm.watch() would keep watching during the next test of this process.
            watched.gives_way()
    assert not wrong, "\n\n".join(wrong)


def test_the_table_of_what_is_not_run_names_blocks_that_are_there() -> None:
    names = [block.name for found in ALL.values() for block in found]
    assert [name for name in NOT_RUN if names.count(name) != 1] == []
    assert set(COMMANDS_NOT_RUN) <= set(all_commands())
    for command, reason in COMMANDS_NOT_RUN.items():
        named = re.search(r"tests/[\w/]+\.py", reason)
        assert named is None or (ROOT / named.group()).exists(), f"{command}: {reason}"
    for page, test in OWN_TESTS.items():
        assert ALL[page]
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not name {page}"


@pytest.mark.parametrize("page", list(ALL))
def test_commands_and_examples_outside_of_blocks(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    plain = [block.text for block in ALL[page] if block.language == "text"]
    usage = [line for each in plain for line in each.splitlines() if line.startswith("meshcomm ")]
    assert wrong_in_text("\n".join([text, *(f"`{line}`" for line in usage)])) == []
    inside = [line for block in ALL[page] for line in block.text.splitlines()]
    outside = [line for line in text.splitlines() if line.startswith(">>> ") and line not in inside]
    assert outside == [], "```pycon"


# -- does the runner find mistakes? ---------------------------------------------------------------

WRONG = [
    ("```python\nprint(3)  # 4\n```", "the comment says '4'"),
    ("```python\nprint(3)\n```\n<!-- output -->\n```\n4\n```", "the page shows"),
    ("<!-- output -->\n```\n4\n```", "nothing has been run"),
    ("```python\nnothing\n```", "NameError"),
    ('<!-- mesh: dp=2 -->\n```python\nmesh.all_reduce("tp", x)\n```', "NameError"),
    ('```python\nimport torch\n\nmesh.all_reduce("nowhere", torch.ones(1))\n```', "nowhere"),
    ("<!-- raises: ValueError -->\n```python\nprint(3)\n```", "did not"),
    ("```toml\n[mesh]\ndims = { dp = 0 }\n```", "dims.dp"),
    ('```json\n{"mesh": {"dims": {"dp": 0}}}\n```', "dims.dp"),
    ("```toml\n[train]\nstepps = 5\n```", "stepps"),
    ("```console\n$ meshcomm plan configs/quickstart.toml\nmesh of 9 ranks\n...\n```", "mesh of 9 ranks"),
    ("```console\n$ meshcomm plan configs/quickstart.toml --wrold 8\n```", "wrold"),
    ("```sh\nmeshcomm plant configs/quickstart.toml\n```", "no command plant"),
    ("```sh\ntorchrun --nproc-per-node 2 -m meshcomm train a.toml --sett x=1\n```", "sett"),
    ("```sh\npython -m meshcomm.nothing\n```", "no such module"),
    ("```sh\nfrobnicate\n```", "frobnicate"),
    ("```\n$ meshcomm plan\n```", "a command in a block without a language"),
    ("```pycon\n>>> 1 + 1\n3\n```", "Expected:"),
    ("```rust\nfn main\n```", "rust"),
    ("<!-- exit: 2 -->\n```console\n$ meshcomm plan configs/quickstart.toml\n```", "exit code 0"),
]


def found_wrong(text: str, folder: Path, pool: Pool) -> list[str]:
    """The mistakes that the runner finds in a page with this text."""
    state = Page("page.md", folder, pool)
    said = []
    for block in blocks("page.md", text):
        try:
            state.run(block)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_page_that_is_wrong(text: str, said: str, tmp_path: Path, pool: Pool) -> None:
    (told,) = found_wrong(text, tmp_path, pool)
    assert said in told


def test_comments_that_no_block_follows_or_that_are_misspelt() -> None:
    with pytest.raises(ValueError, match="no such comment"):
        blocks("page.md", "<!-- outputs -->\n```\n```")
    with pytest.raises(ValueError, match="no block after it"):
        blocks("page.md", "<!-- output -->\nwords\n")


def test_lines_that_stand_for_others() -> None:
    assert differs("a\n...\nd", "a\nb\nc\nd") is None
    assert differs("...\nb\n...", "a\nb\nc") is None
    assert differs("a\n...", "a") is None
    assert differs("a\n...\na", "a") is not None
    assert differs("a", "a\nb") is not None
    assert differs("...\nc\n...\nb\n...", "b\nc") is not None
    assert differs("at x.py:3", "at /tmp/y.py:12") is None
    assert differs("b\na", "a\nb", "any order") is None
    assert differs("b\nb\nc", "a\nb", "any order") is not None


def test_words_of_a_command_line() -> None:
    assert command_lines("a \\\n  b\n# c\nd", prompt=False) == [("a b", ""), ("d", "")]
    assert command_lines("$ a\nx\ny\n$ b", prompt=True) == [("a", "x\ny"), ("b", "")]
    found = read(
        "OMP_NUM_THREADS=1 torchrun --nnodes 2 --nproc-per-node 4 ... -m meshcomm run a.toml b.py --c"
    )
    assert found is not None
    assert (found.name, found.ranks, found.hosts, found.arguments[-1]) == ("run", 4, 2, "--c")
    shell = read("meshcomm plan configs/quickstart.toml --json > plan.json")
    assert shell is not None
    assert shell.arguments == ("configs/quickstart.toml", "--json")
    assert read("python3 -m venv .venv && .venv/bin/pytest") is None
    assert wrong_in_text("`meshcomm plan CONFIG --rnak 3`") == [
        "`meshcomm plan CONFIG --rnak 3`: meshcomm plan has no option --rnak"
    ]
