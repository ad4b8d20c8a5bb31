"""Names that a page's short examples take for granted, made on every rank before its first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TORCH: Final = "import torch\n"

PRELUDES: Final[Mapping[str, str]] = {
    "README.md": _TORCH + "x, q = torch.ones(2, 3, 4), torch.ones(2, 3, 4, 5)\n",
    "docs/guide/checkpoints.md": _TORCH
    + """
from meshcomm.config import TrainConfig
from meshcomm.train.lock import Lock

train = TrainConfig(steps=2, global_batch_size=1, micro_batch_size=1, checkpoint_every=2, out="runs/books")
state = {"model.weight": torch.full((2, 3), float(mesh.rank))}
lock = Lock(step=2, seconds=0.0, fingerprint="", plan={}, config={}, versions={})
""",
}
