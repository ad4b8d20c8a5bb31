"""The seconds of each part of a training step, measured and predicted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import torch

from meshcomm.commands.measure import in_turn, pair, slowest
from meshcomm.config import Config
from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.parallel.compose import Engine
from meshcomm.predict.estimate import expected
from meshcomm.predict.passes import Costs, Pass, orders, timeline
from meshcomm.predict.times import counted_bytes
from meshcomm.watching.spans import PASSES, Span, Spans

# The parts of a traced step besides dims.
COMPUTE: Final = "forward and backward"
OPTIMIZER: Final = "optimizer"
REST: Final = "the rest of a step"
BUBBLE: Final = "bubble"
# More bytes than any cache holds.
_CACHE: Final = 1 << 26


class Parts(NamedTuple):
    """Mean seconds of each part of a step. lanes: the names that are dims. predicted: seconds for some of the names.
    late: for each dim, the part of its seconds before the last rank of a call arrived.
    """

    seconds: dict[str, float]
    lanes: list[str]
    late: dict[str, float]
    predicted: dict[str, float]


def parts_of_a_step(mesh: Mesh, step: Callable[[], object], engine: Engine, steps: int) -> Parts:
    """The seconds of each part of a step on a CPU, as the mean over ranks and over `steps` traced steps.

    A dim's seconds are its exposed time: the program was blocked in a call along the dim, or waited for one. It may wait
    for bytes, for a late rank or, along the pipeline's dim, for its turn. "forward and backward" excludes this time.
    For calls that torch makes (FSDP2, pipelining), only the time until they return is known: torch's later waits stay
    in the pass or in the rest. Called by: every rank.
    """
    spans = Spans()
    optimizing = [0.0, 0.0]

    def before(*_: Any) -> None:
        optimizing[1] = time.perf_counter()

    def after(*_: Any) -> None:
        optimizing[0] += time.perf_counter() - optimizing[1]

    hooks = [engine.optimizer.register_step_pre_hook(before), engine.optimizer.register_step_post_hook(after)]
    mesh.barrier()
    mesh.debug.metrics.trace_into(spans)
    began = time.perf_counter()
    try:
        for _ in range(steps):
            step()
    finally:
        whole = time.perf_counter() - began
        mesh.debug.metrics.trace_into(None)
        for hook in hooks:
            hook.remove()
    passes = [
        (each.began, each.left) for each in spans.found if each.lane == PASSES and each.left is not None
    ]
    found, predicted = {COMPUTE: 0.0, OPTIMIZER: optimizing[0]}, {}
    if (dim := engine.sections.parallel.pipeline) is not None and mesh.size(dim) > 1:
        kind, count = engine.sections.parallel.options.schedule, engine.stages[0].count
        order = orders(kind, mesh.size(dim), count // mesh.size(dim), engine.microbatches)
        mine = [each for each in spans.found if each.lane == PASSES]
        bubble = bubble_of(mesh, dim, order, mine, steps, began)
        found[BUBBLE], predicted[BUBBLE] = bubble.measured, bubble.predicted
        gaps = bubble.gaps
    else:
        gaps = []
    inside, outside = exposed(spans.found, passes, gaps)
    found[COMPUTE] = sum(end - start for start, end in passes) - sum(inside.values())
    names = sorted({each.lane for each in spans.found if each.group})
    for dim in mesh.dims:
        names = sorted({name for row in mesh.objects.all_gather(dim, names) for name in row})
    found |= {name: inside.get(name, 0.0) + outside.get(name, 0.0) for name in names}
    found[REST] = whole - sum(found.values())
    late = {name: _late(mesh, name, spans.found, gaps) for name in names}
    mean = _mean_of_ranks(mesh, steps)
    return Parts(mean(found), names, mean(late), mean(predicted))


def _mean_of_ranks(mesh: Mesh, steps: int) -> Callable[[Mapping[str, float]], dict[str, float]]:
    def mean(values: Mapping[str, float]) -> dict[str, float]:
        sums = torch.tensor(list(values.values()), dtype=torch.float64, device=mesh.device)
        for dim in mesh.dims:
            mesh.all_reduce(dim, sums)
        return dict(zip(values, (sums / steps / mesh.world_size).tolist(), strict=True))

    return mean


def _late(mesh: Mesh, lane: str, spans: Sequence[Span], gaps: Sequence[tuple[float, float]]) -> float:
    """The seconds that this rank spent in collectives along `lane` before the last rank started them."""
    mine = {(span.group, span.number): span for span in spans if span.lane == lane and span.number}
    every = mesh.objects.all_gather(lane, {key: span.began for key, span in mine.items()})
    found = 0.0
    for key, span in mine.items():
        last = max(began.get(key, span.began) for began in every)
        for start, end in _stood(span):
            found += _length(start, min(end, last), gaps)
    return found


def expected_exposure(mesh: Mesh, config: Config, rounds: int = 5) -> dict[str, float]:
    """The predicted exposed seconds of a step along each dim. Each call in `estimate.expected` takes as long as a single
    call of its size: the median of `rounds` on the slowest rank.

    If gradients are summed in several buckets, only the last counts, because the others travel during backward.
    Calls of pipelines, rings and FSDP are left out, because they overlap with compute. Empty for a model whose sizes
    are not in the configuration. Called by: every rank.
    """
    try:
        calls = expected(config, mesh.world_size)
    except ConfigError:
        return {}
    assert config.parallel is not None
    sharded = "shard" in config.parallel.parts
    seconds: dict[str, float] = defaultdict(float)
    for call in calls:
        name = call.along[0]
        if len(call.along) > 1:
            merged = [name for name, parts in mesh.layout.merge.items() if parts == call.along]
            if not merged:
                continue
            name = merged[0]
        moved = "gathered" in call.what or "scattered" in call.what
        summed = call.operation == "all_reduce" and call.what.endswith("gradients")
        if call.operation == "sendrecv" or (summed and sharded) or (moved and "activations" not in call.what):
            continue
        size = counted_bytes(call.operation, int(call.size_bytes), name, mesh.size(name))
        # Each call has its own memory, so that none is in a cache, as in a step. Small calls take as long in a cache.
        number = min(_CACHE // size, 500) + 2
        several = [pair(mesh, name, call.operation, size).ours for _ in range(number)]

        def each(several: Sequence[Callable[[], object]] = several) -> None:
            for one in several:
                one()

        times = in_turn({"": each}, rounds, 1, align=mesh.barrier)
        (worst,) = slowest(mesh, list(times.values()))
        often = 1 if call.what.endswith("gradients") else call.calls
        seconds[name] += often * median(worst) / number
    return dict(seconds)


class Bubble(NamedTuple):
    """Seconds of all steps in which this rank ran no pass, measured and predicted, and the measured intervals."""

    measured: float
    predicted: float
    gaps: list[tuple[float, float]]


def bubble_of(
    mesh: Mesh, dim: str, order: Sequence[Sequence[Pass]], spans: Sequence[Span], steps: int, since: float
) -> Bubble:
    """The idle seconds between the first pass of any rank along the pipeline and the end of the last pass.

    The prediction follows the schedule's order. Each pass takes its stage's mean, and messages take no time.
    order: each rank's passes. spans: this rank's passes. since: when this rank began. All ranks share one host's clock.
    Called by: every rank.
    """
    each = len(spans) // steps
    mine = [
        [(*_named(span), span.began, span.left or span.began) for span in spans[at : at + each]]
        for at in range(0, len(spans), each)
    ]
    ranks = mesh.objects.all_gather(dim, mine)
    count = 1 + max(each.stage for passes in order for each in passes)
    gaps: list[tuple[float, float]] = []
    idle = predicted = 0.0
    for step, passes in enumerate(mine):
        every = [row for rank in ranks for row in rank[step]]
        lengths: dict[tuple[str, int], list[float]] = defaultdict(list)
        for kind, stage, start, end in every:
            lengths[kind, stage].append(end - start)
        means = {key: fmean(found) for key, found in lengths.items()}
        costs = [
            Costs(means["F", at], means.get(("B", at), 0.0), means.get(("W", at), 0.0)) for at in range(count)
        ]
        line = timeline(order, costs)
        here = line.ranks[mesh.coord(dim)]
        predicted += line.length - sum(slot.end - slot.start for slot in here)
        edge = max(since, min(start for *_, start, _ in every))
        for *_, start, end in [*passes, ("", 0, max(end for *_, end in every), 0.0)]:
            gaps.append((edge, start))
            edge = end
        idle += sum(end - start for start, end in gaps[-len(passes) - 1 :])
    return Bubble(idle, predicted, gaps)


def _named(span: Span) -> tuple[str, int]:
    """The kind and stage of a pass. A backward pass without the weights' part is a "B" too."""
    kind, _, _, _, stage = span.call.split()
    return {"forward": "F", "backward": "B", "weights": "W"}[kind], int(stage)


def exposed(
    spans: Sequence[Span], passes: Sequence[tuple[float, float]], gaps: Sequence[tuple[float, float]] = ()
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that the program was blocked along each lane: inside passes, and outside of both passes and `gaps`."""
    inside: dict[str, float] = defaultdict(float)
    outside: dict[str, float] = defaultdict(float)
    for span in spans:
        if not span.group:
            continue
        for start, end in _stood(span):
            if any(first <= start and end <= last for first, last in passes):
                inside[span.lane] += end - start
            else:
                outside[span.lane] += _length(start, end, gaps)
    return inside, outside


def _stood(span: Span) -> list[tuple[float, float]]:
    """The intervals in which the program was blocked in a call."""
    stood = list(span.waits)
    if span.left is not None:
        stood.append((span.began, span.left))
    return _joined(stood)


def _length(start: float, end: float, gaps: Sequence[tuple[float, float]]) -> float:
    """Seconds from start to end without the parts in gaps, or 0 if the end is before the start."""
    shared = sum(max(0.0, min(end, last) - max(start, first)) for first, last in gaps)
    return max(0.0, end - start - shared)


def _joined(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlaps: the wait of a blocking call is inside the call."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
