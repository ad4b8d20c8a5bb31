"""Two jobs of two ranks, each started by `meshcomm run`: versions there and back, a generator that is killed and starts again.

The generators may have an interpreter of their own, with another torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import meshcomm
from meshcomm.errors import CommunicationError
from tests.ports import free_port

ROOT: Final = Path(__file__).parents[2]
# Processes start in this time also on a busy machine.
_OPENS_S: Final = 150.0
_LIMIT_S: Final = 2 * _OPENS_S
# Of weights.
_SIZES: Final = {"split": (515, 257), "copied": (3,), "scalar": ()}
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def whole(version: int) -> dict[str, Tensor]:
    """Return the tensors of a version: random bits, NaNs included."""
    draw = torch.Generator().manual_seed(version)
    tensors = {}
    for dtype in _DTYPES:
        for name, shape in _SIZES.items():
            count = torch.Size(shape).numel() * dtype.itemsize
            bits = torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8)
            tensors[f"{name} {dtype}"] = bits.view(dtype).reshape(shape)
    return tensors


def model_of(mesh: meshcomm.Mesh) -> dict[str, Tensor]:
    """Return tensors without a version, of which those that are split are DTensors."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in whole(0).items()}
    return {
        name: distribute_tensor(tensor, mesh.device_mesh, [Shard(0)], src_data_rank=None)
        if name.startswith("split")
        else tensor
        for name, tensor in blank.items()
    }


def memory_of(model: dict[str, Tensor], mesh: meshcomm.Mesh, version: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's memory of each tensor, each with its values in a version."""
    place, size = mesh.coord("dp"), mesh.size("dp")
    return [
        (x.to_local(), tensor.chunk(size)[place]) if isinstance(x, DTensor) else (x, tensor)
        for x, tensor in zip(model.values(), whole(version).values(), strict=True)
    ]


def holds(model: dict[str, Tensor], mesh: meshcomm.Mesh, version: int) -> bool:
    """Return whether a model has the bits of a version."""
    return all(
        torch.equal(*(part.contiguous().view(-1).view(torch.uint8) for part in parts))
        for parts in memory_of(model, mesh, version)
    )


def program(side: str, address: str, life: str, folder: str) -> None:
    """Run a rank of the trainers, the "source", or of the generators."""
    marks: dict[str, Any] = {"imported": time.time(), "torch": torch.__version__}
    mesh = meshcomm.init(dims={"dp": 2}, device="cpu", timeout_s=_OPENS_S)
    marks["mesh"] = time.time()
    given, returned = model_of(mesh), model_of(mesh)
    trains = side == "source"
    there = meshcomm.link(
        *(mesh, None)[:: 1 if trains else -1], name="there", store=address, timeout_s=_OPENS_S
    )
    marks["met"] = time.time()
    forth = there.weights(given)
    marks["agreed"] = time.time()
    back_link = meshcomm.link(
        *(mesh, None)[:: -1 if trains else 1], name="back", store=address, timeout_s=_OPENS_S
    )
    back = back_link.weights(returned if trains else given)

    def turn(version: int) -> None:
        if trains:
            for part, value in memory_of(given, mesh, version):
                part.copy_(value)
            forth.push(version).wait()
            assert back.pull() == version
            assert holds(returned, mesh, version)
        else:
            assert forth.pull() == version
            marks.setdefault("pulled", time.time())
            assert holds(given, mesh, version)
            back.push(version).wait()

    def told() -> None:
        (Path(folder) / f"{side} {life} {mesh.rank}.json").write_text(json.dumps(marks))

    for version in (1, 2, 3) if life == "1" else ():
        turn(version)
    if not trains and life == "1" and mesh.rank == 1:
        marks["killed"] = time.time()
        told()
        os.kill(os.getpid(), signal.SIGKILL)
    if trains or life == "1":
        try:
            turn(4)
        except CommunicationError:
            marks["lost"] = time.time()
        else:
            raise AssertionError("a version arrived at a rank that was killed")
        if not trains:
            return
        there.reopen()
        back_link.reopen()
    turn(5)
    told()
    for link in (there, back_link):
        link.close()
    mesh.close()


def started(python: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-m", "meshcomm", "run", "--world-size", "2", __file__, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lives(folder: Path, generator: str = sys.executable) -> tuple[dict[str, float], set[str]]:
    """Run both jobs, and the generators twice. generator: their interpreter. Return seconds by part, and the versions of torch.

    Raises AssertionError with what the jobs said if they did not end as they should.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    trainer = started(sys.executable, "source", address, "1", str(folder))
    jobs = [trainer, started(generator, "target", address, "1", str(folder))]
    try:
        said = [jobs[1].communicate(timeout=_LIMIT_S)[0]]
        ended = time.time()
        jobs.append(started(generator, "target", address, "2", str(folder)))
        said += [job.communicate(timeout=_LIMIT_S)[0] for job in (jobs[2], trainer)]
    finally:
        for job in jobs:
            job.terminate()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 128 + signal.SIGKILL, 0], "\n".join(said)
    marks = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    last = _latest([marks[f"target 2 {rank}"] for rank in range(2)])
    killed, lost = (
        marks["target 1 1"]["killed"],
        _latest([marks[f"source 1 {rank}"] for rank in range(2)])["lost"],
    )
    steps = {
        "all trainers raise the error": lost - killed,
        "the launcher has ended the job": ended - killed,
        "start of two processes, imports": last["imported"] - ended,
        "mesh": last["mesh"] - last["imported"],
        "meeting": last["met"] - last["mesh"],
        "agreement": last["agreed"] - last["met"],
        "the next version": last["pulled"] - last["agreed"],
        "in all": last["pulled"] - killed,
    }
    return steps, {mark["torch"] for mark in marks.values()}


def _latest(marks: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: max(mark[name] for mark in marks) for name in marks[0] if name != "torch"}


if __name__ == "__main__":
    program(*sys.argv[1:])
