"""Pipeline parallelism: each coord along one dim runs a contiguous part of the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from meshcomm.errors import LayoutError, MeshcommError
from meshcomm.mesh import Mesh

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Which part of the model a rank runs."""

    index: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """It takes the batch's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It computes the loss."""
        return self.index == self.count - 1


def split_layers(layers: int, stages: int) -> list[range]:
    """Layers of each stage: contiguous, as even as possible.

    Layers left over go one each to the middle stages, and to the first stage once all of those
    have one: the last stage has the head and the loss to compute besides, and the first keeps the
    most microbatches in flight. Raises LayoutError where a stage would have no layer.

    >>> [len(part) for part in split_layers(6, 4)], [len(part) for part in split_layers(7, 4)]
    ([1, 2, 2, 1], [2, 2, 2, 1])
    """
    even, left = divmod(layers, stages)
    if not even:
        raise LayoutError(
            f"{layers} layers cannot fill {stages} pipeline stages",
            given=f"layers = {layers}, {stages} ranks along the pipeline's dim",
            expected="at least one layer per stage",
            hint=f"layers = {stages}, or {layers} stages",
        )
    more = [*range(1, stages - 1), 0][:left]
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + even + (stage in more))
    return [range(start, end) for start, end in pairwise(bounds)]


class Runner(Protocol):
    """Forward and backward of all microbatches of one step."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Accumulate gradients over this rank's batch, split along axis 0 into microbatches.

        Returns the sum of the microbatches' losses on the last stage, None on the others.
        """
        ...


@final
class Accumulate:
    """A `Runner` without a pipeline: one microbatch after the other."""

    def __init__(self, module: nn.Module, loss: Loss, microbatches: int) -> None:
        self._module = module
        self._loss = loss
        self._microbatches = microbatches

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Runner`."""
        losses = []
        for x, target in zip(
            inputs.tensor_split(self._microbatches), targets.tensor_split(self._microbatches), strict=True
        ):
            loss = self._loss(self._module(x), target)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


@final
class Pipelined:
    """A `Runner` over `mesh.group(dim)`, by torch's schedules.

    Args:
        mesh, dim: stages lie along `dim`; its size is the number of stages, 2 or more.
        module: this rank's stage: one tensor in, one tensor out.
        loss: (last stage's output, targets of a microbatch) -> (), already scaled: gradients of
            the microbatches are summed as they come.
        microbatches: per step; "1f1b" wants at least as many as there are stages.
        schedule: "1f1b" keeps at most one microbatch per following stage in flight, "gpipe" all.
        shapes: of one microbatch at each boundary: into stage 0, between stages, out of the last.
        dtype: of what travels between stages.
    """

    def __init__(
        self,
        mesh: Mesh,
        dim: str,
        module: nn.Module,
        loss: Loss,
        *,
        microbatches: int,
        schedule: Literal["1f1b", "gpipe"],
        shapes: tuple[Shape, Shape, Shape],
        dtype: torch.dtype,
    ) -> None:
        stages = mesh.size(dim)
        if schedule == "1f1b" and microbatches < stages:
            raise LayoutError(
                f"{microbatches} microbatches cannot fill a 1f1b pipeline of {stages} stages",
                given=f"{microbatches} microbatches per step, {stages} ranks along {dim}",
                expected=f"at least {stages} microbatches",
                hint='a smaller microbatch, a larger global batch, or schedule = "gpipe"',
            )
        index = mesh.coord(dim)
        self._first, self._last = index == 0, index == stages - 1
        # Shapes are known, so stages are told instead of running a trial step to find them out.
        first, between, last = shapes

        def boundary(shape: Shape) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        inputs = torch.empty(first, dtype=torch.int64, device="meta") if self._first else boundary(between)
        stage = PipelineStage(
            module,
            index,
            stages,
            mesh.device,
            input_args=inputs,
            output_args=boundary(last if self._last else between),
            group=mesh.group(dim),
        )
        kind = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
        self._schedule = kind(stage, microbatches, loss_fn=loss, scale_grads=False)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """See `Runner`. Every rank along the dim calls this; inputs and targets are equal on all."""
        losses: list[Tensor] = []
        try:
            self._schedule.step(
                *((inputs,) if self._first else ()),
                target=targets if self._last else None,
                losses=losses if self._last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            # torch wraps what a stage raises in a RuntimeError that repeats every argument.
            if isinstance(error.__cause__, MeshcommError):
                raise error.__cause__ from error.__cause__.__cause__
            raise
        return torch.stack([loss.detach() for loss in losses]).sum() if self._last else None
