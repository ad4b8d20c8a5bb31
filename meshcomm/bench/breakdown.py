"""Where do the seconds of a training step go?"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from meshcomm.comm.spans import PASSES, Span, Spans
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Engine

# Where a traced step goes beside dims.
COMPUTE: Final = "forward and backward"
OPTIMIZER: Final = "optimizer"
REST: Final = "the rest of a step"


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
