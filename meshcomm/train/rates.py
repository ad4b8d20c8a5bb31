"""The learning rate of every step: a pure function of the configuration, so no state to save."""

from __future__ import annotations

import math

from meshcomm.config import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Of step 1, 2, ..., train.steps.

    Linear up to `lr` at `warmup_steps`. Then, by `schedule`, half a cosine wave or a straight line down
    to `lr * min_lr_ratio` at the last step, or `lr` to the end.

    >>> train = TrainConfig(steps=12, warmup_steps=4, global_batch=1, microbatch=1, lr=1.0, min_lr_ratio=0.2)
    >>> [round(learning_rate(train, step), 3) for step in range(1, 13)]
    [0.25, 0.5, 0.75, 1.0, 0.97, 0.883, 0.753, 0.6, 0.447, 0.317, 0.23, 0.2]
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return train.lr * _left(train, done)


def _left(train: TrainConfig, done: float) -> float:
    """What share of `lr` is left where `done`, 0 to 1, of the steps after the warm-up are done."""
    least = train.min_lr_ratio
    match train.schedule:
        case "cosine":
            return least + (1 - least) / 2 * (1 + math.cos(math.pi * done))
        case "linear":
            return least + (1 - least) * (1 - done)
        case "constant":
            return 1.0
