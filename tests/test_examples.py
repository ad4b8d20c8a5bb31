"""Every example runs, on real processes, and prints what it says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

from meshcomm.testing import Pool

ROOT = Path(__file__).parent.parent
MESH = {"MESHCOMM_CONFIG": str(ROOT / "configs" / "mesh.toml")}


def printed(path: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


def run(pool: Pool, name: str) -> list[str]:
    texts: list[str] = pool.run(printed, str(ROOT / "examples" / name), env=MESH)
    return texts


def test_every_example_is_run_here() -> None:
    named = set(re.findall(r'run\(pool, "(\w+\.py)"\)', Path(__file__).read_text()))
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_hello_mesh(pool: Pool) -> None:
    texts = run(pool, "hello_mesh.py")
    assert texts[0].startswith("mesh of 8 ranks")
    assert texts[5] == (
        "rank 5 (pp=1 dp=0 tp=1): pp: ranks [1, 5], sum 6; dp: ranks [5, 7], sum 12; "
        "tp: ranks [4, 5], sum 9; from the left 4\n"
    )


def test_two_meshes(pool: Pool) -> None:
    texts = run(pool, "two_meshes.py")
    assert texts[1] == "rank 1: in the encoder, {'tp': 1}, features [1.0, 1.0]\n"
    assert texts[7] == "rank 7: in the model, {'pp': 2, 'tp': 1}, features [1.0, 1.0]\n"


def test_fsdp_and_tensor_parallel(pool: Pool) -> None:
    texts = run(pool, "fsdp_and_tensor_parallel.py")
    losses = [re.findall(r"loss ([\d.]+)", text) for text in texts]
    # Equal along pp and tp, and dp averages: all ranks agree to the printed digits.
    assert all(each == losses[0] for each in losses)
    assert float(losses[0][1]) < float(losses[0][0])


def test_bring_your_own_model(pool: Pool) -> None:
    texts = run(pool, "bring_your_own_model.py")
    lines = re.findall(r"step +(\d+): loss ([\d.]+), on one process ([\d.]+)", texts[0])
    assert [line[0] for line in lines] == ["0", "5", "10", "15"]
    assert all(split == alone for _, split, alone in lines)
    assert float(lines[-1][1]) < float(lines[0][1]) - 0.5
    assert texts[1:] == [""] * 7
