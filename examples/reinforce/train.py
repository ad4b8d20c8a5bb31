"""Train the policy on fsdp=2 tp=2. Each rank samples a quarter of the prompts with a plain copy of the policy.

    meshcomm run --world-size 4 train.py [SEED]

The rewards are those of one_process.py until rounding changes a sample.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from one_process import report
from policy import EPOCHS, LEARNING_RATE, advantages, loss, new_policy, sample
from task import rewards
from torch.distributed.fsdp import fully_shard

import meshcomm
from meshcomm.parallel import tensor_parallel, unsplit_state
from meshcomm.parallel.norm import GradientNorm

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


def new_weights(policy: Any, generator: Any) -> None:
    """Copy the weights of the mesh into the plain policy that generates. Called by every rank."""
    generator.load_state_dict(unsplit_state(policy))


def train(mesh: meshcomm.Mesh, seed: int) -> Iterator[float]:
    """Yield the mean reward of each step's samples, the same on every rank."""
    policy, generator = parallel_policy(mesh, seed), new_policy(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, weight_decay=0.0)
    norm = GradientNorm(mesh, policy)
    for step in count():
        new_weights(policy, generator)
        part = sample(generator, seed, step, mesh.rank, mesh.world_size)
        # Ranks along tp train on the same samples.
        sequences, log_probs = (mesh.all_gather("tp", x) for x in part)
        reward = rewards(sequences)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss(policy, sequences, log_probs, advantages(reward)).backward()
            norm.clip_(1.0)
            optimizer.step()
        yield mesh.all_reduce("fsdp", reward.mean(), op="avg").item()


def main(seed: int) -> None:
    torch.set_num_threads(1)
    with meshcomm.init(dims={"fsdp": 2, "tp": 2}, device="cpu") as mesh:
        report(train(mesh, seed), prints=mesh.rank == 0)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
