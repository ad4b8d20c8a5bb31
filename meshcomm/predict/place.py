"""Every legal mesh of a world, ranked by the step time that the model predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple, TypeAlias

from meshcomm.config.parallel import Part
from meshcomm.errors import ConfigError
from meshcomm.predict.estimate import Flow, flows, memory
from meshcomm.predict.links import Span, span, strided
from meshcomm.predict.machine import Machine
from meshcomm.predict.meshes import Order, orders, strides, trainable
from meshcomm.predict.passes import bubble
from meshcomm.predict.times import Operation, backend_lines, fastest
from meshcomm.predict.workload import BASE, Sizes, Workload

# Stated where [topology] does not say them: what Llama 3 405B reached on an H100 in bfloat16 (380 to 430,
# Grattafiori et al. 2024), and that device's memory.
ASSUMED_TFLOPS: Final = 400.0
ASSUMED_MEMORY_GB: Final = 80.0
# Times that differ by less are the same to the model.
_SAME: Final = 1e-9
# The dims that a group lies along, as (size, stride).
_Dims: TypeAlias = tuple[tuple[int, int], ...]


class Share(NamedTuple):
    """What one kind of call takes of a step. along: parts. link: the slowest that its group crosses.
    calls and size_bytes: of one rank in a step, and of one call. algorithm: as in meshcomm.predict.times.
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
    too_large: those of them that a rank's memory does not hold. world to memory_gb: what they were ranked for.
    assumed: those of "tflops" and "memory_gbytes" that nobody has said.
    """

    placements: tuple[Placement, ...]
    meshes: int
    sizes: int
    too_large: int
    world: int
    machine: Machine
    tflops: float
    memory_gb: float
    assumed: tuple[str, ...]


class _Found(NamedTuple):
    """A mesh before it is explained; sorted by time, then by the order of its dims."""

    step_s: float
    order: tuple[int, ...]
    outside: bool
    row: int
    also: int


def rank_placements(
    work: Workload,
    world: int,
    machine: Machine,
    *,
    tflops: float | None = None,
    memory_gb: float | None = None,
    keep: Mapping[Part, int] | None = None,
    top: int = 10,
) -> Ranking:
    """The `top` meshes with the shortest predicted step among all legal ones.

    tflops, memory_gb: of a rank; None: those of an H100. keep: sizes that are not changed. Raises ConfigError where no mesh of `world` ranks can train this,
    or none that can fits into memory.
    """
    assumed = tuple(key for key, value in (("tflops", tflops), ("memory_gbytes", memory_gb)) if value is None)
    tflops, memory_gb = tflops or ASSUMED_TFLOPS, memory_gb or ASSUMED_MEMORY_GB
    kept = (keep or {}).items()
    legal = [each for each in trainable(work, world) if all(getattr(each, part) == n for part, n in kept)]
    if not legal:
        fixed = "".join(f", {part} = {size}" for part, size in kept)
        raise ConfigError(
            f"no sizes that multiply to {world} can train this",
            given=f"{world} ranks along {', '.join(work.parts) or 'no part'}{fixed}, "
            f"global_batch_size = {work.global_batch_size}, micro_batch_size = {work.micro_batch_size}",
            expected="sizes that divide heads, layers, tokens and samples as the checks of a config want it",
            hint="a larger train.global_batch_size, or more parts in [parallel]",
        )
    held = [sum(memory(work, sizes)) for sizes in legal]
    fitting = [sizes for sizes, size in zip(legal, held, strict=True) if size <= memory_gb * 1e9]
    if not fitting:
        raise ConfigError(
            f"no mesh of {world} ranks holds this in {memory_gb:g} GB a rank",
            given=f"at least {min(held) / 1e9:.1f} GB a rank, over {len(legal)} legal sizes",
            expected=f"at most {memory_gb:g} GB",
            hint="train.activation_checkpointing = true, parallel.shard, a smaller train.micro_batch_size, or more ranks",
        )
    model = _Model(work, world, machine, tflops)
    found: list[_Found] = []
    meshes = 0
    for row, sizes in enumerate(fitting):
        steps = model.steps(sizes)
        meshes += len(steps)
        # Orders whose times differ only by rounding are one entry, under the first of them.
        of_row: list[_Found] = []
        for order, step_s in steps:
            same = (i for i, each in enumerate(of_row) if abs(step_s - each.step_s) <= _SAME * step_s)
            if (at := next(same, None)) is not None:
                of_row[at] = of_row[at]._replace(also=of_row[at].also + 1)
            else:
                places = tuple(BASE.index(part) for part in order.parts)
                of_row.append(_Found(step_s, places, not order.experts_inside, row, 0))
        found += of_row
    best = tuple(model.explained(fitting[each.row], each) for each in sorted(found)[:top])
    too_large = len(legal) - len(fitting)
    return Ranking(best, meshes, len(legal), too_large, world, machine, tflops, memory_gb, assumed)


class _Model:
    """Step times; what it found out about groups it keeps, as many meshes have the same ones."""

    def __init__(self, work: Workload, world: int, machine: Machine, tflops: float) -> None:
        self.work, self.tflops = work, tflops
        self.span: Callable[[_Dims], Span] = cache(lambda dims: span(strided(dims, world, machine), machine))
        self._lines: dict[tuple[Operation, _Dims], list[tuple[float, float]]] = {}

    def steps(self, sizes: Sizes) -> list[tuple[Order, float]]:
        """Seconds of a step for every order of these sizes."""
        listed = flows(self.work, sizes)
        compute_s, idle = self._compute(sizes)
        seconds = cache(self._seconds)
        found = []
        for order in orders(self.work, sizes):
            each_s = {True: compute_s, False: 0.0}
            for flow, dims in self._calls(listed, sizes, order):
                each_s[flow.each_microbatch] += seconds(flow, dims)
            found.append((order, each_s[True] * (sizes.microbatches + idle) + each_s[False]))
        return found

    def explained(self, sizes: Sizes, found: _Found) -> Placement:
        """A mesh with all that its time is made of."""
        order = Order(tuple(BASE[at] for at in found.order), not found.outside)
        compute_s, idle = self._compute(sizes)
        shares = []
        of_microbatch = compute_s
        for flow, dims in self._calls(flows(self.work, sizes), sizes, order):
            where, calls = self.span(dims), flow.in_a_step(sizes.microbatches)
            line = fastest(flow.operation, where.route, flow.size_bytes)
            seconds = calls * line.seconds(flow.size_bytes)
            about, sent = (flow.part, flow.along, flow.operation, flow.what), (calls, flow.size_bytes)
            shares.append(Share(*about, str(where.slowest), where.size, *sent, seconds, line.name))
            of_microbatch += seconds / sizes.microbatches if flow.each_microbatch else 0
        return Placement(
            dims={part: getattr(sizes, part) for part in order.parts},
            expert=sizes.expert,
            experts_inside=order.experts_inside,
            microbatches=sizes.microbatches,
            step_s=found.step_s,
            compute_s=compute_s * sizes.microbatches,
            bubble_s=of_microbatch * idle,
            shares=tuple(shares),
            memory_bytes=memory(self.work, sizes)._asdict(),
            also=found.also,
        )

    def _compute(self, sizes: Sizes) -> tuple[float, float]:
        """Seconds of one micro-batch's arithmetic, and how many micro-batches' time a rank stands idle."""
        idle = bubble(self.work.schedule, sizes.pipeline, self.work.stages_per_rank)
        return self.work.flops(sizes) / (self.tflops * 1e12), idle

    def _calls(self, listed: Sequence[Flow], sizes: Sizes, order: Order) -> Iterator[tuple[Flow, _Dims]]:
        """The flows of which a group has two ranks or more, with the dims that it lies along."""
        lie = strides(self.work, sizes, order)
        for flow in listed:
            if dims := tuple(lie[part] for part in flow.along if lie[part][0] > 1):
                yield flow, dims

    def _seconds(self, flow: Flow, dims: _Dims) -> float:
        """Of a flow's calls in a micro-batch or a step: `fastest`, in floats."""
        if (flow.operation, dims) not in self._lines:
            exact = backend_lines(flow.operation, self.span(dims).route)
            self._lines[flow.operation, dims] = [(float(line.fixed_s), float(line.byte_s)) for line in exact]
        lines = self._lines[flow.operation, dims]
        return flow.calls * min(fixed_s + byte_s * flow.size_bytes for fixed_s, byte_s in lines)
