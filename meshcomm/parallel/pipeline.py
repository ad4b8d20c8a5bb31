"""Pipeline parallelism: each coord along one dim runs one or more contiguous stages of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from meshcomm.config.parallel import PipelineSchedule, runs
from meshcomm.errors import LayoutError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.parallel.dropout import Draws
from meshcomm.parallel.loss import own_leaves
from meshcomm.parallel.tensor import local
from meshcomm.parallel.torch_private import is_view
from meshcomm.parallel.tree import in_parts, samples_of, sliced, tensors_of
from meshcomm.predict.passes import schedule_properties
from meshcomm.predict.stages import Stage, split_layers, stages_of_rank
from meshcomm.watching.spans import PASSES, stretch

__all__ = ["Accumulate", "Pipelined", "Stage", "split_layers"]

# The name under which the default generators are seeded first, in one process and on the first stage.
START: Final = "start"
Loss: TypeAlias = Callable[..., Tensor]
Shape: TypeAlias = tuple[int, ...]


@final
class Accumulate:
    """Runs the forward and backward passes of a step, one microbatch after another.

    If inputs need gradients, a loss may differentiate outputs by them, also in forward passes only.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        loss: Loss,
        microbatches: int,
        before: Callable[[bool], None] | None = None,
        mesh: Mesh | None = None,
        draws: Draws | None = None,
    ) -> None:
        self._module, self._loss, self._microbatches = module, loss, microbatches
        # `before` is called before each microbatch, with whether it is the last. `mesh` records spans.
        self._before, self._mesh, self._draws = before, mesh, draws

    def around_forward(self, run: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        """From now on, call `run(module, forward, *inputs)` in place of each forward pass. modules: the only one."""
        self._module = partial(run, modules[0], self._module)

    def __call__(self, inputs: Any, targets: Any, **more: Tensor) -> Tensor:
        """Accumulate gradients over this rank's batch, split along axis 0 into microbatches. Return the sum of the losses.

        more: further arguments of the module, by name, split in the same way.
        """
        losses, spans = [], None if self._mesh is None else self._mesh.debug.metrics.spans
        for i, (x, target, named) in enumerate(_microbatches(self._microbatches, inputs, targets, more)):
            if self._before is not None:
                self._before(i == self._microbatches - 1)
            with stretch(spans, PASSES, f"forward {i}"):
                loss = self._loss_of(i, x, target, named)
            with stretch(spans, PASSES, f"backward {i}"):
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def forward(self, inputs: Any, targets: Any, samples: int | None = None, **more: Tensor) -> Tensor:
        """Run forward passes only, without saving anything for backward.

        samples: if given, only the first samples count. The loss is called with the weight of its microbatch, if that is not 1:
            the share of its samples that count.
        """
        losses = []
        for i, (x, target, named) in enumerate(_microbatches(self._microbatches, inputs, targets, more)):
            weight = 1.0
            if samples is not None:
                # Without samples that count, the pass still takes part in the calls of the other ranks.
                size = samples_of(x)
                size_of_part = min(size, max(0, samples - i * size))
                weight = size_of_part / size
                x, target, named = (sliced(part, slice(size_of_part or size)) for part in (x, target, named))
            losses.append(self._loss_of(i, x, target, named, weight).detach())
        return torch.stack(losses).sum()

    def _loss_of(
        self, number: int, x: Any, target: Any, named: Mapping[str, Tensor], weight: float = 1.0
    ) -> Tensor:
        if self._draws is not None:
            self._draws.microbatch(number, START)
        differentiates = any(tensor.requires_grad for tensor in tensors_of(x))
        if differentiates:
            x, target = own_leaves(x, target)
        with torch.enable_grad() if differentiates else nullcontext():
            y = self._module(x, **named)
            return self._loss(y, target) if weight == 1 else self._loss(y, target, weight)


def _microbatches(
    count: int, inputs: Any, targets: Any, more: Mapping[str, Tensor]
) -> Iterator[tuple[Any, Any, dict[str, Tensor]]]:
    """Yield the inputs, targets and further arguments of each microbatch."""
    parts = {name: tensor.tensor_split(count) for name, tensor in more.items()}
    for i, (x, target) in enumerate(zip(in_parts(inputs, count), in_parts(targets, count), strict=True)):
        yield x, target, {name: part[i] for name, part in parts.items()}


@final
class Pipelined:
    """`Accumulate` for pipeline stages on `mesh.group(dim)`, run by torch's pipeline schedules.

    Args:
        mesh, dim: the pipeline consists of the ranks along `dim`, of which there must be at least 2.
        modules: this rank's stages, or its only stage. Each stage takes one tensor and returns one tensor. All ranks have
            equally many stages. The i-th stage on a rank is stage i * ranks + coord (see `stages_of_rank`).
        loss: (last stage's output, microbatch's targets) -> (), already scaled, because the microbatches' gradients
            are summed. The result is detached after the backward pass.
        microbatches: microbatches per step; see `meshcomm.config.parallel.runs` for the counts that a schedule supports.
        schedule: the order of passes. `schedule_properties` lists each schedule's rules for gradients and their hooks.
        shapes: a microbatch's shape at each boundary: into stage 0, between stages, and out of the last stage.
        dtype: the dtype of the last stage's output and of all tensors sent between stages, including gradients. Each module
            must return this dtype, because torch rejects or misreads any other dtype.
        draws: if given, seeds the default generators before each forward pass of a stage.

    Raises LayoutError if the sizes do not fit the schedule, and UnsupportedOp if zero_bubble is used with modules that
    torch.compile has compiled.
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
        boundary = partial(torch.empty, dtype=dtype, device="meta", requires_grad=True)
        count = ranks * len(mine)
        stages = []
        for module, index in zip(mine, stages_of_rank(mesh.coord(dim), ranks, len(mine)), strict=True):
            tokens = torch.empty(first, dtype=torch.int64, device="meta")
            stage = _PipelineStage(
                module,
                index,
                count,
                mesh.device,
                input_args=boundary(between) if index else tokens,
                output_args=boundary(last if index == count - 1 else between),
                group=mesh.group(dim),
            )
            stage.mesh, stage.draws = mesh, draws
            stages.append(stage)
        self._mesh, self._dim, self._loss, self._microbatches = mesh, dim, loss, microbatches
        self._stages, self._between = stages, (between, dtype)
        self._first, self._last = stages[0].is_first, stages[-1].is_last
        self._targets: list[Any] = []
        self._schedule = _schedule(schedule, stages, microbatches, self._loss_of)

    def _loss_of(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a microbatch. target: its targets; or its number, if they are a tree, which torch does not split."""
        return self._loss(outputs, self._targets[int(target)] if self._targets else target)

    def around_forward(self, run: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        """The same as in `Accumulate`, for this rank's stages."""
        for stage, module in zip(self._stages, modules, strict=True):
            stage.around = partial(run, module)

    def __call__(self, inputs: Tensor, targets: Any, **more: Tensor) -> Tensor | None:
        """Like `Accumulate`, but returns None except on the last stage.

        Called by: every rank along the dim, with equal inputs and targets.
        """
        losses: list[Tensor] = []
        target: Any = targets if self._last else None
        self._targets = []
        if self._last and not isinstance(targets, Tensor):
            self._targets = in_parts(targets, self._microbatches)
            target = torch.arange(self._microbatches)
        try:
            self._schedule.step(
                # torch 2.11 expects each microbatch to have the same strides as the first.
                *((inputs.contiguous(),) if self._first else ()),
                target=target,
                losses=losses if self._last else None,
                return_outputs=False,
                **more,
            )
        except RuntimeError as error:
            # torch wraps an exception that a stage raises in a RuntimeError that repeats every argument.
            if isinstance(error.__cause__, MeshcommError):
                raise error.__cause__ from error.__cause__.__cause__
            raise
        return torch.stack([loss.detach() for loss in losses]).sum() if self._last else None

    @torch.no_grad()
    def forward(self, inputs: Tensor, targets: Any, **more: Tensor) -> Tensor | None:
        """Run forward passes only. Every rank along the dim calls this. One message is sent per microbatch and stage boundary.

        A rank runs all its stages on a microbatch before it starts the next microbatch. With one stage per rank, all
        ranks work at the same time.
        """
        mesh, dim, count = self._mesh, self._dim, self._microbatches
        coord, ranks = mesh.coord(dim), mesh.size(dim)
        shape, dtype = self._between
        losses: list[Tensor] = []
        for microbatch, (tokens, target, named) in enumerate(_microbatches(count, inputs, targets, more)):
            for stage in self._stages:
                x = tokens
                if not stage.is_first:
                    x = torch.empty(shape, dtype=dtype, device=mesh.device)
                    mesh.recv(dim, x, src=(coord - 1) % ranks)
                stage.seed(microbatch)
                y = stage.submod(x, **named)
                if stage.is_last:
                    losses.append(self._loss(y, target))
                else:
                    mesh.send(dim, y.to(dtype).contiguous(), (coord + 1) % ranks)
        return torch.stack(losses).sum() if losses else None


class _PipelineStage(PipelineStage):
    """A stage that seeds the generators before its forward passes, and records when each of its passes runs."""

    mesh: Mesh
    draws: Draws | None = None
    # Called with a forward pass and its inputs, in place of it.
    around: Callable[..., Any] | None = None

    def forward_maybe_with_nosync(self, *args: Any, **more: Any) -> Any:
        forward: Callable[..., Any] = super().forward_maybe_with_nosync
        return forward(*args, **more) if self.around is None else self.around(forward, *args, **more)

    def seed(self, microbatch: int) -> None:
        """Seed the default generators for a forward pass."""
        if self.draws is not None:
            self.draws.microbatch(microbatch, START if self.stage_index == 0 else f"stage {self.stage_index}")

    def _span(self, kind: str, microbatch: int) -> AbstractContextManager[Any]:
        return stretch(
            self.mesh.debug.metrics.spans, PASSES, f"{kind} {microbatch} of stage {self.stage_index}"
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        self.seed(fwd_chunk_id)
        with self._span("forward", fwd_chunk_id):
            try:
                return super().forward_one_chunk(fwd_chunk_id, *args, **more)
            except RuntimeError as error:
                # torch wraps the model's error in a message with all arguments, which hides the error.
                if "failed to run forward" in str(error) and error.__cause__ is not None:
                    raise error.__cause__ from None
                raise

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with self._span("backward", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **more)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        # Sent tensors must be contiguous; torch checks this for outputs only.
        if bwd_chunk_id in self.bwd_cache:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in gradients)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        with self._span("weights", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **more)


def _schedule(schedule: PipelineSchedule, stages: list[_PipelineStage], microbatches: int, loss: Loss) -> Any:
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
            "zero_bubble cannot run a stage that torch.compile has compiled",
            given=str(error),
            expected="modules whose backward pass can be run in two halves",
            hint='remove torch.compile, or set schedule = "interleaved_1f1b"',
        ) from error


def _no_view(_module: object, _inputs: object, output: Tensor) -> Tensor:
    """Return the output, cloned if it is a view: torch detaches the output in place, which is not allowed for a view."""
    return output.clone() if is_view(output) else output


def _check(schedule: PipelineSchedule, microbatches: int, ranks: int, per_rank: int, dim: str) -> None:
    several = schedule_properties(schedule).several_stages
    if ranks < 2:
        what, expected = f"a pipeline along {dim} has one rank", "2 or more ranks"
        hint = "Accumulate(module, loss, microbatches) runs all stages on one rank"
    elif (per_rank < 2) if several else (per_rank != 1):
        what = f"{schedule} does not run {per_rank} stage{'' if per_rank == 1 else 's'} on each rank"
        expected = "2 or more stages on each rank" if several else "1 stage on each rank"
        hint = 'schedule = "1f1b"' if per_rank == 1 else 'schedule = "interleaved_1f1b"'
    elif runs(schedule, microbatches, ranks):
        return
    elif microbatches < ranks:
        size = f"{ranks} {'ranks' if several else 'stages'}"
        what = f"{microbatches} microbatches cannot fill a {schedule} pipeline of {size}"
        expected = f"at least {ranks} microbatches"
        hint = 'a smaller microbatch, a larger global batch, or parallel.options.schedule = "gpipe"'
    else:
        what = f"{schedule} cannot divide {microbatches} microbatches into equal rounds"
        rounds = ranks if schedule == "interleaved_1f1b" else microbatches // ranks
        expected, hint = f"a multiple of {rounds}", f"{microbatches // ranks * ranks} microbatches"
    given = f"{microbatches} microbatches per step, {ranks} ranks along {dim}, {per_rank} modules"
    raise LayoutError(what, given=given, expected=expected, hint=hint)


@final
class TiedWeight:
    """Ties the embedding on a pipeline's first coord and the head on its last coord, so that they stay equal.

    The two holders exchange their gradients and add them; the ranks between them do nothing. Both holders add the same two
    gradients, so the sums are bitwise equal, and identical optimizers keep the copies equal. If the weight is split along
    other dims (vocabulary, data), both holders must split it in the same way. Neither copy is transposed.

    Args:
        mesh, dim: the pipeline's mesh and dim.
        weight: the parameter on the first and the last coord, None on all others. In a
            pipeline of one rank, nothing is exchanged, and both modules must use the same object.

    Called by: every rank along `dim`, for the constructor and all methods.
    Raises LayoutError if a holder passes no weight, or another coord passes one.
    """

    def __init__(self, mesh: Mesh, dim: str, weight: nn.Parameter | None) -> None:
        self._mesh, self._dim, self._weight = mesh, dim, weight
        size, coord = mesh.size(dim), mesh.coord(dim)
        holds = coord in (0, size - 1)
        if holds != (weight is not None):
            raise LayoutError(
                f"coord {coord} of {size} along {dim} {'holds' if holds else 'does not hold'} the tied weight",
                given="no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}",
                expected="the embedding's weight on coord 0, the head's weight on the last coord, None on all others",
                hint="TiedWeight(mesh, dim, parameter if this rank has it else None)",
            )
        self.is_owner = coord == 0
        """Whether this rank counts the weight, so that norms, sizes and checkpoints include it once."""
        self._other = (size - 1 - coord) if size > 1 and holds else None

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the weight from coord 0 to the last coord. Call this once, after both copies are initialized."""
        if self._weight is None or self._other is None:
            return
        part = local(self._weight)
        if self.is_owner:
            self._mesh.send(self._dim, part, self._other)
        else:
            part.copy_(self._mesh.recv(self._dim, torch.empty_like(part), src=self._other))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace both gradients with their sum, in place. Call this after the step's last backward pass.

        Call this before or after the sum along the data dims, but not while that sum is in progress. Raises
        TrainingError if this rank's weight has no gradient; this rank's message is sent anyway.
        """
        if self._weight is None or self._other is None:
            return
        gradient = self._weight.grad
        mine = torch.zeros_like(local(self._weight)) if gradient is None else local(gradient)
        theirs: Tensor = torch.empty_like(mine)
        self._mesh.exchange(self._dim, [(mine, self._other)], [(theirs, self._other)])
        if gradient is None:
            raise TrainingError(
                "the tied weight got no gradient",
                given=f"the {'embedding' if self.is_owner else 'head'} of shape {tuple(self._weight.shape)}",
                expected="a .grad on both holders",
                hint="call sum_gradients after the last backward pass, and use the weight in forward",
            )
        mine.add_(theirs)
