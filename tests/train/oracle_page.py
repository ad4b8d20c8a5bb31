"""Writes docs/reference/kinds.md: kinds of models on kinds of meshes. `python -m tests.train.oracle_page [KIND ...]`

With kinds, it measures only these and prints the results with whole errors, without writing the page.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from meshcomm.errors import MeshcommError
from meshcomm.testing import Pool
from tests.oracles.kind import STEPS, alone
from tests.train.runs import sizes_of
from tests.train.test_oracles import CASES, MESHES, config_of, difference, trained

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "kinds.md"
_ABOUT: Final = """# Kinds of models

The page compares training on meshes with plain programs of torch on one process. Each program in `tests/oracles` is written as its users would write it, without
meshcomm. A [`Trainer`](../guide/step.md) trains the same module, loss and optimizer on a mesh, with a [`ModelSpec`](../guide/models.md#tensor-and-pipeline-parallelism-modelspec)
that declares what can be split. A number is the largest difference of any loss, weight or buffer after {steps} steps in float64, relative to the largest element of that tensor.
A number in brackets is the note below the table that says why the step is refused.

Measured with torch {version} on CPU with Gloo, by `python -m tests.train.oracle_page`. `tests/train/test_oracles.py` compares the same programs on each change.

"""


def measured(pool: Pool, name: str, dims: str) -> float | str:
    """The largest difference from one process on any rank, or the text of the error."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as out:
        try:
            config = config_of(dims, case, out, check=True)
        except MeshcommError as error:
            return str(error)
        expected = alone(case.kind)
        each = pool.run(trained, config, name, ranks=math.prod(sizes_of(dims).values()), timeout_s=120)
    texts = [one for one in each if isinstance(one, str)]
    return texts[0] if texts else max(difference(one, expected) for one in each)


def reason(text: str) -> str:
    """The first line of an error and the first line of its `given` part."""
    what, *more = text.splitlines()
    given = next((line.partition("given:")[2].strip() for line in more if "given:" in line), "")
    return f"{what}: {given}" if given else what


def page(found: Mapping[tuple[str, str], float | str]) -> str:
    """The text of the page, from the results by kind and mesh."""
    notes: dict[str, int] = {}
    rows = [("kind", *MESHES), ("---",) * (1 + len(MESHES))]
    for name in CASES:
        cells = []
        for dims in MESHES:
            one = found[name, dims]
            cells.append(
                f"[{notes.setdefault(reason(one), len(notes) + 1)}]" if isinstance(one, str) else f"{one:.0e}"
            )
        rows.append((name, *cells))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    listed = "\n".join(f"{number}. {text}" for text, number in notes.items())
    about = _ABOUT.format(steps=STEPS, version=torch.__version__.partition("+")[0])
    return f"{about}{table}\n\n## Why a step is refused\n\n{listed}\n"


def main(names: list[str]) -> None:
    """Measure and print the named kinds; without names, measure all kinds and write the page."""
    found: dict[tuple[str, str], float | str] = {}
    with contextlib.closing(Pool(("torch", "torch.distributed.fsdp", "meshcomm.train"))) as pool:
        for name in names or CASES:
            for dims in MESHES:
                one = found[name, dims] = measured(pool, name, dims)
                print(
                    f"{name}, {dims}: {one if names or isinstance(one, float) else reason(one)}", flush=True
                )
    if not names:
        PAGE.write_text(page(found))
        print(f"{PAGE.name} is written")


if __name__ == "__main__":
    main(sys.argv[1:])
