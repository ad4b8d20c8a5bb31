"""Names that a page's short examples take for granted, made on every rank before its first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TORCH: Final = "import torch\n"

PRELUDES: Final[Mapping[str, str]] = {
    "README.md": _TORCH + "x, q = torch.ones(2, 3, 4), torch.ones(2, 3, 4, 5)\n",
    "docs/guide/algorithms.md": _TORCH + 'grad = torch.ones(8)\nmesh.create("both", ("dp", "tp"))\n',
    "docs/guide/checkpoints.md": _TORCH
    + """
from meshcomm.config import TrainConfig
from meshcomm.train.lock import Lock

train = TrainConfig(steps=2, global_batch=1, microbatch=1, checkpoint_every=2, out="runs/books")
state = {"model.weight": torch.full((2, 3), float(mesh.rank))}
lock = Lock(step=2, seconds=0.0, fingerprint="", plan={}, config={}, versions={})
""",
    "docs/guide/collectives.md": _TORCH
    + """
grad, norm, params = torch.ones(4), torch.ones(4), torch.ones(4)
x, kv = torch.ones(2, 4, 6), torch.ones(4)
if "cp" in mesh.dims and "pp" in mesh.dims:
    b, s, d = 2, 3, 4
    act, buffer = torch.ones(b, s, d), torch.empty(b, s, d)
    x, y, p, q = (torch.full((2,), float(mesh.coord("cp"))) for _ in range(4))
""",
    "docs/guide/gradients.md": _TORCH
    + "x, w1_columns, w2_rows = torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 3)\n",
    "docs/guide/objects.md": _TORCH
    + 'cfg, loss, state = {"lr": 1e-3}, 2.0, {"step": 7}\nshards = ["a", "b"]\n',
}
