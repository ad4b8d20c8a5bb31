"""The table of combinations in docs/guide/parity.md, from the meshes that were compared with one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshcomm.config.write import toml
from meshcomm.train.parity import Difference
from tests.train.parity_cases import BASE, CASES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "parity.md"

_BEGIN, _END = "<!-- parity table -->\n", "<!-- end of parity table -->\n"


def write_page(found: Mapping[str, Difference]) -> str:
    """Write the table if all cases were measured. Return a line about the result, which names unmeasured cases."""
    missing = [case for case in CASES if case not in found]
    if missing:
        return f"{PAGE.name} is not written: not measured: {', '.join(missing)}"
    rows = [("mesh", "parts", "besides", "worst difference")]
    rows.append(("---",) * 4)
    for case, one in found.items():
        rows.append((case, *settings(CASES[case]), f"{one.relative:.1e}, {one.words}"))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    measured = f"Measured with torch {torch.__version__} on CPU with Gloo."
    PAGE.write_text(f"{before}{_BEGIN}{measured}\n\n{table}\n{_END}{after}")
    return f"{PAGE.name} is written"


def settings(case: Mapping[str, Any]) -> tuple[str, str]:
    """The dims of each part, and all other settings that differ from BASE, as in a config."""
    parallel = case["parallel"]
    sizes = dict(case["mesh"]["dims"])
    for view in case["mesh"].get("views", {}).values():
        sizes |= view
    parts = [f"{part} {sizes[dim]}" for part, dim in parallel.items() if str(dim) in sizes]
    besides = list(parallel.get("options", {}).items())
    for section in ("model", "train"):
        besides += [(key, value) for key, value in case[section].items() if BASE[section].get(key) != value]
    return ", ".join(parts), _words(besides)


def _words(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"`{key} = {toml(value)}`" for key, value in pairs)
