"""How fast does a mesh train, beside the limit of the machine and beside torch's own ways? All in one run, in turn."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from meshcomm.bench.measure import in_turn, slowest
from meshcomm.bench.plain import Plain, split_by_torch
from meshcomm.comm.spans import PASSES, Span, Spans
from meshcomm.config import Config, ModelConfig, TrainConfig
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.models import model_of
from meshcomm.models.transformer import initialise
from meshcomm.parallel.compose import Engine, sections
from meshcomm.parallel.meta import materialise
from meshcomm.parallel.optimizer import decay_groups, optimizer_of
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.splits import Splits
from meshcomm.parallel.tensor import TensorSplit

# The training that meshes are compared with where the configuration has none: 4.3 million parameters, 4 microbatches
# of 4 samples on each rank along data and shard.
YARDSTICK: Final = (
    "model={ layers = 4, width = 256, heads = 8, kv_heads = 8, ff = 1024 }",
    "data={ sequence = 256 }",
)
MICROBATCH: Final = 4
MICROBATCHES: Final = 4
OURS: Final = "meshcomm"
# Where a traced step goes beside dims.
COMPUTE, OPTIMIZER, REST = "forward and backward", "optimizer", "the rest of a step"


class Way(NamedTuple):
    """One way to train. tokens: of one step, over all ranks. step: what this rank does for one.

    losses: of each step, the mean over this rank's samples, of the mesh's way over all; empty where a rank has none.
    """

    name: str
    tokens: int
    step: Callable[[], object]
    losses: list[float]


class Without(NamedTuple):
    """A way that is not measured, and why."""

    name: str
    why: str


def ways(mesh: Mesh, config: Config) -> tuple[list[Way], list[Without], Engine]:
    """The mesh's way first, the limit second, then torch's.

    config: with [parallel], [model], [data] and [train]. Called by: every rank; all of the world are in the mesh.
    """
    known = sections(mesh, config)
    part, settings, data, train = known
    assert settings is not None and data is not None
    model = model_of(settings, data, train)
    if not model.vocabulary:
        raise UnsupportedOp(
            "the samples of a measurement are tokens",
            given="a model whose inputs are no tokens: vocabulary = 0",
            expected="a model of tokens",
            hint="leave [model] out: the yardstick is trained",
        )
    engine = Engine(mesh, config, model)
    each = train.microbatch * engine.microbatches * data.sequence
    x, y = _samples(
        mesh, model.vocabulary, train.microbatch * engine.microbatches, data.sequence, engine.data_coord
    )
    losses: list[float] = []

    def ours() -> None:
        engine.step(x, y, train.lr, len(losses) + 1)
        losses.extend(step.loss for step in engine.look())

    found = [Way(OURS, each * engine.data_size, ours, losses)]
    count = _alone(mesh)

    def whole() -> nn.Module:
        """All of it on this rank, split by nothing."""
        splits = Splits.of(TensorSplit(mesh, None, getattr(torch, train.dtype)))
        stage = Stage(0, 1, range(model.layers))
        module = model.stage(splits, stage)
        materialise(module, mesh.device)
        model.fill(module, stage)
        return module

    loop = _Loop(whole(), train, engine.microbatches, x, y)
    alone = loop.step if mesh.rank < count else _nothing
    name = f"limit: {count} independent process{'es' * (count > 1)}"
    found.append(Way(name, each * count, alone, loop.losses))
    without: list[Without] = []
    if mesh.world_size > 1:
        copied: nn.Module = DistributedDataParallel(whole(), process_group=dist.new_group())
        loop = _Loop(copied, train, engine.microbatches, x, y)
        found.append(Way("torch: DDP on all ranks", each * mesh.world_size, loop.step, loop.losses))
        why = _no_counterpart(part.parts, settings)
        if why is None:
            found.append(_torch(mesh, engine, settings, x, y))
        else:
            without.append(Without("torch: the same mesh", why))
    return found, without, engine


def measured(mesh: Mesh, found: Sequence[Way], rounds: int, steps: int) -> dict[str, Any]:
    """Every way in turn, `rounds` times `steps` steps; as data that JSON can hold.

    Called by: every rank. Returns: equal on all ranks.
    """
    spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def counted(way: Way) -> Callable[[], None]:
        def call() -> None:
            thread, process = time.thread_time(), time.process_time()
            way.step()
            spent[way.name].append((time.thread_time() - thread, time.process_time() - process))

        return call

    def finish() -> None:
        if mesh.device.type != "cpu":
            torch.accelerator.synchronize(mesh.device)

    seconds = in_turn(
        {way.name: counted(way) for way in found}, rounds, steps, align=mesh.barrier, finish=finish
    )
    times = dict(zip(seconds, slowest(mesh, list(seconds.values())), strict=True))
    # The round before the others is not counted here either.
    per_step = [[fmean(each) for each in zip(*spent[way.name][steps:], strict=True)] for way in found]
    mine = torch.tensor(per_step, dtype=torch.float64, device=mesh.device)
    for dim in mesh.dims:
        mesh.all_reduce(dim, mine)
    rows = []
    for way, (threads, processes) in zip(found, mine.tolist(), strict=True):
        # Of independent processes only some ran.
        rows.append(
            {
                "way": way.name,
                "tokens": way.tokens,
                "seconds": median(times[way.name]),
                "tokens_s": median(way.tokens / each for each in times[way.name]),
                "cpu_s": processes,
                "main_threads_s": threads,
                "ratio": median(
                    (found[0].tokens / ours) / (way.tokens / theirs)
                    for ours, theirs in zip(times[OURS], times[way.name], strict=True)
                ),
            }
        )
    return {"rounds": rounds, "steps": steps, "ways": rows}


class Parts(NamedTuple):
    """Mean seconds of a step by where they go. lanes: which of the names are dims."""

    seconds: dict[str, float]
    lanes: list[str]


def parts_of_a_step(mesh: Mesh, step: Callable[[], object], engine: Engine, steps: int) -> Parts:
    """Where the seconds of one step go on a CPU, as the mean over ranks and `steps` traced steps.

    Of every dim, what is exposed: the time in which the program stood still in a call along it or waited for one, be
    it for bytes, for a rank that came late or, along the pipeline's, for its turn. "forward and backward" is without
    that. Of calls that torch makes by itself, as FSDP2 and pipelining do, only the time until they return is known:
    what torch waits for them stays in the pass, or in the rest. Called by: every rank.
    """
    spans = Spans()
    optimizing = [0.0, 0.0]

    def before(*_: Any) -> None:
        optimizing[1] = time.perf_counter()

    def after(*_: Any) -> None:
        optimizing[0] += time.perf_counter() - optimizing[1]

    hooks = [engine.optimizer.register_step_pre_hook(before), engine.optimizer.register_step_post_hook(after)]
    mesh.barrier()
    mesh.trace_into(spans)
    began = time.perf_counter()
    try:
        for _ in range(steps):
            step()
    finally:
        whole = time.perf_counter() - began
        mesh.trace_into(None)
        for hook in hooks:
            hook.remove()
    passes = [
        (each.began, each.left) for each in spans.found if each.lane == PASSES and each.left is not None
    ]
    inside, outside = exposed(spans.found, passes)
    found = {
        COMPUTE: sum(end - start for start, end in passes) - sum(inside.values()),
        OPTIMIZER: optimizing[0],
    }
    names = sorted({each.lane for each in spans.found if each.group})
    for dim in mesh.dims:
        names = sorted({name for row in mesh.objects.all_gather(dim, names) for name in row})
    found |= {name: inside.get(name, 0.0) + outside.get(name, 0.0) for name in names}
    found[REST] = whole - sum(found.values())
    values = (
        torch.tensor(list(found.values()), dtype=torch.float64, device=mesh.device) / steps / mesh.world_size
    )
    for dim in mesh.dims:
        mesh.all_reduce(dim, values)
    return Parts(dict(zip(found, values.tolist(), strict=True)), names)


def exposed(
    spans: Sequence[Span], passes: Sequence[tuple[float, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that the program stood still along each lane: inside of passes, and outside."""
    inside: dict[str, float] = defaultdict(float)
    outside: dict[str, float] = defaultdict(float)
    for span in spans:
        if not span.group:
            continue
        stood = list(span.waits)
        if span.left is not None:
            stood.append((span.began, span.left))
        for start, end in _joined(stood):
            within = any(first <= start and end <= last for first, last in passes)
            (inside if within else outside)[span.lane] += end - start
    return inside, outside


def _joined(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without overlaps: a call that waits at once has its wait inside."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


class _Loop:
    """A training loop in plain PyTorch: gradients of some microbatches added up, then AdamW."""

    def __init__(
        self, module: nn.Module, train: TrainConfig, microbatches: int, x: Tensor, y: Tensor
    ) -> None:
        self.module, self.pairs = module, list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
        self.optimizer = optimizer_of(train, x.device)(decay_groups(module))
        self.mixed = None if train.compute_dtype is None else getattr(torch, train.compute_dtype)
        self.losses: list[float] = []
        self.split_logits = False

    def step(self) -> None:
        """One step; the mean loss of this rank's samples is kept."""
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
        """Gradients travel with the last microbatch."""
        module: Any = self.module
        if isinstance(module, DistributedDataParallel):
            return nullcontext() if last else module.no_sync()
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(last)
        return nullcontext()


class _Piped:
    """The same through torch's pipeline schedules."""

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
            kind = ScheduleGPipe if engine.sections.parallel.schedule == "gpipe" else Schedule1F1B
            self.schedule = kind(made[0], microbatches, loss_fn=loss)

    def step(self) -> None:
        """One step; the mean loss of this rank's samples is kept where they come out."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] | None = [] if self.last else None
        inputs = (self.x,) if self.first else ()
        target = self.y if self.last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        self.optimizer.step()
        if losses:
            self.losses.append(float(torch.stack([loss.detach() for loss in losses]).mean()))


def _torch(mesh: Mesh, engine: Engine, settings: ModelConfig, x: Tensor, y: Tensor) -> Way:
    """`parallelize_module`, `fully_shard` and pipeline stages by the same dims."""
    part, _, data, train = engine.sections
    assert data is not None
    over = init_device_mesh(mesh.device.type, tuple(mesh.dims.values()), mesh_dim_names=tuple(mesh.dims))
    names = []
    modules: list[Any] = []
    for stage in engine.stages:
        module = Plain(settings, data.sequence, stage.layers).to(mesh.device, getattr(torch, train.dtype))
        initialise(module, settings, train.seed)
        modules.append(module)
    if part.tensor is not None and mesh.size(part.tensor) > 1:
        names.append("parallelize_module")
        for module in modules:
            split_by_torch(module, over[part.tensor], part.sequence_parallel, part.pipeline is None)
    dims = [dim for dim in part.data_dims if mesh.size(dim) > 1]
    if dims:
        names.append("fully_shard")
        for module in modules:
            for layer in module.layers.values():
                fully_shard(layer, mesh=over[tuple(dims)])
            fully_shard(module, mesh=over[tuple(dims)])
    tokens = train.global_batch * data.sequence
    if part.pipeline is not None and mesh.size(part.pipeline) > 1:
        names.append(
            f"pipelining, {'interleaved 1F1B' if len(modules) > 1 else '1F1B' if part.schedule != 'gpipe' else 'GPipe'}"
        )
        loop: _Loop | _Piped = _Piped(modules, engine.stages, over[part.pipeline], engine, x, y)
    else:
        loop = _Loop(modules[0], train, engine.microbatches, x, y)
        loop.split_logits = "parallelize_module" in names
    return Way(f"torch: {' + '.join(names) or 'a loop'}", tokens, loop.step, loop.losses)


def _no_counterpart(parts: Collection[str], settings: ModelConfig) -> str | None:
    if not settings.is_built_in:
        return "only the built-in model is written in plain PyTorch too"
    if settings.experts or "expert" in parts:
        return "experts are not in the plain model"
    if settings.dropout or settings.tied_embeddings:
        return "dropout and shared embeddings are not in the plain model"
    if "context" in parts:
        return "a split sequence is not in the plain model"
    return None


def _alone(mesh: Mesh) -> int:
    """How many ranks can compute at once without taking turns."""
    return mesh.world_size if mesh.device.type != "cpu" else min(mesh.world_size, os.cpu_count() or 1)


def _samples(mesh: Mesh, vocabulary: int, count: int, sequence: int, coord: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(coord)
    tokens = torch.randint(vocabulary, (count, sequence + 1), generator=generator).to(mesh.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _nothing() -> None:
    pass
