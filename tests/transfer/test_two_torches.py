"""A link between jobs with different versions of torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transfer.restarted import lives

# The path of an interpreter that has another torch and what meshcomm requires.
OTHER = os.environ.get("MESHCOMM_OTHER_PYTHON", "")


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OTHER, reason="MESHCOMM_OTHER_PYTHON names no interpreter with another torch")
def test_jobs_with_two_versions_of_torch(tmp_path: Path) -> None:
    """Three versions there and back, then one more after a generator was killed, bit for bit."""
    _, torches = lives(tmp_path, OTHER)
    assert len(torches) == 2, torches
