"""Pipeline parallelism: each coord along one dim runs one contiguous part of the layers, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from meshcomm.comm.spans import PASSES, stretch
from meshcomm.config.parallel import PipelineSchedule, runs
from meshcomm.errors import LayoutError, MeshcommError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.random_numbers import Draws
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import Stage, split_layers, stages_of_rank

__all__ = ["Accumulate", "Pipelined", "Runner", "Stage", "split_layers"]

# Where the default generators are set first, in one process and on the first stage.
START: Final = "start"
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Shape: TypeAlias = tuple[int, ...]


class Runner(Protocol):
    """Forward and backward of all microbatches of one step."""

    def __call__(self, inputs: Tensor, targets: Tensor, **more: Tensor) -> Tensor | None:
        """Accumulate gradients over this rank's batch, split along axis 0 into microbatches.

        more: what every stage's module is given by name besides, split in the same way.
        Returns the sum of the microbatches' losses on the last stage, None on the others.
        """
        ...

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The same without a backward pass, nothing being kept for one. Returns what a call does."""
        ...


@final
class Accumulate:
    """A `Runner` without a pipeline: one microbatch after the other."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        microbatches: int,
        before: Callable[[bool], None] | None = None,
        mesh: Mesh | None = None,
        draws: Draws | None = None,
    ) -> None:
        self._module = module
        self._draws = draws
        # Of whose ranks a trace may be taken.
        self._mesh = mesh
        self._loss = loss
        self._microbatches = microbatches
        # Told before each microbatch whether it is the last.
        self._before = before

    def __call__(self, inputs: Tensor, targets: Tensor, **more: Tensor) -> Tensor:
        """See `Runner`."""
        count = self._microbatches
        losses = []
        parts = {name: tensor.tensor_split(count) for name, tensor in more.items()}
        for i, (x, target) in enumerate(
            zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        ):
            if self._before is not None:
                self._before(i == count - 1)
            if self._draws is not None:
                self._draws.microbatch(i, START)
            here = {name: part[i] for name, part in parts.items()}
            spans = None if self._mesh is None else self._mesh.metrics.spans
            with stretch(spans, PASSES, f"forward {i}"):
                loss = self._loss(self._module(x, **here), target)
            with stretch(spans, PASSES, f"backward {i}"):
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Runner`."""
        count = self._microbatches
        losses = []
        pairs = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for i, (x, target) in enumerate(pairs):
            if self._draws is not None:
                self._draws.microbatch(i, START)
            losses.append(self._loss(self._module(x), target))
        return torch.stack(losses).sum()


@final
class Pipelined:
    """A `Runner` over `mesh.group(dim)`, by torch's schedules.

    Args:
        mesh, dim: ranks of the pipeline lie along `dim`, 2 or more.
        modules: this rank's stages, one tensor in, one tensor out; a module alone is its only one.
            Stage s lies on coord s % ranks, so the i-th is stage i * ranks + coord (see
            `stages_of_rank`). As many on every rank.
        loss: (last stage's output, targets of a microbatch) -> (), already scaled: gradients of
            the microbatches are summed as they come. The tensor that it returns is detached
            once its backward pass has run.
        microbatches: per step; see `meshcomm.config.parallel.runs` for the numbers that a
            schedule runs.
        schedule: which pass comes when; `meshcomm plan CONFIG --schedule` draws it. What holds
            for gradients and their hooks: `schedule_properties`.
        shapes: of one microbatch at each boundary: into stage 0, between stages, out of the last.
            They are told, so no trial step is run to find them out.
        dtype: of what travels between stages, gradients too, and of the last output. A module that returns
            another one is refused by torch, or read wrongly: cast at its end.
        on_stage_done: called with the position in `modules` of a stage when its gradients of this
            step are complete, which is while other stages of the rank still run. As an order of
            calls it is the same on every rank with this coord along `dim`.
        draws: what sets the default generators before each forward pass of a stage; None: nothing does.

    Raises LayoutError where the sizes do not fit the schedule, UnsupportedOp where a module that
    torch.compile made meets zero_bubble.
    """

    def __init__(
        self,
        mesh: Mesh,
        dim: str,
        modules: nn.Module | Sequence[nn.Module],
        loss: Loss,
        *,
        microbatches: int,
        schedule: PipelineSchedule,
        shapes: tuple[Shape, Shape, Shape],
        dtype: torch.dtype,
        on_stage_done: Callable[[int], None] | None = None,
        draws: Draws | None = None,
    ) -> None:
        mine = [modules] if isinstance(modules, nn.Module) else list(modules)
        ranks = mesh.size(dim)
        _check(schedule, microbatches, ranks, len(mine), dim)
        properties = schedule_properties(schedule)
        if properties.splits_backward:
            for module in mine:
                module.register_forward_hook(_no_view)
        first, between, last = shapes

        def boundary(shape: Shape) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

        count = ranks * len(mine)
        stages = []
        for position, index in enumerate(stages_of_rank(mesh.coord(dim), ranks, len(mine))):
            tokens = torch.empty(first, dtype=torch.int64, device="meta")
            stage = _ToldStage(
                mine[position],
                index,
                count,
                mesh.device,
                input_args=boundary(between) if index else tokens,
                output_args=boundary(last if index == count - 1 else between),
                group=mesh.group(dim),
            )
            stage.position, stage.on_done, stage.mesh = position, on_stage_done, mesh
            stage.draws = draws
            stages.append(stage)
        self._mesh, self._dim, self._loss, self._microbatches = mesh, dim, loss, microbatches
        self._stages, self._between = stages, (between, dtype)
        self._first = stages[0].is_first
        self._last = stages[-1].is_last
        self._schedule = _schedule(schedule, stages, microbatches, loss)

    def __call__(self, inputs: Tensor, targets: Tensor, **more: Tensor) -> Tensor | None:
        """See `Runner`. Every rank along the dim calls this; inputs and targets are equal on all."""
        losses: list[Tensor] = []
        try:
            self._schedule.step(
                # torch 2.11 wants the strides of the first microbatch that it was told of.
                *((inputs.contiguous(),) if self._first else ()),
                target=targets if self._last else None,
                losses=losses if self._last else None,
                return_outputs=False,
                **more,
            )
        except RuntimeError as error:
            # torch wraps what a stage raises in a RuntimeError that repeats every argument.
            if isinstance(error.__cause__, MeshcommError):
                raise error.__cause__ from error.__cause__.__cause__
            raise
        return torch.stack([loss.detach() for loss in losses]).sum() if self._last else None

    @torch.no_grad()
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """See `Runner`. Every rank along the dim calls this; one message for each microbatch and boundary.

        Each microbatch goes through all of a rank's stages before the next one: with one stage on each rank all of them
        work at the same time.
        """
        mesh, dim, count = self._mesh, self._dim, self._microbatches
        coord, ranks = mesh.coord(dim), mesh.size(dim)
        shape, dtype = self._between
        losses: list[Tensor] = []
        pairs = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        for microbatch, (tokens, target) in enumerate(pairs):
            for stage in self._stages:
                x = tokens
                if not stage.is_first:
                    x = torch.empty(shape, dtype=dtype, device=mesh.device)
                    mesh.recv(dim, x, src=(coord - 1) % ranks)
                stage.seed(microbatch)
                y = stage.submod(x)
                if stage.is_last:
                    losses.append(self._loss(y, target))
                else:
                    mesh.send(dim, y.to(dtype).contiguous(), (coord + 1) % ranks)
        return torch.stack(losses).sum() if losses else None


class _ToldStage(PipelineStage):
    """A stage that says when its gradients are complete, and a trace when each of its passes runs."""

    mesh: Mesh
    position: int = 0
    draws: Draws | None = None
    on_done: Callable[[int], None] | None = None

    def seed(self, microbatch: int) -> None:
        """Set the default generators for a forward pass."""
        if self.draws is not None:
            self.draws.microbatch(microbatch, START if self.stage_index == 0 else f"stage {self.stage_index}")

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        self.seed(fwd_chunk_id)
        with stretch(self.mesh.metrics.spans, PASSES, f"forward {fwd_chunk_id} of stage {self.stage_index}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **more)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with stretch(self.mesh.metrics.spans, PASSES, f"backward {bwd_chunk_id} of stage {self.stage_index}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **more)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with stretch(self.mesh.metrics.spans, PASSES, f"weights {bwd_chunk_id} of stage {self.stage_index}"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **more)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # Every schedule calls this right after the stage's last backward pass of a step.
        super().perform_reduce_grad(grad_scale_factor)
        if self.on_done is not None:
            self.on_done(self.position)


def _schedule(schedule: PipelineSchedule, stages: list[_ToldStage], microbatches: int, loss: Loss) -> Any:
    if schedule in ("gpipe", "1f1b"):
        single = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        return single(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    many: list[Any] = list(stages)
    if schedule == "interleaved_1f1b":
        return ScheduleInterleaved1F1B(many, microbatches, loss_fn=loss, scale_grads=False)

    def no_view(output: Tensor, targets: Tensor) -> Tensor:
        return _no_view(None, None, loss(output, targets))

    try:
        return ScheduleInterleavedZeroBubble(many, microbatches, loss_fn=no_view, scale_grads=False)
    except RuntimeError as error:
        raise UnsupportedOp(
            "zero_bubble cannot run a stage that torch.compile made",
            given=str(error),
            expected="modules whose backward pass can be run in two halves",
            hint='no torch.compile, or schedule = "interleaved_1f1b"',
        ) from error


def _no_view(_module: object, _inputs: object, output: Tensor) -> Tensor:
    """The output in memory of its own: torch detaches it in place, which a view refuses."""
    return output.clone() if output._is_view() else output


def _check(schedule: PipelineSchedule, microbatches: int, ranks: int, each: int, dim: str) -> None:
    if ranks < 2:
        raise LayoutError(
            f"a pipeline along {dim} has one rank",
            given=f"{ranks} rank along {dim}",
            expected="2 or more",
            hint="Accumulate(module, loss, microbatches) runs all stages on one rank",
        )
    several = schedule_properties(schedule).several_stages
    if (each < 2) if several else (each != 1):
        raise LayoutError(
            f"{schedule} does not run {each} stage{'' if each == 1 else 's'} on each rank",
            given=f"{each} modules",
            expected="2 or more stages on each rank" if several else "1 stage on each rank",
            hint='schedule = "1f1b"' if each == 1 else 'schedule = "interleaved_1f1b"',
        )
    if runs(schedule, microbatches, ranks):
        return
    given = f"{microbatches} microbatches per step, {ranks} ranks along {dim}"
    if microbatches < ranks:
        raise LayoutError(
            f"{microbatches} microbatches cannot fill a {schedule} pipeline of {ranks} {'ranks' if several else 'stages'}",
            given=given,
            expected=f"at least {ranks} microbatches",
            hint='a smaller microbatch, a larger global batch, or schedule = "gpipe"',
        )
    rounds = ranks if schedule == "interleaved_1f1b" else microbatches // ranks
    raise LayoutError(
        f"{schedule} cannot divide {microbatches} microbatches into equal rounds",
        given=given,
        expected=f"a multiple of {rounds}",
        hint=f"{microbatches // ranks * ranks} microbatches",
    )
