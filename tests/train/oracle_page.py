"""Writes docs/reference/kinds.md: kinds of models on kinds of meshes. python -m tests.train.oracle_page [KIND ...]

With kinds, their rows are printed with all errors, and the page is not written.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from meshcomm.errors import MeshcommError
from meshcomm.testing import Pool
from tests.oracles.kind import alone
from tests.train.runs import sizes_of
from tests.train.test_oracles import CASES, MESHES, config_of, difference, trained

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "kinds.md"


def found(pool: Pool, name: str, dims: str) -> float | str:
    """The largest difference from one process on any rank; the text of the error."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as out:
        config = config_of(dims, case, out)
        expected = alone(case.kind)
        each = pool.run(trained, config, name, ranks=math.prod(sizes_of(dims).values()))
    texts = [one for one in each if isinstance(one, str)]
    return texts[0] if texts else max(difference(one, expected) for one in each)


def main(names: Iterable[str]) -> None:
    with contextlib.closing(
        Pool(("torch", "torch.distributed", "meshcomm.train", "torch.distributed.fsdp"))
    ) as pool:
        for name in names:
            for dims in MESHES:
                try:
                    print(f"## {name} | {dims} | {found(pool, name, dims)}", flush=True)
                except Exception as error:
                    print(f"## {name} | {dims} | RAW {type(error).__name__} {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or CASES)
