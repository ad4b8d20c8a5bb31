"""The parts of examples/finetune_llama fit together: what it makes can be configured, and opened by transformers."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshcomm.config import load

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_llama"


@pytest.mark.timeout(300)
def test_what_the_example_makes_can_be_trained_and_opened(tmp_path: Path) -> None:
    def called(script: str, *arguments: str) -> str:
        command = [sys.executable, str(EXAMPLE / script), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "172,608 parameters, 384 tokens" in called("make_model.py", "1")
    shutil.copy(EXAMPLE / "finetune.toml", tmp_path)
    config = load(tmp_path / "finetune.toml")
    assert config.model is not None and config.model.vocabulary == 384 and config.model.tied_embeddings
    # After one step all 384 tokens are still about equally likely.
    said = called("evaluate.py", "llama").splitlines()[0]
    assert abs(float(said.removeprefix("llama: loss on held_out.txt ")) - math.log(384)) < 0.2
    lines = (EXAMPLE / "finetune.toml").read_text().splitlines()
    assert f"A config of {len([line for line in lines if line])} lines" in (EXAMPLE / "README.md").read_text()
