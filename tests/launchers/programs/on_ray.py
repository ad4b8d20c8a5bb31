"""Ray programs that use meshcomm themselves: python on_ray.py actors|trainer [--dies RANK]"""
# mypy: ignore-errors

from __future__ import annotations

import argparse
import os
import signal
import socket

import ray
import ray.exceptions
import torch

RANKS, CALLS = 4, 60


def sums(number: int, dies: int, **where: object) -> None:
    """Does the same as sums.py, in a process of Ray."""
    import meshcomm

    with meshcomm.init(dims={"dp": 2, "tp": 2}, device="cpu", timeout_s=30, **where) as mesh:
        assert mesh.rank == number
        for call in range(CALLS):
            if call == CALLS // 2 and mesh.rank == dies:
                print(f"rank {mesh.rank} is killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            part = mesh.all_reduce("tp", torch.ones(1))
            total = mesh.all_reduce("dp", part).item()
            assert total == 4
        print(f"rank {mesh.rank} summed {CALLS} times: {total:g}", flush=True)


class Rank:
    """An actor that gives its rank, as in docs/guide/launching.md."""

    def run(self, rank: int, port: int, dies: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sums(rank, dies, rank=rank, world_size=RANKS)


def by_actors(dies: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    actors = [ray.remote(Rank).options(num_cpus=0.25).remote() for _ in range(RANKS)]
    ran = {actor.run.remote(rank, port, dies): rank for rank, actor in enumerate(actors)}
    wrong = []
    for ref, rank in ran.items():
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            wrong.append(f"of rank {rank}: {error}")
    print("\n".join(wrong), flush=True)
    if wrong:
        raise SystemExit(1)


def by_trainer(dies: int) -> None:
    from ray.train import ScalingConfig, get_context
    from ray.train.torch import TorchTrainer

    def loop(given: dict[str, int]) -> None:
        sums(get_context().get_world_rank(), given["dies"])

    scaling = ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 0.25})
    TorchTrainer(loop, train_loop_config={"dies": dies}, scaling_config=scaling).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("actors", "trainer"))
    parser.add_argument("--dies", type=int, default=-1)
    given = parser.parse_args()
    ray.init(include_dashboard=False)
    (by_actors if given.kind == "actors" else by_trainer)(given.dies)
