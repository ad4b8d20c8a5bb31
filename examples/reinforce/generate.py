"""Sample with the weights of train.py, which is another job. Each of the two ranks has a plain copy of the policy.

    meshcomm run --world-size 2 generate.py [SEED [STORE]]

A generator keeps nothing but the last weights, so after a loss, this job just starts again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
from policy import new_policy, sample

import meshcomm

STORE = "tcp://127.0.0.1:29700"  # where both jobs meet
SAMPLES = "n/copy k -> n/fsdp k"
END = 0  # the version after the last one


def generate(mesh: meshcomm.Mesh, seed: int, store: str) -> Iterator[int]:
    """Sample with each version of the weights, until training ends. Yield the version once the trainers have the samples."""
    policy = new_policy(seed)
    with meshcomm.link(target=mesh, name="policy", store=store) as from_trainers:
        # Before the next link, because a trainer's `reopen` of this one agrees on the weights, too.
        weights = from_trainers.weights(policy)
        with meshcomm.link(source=mesh, name="samples", store=store) as to_trainers:
            while (version := weights.pull()) != END:
                with weights.reading():
                    part = sample(policy, seed, version, mesh.coord("copy"), mesh.size("copy"))
                for x in part:
                    to_trainers.transfer(x, None, SAMPLES)
                yield version


def main(seed: int = 0, store: str = STORE) -> None:
    torch.set_num_threads(1)
    with meshcomm.init(dims={"copy": 2}, device="cpu") as mesh:
        print(f"generator {mesh.rank} is process {os.getpid()}", flush=True)
        for _ in generate(mesh, seed, store):
            pass


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
