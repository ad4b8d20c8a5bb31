"""Dry runs of a training config, and the results of any dry run as plain data: verdicts, memory, calls and times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshcomm.config import Config, TopologyConfig
from meshcomm.dryrun.rank import pretended_step
from meshcomm.dryrun.replay import Replay, Seconds, replay
from meshcomm.dryrun.world import World, chosen, dry_world
from meshcomm.predict.links import ASSUMED_TFLOPS, Machine, discovered, machine
from meshcomm.predict.links import span as links_of
from meshcomm.predict.lint import footprint
from meshcomm.predict.times import OPERATIONS, Operation, fastest
from meshcomm.train.data.load import named_files

if TYPE_CHECKING:
    from meshcomm.dryrun.compare import Members
    from meshcomm.dryrun.rank import RankStep
    from meshcomm.watching.spans import Span

Facts = dict[str, Any]

# These operations are timed like the ones that move the same bytes over the same links.
_LIKE: Final[dict[str, Operation]] = {"gather": "reduce", "scatter": "broadcast"}


def dry_training(settings: Config, world: int, ranks: Sequence[int] = (), sample: int = 8) -> Facts:
    """Dry-run the training as ranks that represent all of `world`, and return the results as plain data.

    ranks, sample: additional ranks to run, see `chosen`. Raises the same errors as `chosen` and `dry_world`; TrainingError for data
        files that do not exist. Their content is not read.
    """
    began = time.perf_counter()
    settings = settings.resolved(world)
    unread = {} if settings.data is None else named_files(settings.data)
    topology = discovered(settings.topology, os.environ)
    pipeline = None if settings.parallel is None else settings.parallel.pipeline
    program, layout = partial(pretended_step, settings), settings.plan(world).layout
    first = chosen(layout, pipeline, also=ranks, sample=sample)
    ran = dry_world(program, layout, pipeline, first, replayed=priced(topology))
    return dry_facts(ran, settings, topology, time.perf_counter() - began) | {"unread": unread}


def priced(topology: TopologyConfig) -> Callable[..., Replay]:
    """Return the replay function. It computes times only if it is known which ranks share a node."""
    links = machine(topology)
    if links is None:
        return replay
    flop_s = 1e-12 / (topology.tflops or ASSUMED_TFLOPS)
    speed = topology.memory_bandwidth_gbytes_s
    return partial(replay, seconds=prices(links), flop_s=flop_s, byte_s=1e-9 / speed if speed else 0.0)


def prices(machine: Machine) -> Seconds:
    """Return a function that computes a call's alpha-beta time with the best algorithm that a backend would choose, as
    in `meshcomm costs`.

    Barriers and exchanges of Python objects are short, and their time is taken as 0.
    """

    @cache
    def priced(operation: Operation, nbytes: int, members: Members) -> float:
        route = links_of(np.array([members]), machine).route
        return fastest(operation, route, nbytes).seconds(nbytes)

    def seconds(span: Span, members: Members) -> float:
        if span.parts:
            return priced("sendrecv", span.nbytes // len(span.parts), members)
        name = span.call.removesuffix(" (torch)")
        operation = _LIKE.get(name) or next(
            (operation for operation in OPERATIONS if operation == name), None
        )
        return 0.0 if operation is None or not span.nbytes else priced(operation, span.nbytes, members)

    return seconds


def dry_facts(world: World, settings: Config | None, topology: TopologyConfig, seconds: float) -> Facts:
    """Return a `World` as JSON-serializable data. settings: the training's settings, or None for a script. seconds: how
    long the dry run took.
    """
    layout, steps = world.layout, list(world.steps.values())
    limit = topology.memory_gbytes
    stages = [_stage(stage, ran) for stage, ran in world.stages().items()]
    largest = max(stages, key=lambda stage: stage["reserved_bytes"])
    part = max(largest["parts"], key=lambda name: largest["parts"][name])
    buffers = 0
    if settings is not None:
        buffers = footprint(settings, settings.plan(layout.world_size), layout.world_size).nccl_mb * 10**6
    return {
        "world_size": layout.world_size,
        "dims": dict(layout.dims),
        "pipeline": world.pipeline,
        "ran": [step.rank for step in steps],
        "part": _part(steps),
        "unlike": world.unlike,
        "unseen": max(step.unseen for step in steps),
        "findings": [finding._asdict() for finding in world.findings],
        "memory": {
            "stages": stages,
            "largest_stage": largest["stage"],
            "limit_bytes": None if limit is None else int(limit * 1e9),
            "communicators_bytes": buffers,
            "fits": None if limit is None else largest["reserved_bytes"] + buffers <= limit * 1e9,
            "most": part,
            "less_by": (_LESS if settings is not None else _LESS_OF_A_SCRIPT)[part],
        },
        "calls": _calls(steps, world.replay, machine(topology)),
        "step": _step(world, settings, topology),
        "took_s": seconds,
    }


def _part(steps: Sequence[RankStep]) -> str:
    """Return a description of the part of the program that calls and times cover."""
    parts = list(dict.fromkeys(step.part for step in steps))
    return parts[0] if len(parts) == 1 else "the program (some ranks end earlier)"


# Ways to reduce the memory of each purpose, with settings first.
_LESS: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("activations", "rest"),
        "train.activation_checkpointing, a smaller train.micro_batch_size, or more ranks along parallel.context or parallel.tensor",
    ),
    **dict.fromkeys(
        ("weights", "gradients", "optimizer"),
        "more ranks along parallel.shard, parallel.pipeline or parallel.tensor",
    ),
    "gathered": "parallel.options.reshard = true, or more ranks along parallel.tensor or parallel.pipeline",
}
# The same for a program that does not have these settings.
_LESS_OF_A_SCRIPT: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("activations", "rest"), "activation checkpointing, smaller micro-batches, or more ranks"
    ),
    **dict.fromkeys(("weights", "gradients", "optimizer"), "sharding or splitting them across more ranks"),
    "gathered": "resharding after the forward pass, or smaller fully_shard units",
}


def _stage(stage: int, ran: Sequence[RankStep]) -> Facts:
    step = max(ran, key=lambda rank_step: (rank_step.reserved, rank_step.peak.nbytes))
    return {
        "stage": stage,
        "ranks": len(ran),
        "rank": step.rank,
        "coords": dict(step.coords),
        "parameters": step.parameters,
        "before_bytes": sum(step.before.values()),
        "peak_bytes": step.peak.nbytes,
        "reserved_bytes": step.reserved,
        "parts": dict(step.peak.parts),
        "during": step.peak.during,
        "at": step.peak.at,
        "operator": step.peak.operator,
    }


def _calls(steps: Sequence[RankStep], met: Replay | None, links: Machine | None) -> list[Facts]:
    """Return, for each dim, the largest byte and call counts of each kind on any rank, and the longest time for which any rank
    is blocked.

    link: the slowest link that any examined group crosses; None if it is unknown which ranks share a node.
    """
    dims: dict[str, dict[str, tuple[int, int]]] = {}
    for step in steps:
        for row in step.rows:
            calls = dims.setdefault(row.dim, {})
            calls[row.call] = max(calls.get(row.call, (0, 0)), (row.nbytes, row.calls))
    groups: dict[str, set[tuple[int, ...]]] = {}
    for step in steps:
        for span in step.calls:
            groups.setdefault(span.lane, set()).add(tuple(step.groups[span.group]))
    # Without links, calls have no times, so the replay's seconds mean nothing.
    if links is None:
        met = None
    rows = []
    for dim, calls in dims.items():
        members = sorted(groups.get(dim, ()))
        crossed = None if links is None or not members else links_of(np.array(members), links).slowest
        times = [] if met is None else [(met.dims[r][dim], r) for r in met.sound if dim in met.dims[r]]
        longest, rank = max(times, key=lambda pair: pair[0].waits, default=(None, -1))
        rows.append(
            {
                "dim": dim,
                "link": crossed,
                "calls": [
                    {"call": call, "calls": number, "bytes": nbytes}
                    for call, (nbytes, number) in calls.items()
                ],
                "bytes": sum(nbytes for nbytes, _ in calls.values()),
                "exposed_s": None if longest is None else longest.waits - longest.late,
                "late_s": None if longest is None or met is None or rank in met.early else longest.late,
            }
        )
    return rows


def _step(world: World, settings: Config | None, topology: TopologyConfig) -> Facts | None:
    """Return the time of a step, or None if calls do not match or if it is unknown which ranks share a node."""
    met, links = world.replay, machine(topology)
    if met is None or met.stuck or links is None:
        return None
    seconds = met.seconds
    last = max(met.sound, key=lambda rank: met.ends[rank])
    stages = world.stages()
    flops = sum(max(step.part_flops for step in ran) for ran in stages.values()) / len(stages)
    sums = met.dims[last]
    train, data = (None, None) if settings is None else (settings.train, settings.data)
    tokens = None if train is None or data is None else train.global_batch_size * data.seq_len
    peak = None if train is None else train.peak_flops
    again = train is not None and train.activation_checkpointing is not False
    tflops = topology.tflops or ASSUMED_TFLOPS
    return {
        "seconds": seconds,
        "rank": last,
        "compute_s": met.computed[last],
        "exposed_s": {dim: waiting.waits - waiting.late for dim, waiting in sums.items()},
        # The waits of a rank that arrives early are not real.
        "late_s": {} if last in met.early else {dim: waiting.late for dim, waiting in sums.items()},
        "tokens_s": None if tokens is None or not seconds else tokens / seconds,
        "tflops": flops / seconds / 1e12 if seconds else None,
        "share_of_peak": flops / seconds / peak if peak and seconds else None,
        "computed_again": again,
        "assumed_tflops": tflops,
        "memory_gbytes_s": topology.memory_bandwidth_gbytes_s,
        "assumed": [] if topology.tflops else ["tflops"],
        "device": "auto" if settings is None else settings.mesh.device,
        "links": [str(level) for level in links.levels],
    }
