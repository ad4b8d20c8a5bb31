"""What all tests share: the pool of warm ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshcomm.testing import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Warm ranks for tests on real processes."""
    ranks = Pool()
    yield ranks
    ranks.close()
