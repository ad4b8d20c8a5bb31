"""Files are written whole or stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshcomm.config.write import write_whole
from meshcomm.errors import ConfigError


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "topo.svg"
    path.write_text("old", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match=r"topo.svg: cannot be written: no space left on device"):
        write_whole(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("topo.svg", "old")]


def test_files_get_the_umask_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask belongs to the process: if it changed, other threads would create files that are open to everybody."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
            write_whole(tmp_path / "a.toml", "new")
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert (path.name, path.read_text(), path.stat().st_mode & 0o777) == ("a.toml", "new", 0o640)
