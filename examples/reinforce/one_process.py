"""Train the policy in one process, without meshcomm, and print the mean reward every ten steps.

    python one_process.py [SEED]

The run ends when the mean reward of ten steps is at least 0.9.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

import torch
from policy import EPOCHS, LEARNING_RATE, advantages, loss, new_policy, sample
from task import rewards


def train(seed: int, shares: int = 2) -> Iterator[float]:
    """Yield the mean reward of each step's samples. shares: as many as there are generators, which sample a part of the prompts each."""
    policy = new_policy(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, weight_decay=0.0)
    for step in count(1):
        parts = [sample(policy, seed, step, share, shares) for share in range(shares)]
        sequences, log_probs = map(torch.cat, zip(*parts, strict=True))
        reward = rewards(sequences)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss(policy, sequences, log_probs, advantages(reward)).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        yield reward.mean().item()


def report(steps: Iterator[float], more: Callable[[], str] = str, *, prints: bool = True) -> int:
    """Train until the mean reward of ten steps is at least 0.9, and print this mean every ten steps. Return the number of steps.

    steps: from `train`. more: what else to print.
    """
    start, recent = time.monotonic(), deque[float](maxlen=10)
    for step, reward in enumerate(steps, 1):
        recent.append(reward)
        mean = sum(recent) / len(recent)
        done = step >= 10 and mean >= 0.9
        if prints and (step % 10 == 0 or done):
            print(f"step {step}: reward {mean:.3f}{more()}, {time.monotonic() - start:.1f} s", flush=True)
        if done:
            return step
    raise AssertionError


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(train(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
