"""Count the files that a call, a config, a step and an error pass through.

python -m tests.walks            prints a table
python -m tests.walks --files    also prints the files of each walk, in order

A stay is a run of calls to functions of one file of the package. A walk that calls functions of one file, then of another, and then of
the first again, has two stays in the first.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import meshcomm
from meshcomm.config import load_config
from meshcomm.errors import CallMismatchError
from meshcomm.testing import Pool
from meshcomm.train import Trainer

_PACKAGE: Final = str(Path(meshcomm.__file__).parent) + "/"


class Walk(NamedTuple):
    """The files of the package that a call passes through, in order, with one entry for each stay."""

    stays: list[str]

    @property
    def files(self) -> int:
        """The number of different files."""
        return len({*self.stays})

    @property
    def returns(self) -> int:
        """How often the walk returns to an earlier file."""
        return len(self.stays) - self.files


@contextmanager
def walking() -> Iterator[Walk]:
    """Record the walk of this thread within the block."""
    walk = Walk([])

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(_PACKAGE):
            name = file.removeprefix(_PACKAGE)
            if not walk.stays or walk.stays[-1] != name:
                walk.stays.append(name)

    sys.setprofile(seen)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def walk_of(call: Callable[[], object]) -> Walk:
    """Return the walk of a call."""
    with walking() as walk:
        call()
    return walk


def calls() -> dict[str, Walk]:
    """Return the walks of opening a mesh, and of a first and a warm all_reduce, with one process on torch's fake backend."""
    found: dict[str, Walk] = {}
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        with walking() as walk:
            mesh = meshcomm.init(
                load_config({"mesh": {"dims": {"dp": 4}, "device": "cpu", "backend": "fake"}})
            )
        found["config to an open mesh"] = walk
        x = torch.ones(4)
        found["first all_reduce"] = walk_of(lambda: mesh.all_reduce("dp", x))
        for _ in range(100):
            mesh.all_reduce("dp", x)
        found["warm all_reduce"] = walk_of(lambda: mesh.all_reduce("dp", x))
        mesh.close()
    finally:
        dist.destroy_process_group()
    return found


def step() -> Walk:
    """Return the walk of a warm training step of a one-layer transformer."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            {
                "mesh": {"dims": {"dp": 1, "tp": 1}, "device": "cpu"},
                "parallel": {"data": "dp", "tensor": "tp"},
                "model": {
                    "vocab_size": 64,
                    "hidden_size": 16,
                    "num_layers": 1,
                    "num_heads": 2,
                    "num_kv_heads": 2,
                    "intermediate_size": 32,
                },
                "data": {"seq_len": 8},
                "train": {"steps": 9, "global_batch_size": 4, "micro_batch_size": 4, "out": folder},
            }
        )
        with meshcomm.init(config) as mesh:
            trainer = Trainer(mesh, config)
            tokens = torch.randint(64, (4, 9))
            for _ in range(4):
                trainer.step(tokens[:, :-1], tokens[:, 1:])
            return walk_of(lambda: trainer.step(tokens[:, :-1], tokens[:, 1:]))


def mismatch() -> Walk:
    """Return the walk of a call that differs between two ranks, from the call to its exception."""
    with closing(Pool()) as pool:
        stays: list[list[str]] = pool.run(_differs, ranks=2)
    return Walk(stays[0])


def _differs() -> list[str]:
    with meshcomm.init(dims={"dp": 2}, device="cpu") as mesh:
        x = torch.ones(4 + mesh.rank)
        with walking() as walk, suppress(CallMismatchError):
            mesh.all_reduce("dp", x)
    return walk.stays


def main() -> None:
    """Print the table."""
    walks = {**calls(), "warm training step": step(), "mismatch to exception": mismatch()}
    table = Table("walk", "stays", "files", "returns")
    for name, walk in walks.items():
        table.add_row(name, str(len(walk.stays)), str(walk.files), str(walk.returns))
    console = Console()
    console.print(table)
    if "--files" in sys.argv:
        for name, walk in walks.items():
            console.print(f"[bold]{name}[/]: {' > '.join(walk.stays)}")


if __name__ == "__main__":
    # Ranks import the function by this module's name.
    from tests.walks import main as named

    named()
