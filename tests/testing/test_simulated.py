"""The output of simulated ranks."""

from __future__ import annotations

import io

# pytester forgets the imports of a suite, and torch cannot be imported twice.
import meshcomm.testing.processes
import meshcomm.testing.simulated


def test_the_streams_of_simulated_ranks_outlive_those_of_pytest() -> None:
    usual = io.TextIOWrapper(io.BytesIO())
    stream = meshcomm.testing.simulated._Streams(usual)
    usual.close()
    stream.close()  # as when it is collected; Python 3.13 reports an exception from this
