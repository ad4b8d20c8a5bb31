"""Which frames of a traceback are the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import meshcomm
from meshcomm.comm.callsite import is_ours

TORCH, OWN = Path(torch.__file__).parent, Path(meshcomm.__file__).parent


@pytest.mark.parametrize(
    ("file", "ours"),
    [
        (TORCH / "nn/modules/module.py", True),
        (OWN / "comm/along.py", True),
        (f"{TORCH}titan/train.py", False),
        (f"{TORCH}vision/models/resnet.py", False),
        (f"{OWN}_tools/train.py", False),
        (OWN / "bench/overhead.py", False),
        (os.__file__, False),
    ],
)
def test_a_package_whose_name_begins_alike_is_the_users(file: str | Path, ours: bool) -> None:
    assert is_ours(str(file)) is ours
