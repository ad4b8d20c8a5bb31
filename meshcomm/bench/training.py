"""How fast does a mesh train, beside the limit of the machine and beside torch's own ways? All in one run, in turn."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshcomm.bench.loops import Loop, by_torch, no_counterpart
from meshcomm.bench.measure import in_turn, slowest
from meshcomm.config import Config
from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh
from meshcomm.models import model_of
from meshcomm.parallel.compose import Engine, sections
from meshcomm.parallel.meta import materialise
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

    loop = Loop(whole(), train, engine.microbatches, x, y)
    alone = loop.step if mesh.rank < count else _nothing
    name = f"limit: {count} independent process{'es' * (count > 1)}"
    found.append(Way(name, each * count, alone, loop.losses))
    without: list[Without] = []
    if mesh.world_size > 1:
        copied: nn.Module = DistributedDataParallel(whole(), process_group=dist.new_group())
        loop = Loop(copied, train, engine.microbatches, x, y)
        found.append(Way("torch: DDP on all ranks", each * mesh.world_size, loop.step, loop.losses))
        why = no_counterpart(part.parts, settings)
        if why is None:
            mine = [engine.splits.context.split(samples, 1) for samples in (x, y)]
            name, same = by_torch(mesh, engine, settings, *mine)
            found.append(Way(f"torch: {name}", each * engine.data_size, same.step, same.losses))
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


def _alone(mesh: Mesh) -> int:
    """How many ranks can compute at once without taking turns."""
    return mesh.world_size if mesh.device.type != "cpu" else min(mesh.world_size, os.cpu_count() or 1)


def _samples(mesh: Mesh, vocabulary: int, count: int, sequence: int, coord: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(coord)
    tokens = torch.randint(vocabulary, (count, sequence + 1), generator=generator).to(mesh.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _nothing() -> None:
    pass
