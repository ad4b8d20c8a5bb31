"""Train the policy on fsdp=2 tp=2. Each step sends the weights to the job of generate.py, and receives samples.

    meshcomm run --world-size 4 train.py [SEED [STORE]]

The rewards are those of one_process.py. If a generator is lost, the step waits until it has come again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from generate import END, SAMPLES, STORE
from one_process import report
from policy import EPOCHS, GROUP, LEARNING_RATE, PROMPTS, advantages, loss, new_policy
from task import LENGTH, rewards
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import meshcomm
from meshcomm.errors import CommunicationError
from meshcomm.parallel import tensor_parallel

PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "column:whole",
}


def parallel_policy(mesh: meshcomm.Mesh, seed: int) -> Any:
    policy = new_policy(seed)
    tensor_parallel(policy, mesh, "tp", PLAN)
    for block in policy.model.layers:
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(policy, mesh=mesh["fsdp"])
    return policy


class Generators:
    """The job of generate.py, as each trainer sees it."""

    def __init__(self, mesh: meshcomm.Mesh, policy: Any, store: str) -> None:
        self.mesh, self.reconnects = mesh, 0
        mesh.create_group("all", ("fsdp", "tp"))
        self.policy = meshcomm.link(source=mesh, name="policy", store=store)
        self.weights = self.policy.weights(policy)
        self.samples = meshcomm.link(target=mesh, name="samples", store=store)

    def sample(self, version: int) -> tuple[Tensor, Tensor]:
        """Return samples of this version of the weights: half of them on each coord along fsdp, the same along tp."""
        samples = PROMPTS * GROUP // self.mesh.size("fsdp")
        sequences = torch.empty(samples, 2 * LENGTH + 1, dtype=torch.int64)
        log_probs = torch.empty(samples, LENGTH)
        is_lost = False
        while True:
            failure = ""
            try:
                if is_lost:  # again, if no generator came within the links' timeout
                    self.policy.reopen()
                    self.samples.reopen()
                    self.reconnects += 1
                self.weights.push(version=version).wait()
                for out in (sequences, log_probs):
                    self.samples.transfer(None, out, SAMPLES)
            except CommunicationError as error:
                failure = error.what
            # One rank may have its samples when another one has lost its generator.
            failures = [*filter(None, self.mesh.objects.all_gather("all", failure))]
            if not failures:
                return sequences, log_probs
            if self.mesh.rank == 0:
                print(f"step {version}: {failures[0]}", flush=True)
            is_lost = True

    def end(self) -> None:
        self.weights.push(version=END).wait()
        self.samples.close()
        self.policy.close()


def train(mesh: meshcomm.Mesh, policy: Any, generators: Generators) -> Iterator[float]:
    """Yield the mean reward of each step's samples, the same on every rank."""
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, weight_decay=0.0)
    for step in count(1):
        sequences, log_probs = generators.sample(version=step)
        reward = rewards(sequences)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss(policy, sequences, log_probs, advantages(reward)).backward()
            meshcomm.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        yield mesh.all_reduce("fsdp", reward.mean(), op="avg").item()


def main(seed: int = 0, store: str = STORE) -> None:
    torch.set_num_threads(1)
    with meshcomm.init(dims={"fsdp": 2, "tp": 2}, device="cpu") as mesh:
        policy = parallel_policy(mesh, seed)
        generators = Generators(mesh, policy, store)
        steps = train(mesh, policy, generators)
        versions = report(steps, lambda: f", version {generators.weights.version}", prints=mesh.rank == 0)
        generators.end()
        if mesh.rank == 0:
            print(f"versions: {versions}, reconnects: {generators.reconnects}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
