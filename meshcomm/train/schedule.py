"""The learning rate of each step: the schedule in [train], or a scheduler of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshcomm.config import TrainConfig
from meshcomm.errors import ConfigError, UnsupportedOp

MakeScheduler: TypeAlias = Callable[[Optimizer], LRScheduler]


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, from 1 to train.steps. It depends only on the configuration, so there is no
    state to save.

    The rate rises linearly to `lr` at `warmup_steps`. Then, depending on `schedule`, it follows half a cosine wave or a
    straight line down to `lr * min_lr_ratio` at the last step, or stays at `lr`. With wsd (warmup, stable, decay: Hu et
    al. 2024), the straight line begins after step `steps - decay_steps`.

    >>> train = TrainConfig(steps=12, warmup_steps=4, global_batch_size=1, micro_batch_size=1, lr=1.0, min_lr_ratio=0.2)
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


def scheduler_for(make: MakeScheduler, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the scheduler that `make` creates for the optimizer. Raises ConfigError or UnsupportedOp if it is invalid, or
    cannot be advanced `steps` times.
    """
    example = "lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))"
    try:
        found = make(optimizer)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the scheduler cannot be made",
            given=f"{type(error).__name__}: {error}",
            expected="a function of the optimizer",
            hint=example,
        ) from error
    kind = type(found).__name__
    if not isinstance(found, LRScheduler) or isinstance(found, ReduceLROnPlateau):
        raise UnsupportedOp(
            f"the scheduler is a {kind}",
            given=f"scheduler(optimizer) returned a {kind}",
            expected="a torch.optim.lr_scheduler.LRScheduler whose rates depend only on the number of steps",
            hint=example,
        )
    if found.optimizer is not optimizer:
        raise ConfigError(
            f"the {kind} belongs to another optimizer",
            given=f"a {kind} of another {type(found.optimizer).__name__}",
            expected="a scheduler for the optimizer that is passed to the function",
            hint=example,
        )
    total = getattr(found, "total_steps", None)
    if isinstance(total, int) and total < steps:
        raise ConfigError(
            f"the {kind} ends before the training",
            given=f"total_steps = {total}, train.steps = {steps}",
            expected="total_steps of train.steps or more",
            hint=f"total_steps={steps}",
        )
    return found
