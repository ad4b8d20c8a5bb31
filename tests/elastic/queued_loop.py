"""A loop whose calls are queued, as on NCCL: `meshcomm run --replace 2 --world-size 4 FILE value barrier`.

There are two steps for each word. In the second one a rank dies, another one for each word, and the word names the call that
blocks the host. With "reopening", one more rank dies while the others reopen the mesh; with "joining", the new rank dies before
its first call. With "network" the backend detects the death, as NCCL does between hosts. With "late" rank 0 learns of the death a
second after the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist

import meshcomm
from meshcomm.errors import RankLost
from meshcomm.rendezvous import generation
from meshcomm.testing.emulated_nccl import NAME, emulated_nccl
from meshcomm.transport import connections

Dies = Callable[[], None]


def read(mesh: meshcomm.Mesh, x: torch.Tensor) -> float:
    """The sum of x. On a queue, reading the result of a call that was aborted for a lost rank raises nothing."""
    found = x.sum().item()
    if (lost := mesh.elastic.lost()) is not None:
        raise lost
    return found


def value(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Reads the result of a call that the lost rank never makes, or of a call queued after such a call on another group."""
    x = torch.full((3,), float(mesh.rank), device=mesh.device)
    dies()
    for dim in ("tp", "dp"):
        mesh.all_reduce(dim, x)
    return read(mesh, x)


def message(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Reads a message whose other end is missing."""
    x = torch.full((3,), float(mesh.rank), device=mesh.device)
    dies()
    for dim in ("dp", "tp"):
        if mesh.size(dim) > 1:
            came = mesh.shift(dim, x)
            assert came is not None
            x = x + came
    return read(mesh, x)


def handle(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Waits for an asynchronous handle with a limit, because a wait without a limit does not block."""
    x = torch.full((3,), float(mesh.rank), device=mesh.device)
    dies()
    for dim in ("dp", "tp"):
        x = mesh.all_reduce(dim, x, async_op=True).wait(timeout_s=60)
    return x.sum().item()


def barrier(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Makes a barrier as the last call of the step. It must not return as if all ranks had arrived."""
    x = torch.full((3,), float(mesh.rank), device=mesh.device)
    dies()
    for dim in ("tp", "dp"):
        mesh.all_reduce(dim, x)
    mesh.barrier("dp")
    return x.sum().item()


def objects(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Gathers objects, as bytes."""
    ranks = [mesh.rank]
    dies()
    for dim in ("dp", "tp"):
        ranks = [each for part in mesh.objects.all_gather(dim, ranks) for each in part]
    return 3.0 * sum(ranks)


def first(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Makes the first call on a group, whose ranks wait for each other in the store to connect."""
    if step % 2 == 0:
        return value(mesh, step, dies)
    mesh.create_group(f"all{step}", ("dp", "tp"))
    x = torch.full((3,), float(mesh.rank), device=mesh.device)
    dies()
    return read(mesh, mesh.all_reduce(f"all{step}", x))


def torchs(mesh: meshcomm.Mesh, step: int, dies: Dies) -> float:
    """Reads the result of torch's own call on the default group."""
    x = torch.full((3,), float(mesh.rank), device=mesh.device)
    dies()
    dist.all_reduce(x)
    return read(mesh, x)


WAITS = {each.__name__: each for each in (value, message, handle, barrier, objects, first, torchs)}


def of_the_farthest(mesh: meshcomm.Mesh, step: int, total: float) -> tuple[int, float]:
    """The step and total of the rank that has made the most steps; a new rank has made none."""
    for dim in ("dp", "tp"):
        step, total = max(mesh.objects.all_gather(dim, (step, total)))
    return step, total


def end() -> NoReturn:
    """Die."""
    time.sleep(0.5)  # by then, the others are blocked
    print(f"dies {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def learns_late(stack: ExitStack) -> None:
    """Let rank 2 send rank 0 data of a call that it has dropped, a second before rank 0 learns of the death."""

    def announced(store: Any, number: int) -> Any:
        time.sleep(1.0)
        return plain(store, number)

    def drop(aborts: Any) -> None:
        for abort in reversed(list(aborts)):
            abort()

    plain = generation.announcement_of
    if os.environ["RANK"] == "0":
        stack.enter_context(patch.object(generation, "announcement_of", announced))
    elif os.environ["RANK"] == "2":
        stack.enter_context(patch.object(connections, "abort_all", drop))


def main(words: list[str], validate_calls: int, backend: str = NAME, device: str = "cpu") -> None:
    """Sum something in every step."""
    waits = [WAITS[word] for word in words if word in WAITS]
    dims = {"dp": 2, "tp": int(os.environ["WORLD_SIZE"]) // 2}
    with (
        ExitStack() as stack,
        emulated_nccl(network="network" in words) if backend == NAME else nullcontext(),
        meshcomm.init(dims=dims, backend=backend, device=device, validate_calls=validate_calls) as mesh,
    ):
        if "late" in words:
            learns_late(stack)
        step, total, number = 0, 0.0, mesh.elastic.generation.number
        again = bool(number)
        if "joining" in words and number == 1:
            end()

        def dies() -> None:
            if step % 2 and step // 2 == mesh.elastic.generation.number == mesh.world_size - 1 - mesh.rank:
                end()

        while True:
            try:
                if again:
                    step, total = of_the_farthest(mesh, step, total)
                    again = False
                if step == 2 * len(waits):
                    mesh.barrier()  # a new rank could not meet a rank that has ended
                    break
                found = waits[step // 2](mesh, step, dies)
                step, total = step + 1, total + (step + 1) * found
            except (RankLost, dist.DistBackendError) as error:  # torch's own calls raise DistBackendError
                lost = mesh.elastic.lost(error)
                print(f"lost {lost and lost.missing} {time.time()}", flush=True)
                if "reopening" in words and mesh.rank == 0 and not mesh.elastic.generation.number:
                    end()
                mesh.elastic.reopen(error)
                again = True
        print(f"rank {mesh.rank}: {total}", flush=True)


if __name__ == "__main__":
    main(sys.argv[2:], int(sys.argv[1]))
