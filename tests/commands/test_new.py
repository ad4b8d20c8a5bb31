"""`meshcomm new` writes the quickstart, and overwrites nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands.test_app import meshcomm

ROOT = Path(__file__).parents[2]


def test_new_writes_the_quickstart_and_the_hello_of_the_readme(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "demo"
    done = meshcomm("new", str(folder))
    assert done.exit_code == 0 and str(folder / "hello.py") in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "hello.py"]
    assert (folder / "config.toml").read_text() == (ROOT / "configs" / "quickstart.toml").read_text()
    shown = re.search(r"<!-- file: hello.py -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown is not None and (folder / "hello.py").read_text() == shown[1]


@pytest.mark.parametrize("name", ["config.toml", "hello.py"])
def test_new_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("mine")
    done = meshcomm("new")
    assert done.exit_code == 2 and done.stderr == (
        f"meshcomm new does not overwrite files, and {name} exists\n"
        "  given:    .\n"
        "  expected: a folder without config.toml and hello.py\n"
        "  try:      meshcomm new demo\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"
    # A broken link counts as existing, too.
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")
    done = meshcomm("new")
    assert done.exit_code == 2 and f"{name} exists" in done.stderr
    in_a_file = meshcomm("new", __file__)
    assert in_a_file.exit_code == 2 and "cannot be written" in in_a_file.stderr and "try:" in in_a_file.stderr
