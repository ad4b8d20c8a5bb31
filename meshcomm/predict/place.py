"""Rank every legal mesh of a given world size by predicted step time, and write the best one as a config file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import permutations
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from meshcomm.config import Config, Resolved, TopologyConfig, load_config
from meshcomm.config.of_model import expert_view
from meshcomm.config.parallel import ParallelRole
from meshcomm.config.parse import parse_toml
from meshcomm.config.rules import broken
from meshcomm.config.write import check_ending, plain, toml_text, write_whole
from meshcomm.errors import ConfigError
from meshcomm.layout.names import did_you_mean
from meshcomm.layout.sizes import divisors
from meshcomm.predict.estimate import (
    BASE,
    EXPERT_SHARD,
    REPLICA,
    Counts,
    Flow,
    Sizes,
    Workload,
    flows,
    memory,
    workload,
)
from meshcomm.predict.links import (
    ASSUMED_MEMORY_GB,
    ASSUMED_TFLOPS,
    Machine,
    Span,
    known_machine,
    span,
    strided,
)
from meshcomm.predict.passes import bubble
from meshcomm.predict.times import Operation, backend_lines, fastest

# The share of a rank's memory that stays free by default, for what the estimate does not count: temporary buffers, kernels'
# workspaces, NCCL's communicators, and what the allocator reserves beyond the tensors.
MARGIN: Final = 0.1
# Times whose relative difference is at most this are considered equal.
_SAME: Final = 1e-9
# The parts whose ranks the experts are distributed across.
_BLOCK: Final[tuple[ParallelRole, ...]] = ("data", "shard", "context")
# The name of the dim along which experts are replicated, if the file does not name it.
_COPIES_NAME: Final = "edp"
# The dims of a group, as (size, stride).
_Dims: TypeAlias = tuple[tuple[int, int], ...]
# The base's parts, outermost first.
_Order: TypeAlias = tuple[ParallelRole, ...]


class Share(NamedTuple):
    """The share of a step taken by one kind of call. link: the slowest link that a group of `ranks` ranks crosses.
    calls: the number of calls per rank and step. seconds: what of them does not overlap with compute. algorithm: its name in
    meshcomm.predict.times.
    """

    flow: Flow
    link: str
    ranks: int
    calls: int
    seconds: float
    algorithm: str


class Placement(NamedTuple):
    """One mesh. dims: part -> size of its base dim, outermost first. expert: the size of the expert dim.

    step_s = compute_s + bubble_s + the seconds of all shares. microbatches: the number of micro-batches per rank and step.
    memory_bytes: the memory, by kind, of the rank that needs the most. also: how many other orders of the same sizes have
    the same predicted time.
    """

    dims: Mapping[ParallelRole, int]
    expert: int
    microbatches: int
    step_s: float
    compute_s: float
    bubble_s: float
    shares: tuple[Share, ...]
    memory_bytes: Mapping[str, float]
    also: int


class Ranking(NamedTuple):
    """placements: the best meshes, fastest first. meshes: how many meshes were ranked.

    sizes: the number of legal factorizations. too_large: how many of them do not fit in a rank's memory.
    world, machine, tflops, memory_gb, margin: the inputs of the ranking. assumed: which of "tflops" and "memory_gbytes" were not
    configured.
    """

    placements: tuple[Placement, ...]
    meshes: int
    sizes: int
    too_large: int
    world: int
    machine: Machine
    tflops: float
    memory_gb: float
    margin: float
    assumed: tuple[str, ...]

    @property
    def limit_bytes(self) -> float:
        """The memory that a mesh may use: all but the margin."""
        return self.memory_gb * 1e9 * (1 - self.margin)


class _Found(NamedTuple):
    """A mesh's predicted time and dim order, without details. Meshes sort by time, then by the order of their dims."""

    step_s: float
    order: tuple[int, ...]
    row: int


def rank_placements(
    work: Workload,
    world: int,
    topology: TopologyConfig,
    keep: Mapping[ParallelRole, int] | None = None,
    top: int = 10,
    margin: float = MARGIN,
) -> Ranking:
    """Return the `top` legal meshes with the shortest predicted steps.

    topology: must set ranks_per_node; a missing speed or memory size defaults to an H100's. keep: the sizes to keep fixed.
    margin: the share of the memory that stays free.
    Raises ConfigError if no mesh of `world` ranks can run this training, or if no such mesh fits in memory.
    """
    machine = known_machine(topology, "[topology]")
    assumed = tuple(key for key in ("tflops", "memory_gbytes") if getattr(topology, key) is None)
    tflops, memory_gb = topology.tflops or ASSUMED_TFLOPS, topology.memory_gbytes or ASSUMED_MEMORY_GB
    fixed_sizes = (keep or {}).items()
    legal = [
        sizes for sizes in trainable(work, world) if all(getattr(sizes, part) == n for part, n in fixed_sizes)
    ]
    if not legal:
        fixed = "".join(f", {part} = {size}" for part, size in fixed_sizes)
        raise ConfigError(
            f"no sizes that multiply to {world} can train this",
            given=f"{world} ranks along {', '.join(work.parts) or 'no part'}{fixed}, "
            f"global_batch_size = {work.train.global_batch_size}, micro_batch_size = {work.train.micro_batch_size}",
            expected="sizes that satisfy a config's rules for splitting heads, layers, tokens and samples",
            hint="a larger train.global_batch_size, or more parts in [parallel]",
        )
    held = [sum(memory(work, sizes)) for sizes in legal]
    limit_gb = memory_gb * (1 - margin)
    fitting = [sizes for sizes, size in zip(legal, held, strict=True) if size <= limit_gb * 1e9]
    if not fitting:
        raise ConfigError(
            f"no mesh of {world} ranks holds this in {memory_gb:g} GB per rank",
            given=f"at least {min(held) / 1e9:.1f} GB per rank, for all {len(legal)} legal sizes",
            expected=f"at most {limit_gb:g} GB: {memory_gb:g} GB less a margin of {margin:.0%}",
            hint="train.activation_checkpointing = true, parallel.shard, a smaller train.micro_batch_size, more ranks"
            + (", or --margin 0" if margin else ""),
        )
    model = _Model(work, world, machine, tflops)
    # Orders whose times differ only by rounding are counted under the first of them.
    alike: Counter[_Found] = Counter()
    for row, sizes in enumerate(fitting):
        of_row: list[_Found] = []
        for order, step_s in model.steps(sizes):
            new = _Found(step_s, tuple(map(BASE.index, order)), row)
            same = next((row for row in of_row if abs(step_s - row.step_s) <= _SAME * step_s), new)
            of_row += [new] if same is new else []
            alike[same] += 1
    best = tuple(model.explained(fitting[each.row], each, alike[each] - 1) for each in sorted(alike)[:top])
    too_large = len(legal) - len(fitting)
    return Ranking(
        best, alike.total(), len(legal), too_large, world, machine, tflops, memory_gb, margin, assumed
    )


class _Model:
    """Predicts step times. Results per group are cached, because many meshes contain the same groups."""

    def __init__(self, work: Workload, world: int, machine: Machine, tflops: float) -> None:
        self.work, self.tflops = work, tflops
        self.span: Callable[[_Dims], Span] = cache(lambda dims: span(strided(dims, world, machine), machine))
        self._lines = cache(self._in_floats)

    def steps(self, sizes: Sizes) -> list[tuple[_Order, float]]:
        """Return the predicted seconds per step for every order of these sizes."""
        listed = flows(self.work, sizes)
        compute_s, idle = self._compute(sizes)
        seconds = cache(partial(self._seconds, compute_s))
        seconds_of = []
        for order in orders(self.work, sizes):
            each_s = {True: compute_s, False: 0.0}
            for flow, dims in self._calls(listed, sizes, order):
                each_s[flow.each_microbatch] += seconds(flow, dims)
            seconds_of.append((order, each_s[True] * (sizes.microbatches + idle) + each_s[False]))
        return seconds_of

    def explained(self, sizes: Sizes, found: _Found, also: int) -> Placement:
        """Return the placement for a mesh, with a breakdown of its step time."""
        order = tuple(BASE[at] for at in found.order)
        compute_s, idle = self._compute(sizes)
        shares = []
        of_microbatch = compute_s
        for flow, dims in self._calls(flows(self.work, sizes), sizes, order):
            where, calls = self.span(dims), flow.in_a_step(sizes.microbatches)
            line = fastest(flow.operation, where.route, flow.size_bytes)
            seconds = flow.exposed_s(line.seconds(flow.size_bytes), compute_s) * calls / flow.calls
            shares.append(Share(flow, str(where.slowest), where.size, calls, seconds, line.name))
            of_microbatch += seconds / sizes.microbatches if flow.each_microbatch else 0
        return Placement(
            dims={part: getattr(sizes, part) for part in order},
            expert=sizes.expert,
            microbatches=sizes.microbatches,
            step_s=found.step_s,
            compute_s=compute_s * sizes.microbatches,
            bubble_s=of_microbatch * idle,
            shares=tuple(shares),
            memory_bytes=memory(self.work, sizes)._asdict(),
            also=also,
        )

    def _compute(self, sizes: Sizes) -> tuple[float, float]:
        """Return the compute time of one micro-batch in seconds, and a rank's idle time in units of micro-batches."""
        options = self.work.parallel.options
        idle = bubble(options.schedule, sizes.pipeline, options.stages_per_rank)
        return self.work.flops(sizes) / (self.tflops * 1e12), idle

    def _calls(self, listed: Sequence[Flow], sizes: Sizes, order: _Order) -> Iterator[tuple[Flow, _Dims]]:
        """Yield the flows whose groups have at least two ranks, each with the dims of its group."""
        lie = strides(self.work, sizes, order)
        for flow in listed:
            if dims := tuple(lie[part] for part in flow.along if lie[part][0] > 1):
                yield flow, dims

    def _seconds(self, compute_s: float, flow: Flow, dims: _Dims) -> float:
        """Return the exposed seconds of a flow's calls per micro-batch or step, like `fastest` but in floats."""
        lines = self._lines(flow.operation, dims)
        call_s = min(fixed_s + byte_s * flow.size_bytes for fixed_s, byte_s in lines)
        return flow.exposed_s(call_s, compute_s)

    def _in_floats(self, operation: Operation, dims: _Dims) -> list[tuple[float, float]]:
        exact = backend_lines(operation, self.span(dims).route)
        return [(float(line.fixed_s), float(line.byte_s)) for line in exact]


def place_config(
    settings: Config,
    world: int,
    topology: TopologyConfig,
    keep: Sequence[str] = (),
    top: int = 10,
    counts: Counts | None = None,
    margin: float = MARGIN,
) -> Ranking:
    """Rank the meshes of `world` ranks for the training run that `settings` describes.

    topology: the result of `discovered`. keep: dims whose sizes stay as in the file. counts: see `workload`. margin: see
    `rank_placements`.
    Raises ConfigError.
    """
    work = workload(settings, counts)
    known_machine(topology, settings.source)
    parts = {dim: part for part, dim in work.parallel.parts.items()}
    sizes = {**settings.mesh.dims, **settings.mesh.views.get(settings.expert_view or "", {})}
    for dim in keep:
        if dim not in parts or sizes[dim] == -1:
            open_size = dim in parts
            raise ConfigError(
                f"the size of {dim} is open" if open_size else f"no part of the training uses a dim {dim}",
                given=f"--keep {dim}" + (f", {dim} = -1" if open_size else ""),
                expected="a dim with a size" if open_size else "one of " + ", ".join(parts),
                hint=f"--set mesh.dims.{dim}=2" if open_size else did_you_mean(dim, parts),
            )
    return rank_placements(work, world, topology, {parts[dim]: sizes[dim] for dim in keep}, top, margin)


# -- which meshes ------------------------------------------------------------------------------------


def trainable(work: Workload, world: int) -> Iterator[Sizes]:
    """Yield all sizes of the parts in use whose product is `world` and that pass a config's checks, with the number of
    micro-batches. The expert size divides the product of the data, shard and context sizes.
    """
    played = [part for part in BASE if part in work.parts]
    for factors in _factors(world, len(played)):
        sizes = Sizes(**dict(zip(played, factors, strict=True)))
        if not _passes(work, sizes):
            continue
        copies = sizes.data * sizes.shard
        number = work.train.global_batch_size // (copies * work.train.micro_batch_size)
        experts = divisors(copies * sizes.context) if "expert" in work.parts else [1]
        candidates = (sizes._replace(microbatches=number, expert=expert) for expert in experts)
        yield from (sizes for sizes in candidates if sizes.expert == 1 or _passes(work, sizes))


def _passes(work: Workload, sizes: Sizes) -> bool:
    """Return whether the rules of a config find no problem with these sizes."""
    dims = {dim: getattr(sizes, part) for part, dim in work.parallel.parts.items()}
    return next(broken(work.settings.rules, Resolved(work.settings, dims)), None) is None


def orders(work: Workload, sizes: Sizes) -> Iterator[_Order]:
    """Yield every distinct order of the base dims that a configuration may have.

    The position of a dim of size 1 affects no group, so such dims stay outermost, in BASE's order. With experts, data,
    shard and context must be adjacent, because the experts are distributed across the block of ranks that they form.
    """
    played = [part for part in BASE if part in work.parts]
    ones = [part for part in played if getattr(sizes, part) == 1]
    for parts in permutations(part for part in played if part not in ones):
        at = {part: place for place, part in enumerate(parts)}
        block = [at[part] for part in _BLOCK if part in at]
        if "expert" not in work.parts or not block or max(block) - min(block) < len(block):
            yield (*ones, *parts)


def strides(work: Workload, sizes: Sizes, order: _Order) -> dict[str, tuple[int, int]]:
    """Return the (size, stride) of each part's dim. With experts, the result also contains expert, REPLICA and, if the
    shard part is used, EXPERT_SHARD.
    """
    size_and_stride: dict[str, tuple[int, int]] = {}
    step = 1
    for part in reversed(order):
        size_and_stride[part] = getattr(sizes, part), step
        step *= size_and_stride[part][0]
    if "expert" in work.parts:
        # The stride of the block is that of its innermost part of size 2 or more.
        shared = [size_and_stride[part] for part in _BLOCK if part in size_and_stride]
        block = min((stride for size, stride in shared if size > 1), default=1)
        copies = prod(size for size, _ in shared) // sizes.expert
        # With shard, the ranks along the dim of the experts' copies hold shards of the experts.
        beside = EXPERT_SHARD if "shard" in work.parts else REPLICA
        size_and_stride |= {
            "expert": (sizes.expert, block),
            REPLICA: (1, 1),
            beside: (copies, block * sizes.expert),
        }
    return size_and_stride


def _factors(world: int, count: int) -> Iterator[Sequence[int]]:
    """Yield all ordered factorizations of `world` into `count` factors, sorted by their first factor."""
    if count <= 1:
        yield from [[world]] if count else [[]] * (world == 1)
        return
    for first in divisors(world):
        for rest in _factors(world // first, count - 1):
            yield [first, *rest]


# -- as a file ---------------------------------------------------------------------------------------


def write_placement(settings: Config, ranking: Ranking, path: Path) -> Config:
    """Write the first placement as a TOML file, and return the `Config` that `load_config` reads from that file.

    Raises ConfigError if the filename does not end in .toml, or if the file cannot be written.
    """
    check_ending(path, "--write", ".toml")
    data = placed_data(settings, ranking.placements[0])
    text = toml_text([f"{settings.source} on {ranking.world} ranks, by `meshcomm tune`"], data)
    # Check that the text contains the chosen dims before it is written.
    assert parse_toml(text, str(path))["mesh"]["dims"] == data["mesh"]["dims"]
    load_config(data).resolved(ranking.world)
    write_whole(path, text, given=f"--write {path}")
    return load_config(path)


def placed_data(settings: Config, placement: Placement) -> dict[str, Any]:
    """Return `settings` as a mapping, with the dims and the expert view of `placement`. It describes the same training run
    on a different mesh.
    """
    parallel = workload(settings).parallel
    data: dict[str, Any] = plain(settings.model_dump(exclude_unset=True))
    data["mesh"]["dims"] = {parallel.parts[part]: size for part, size in placement.dims.items()}
    if parallel.expert is not None and settings.expert_view is not None:
        old, dims = settings.mesh.views[settings.expert_view], (*settings.mesh.dims, parallel.expert)
        copies = next((name for name in old if name not in dims), _COPIES_NAME)
        block = [dim for part, dim in parallel.parts.items() if part in _BLOCK]
        ranks = prod(placement.dims.get(part, 1) for part in _BLOCK)
        pair = {copies: ranks // placement.expert, parallel.expert: placement.expert}
        view = expert_view(data["mesh"]["dims"], block, pair)
        data["mesh"]["views"] = {settings.expert_view: view}
    return data
