"""`meshcomm train` with a configuration that has no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcomm.errors import ConfigError


def test_a_configuration_without_a_model_is_told_by_the_command(tmp_path: Path) -> None:
    from meshcomm.commands.train import train

    path = tmp_path / "mine.toml"
    path.write_text(
        '[mesh]\ndims = { dp = 2 }\ndevice = "cpu"\n[parallel]\ndata = "dp"\n[train]\nsteps = 1\nglobal_batch_size = 2\nmicro_batch_size = 1\n'
    )
    with pytest.raises(ConfigError, match=r"has no settings for a model\n.*\n.*meshcomm run with a script"):
        train(path)
