"""Data that the user brings: what is each step made of?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from meshcomm.errors import TrainingError
from meshcomm.parallel.compose import Engine
from meshcomm.train.data.batches import repeated

Batch: TypeAlias = tuple[Tensor, Tensor]
# What the step of this number is made of, from 1 on, or one step after the other.
Data: TypeAlias = Callable[[int], Batch] | Iterable[Batch]


def placed(engine: Engine, batch: Any, whose: str) -> Batch:
    """Inputs and targets on the device of the mesh, those of a floating type in train.dtype.

    whose: "step 3". Raises TrainingError for what is not two tensors.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(map(torch.is_tensor, batch)):
        held = batch if isinstance(batch, (tuple, list)) else ()
        kinds = ", ".join(type(each).__name__ for each in held[:4])
        raise TrainingError(
            f"the data of {whose} are not inputs and targets",
            given=f"a {type(batch).__name__}" + (f" of {len(held)}: {kinds}" if held else ""),
            expected="two tensors, each with this rank's samples of the step along axis 0",
            hint="a generator that yields (inputs, targets)",
        )
    device, dtype = engine.mesh.device, engine.split.dtype
    inputs, targets = (
        each.to(device, dtype if each.is_floating_point() else each.dtype, non_blocking=True)
        for each in batch
    )
    return inputs, targets


@final
class GivenBatches:
    """Batches of the user's, with the methods of `Batches`.

    after: the steps that were done before this attempt; of an iterable, theirs are taken first.
    """

    def __init__(self, data: Data, engine: Engine, after: int) -> None:
        self._engine, self._of = engine, data
        if isinstance(data, Iterable):
            follow = repeated(data)
            for _ in range(after):
                next(follow)
            self._of = lambda step: next(follow)

    def __call__(self, step: int) -> Batch:
        """Raises TrainingError where there is nothing, or for what is not two tensors."""
        assert callable(self._of)
        return placed(self._engine, self._of(step), f"step {step}")

    def read(self, step: int) -> None:
        """Where in its data a step ends: only the steps are counted."""
        return
