"""One rank's part of `meshcomm parity`: `python -m meshcomm.train.parity_rank FOLDER`, under a launcher."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from meshcomm.config import Config, load
from meshcomm.launch.rank import as_rank
from meshcomm.mesh.environment import find_launch
from meshcomm.mesh.opening import init
from meshcomm.train.differences import Difference, compare
from meshcomm.train.parity import Record, record

CONFIG = "config.json"
REFERENCE = "reference.pt"


def write(folder: Path, config: Config, steps: int) -> None:
    """What the ranks need in `folder`, beside the reference in the folder above it."""
    facts = config.model_dump(mode="json", exclude_unset=True)
    (folder / CONFIG).write_text(json.dumps({"config": facts, "steps": steps}))


def read(folder: Path) -> list[list[Difference]]:
    """What each rank wrote, in their order."""
    files = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
    return [[Difference(**facts) for facts in json.loads(path.read_text())] for path in files]


def differences(config: Config, steps: int, reference: Path) -> list[Difference] | None:
    """Run the steps on the mesh of `config`; this rank's differences from the record in `reference`.

    Called by: every rank of the job. None on a rank that the mesh leaves out.
    """
    with init(config) as mesh:
        if not mesh.is_member:
            return None
        return compare(record(mesh, config, steps), Record.read(reference), mesh.rank)


def main(folder: Path) -> None:
    """Run as a rank, and leave its differences in `folder`."""
    here = find_launch(os.environ)
    facts = json.loads((folder / CONFIG).read_text())
    config = load(facts["config"])

    def body() -> None:
        found = differences(config, facts["steps"], folder.parent / REFERENCE)
        if found is not None:
            (folder / f"rank{here.rank}.json").write_text(json.dumps([asdict(one) for one in found]))

    as_rank(body, here, lambda: f"rank {here.rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
