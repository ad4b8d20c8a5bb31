"""A dry run of a world: run some of its ranks separately, and draw conclusions about all of them."""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from meshcomm.dryrun.compare import DryRunFinding, find_differences, sequence
from meshcomm.dryrun.replay import Replay, replay
from meshcomm.errors import MeshcommError, RankFailed
from meshcomm.layout import Layout
from meshcomm.lines import source_line

if TYPE_CHECKING:
    from meshcomm.dryrun.rank import RankStep

# Runs the program as one rank, given (rank, world size). The function must be picklable.
Program: TypeAlias = "Callable[[int, int], RankStep]"

# Like the built-in `map`, but it may run in other processes.
_Map: TypeAlias = "Callable[..., Iterator[RankStep | MeshcommError]]"

# In worlds of up to this many ranks, all ranks are run.
WHOLE: Final = 16
# Corners are chosen along at most this many of the outermost dims, so there are at most 2 ** 5 corner ranks.
_CORNERS: Final = 5
# A middle rank is chosen along each dim of at least this size.
_MIDDLE: Final = 4
# How many additional ranks are run, at most, if calls differ within a stage.
_PEERS: Final = 16


class World(NamedTuple):
    """The results of a dry run.

    steps: the steps by rank, ascending.
    findings: predicted failures.
    unlike: messages about ranks whose calls differ from the calls of the first rank in their stage.
    replay: None if calls do not match.
    """

    layout: Layout
    pipeline: str | None
    steps: dict[int, RankStep]
    findings: list[DryRunFinding]
    unlike: list[str]
    replay: Replay | None

    def stages(self) -> dict[int, list[RankStep]]:
        """Return the steps of each stage."""
        steps_of_stage: dict[int, list[RankStep]] = defaultdict(list)
        for step in self.steps.values():
            steps_of_stage[self.stage(step.rank)].append(step)
        return dict(sorted(steps_of_stage.items()))

    def stage(self, rank: int) -> int:
        """Return a rank's coord along the pipeline dim, or 0 without a pipeline."""
        return 0 if self.pipeline is None else self.layout.coord(rank, self.pipeline)


def dry_world(
    program: Program,
    layout: Layout,
    pipeline: str | None = None,
    ranks: Sequence[int] | None = None,
    *,
    processes: int | None = None,
    replayed: Callable[[Sequence[RankStep], Callable[[int], str]], Replay] = replay,
) -> World:
    """Run `program` as some of the ranks of `layout`, and compare their calls.

    pipeline: the dim of the stages. ranks: the ranks to run first; if None, the result of `chosen`. processes: the number
    of processes that run ranks in parallel; None means one per core, and 0 means this process. replayed: the replay
    function.

    Raises ConfigError, or RankFailed if the program raises on a rank.
    """
    if pipeline is not None and layout.size(pipeline) == 1:
        pipeline = None
    first = chosen(layout, pipeline) if ranks is None else ranks

    def where(rank: int) -> str:
        coords = " ".join(f"{dim}={coord}" for dim, coord in layout.coords(rank).items())
        return f"rank {rank:,} ({coords})"

    with _processes((os.cpu_count() or 1) if processes is None else processes) as run:
        steps = _steps(run, program, {rank: where(rank) for rank in first}, layout.world_size)
        world = World(layout, pipeline, steps, [], [], None)
        peers, unlike = _unlike(world, where)
        beside = {rank: where(rank) for rank in peers if rank not in steps}
        steps |= _steps(run, program, beside, layout.world_size)
    steps = dict(sorted(steps.items()))
    findings = find_differences(list(steps.values()), where)
    met = None
    if not findings:
        met = replayed(list(steps.values()), where)
        findings = met.stuck
    return World(layout, pipeline, steps, findings, unlike, met)


def _unlike(world: World, where: Callable[[int], str]) -> tuple[list[int], list[str]]:
    """Return additional ranks to run, and messages about ranks whose calls differ from those of the first rank that was
    run in their stage.

    The ranks that were run represent the other ranks of their stage. If the calls of two of them differ along a dim, more
    ranks along that dim are run, to find out whether calls also differ within a group.
    """
    more: dict[int, None] = {}
    sentences = []
    for steps in world.stages().values():
        usual = sequence(steps[0])
        for step in steps[1:]:
            mine = sequence(step)
            dims = [dim for dim in usual.keys() | mine.keys() if usual.get(dim) != mine.get(dim)]
            if not dims:
                continue
            sentences.append(
                f"{where(step.rank)} makes different calls than {where(steps[0].rank)} along {', '.join(sorted(dims))}"
            )
            for dim in dims:
                if dim in world.layout.names:
                    line = world.layout.group_of(step.rank, dim)
                    more |= dict.fromkeys(int(rank) for rank in (line[0], line[-1], line[len(line) // 2]))
    return list(more)[:_PEERS], sentences


def chosen(
    layout: Layout, pipeline: str | None = None, *, also: Sequence[int] = (), sample: int = 8
) -> list[int]:
    """Return the ranks that represent all ranks, in ascending order.

    They are the first, middle and last rank along each dim of the base and of each view, with all other coords 0; one
    rank of every stage of `pipeline`; every corner, that is, ranks that are first or last along each dim; the ranks in
    `also`; and `sample` more, chosen at random with a fixed seed. In a world of up to 16 ranks, all ranks are returned.
    Raises LayoutError if a rank in `also` is outside the world.

    >>> chosen(Layout({"pp": 4, "dp": 64, "tp": 8}), "pp", sample=0)[:6]
    [0, 4, 7, 256, 504, 511]
    """
    for rank in also:
        layout.position(rank)
    world = layout.world_size
    everyone = [int(rank) for rank in layout.ranks]
    if world <= WHOLE:
        return sorted(everyone)
    first = layout.rank_of(0)
    ranks = {first, *also}
    for sizes in (layout.dims, *layout.views.values()):
        for dim, size in sizes.items():
            line = layout.group_of(first, dim)
            middle = [size // 2] if size >= _MIDDLE else []
            coords = range(size) if dim == pipeline else {0, *middle, size - 1}
            ranks.update(int(line[coord]) for coord in coords)
    wide = [dim for dim, size in layout.dims.items() if size > 1][:_CORNERS]
    for ends in product((0, 1), repeat=len(wide)):
        coords_of = dict.fromkeys(layout.dims, 0)
        coords_of |= {dim: end * (layout.size(dim) - 1) for dim, end in zip(wide, ends, strict=True)}
        ranks.add(layout.get_rank(**coords_of))
    draw = random.Random(0)
    while sample and len(ranks) < world:
        ranks.add(layout.rank_of(draw.randrange(world)))
        sample -= 1
    return sorted(ranks)


@contextmanager
def _processes(count: int) -> Iterator[_Map]:
    """Yield a `map` that runs in `count` processes, or in this process if `count` is 0."""
    if not count:
        yield map
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshcomm.dryrun.rank"])
    pool = ProcessPoolExecutor(count, mp_context=context)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _steps(run: _Map, program: Program, names: Mapping[int, str], world: int) -> dict[int, RankStep]:
    """Run the ranks in `names`, and return the step of each.

    Raises an error that affects all ranks, or RankFailed for the first rank that failed.
    """
    steps: dict[int, RankStep] = {}
    for rank, step in zip(names, run(partial(_ran, program, world), names.items()), strict=True):
        if isinstance(step, MeshcommError):
            raise step
        steps[rank] = step
    return steps


def _ran(program: Program, world: int, rank: tuple[int, str]) -> RankStep | MeshcommError:
    """Run the program as one rank, and return its step or its error. rank: the rank's number and name."""
    try:
        return program(rank[0], world)
    except Exception as error:
        return failure_of(error, rank[1])


def failure_of(error: Exception, name: str) -> MeshcommError:
    """Return a MeshcommError unchanged, and convert any other error to RankFailed with the program's line."""
    from meshcomm.watching.callsite import is_ours

    if isinstance(error, MeshcommError):
        return error
    if isinstance(error, SyntaxError):
        file, number = error.filename or "?", error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if not is_ours(frame.filename)), frames[-1])
        file, number = frame.filename, frame.lineno
    failed = RankFailed(f"{name} failed: {type(error).__name__}: {error}", given=source_line(file, number))
    failed.by_rank = {}
    return failed
