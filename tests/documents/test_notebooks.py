"""The notebooks of the documentation show what they say, and errors in a notebook name its cells."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.blocks import blocks
from tests.documents.notebooks import NOTEBOOKS, Shell, executed, shell, shown

pytestmark = pytest.mark.long


@pytest.fixture
def notebook() -> Iterator[Shell]:
    with shell() as made:
        yield made


def error_of(made: Shell, source: str) -> str:
    *_, output = made.outputs_of(source)
    assert output["output_type"] == "error", output
    return "\n".join(output["traceback"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_file_has(path: Path) -> None:
    """To write new outputs into the files: python -m tests.documents.notebooks."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert shown(executed(book)) == shown(book)


def test_the_guide_shows_an_error_of_the_notebooks() -> None:
    page = [block.text for block in blocks("docs/guide/notebooks.md") if block.language == "text"]
    books = [json.loads(path.read_text(encoding="utf-8")) for path in NOTEBOOKS]
    errors = [each for book in books for cell in shown(book) for each in cell if "traceback" in each]
    assert len(page) == 1 and page[0] in [each["traceback"] for each in errors]


@pytest.mark.parity  # the same in a kernel, which loads torch anew
@pytest.mark.filterwarnings("default")  # of Jupyter's client
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_the_same_in_a_kernel(path: Path) -> None:
    import nbclient
    import nbformat

    book = nbformat.read(path, nbformat.NO_CONVERT)
    before = shown(book)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    assert shown(book) == before


SKIPS = """import meshcomm, torch

def body(mesh):
    mesh.all_reduce("dp", torch.ones(2 + mesh.rank))
"""
CALL = 'meshcomm.simulate(body, dims={"dp": 2})'


def test_an_error_names_the_cell_of_each_rank_s_line(notebook: Shell) -> None:
    said = error_of(notebook, f"{SKIPS}\n{CALL}")
    assert "op sum) at cell In[1], line 4" in said and "cell In[1], line 6 in <module>" in said
    # The function equals the one of the cell before, and its line is another cell's.
    said = error_of(notebook, f"{SKIPS}\nprint('again')\n{CALL}")
    assert said.count("op sum) at cell In[2], line 4") == 2 and "In[1]" not in said
    # A cell that defines, and a cell that calls.
    notebook.outputs_of(SKIPS)
    said = error_of(notebook, CALL)
    assert "at cell In[3], line 4" in said and "cell In[4], line 1 in <module>" in said
    assert "ipykernel_" not in said


def test_a_line_of_a_file_stays_one(notebook: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_program.py").write_text(SKIPS)
    monkeypatch.syspath_prepend(tmp_path)
    said = error_of(notebook, f"import meshcomm\nfrom my_program import body\n{CALL}")
    assert f"at {tmp_path}/my_program.py:4" in said and "cell In[1], line 3 in <module>" in said
    del sys.modules["my_program"]


@pytest.mark.parametrize(
    ("call", "name", "cure"),
    [
        ('meshcomm.init(dims={"dp": 2})', "LaunchError", "meshcomm.simulate(function, dims={'dp': 2})"),
        ("meshcomm.Layout({'dp': 2}).size('tp')", "UnknownDim", 'did you mean "dp"?'),
    ],
)
def test_an_error_has_the_program_s_lines_and_the_message(
    call: str, name: str, cure: str, notebook: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    said = error_of(notebook, f"import meshcomm\n\ndef opens():\n    {call}\nopens()")
    top, opens, middle, inner, message, *_, last = said.splitlines()
    assert (top, opens) == ("cell In[1], line 5 in <module>", "    opens()")
    assert (middle, inner) == ("cell In[1], line 4 in opens", f"    {call}")
    assert message.startswith(f"{name}: ") and cure in said and len(said.splitlines()) == 9
    # What the last line says shows the frames that were left out.
    *_, whole = notebook.outputs_of(
        last.removeprefix("all frames: ").replace("()", "(file=__import__('sys').stdout)")
    )
    assert "in opens\n" in whole["text"] and "/meshcomm/" in whole["text"]


def test_the_first_cause_of_a_failed_rank_is_shown_with_its_line(notebook: Shell) -> None:
    said = error_of(
        notebook,
        "import meshcomm\n\ndef body(mesh):\n    if mesh.rank == 1:\n        return {}['key']\n    mesh.barrier()\n"
        + CALL,
    )
    assert (
        "cell In[1], line 5 in body\n    return {}['key']\nRankFailed: rank 1 (dp=1) failed: KeyError" in said
    )
    assert len(said.splitlines()) < 13


def test_a_notebook_that_imports_meshcomm_shows_a_plan_as_a_table() -> None:
    program = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import meshcomm
plan = meshcomm.Plan(meshcomm.Layout({"dp": 4, "tp": 2}))
loaded = {"torch", "rich", "meshcomm.show"} & set(sys.modules)
shown, _ = shell.display_formatter.format(plan)
assert not loaded and shown["text/html"].count("<tr>") == 3, (loaded, shown)
assert shown["text/plain"] == f"Plan(dp=4, tp=2; {plan.fingerprint})"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
