"""The blocks that are not run and why, and the names that a page's short examples take for granted.

Python that is not run is still compiled, and the real command line still parses commands. tests/documents/commands.py lists the
commands that no page runs (`meshcomm train`, ...). Commands on files that only the reader has are only parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Page and first line of the block -> why. The tests fail for a line that no block has any more.
NOT_RUN: Final[Mapping[str, str]] = {
    'docs/guide/transfer.md: link = meshcomm.link(source=mesh, name="policy", store="tcp://10.0.0.7:29700")  # in the trainer\'s job': "two jobs; tests/transfer/test_two_jobs.py",
    "docs/guide/transfer.md: has_failed = torch.zeros(1)": "two jobs; tests/transfer/test_two_jobs.py",
    "docs/guide/transfer.md: room = {name: torch.empty_like(p) for name, p in engine_model.named_parameters()}": "a sketch for an engine; tests/transfer/test_weights.py",
    'docs/guide/performance.md: torchrun --nproc-per-node 8 -m tests.benchmarks.training configs/mesh.toml --rounds 5 --set \'parallel={ data = "dp", tensor = "tp", pipeline = "pp" }\'': "measures for minutes; tests/benchmarks/test_training.py",
}

# Pages whose blocks other tests run. Here they are only parsed.
OWN_TESTS: Final[Mapping[str, str]] = {
    "docs/reference/errors.md": "tests/documents/error_page.py",
}

# Code that runs on every rank before a page's first example.
_TORCH: Final = "import torch\n"

PRELUDES: Final[Mapping[str, str]] = {
    "docs/guide/checkpoints.md": _TORCH
    + """
from meshcomm.config import TrainConfig
from meshcomm.train.checkpoint.lock import Lock

train = TrainConfig(steps=2, global_batch_size=1, micro_batch_size=1, checkpoint_every=2, out="runs/books")
state = {"model.weight": torch.full((2, 3), float(mesh.rank))}
lock = Lock(step=2, seconds=0.0, fingerprint="", plan={}, config={}, versions={})
""",
}
