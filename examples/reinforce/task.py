"""The task: answer a prompt of digits with the successor of each, modulo ten. "3 9 0 7" is answered by "4 0 1 8".

Prompts are drawn from a seed, and an answer is checked by arithmetic, so the task needs no data. Chance is 1 / VOCABULARY.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIGITS, LENGTH = 10, 4
STOP = DIGITS  # the last token of a prompt
VOCABULARY = 16


def prompts(count: int, seed: int) -> Tensor:
    """Return (count, LENGTH + 1) int64 tokens: digits, and STOP."""
    digits = torch.randint(DIGITS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.pad(digits, (0, 1), value=STOP)


def rewards(sequences: Tensor) -> Tensor:
    """Return the share of right digits in each answer. (n, 2 * LENGTH + 1), prompts with answers -> (n,), from 0 to 1."""
    right = (sequences[:, :LENGTH] + 1) % DIGITS
    return (sequences[:, LENGTH + 1 :] == right).float().mean(1)
