"""How large is a step? The learning rate, a pure function of the configuration."""

from __future__ import annotations

import math

from meshcomm.config import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Of step 1, 2, ..., train.steps: a pure function of the configuration, so no state to save.

    Linear up to `lr` at `warmup_steps`. Then, by `schedule`, half a cosine wave or a straight line down
    to `lr * min_lr_ratio` at the last step, or `lr` to the end. With wsd (warm-up, stable, decay: Hu et al. 2024)
    the straight line begins after the step `steps - decay_steps`.

    >>> train = TrainConfig(steps=12, warmup_steps=4, global_batch=1, microbatch=1, lr=1.0, min_lr_ratio=0.2)
    >>> [round(learning_rate(train, step), 3) for step in range(1, 13)]
    [0.25, 0.5, 0.75, 1.0, 0.97, 0.883, 0.753, 0.6, 0.447, 0.317, 0.23, 0.2]
    >>> linear, constant = (train.model_copy(update={"schedule": name}) for name in ("linear", "constant"))
    >>> [(round(learning_rate(linear, step), 3), learning_rate(constant, step)) for step in (8, 12)]
    [(0.6, 1.0), (0.2, 1.0)]
    >>> wsd = train.model_copy(update={"schedule": "wsd", "decay_steps": 4})
    >>> [round(learning_rate(wsd, step), 3) for step in range(7, 13)]
    [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    first = train.warmup_steps
    if train.schedule == "wsd":
        first = max(first, train.steps - (train.decay_steps or max(1, train.steps // 10)))
    done = max(0.0, (step - first) / max(1, train.steps - first))
    falls = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    least = 1.0 if train.schedule == "constant" else train.min_lr_ratio
    return train.lr * (least + (1 - least) * falls.get(train.schedule, 1 - done))
