"""Training the built-in model in plain PyTorch: a loop with torch's own parallelism along the dims of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from meshcomm.config import ModelConfig, TrainConfig
from meshcomm.mesh import Mesh
from meshcomm.models.transformer import initialise
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.context import sequence_positions
from meshcomm.parallel.optimizer import decay_groups, optimizer_of
from meshcomm.parallel.pipeline import Stage
from tests.benchmarks.plain import Plain, split_by_torch, split_sequence


class Loop:
    """A training loop in plain PyTorch: accumulate the gradients of some microbatches, then run AdamW."""

    def __init__(
        self, module: nn.Module, train: TrainConfig, microbatches: int, x: Tensor, y: Tensor
    ) -> None:
        self.module, self.pairs = module, list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
        self.optimizer = optimizer_of(train, x.device)(decay_groups(module))
        self.mixed = None if train.compute_dtype is None else getattr(torch, train.compute_dtype)
        self.losses: list[float] = []
        self.split_logits = False

    def step(self) -> None:
        """Run one step and record the mean loss of this rank's samples."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (x, y) in enumerate(self.pairs):
            last = number == len(self.pairs) - 1
            with self._synced(last), loss_parallel() if self.split_logits else nullcontext():
                with torch.autocast(x.device.type, self.mixed) if self.mixed else nullcontext():
                    logits = self.module(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / len(self.pairs)
                loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.losses.append(float(torch.stack(losses).sum()))

    def _synced(self, last: bool) -> Any:
        """Gradients are reduced only with the last microbatch."""
        module: Any = self.module
        if isinstance(module, DistributedDataParallel):
            return nullcontext() if last else module.no_sync()
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(last)
        return nullcontext()


class Piped:
    """The same with torch's pipeline schedules."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        stages: Sequence[Stage],
        over: DeviceMesh,
        engine: Engine,
        x: Tensor,
        y: Tensor,
    ) -> None:
        train, self.x, self.y = engine.sections.train, x, y
        self.optimizer = optimizer_of(train, x.device)(decay_groups(nn.ModuleList(modules)))
        group, microbatches = over.get_group(), engine.microbatches
        made = [
            PipelineStage(module, stage.index, stage.count, x.device, group=group)
            for module, stage in zip(modules, stages, strict=True)
        ]
        self.first, self.last = made[0].is_first, made[-1].is_last
        self.losses: list[float] = []

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        if len(made) > 1:
            self.schedule: Any = ScheduleInterleaved1F1B(list(made), microbatches, loss_fn=loss)
        else:
            kind = ScheduleGPipe if engine.sections.parallel.options.schedule == "gpipe" else Schedule1F1B
            self.schedule = kind(made[0], microbatches, loss_fn=loss)

    def step(self) -> None:
        """Run one step. The last stage's rank records the mean loss of its samples."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] | None = [] if self.last else None
        inputs = (self.x,) if self.first else ()
        target = self.y if self.last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        self.optimizer.step()
        if losses:
            self.losses.append(float(torch.stack([loss.detach() for loss in losses]).mean()))


def by_torch(
    mesh: Mesh, engine: Engine, settings: ModelConfig, x: Tensor, y: Tensor
) -> tuple[str, Loop | Piped]:
    """torch's counterparts for the dims of the mesh, in words, and the loop that uses them; a plain loop if there are none.

    x, y: this rank's samples, with only its part of the tokens. Called by: every rank.
    """
    part, _, data, train = engine.sections
    assert data is not None
    over = init_device_mesh(mesh.device.type, tuple(mesh.dims.values()), mesh_dim_names=tuple(mesh.dims))
    names: list[str] = []
    modules: list[Any] = []
    for stage in engine.stages:
        module = Plain(settings, data.seq_len, stage.layers).to(mesh.device, getattr(torch, train.dtype))
        initialise(module, settings, train.seed)
        modules.append(module)
    context = engine.splits.context
    if context.size > 1:
        names.append("keys and values gathered")
        every = [
            sequence_positions(data.seq_len, context.size, coord, context.order)
            for coord in range(context.size)
        ]
        for module in modules:
            split_sequence(module, over[context.dim].get_group(), every)
    if part.tensor is not None and mesh.size(part.tensor) > 1:
        names.append("parallelize_module")
        for module in modules:
            split_by_torch(module, over[part.tensor], part.options.sequence_parallel, part.pipeline is None)
    dims = [dim for dim in part.gradient_dims if mesh.size(dim) > 1]
    # fully_shard would shard parameters that the mesh replicates, so use DDP. With tensor or pipeline, torch needs fully_shard.
    if part.shard is None and context.size > 1 and len(dims) == len(over.shape):
        names.append("DDP")
        # The buffers of ranks along context have different positions.
        alone = {"init_sync": False, "broadcast_buffers": False, "process_group": dist.new_group()}
        modules = [DistributedDataParallel(modules[0], **alone)]  # type: ignore[arg-type]
    elif dims:
        names.append("fully_shard")
        for module in modules:
            for layer in module.layers.values():
                fully_shard(layer, mesh=over[tuple(dims)])
            fully_shard(module, mesh=over[tuple(dims)])
    if part.pipeline is not None and mesh.size(part.pipeline) > 1:
        names.append(
            f"pipelining, {'interleaved 1F1B' if len(modules) > 1 else '1F1B' if part.options.schedule != 'gpipe' else 'GPipe'}"
        )
        loop: Loop | Piped = Piped(modules, engine.stages, over[part.pipeline], engine, x, y)
    else:
        loop = Loop(modules[0], train, engine.microbatches, x, y)
        loop.split_logits = "parallelize_module" in names
    return " + ".join(names) or "a loop", loop


def no_counterpart(settings: ModelConfig) -> str | None:
    """Why torch has no counterpart to compare with, or None if it has one."""
    if not settings.is_built_in:
        return "only the built-in model is written in plain PyTorch too"
    if settings.dropout or settings.tied_embeddings or settings.experts:
        return "experts, dropout and shared embeddings are not in the plain model"
    return None
