"""The task: answer a prompt of letters with the next letter of the alphabet for each, as HAL with IBM.

Prompts are drawn from a seed. A reward needs no data, because an answer can be checked. A policy that knows nothing gets 1 / VOCABULARY.
"""

from __future__ import annotations

import torch
from torch import Tensor

LETTERS, LENGTH = 20, 4
STOP = LETTERS  # ends a prompt
VOCABULARY = 24  # divisible by the number of tensor-parallel ranks


def prompts(count: int, seed: int) -> Tensor:
    """Return (count, LENGTH + 1) int64 tokens: letters, and STOP."""
    letters = torch.randint(LETTERS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.pad(letters, (0, 1), value=STOP)


def rewards(sequences: Tensor) -> Tensor:
    """Return the share of right letters in each answer. (n, 2 * LENGTH + 1), a prompt and its answer -> (n,), 0.0 to 1.0."""
    right = (sequences[:, :LENGTH] + 1) % LETTERS
    return (sequences[:, LENGTH + 1 :] == right).float().mean(1)
