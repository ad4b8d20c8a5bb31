"""How many process groups does a job create, and by how many calls of each rank? Here and elsewhere.

Everywhere but here each rank calls `new_group` for every group of the job, also for those that it is
not in. Which groups these are is written down as data and counted; the tests count torch's own calls.

Sources. DeviceMesh: torch 2.13, `DeviceMesh._init_process_groups`: one call for each group along each
dim, in order; a dim that is the whole world is the default group. Megatron-Core 0.20,
megatron/core/parallel_state.py, `initialize_model_parallel` with its defaults (Gloo twins included),
order tp-cp-ep-dp-pp from the inside, and the axis gtp_remat at size 1. torchtitan in August 2026,
torchtitan/distributed/parallel_dims.py, `ParallelDims.build_mesh` for spmd_types: a 1-D world mesh,
unflattened four times and flattened once; dims that are off get the backend "fake", by a call each.
nanotron: src/nanotron/parallel/context.py. picotron: picotron/process_group_manager.py. DeepSpeed:
deepspeed/runtime/pipe/topology.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshcomm.layout import Plan

Sizes = Mapping[str, int]


class Family(NamedTuple):
    """Groups of one kind: what each rank calls `new_group` for, group after group.

    grid: sizes by axis, outermost first. axes: those that a group spans. times: calls for each group
    (2: a Gloo twin). keep: members by their place in the group; None: all.
    fake: created with the backend "fake", which cannot communicate.
    """

    name: str
    grid: Sizes
    axes: tuple[str, ...]
    times: int = 1
    keep: tuple[int, ...] | None = None
    fake: bool = False

    @property
    def number(self) -> int:
        """Number of groups."""
        return math.prod(size for axis, size in self.grid.items() if axis not in self.axes)

    def groups(self) -> NDArray[np.int64]:
        """Every group's ranks, shape (number, members)."""
        names = list(self.grid)
        order = [names.index(axis) for axis in names if axis not in self.axes]
        order += [names.index(axis) for axis in names if axis in self.axes]
        ranks = np.arange(math.prod(self.grid.values())).reshape(tuple(self.grid.values()))
        found = ranks.transpose(order).reshape(self.number, -1)
        if self.keep is None:
            return found
        places = dict.fromkeys(place % found.shape[1] for place in self.keep)
        return found[:, list(places)]


class Creation(NamedTuple):
    """What one way of creating groups costs, fake groups apart from the others.

    calls: of `new_group`, on every rank. fake: how many of them make a group that cannot communicate.
    distinct: different sets of two or more ranks. sets_of_0, member_0: sets that rank 0 is in, and
    groups that it is a member of, singletons included.
    """

    calls: int
    fake: int
    distinct: int
    sets_of_0: int
    member_0: int


def count(families: Iterable[Family], *, once: bool = False) -> Creation:
    """Add up what the families create; once: a rank set that was created before is used again."""
    calls = fake = member = 0
    sets: set[bytes] = set()
    sets_of_0: set[bytes] = set()
    created: set[bytes] = set()
    for family in families:
        if family.fake:
            calls += family.number * family.times
            fake += family.number * family.times
            continue
        groups = family.groups()
        if once:
            groups = groups[[row.tobytes() not in created for row in groups]]
            created.update(row.tobytes() for row in groups)
        calls += len(groups) * family.times
        member += family.times * int((groups == 0).any(axis=1).sum())
        if groups.shape[1] > 1:
            sets.update(row.tobytes() for row in groups)
            sets_of_0.update(row.tobytes() for row in groups if row[0] == 0)
    return Creation(calls, fake, len(sets), len(sets_of_0), member)


def device_mesh(dims: Sizes) -> list[Family]:
    """`init_device_mesh`: dims outermost first."""
    world = math.prod(dims.values())
    return [Family(name, dims, (name,)) for name, size in dims.items() if size != world]


# Axes of a group, calls for each group, kept members; in the order of creation.
_Kind = tuple[str, tuple[str, ...], int, tuple[int, ...] | None]
_DENSE: Final[Sequence[_Kind]] = (
    ("data parallel with context", ("dp", "cp"), 2, None),
    ("data parallel", ("dp",), 2, None),
    ("weights gathered again", ("gtp",), 1, None),
    ("context parallel", ("cp",), 1, None),
    ("model parallel", ("pp", "gtp", "tp"), 1, None),
    ("tensor parallel", ("tp",), 1, None),
    ("pipeline", ("pp",), 1, None),
    ("embedding: first and last stage", ("pp",), 1, (0, -1)),
    ("position embedding: first stage", ("pp",), 1, (0,)),
    ("tensor, data and context", ("dp", "cp", "gtp", "tp"), 1, None),
    ("tensor and data", ("dp", "gtp", "tp"), 1, None),
    ("tensor and context", ("cp", "tp"), 1, None),
)
_EXPERT: Final[Sequence[_Kind]] = (
    ("experts", ("ep",), 1, None),
    ("tensor parallel of an expert", ("tp",), 1, None),
    ("experts and their tensors", ("ep", "tp"), 1, None),
    ("experts, tensors and pipeline", ("pp", "ep", "tp"), 1, None),
    ("the same with weights gathered again", ("pp", "gtp", "ep", "tp"), 1, None),
    ("an expert's weights gathered again", ("gtp",), 1, None),
    ("data parallel of an expert", ("dp",), 2, None),
    # The union of the groups over experts, tensors and pipeline that share one optimizer: one instance.
    ("one distributed optimizer", ("pp", "dp", "gtp", "ep", "tp"), 1, None),
)


def megatron(world: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 0) -> list[Family]:
    """Megatron-Core's `initialize_model_parallel`; etp: tensor parallel size of an expert, 0: tp."""
    etp = etp or tp
    dense = {"pp": pp, "dp": world // (tp * pp * cp), "cp": cp, "gtp": 1, "tp": tp}
    expert = {"pp": pp, "dp": world // (etp * pp * ep), "gtp": 1, "ep": ep, "tp": etp}
    for grid in (dense, expert):
        assert math.prod(grid.values()) == world, grid
    return [
        Family(name, grid, axes, times, keep)
        for grid, kinds in ((dense, _DENSE), (expert, _EXPERT))
        for name, axes, times, keep in kinds
    ]


def torchtitan(
    world: int, *, pp: int = 1, dp_shard: int = 1, cp: int = 1, tp: int = 1, ep: int = 1
) -> list[Family]:
    """torchtitan's `build_mesh` without data-parallel replicas; the world mesh is the default group."""
    data = {"pp": pp, "batch": dp_shard, "cp": cp, "tp": tp}
    storage = {"pp": pp, "dp_replicate": 1, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    used = {"pp": pp, "dp": dp_shard, "cp": cp, "tp": tp}
    sparse = {"pp": pp, "dp_replicate": 1, "efsdp": dp_shard * cp * tp // ep, "ep": ep}
    families = []
    for grid in (data, storage, used, sparse):
        assert math.prod(grid.values()) == world, grid
        for axis, size in grid.items():
            # Sharding an expert's parameters over its own ranks means nothing without expert parallelism.
            off = ep == 1 if axis == "efsdp" else size == 1
            families.append(Family(axis, grid, (axis,), fake=off))
        if grid is data:
            families.append(Family("loss", grid, ("batch", "cp")))
    return families


def nanotron(world: int, *, pp: int, dp: int, cp: int, tp: int, local: int = 8) -> list[Family]:
    """nanotron's `ParallelContext` without expert parallelism; count it with `once`. local: ranks of a host.

    Its world group is created apart from the others, so that on one host the same ranks come twice.
    """
    grid = {"ep": 1, "pp": pp, "dp": dp, "cp": cp, "tp": tp}
    hosts = {"host": world // local, "local": local}
    spans = (("tp",), ("cp",), ("dp",), ("pp",), ("ep",), ("ep", "pp", "tp"), ("cp", "tp"))
    return [Family("host", hosts, ("local",)), *(Family("-".join(axes), grid, axes) for axes in spans)]


def picotron(*, dp: int, pp: int, cp: int, tp: int) -> list[Family]:
    """picotron's `ProcessGroupManager`."""
    grid = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}
    spans = (("tp",), ("cp",), ("pp",), ("dp",), ("dp", "cp"), ("dp", "pp"))
    return [Family("-".join(axes), grid, axes) for axes in spans]


def deepspeed(*, pp: int, dp: int, mp: int) -> list[Family]:
    """DeepSpeed's `PipelineParallelGrid`: a model each, data, pipeline, slices of a layer."""
    grid = {"pp": pp, "dp": dp, "mp": mp}
    spans = (("pp", "mp"), ("dp",), ("pp",), ("mp",))
    return [Family("-".join(axes), grid, axes) for axes in spans]


def ours(plan: Plan) -> Creation:
    """The groups that a plan creates: each rank only those that it is in, equal ones once."""
    own = plan.for_rank(int(plan.layout.ranks[0])).creations
    return Creation(own, 0, sum(family.count for family in plan.families if family.creates), own, own)
