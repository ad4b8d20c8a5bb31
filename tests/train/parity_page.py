"""The page of what can be combined, from the meshes that were compared with one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshcomm.config.wording import toml
from meshcomm.train.differences import Difference
from tests.train.parity_cases import BASE, CASES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "combinations.md"

_HEAD = """\
# What can be combined

Each line is a mesh of 8 processes that trained 20 steps in float64 as one process does: the same losses,
gradient norms, weights and gradients. The worst difference is the largest of all of them, relative to
the largest value of the quantity, 1 at least; the tests refuse more than 1e-9.
Measured with torch {torch} on CPU with Gloo.

`pytest -n 0 -m parity --write-parity-table` runs the meshes and writes this page. The
configurations are in `tests/train/parity_cases.py`; the model has {layers} layers of width {width} with dropout
{dropout}, gradients are clipped. [`meshcomm parity`](parity.md) does the same for a configuration of yours.

"""


def write_page(found: Mapping[str, Difference]) -> str:
    """Write the page; says that it is written, or which case was not measured, and then it is not."""
    missing = [case for case in CASES if case not in found]
    if missing:
        return f"{PAGE.name} is not written: not measured: {', '.join(missing)}"
    model = BASE["model"]
    head = _HEAD.format(
        torch=torch.__version__, layers=model["layers"], width=model["width"], dropout=model["dropout"]
    )
    rows = [("mesh", "parts", "besides", "worst difference")]
    rows.append(("---",) * 4)
    for case, one in found.items():
        rows.append((case, *settings(CASES[case]), f"{one.relative:.1e}, {one.words}"))
    PAGE.write_text(head + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    return f"{PAGE.name} is written"


def settings(case: Mapping[str, Any]) -> tuple[str, str]:
    """Which dims play which parts, and what else is not as in BASE, as a config has it."""
    parallel = case["parallel"]
    sizes = dict(case["mesh"]["dims"])
    for view in case["mesh"].get("views", {}).values():
        sizes |= view
    parts = [f"{part} {sizes[dim]}" for part, dim in parallel.items() if str(dim) in sizes]
    besides = [(key, value) for key, value in parallel.items() if str(value) not in sizes]
    for section in ("model", "train"):
        besides += [(key, value) for key, value in case[section].items() if BASE[section].get(key) != value]
    return ", ".join(parts), _words(besides)


def _words(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"`{key} = {toml(value)}`" for key, value in pairs)
