"""Every legal mesh of a world, ranked by the step time that the model predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from meshcomm.config.parallel import Part, PipelineSchedule
from meshcomm.costs import Line, Operation, best, lines
from meshcomm.costs.route import Hop, Route
from meshcomm.errors import ConfigError
from meshcomm.place.links import ALGORITHMS, Groups, groups, seconds
from meshcomm.place.memory import Floats, layers_of_rank, memory
from meshcomm.place.orders import Order, distinct, orders, strides
from meshcomm.place.sizes import BASE, Sizes, factorisations, trainable
from meshcomm.place.traffic import Flow, flows
from meshcomm.place.workload import Workload
from meshcomm.topology import Machine

# Stated where [topology] does not say them: what Llama 3 405B reached on an H100 in bfloat16 (380 to 430,
# Grattafiori et al. 2024), and that device's memory.
ASSUMED_TFLOPS: Final = 400.0
ASSUMED_MEMORY_GB: Final = 80.0
# Times that differ by less are the same to the model.
_SAME: Final = 1e-9


class Share(NamedTuple):
    """What one kind of call takes of a step. along: parts. link: the slowest that its group crosses.
    calls and size_bytes: of one rank in a step, and of one call. algorithm: of meshcomm.costs.
    """

    part: Part
    along: tuple[str, ...]
    operation: Operation
    what: str
    link: str
    ranks: int
    calls: int
    size_bytes: float
    seconds: float
    algorithm: str


class Placement(NamedTuple):
    """One mesh. dims: part -> size of the base, outermost first; expert, experts_inside: the view.

    step_s = compute_s + bubble_s + the seconds of all shares. microbatches: of a rank in a step.
    memory_bytes: weights, gradients, optimizer, activations of the largest rank. also: how many other
    orders of the same sizes are predicted to take as long.
    """

    dims: Mapping[Part, int]
    expert: int
    experts_inside: bool
    microbatches: int
    step_s: float
    compute_s: float
    bubble_s: float
    shares: tuple[Share, ...]
    memory_bytes: Mapping[str, float]
    also: int


class Ranking(NamedTuple):
    """placements: the best, fastest first. meshes: all that were ranked. sizes: legal factorisations;
    too_large: those of them that a rank's memory does not hold.
    """

    placements: tuple[Placement, ...]
    meshes: int
    sizes: int
    too_large: int


def rank_placements(
    work: Workload,
    world: int,
    machine: Machine,
    *,
    tflops: float = ASSUMED_TFLOPS,
    memory_gb: float = ASSUMED_MEMORY_GB,
    keep: Mapping[Part, int] | None = None,
    top: int = 10,
) -> Ranking:
    """The `top` meshes with the shortest predicted step among all legal ones.

    keep: sizes that are not changed. Raises ConfigError where no mesh of `world` ranks can train this,
    or none that can fits into memory.
    """
    sizes = trainable(work, factorisations(work, world))
    for part, size in (keep or {}).items():
        sizes = sizes.where(sizes.of(part) == size)
    legal = len(sizes.tensor)
    if not legal:
        kept = "".join(f", {part} = {size}" for part, size in (keep or {}).items())
        raise ConfigError(
            f"no sizes that multiply to {world} can train this",
            given=f"{world} ranks along {', '.join(work.parts) or 'no part'}{kept}, "
            f"global_batch = {work.global_batch}, microbatch = {work.microbatch}",
            expected="sizes that divide heads, layers, tokens and samples as the checks of a config want it",
            hint="a larger train.global_batch, or more parts in [parallel]",
        )
    held_bytes = memory(work, sizes).total
    fits = held_bytes <= memory_gb * 1e9
    if not fits.any():
        raise ConfigError(
            f"no mesh of {world} ranks holds this in {memory_gb:g} GB a rank",
            given=f"at least {held_bytes.min() / 1e9:.1f} GB a rank, over {legal} legal sizes",
            expected=f"at most {memory_gb:g} GB",
            hint="train.recompute = true, parallel.shard, a smaller train.microbatch, or more ranks",
        )
    sizes = sizes.where(fits)
    model = _Model(work, sizes, world, machine, tflops)
    every = list(orders(work))
    steps = np.stack([model.step(order) for order in every])
    finite = np.isfinite(steps)
    return Ranking(tuple(_top(model, every, steps, top)), int(finite.sum()), legal, int((~fits).sum()))


class _Model:
    """Everything that does not depend on the order, once for all rows."""

    def __init__(self, work: Workload, sizes: Sizes, world: int, machine: Machine, tflops: float) -> None:
        self.work, self.sizes, self.world, self.machine = work, sizes, world, machine
        self.flows = flows(work, sizes)
        layers = layers_of_rank(work, sizes)
        tokens = work.microbatch * work.sequence / sizes.context
        macs = (layers * work.layer_macs + work.head_macs) / sizes.tensor
        # Of one micro-batch: two operations a multiply-add, three passes' worth, four with recompute.
        self.compute = 2 * (4 if work.recompute else 3) * tokens * macs / (tflops * 1e12)
        self.bubble = bubble(work.schedule, sizes.pipeline.astype(np.float64), work.stages_per_rank)

    def step(self, order: Order) -> Floats:
        """Seconds of a step for every row; infinite where this order is none of its own."""
        rows = distinct(self.work, self.sizes, order)
        result = np.full(len(rows), np.inf)
        if rows.any():
            part = self.sizes.where(rows)
            of_microbatch, of_step = self.compute[rows].copy(), np.zeros(int(rows.sum()))
            places = self.places(part, order)
            for flow in self.flows:
                time = flow.calls[rows] * seconds(
                    flow.operation, places[flow.along], flow.size_bytes[rows], self.machine
                )
                if flow.each_microbatch:
                    of_microbatch += time
                else:
                    of_step += time
            result[rows] = of_microbatch * (part.microbatches + self.bubble[rows]) + of_step
        return result

    def places(self, sizes: Sizes, order: Order) -> dict[tuple[str, ...], Groups]:
        """Where the groups of every flow lie."""
        dims = strides(self.work, sizes, order)
        return {
            along: groups([dims[part] for part in along], self.world, self.machine)
            for along in {flow.along for flow in self.flows}
        }


def bubble(schedule: PipelineSchedule, ranks: Floats, each: int) -> Floats:
    """How many micro-batches' time a rank stands idle in a step.

    gpipe and 1f1b p - 1 (Huang et al. 2019, Narayanan et al. 2019); interleaved (p - 1) / v (Narayanan et
    al. 2021); zero bubble, on v stages a rank, a third of that (Qi et al. 2024, ZB-H1 with equal passes).
    """
    if schedule in ("gpipe", "1f1b"):
        return ranks - 1
    return (ranks - 1) / each / (3 if schedule == "zero_bubble" else 1)


def _top(model: _Model, every: list[Order], steps: Floats, top: int) -> list[Placement]:
    """The best meshes; orders of the same sizes and the same time as one."""
    flat = steps.reshape(-1)
    # Times that differ only by rounding tie, and ties are settled by the order of orders.
    finite = int(np.isfinite(flat).sum())
    ranked = np.argsort(flat, kind="stable")[:finite]
    found: list[Placement] = []
    seen: list[tuple[int, float]] = []
    for index in ranked:
        row = int(index) % steps.shape[1]
        step = float(flat[index])
        if any(row == old and abs(step - time) <= _SAME * step for old, time in seen):
            continue
        same = np.flatnonzero(np.abs(steps[:, row] - step) <= _SAME * step)
        seen.append((row, step))
        found.append(_placement(model, row, every[int(same[0])], float(steps[same[0], row]), len(same) - 1))
        if len(found) == top:
            break
    return found


def _placement(model: _Model, row: int, order: Order, step_s: float, also: int) -> Placement:
    sizes = model.sizes.where(np.array([row]))
    places = model.places(sizes, order)
    number = int(sizes.microbatches[0])
    there = [flow for flow in model.flows if places[flow.along].size[0] > 1 and flow.calls[row] > 0]
    shares = [_share(flow, row, places[flow.along], number, model.machine) for flow in there]
    of_microbatch = float(model.compute[row]) + sum(
        share.seconds / number for share, flow in zip(shares, there, strict=True) if flow.each_microbatch
    )
    held_bytes = memory(model.work, sizes)
    ones = [part for part in BASE if part in order.parts and sizes.of(part)[0] == 1]
    parts = [*ones, *(part for part in order.parts if part not in ones)]
    if {"data", "shard"} <= set(parts) and parts.index("data") > parts.index("shard"):
        # The shard has a single rank and may stand anywhere: inside its copies, as a config wants it.
        parts.remove("shard")
        parts.insert(parts.index("data") + 1, "shard")
    return Placement(
        dims={part: int(sizes.of(part)[0]) for part in parts},
        expert=int(sizes.expert[0]),
        experts_inside=order.experts_inside,
        microbatches=number,
        step_s=step_s,
        compute_s=float(model.compute[row]) * number,
        bubble_s=of_microbatch * float(model.bubble[row]),
        shares=tuple(shares),
        memory_bytes={name: float(getattr(held_bytes, name)[0]) for name in held_bytes._fields},
        also=also,
    )


def _share(flow: Flow, row: int, where: Groups, microbatches: int, machine: Machine) -> Share:
    line = fastest(flow.operation, where, float(flow.size_bytes[row]), machine)
    calls = round(float(flow.calls[row])) * (microbatches if flow.each_microbatch else 1)
    return Share(
        part=flow.part,
        along=flow.along,
        operation=flow.operation,
        what=flow.what,
        link=machine.levels[int(where.slowest[0])].name,
        ranks=int(where.size[0]),
        calls=calls,
        size_bytes=float(flow.size_bytes[row]),
        seconds=calls * line.seconds(float(flow.size_bytes[row])),
        algorithm=line.name,
    )


def fastest(operation: Operation, where: Groups, size_bytes: float, machine: Machine) -> Line:
    """The exact model's fastest of ALGORITHMS for one mesh: `where` with a single row."""
    levels = machine.levels
    if where.even[0]:
        hops = [
            Hop(int(hop[0]), level.alpha_s, level.beta_s)
            for hop, level in zip(where.hops, levels, strict=True)
        ]
        way = Route(tuple(hop for hop in hops if hop.ranks > 1), call_s=machine.call_s)
    else:
        level = levels[int(where.slowest[0])]
        hop = Hop(int(where.size[0]), level.alpha_s, level.beta_s)
        way = Route((hop,), even=False, call_s=machine.call_s)
    return best([line for line in lines(operation, way) if line.name in ALGORITHMS], size_bytes)
