"""THE table of blocks that are not run, and why. Whatever is not in it is run.

Python in it is still compiled, and commands are still read by the real command line. Whole commands that no
page runs (`meshcomm train`, ...) are in tests/documents/commands.py, with the tests that run them; commands
on files that only the reader has are read, and not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Page and first line of the block -> why. A line that no block has any more fails the tests.
NOT_RUN: Final[Mapping[str, str]] = {
    'docs/guide/performance.md: torchrun --nproc-per-node 8 -m tests.benchmarks.training configs/mesh.toml --rounds 5 --set \'parallel={ data = "dp", tensor = "tp", pipeline = "pp" }\'': "measures for minutes; tests/benchmarks/test_training.py",
    "docs/benchmarks.md: import time, torch, meshcomm": "times 256 simulated ranks five times over, 25 s",
}

# Pages whose blocks other tests run; here they are only read.
OWN_TESTS: Final[Mapping[str, str]] = {
    "docs/reference/errors.md": "tests/documents/error_page.py",
}
