"""The `[mesh]` section, and the plan computed from it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from meshcomm.config.problems import Problem, refused, report
from meshcomm.config.rules_mesh import MOST_RANKS, RULES, world_fits
from meshcomm.config.section import FrozenList, FrozenTable, Seconds, Section, Table, Text, TextOrEmpty
from meshcomm.errors import LayoutError
from meshcomm.layout import GroupOptions, Layout, Plan
from meshcomm.layout.names import merged_name
from meshcomm.layout.sizes import resolve

# Group options that only NCCL supports.
NCCL_OPTIONS: Final = ("high_priority", "min_ctas", "max_ctas", "cga_cluster_size", "split_share")


class DimOptions(Section):
    """`[mesh.options.NAME]`: options for the groups along one dim, merged dim or dim of a view."""

    place = "mesh.options"
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Seconds after which an unfinished operation raises an error. If omitted, mesh.timeout_s applies."""
    backend: Text | None = None
    """Backend for this dim, in the format of mesh.backend. If omitted, mesh.backend is used."""
    comm_id: TextOrEmpty = ""
    """Dims with the same ranks and options share groups unless their comm_ids differ. By default, they share groups."""
    high_priority: bool = False
    """NCCL only: run the group's asynchronous kernels on a separate high-priority stream."""
    min_ctas: int | None = Field(default=None, ge=1)
    """NCCL only: minimum number of thread blocks per kernel. If omitted, NCCL chooses."""
    max_ctas: int | None = Field(default=None, ge=1)
    """NCCL only: maximum number of thread blocks per kernel; each block occupies one SM. If omitted, NCCL chooses."""
    cga_cluster_size: int | None = Field(default=None, ge=0, le=8)
    """NCCL only: size of the thread block clusters on Hopper and newer GPUs. If omitted, NCCL chooses."""
    split_share: bool = False
    """NCCL only, with process.device_id = true: share the world group's buffers and threads instead of
    allocating new ones. Calls on groups that share these resources must not overlap.
    """

    def backend_options(self) -> tuple[tuple[str, int], ...]:
        """Return a mapping from name to value of the backend-specific options that are set."""
        values = ((name, getattr(self, name)) for name in NCCL_OPTIONS)
        return tuple((name, value) for name, value in values if value not in (None, False))


def check_world(world: int | None) -> None:
    """Raise LayoutError if no job can have `world` processes. None: the number is not known."""
    if world is not None and not 1 <= world <= MOST_RANKS:
        raise LayoutError(
            f"{world} is not a number of processes",
            given=f"a world of {world}",
            expected=f"1 to {MOST_RANKS}",
            hint="give the number of processes in the job",
        )


class MeshConfig(Section):
    """`[mesh]`: names and sizes of the dims, the order of the ranks, and the groups to create.

    Raises ConfigError, which lists every problem found.

    >>> mesh = MeshConfig(dims={"pp": 2, "dp": -1, "tp": 2})
    >>> mesh.sizes(16)
    {'pp': 2, 'dp': 4, 'tp': 2}
    """

    place = "mesh"
    rules = RULES
    dims: FrozenTable[int] = Field(examples=[{"dp": 8}])
    """Sizes of the dims by name, outermost first. One size may be -1; that dim then takes the remaining ranks. A dim
    of size 1 has no group.
    """
    merge: FrozenTable[FrozenList[str]] = Field(default_factory=Table)
    """Merged dims by name: each combines the listed dims into one dim, in row-major order. Default: none."""
    views: FrozenTable[FrozenTable[int]] = Field(default_factory=Table)
    """Views by name: each is another {dim: size} factorization of the same ranks. One size may be -1. Default: none."""
    rank_order: FrozenList[int] | None = None
    """The rank at each position of the row-major grid. If omitted, the ranks are in ascending order."""
    ranks: FrozenList[int] | None = None
    """The ranks of the world that the mesh covers, in ascending order. If omitted, the mesh covers all ranks."""
    device: Text = "auto"
    """Device type: "cpu", "cuda", ... Default "auto": cuda if available, else cpu."""
    backend: Text = "auto"
    """A torch.distributed backend, or "cpu:gloo,cuda:nccl". Default "auto": nccl on cuda, gloo on cpu."""
    timeout_s: Seconds = Field(default=600.0, gt=0)
    """Seconds after which an unfinished operation raises an error. Default 600."""
    validate_calls: Annotated[int, Field(ge=0)] | Literal["always"] = 64
    """Number of initial calls on each group that are compared across the group's ranks before any data is sent. 0
    compares no calls, "always" compares all.
    """
    warm_up: bool = False
    """Use every group once, in plan order, before init returns, so that no later call has to connect first."""
    reports: TextOrEmpty = "meshcomm-reports"
    """Folder for reports about failed calls, relative to the job's working folder. Each run writes to a
    subfolder named after its time and job. Default "meshcomm-reports". If "", no reports are written.
    """
    options: FrozenTable[DimOptions] = Field(default_factory=Table)
    """Group options by the name of a dim, merged dim or dim of a view. Default: none."""

    @classmethod
    def from_megatron(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = "tp-cp-ep-dp-pp",
        **keys: Any,
    ) -> MeshConfig:
        """Return the mesh that Megatron-Core's `initialize_model_parallel` creates.

        The mesh has the dims pp, dp, cp and tp and, for experts, a view with edp, ep and etp.

        order: dims from the innermost to the outermost, as in Megatron. dp and edp take the remaining ranks.
        etp: size of the experts' tensor dim. If None, tp is used.
        keys: additional keys of `[mesh]`, such as `merge={"dp_cp": ("dp", "cp")}`.

        The ranks are placed in the same way as by RankGenerator in Megatron-Core 0.16. Raises ConfigError.

        >>> mesh = MeshConfig.from_megatron(tp=2, pp=2, ep=2, etp=1)
        >>> mesh.sizes(8), mesh.layout(8).views["expert"]["edp"]
        ({'pp': 2, 'dp': 2, 'cp': 1, 'tp': 2}, 2)
        """
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": -1, "pp": pp}
        names = str(order).split("-")
        missing = [name for name in sizes if name not in names]
        if sorted({*names, *missing}) != sorted(sizes) or len(names) + len(missing) != len(sizes):
            what = "not an order of Megatron's dims"
            expected = f'some of {", ".join(sizes)}, each once, joined by "-"'
            unknown = Problem("order", what, expected, ('order="tp-cp-ep-dp-pp"',), f"{order!r}")
            raise report("MeshConfig.from_megatron", [unknown])
        # Dims that Megatron's order leaves out are outermost.
        outermost = [*reversed(missing), *reversed(names)]
        dense = {name: sizes[name] for name in outermost if name != "ep"}
        if ep == 1 and etp is None:
            return cls(dims=dense, **keys)
        expert = {
            "dp": ("edp", -1),
            "tp": ("etp", tp if etp is None else etp),
            "ep": ("ep", ep),
            "pp": ("pp", pp),
        }
        view = dict(expert[name] for name in outermost if name != "cp")
        return cls(dims=dense, views={**keys.pop("views", {}), "expert": view}, **keys)

    @classmethod
    def from_parallel_dims(cls, dims: Any, **keys: Any) -> MeshConfig:
        """Return the mesh that torchtitan's `ParallelDims` describes, with its flattened meshes as merged dims and a
        view for experts.

        dims: an object with the attributes dp_replicate, dp_shard, cp, tp, pp, ep and world_size.
        keys: additional keys of `[mesh]`.

        >>> from types import SimpleNamespace
        >>> one = SimpleNamespace(pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=2, ep=1, world_size=8)
        >>> MeshConfig.from_parallel_dims(one).merge["fsdp"]
        ('dp_shard', 'cp')
        """
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        merge = {"batch": names[1:3], "loss": names[1:4], "fsdp": names[2:4], **keys.pop("merge", {})}
        views = dict(keys.pop("views", {}))
        if dims.ep > 1:
            views["expert"] = {"pp": dims.pp, "dp_replicate": dims.dp_replicate, "efsdp": -1, "ep": dims.ep}
        sizes = {name: getattr(dims, name) for name in names}
        return cls(dims=sizes, merge=merge, views=views, **keys)

    def count(self, world: int | None) -> int | None:
        """Return the number of ranks in the mesh when `world` processes run, or None if the number is unknown."""
        if self.ranks is not None:
            return len(self.ranks)
        if world is not None:
            return world
        if -1 not in self.dims.values():
            return math.prod(self.dims.values())
        return None if self.rank_order is None else len(self.rank_order)

    def smallest_world(self) -> int:
        """Return the number of ranks in the smallest world that fits this mesh. Raises ConfigError if a size is -1."""
        return math.prod(self.sizes(None).values()) if self.ranks is None else max(self.ranks) + 1

    def sizes(self, world: int | None, source: str | None = None) -> dict[str, int]:
        """Return the size of every base dim, with -1 resolved. Raises ConfigError if `world` does not fit the dims.

        source: the file name to show in errors, with keys under `mesh`. If None, errors name this section.
        """
        check_world(world)
        number = self.count(world)
        # The other rules were checked when the section was created.
        problems = list(world_fits(self, world, number))
        if not problems and number is None:
            problems = refused("dims", resolve, self.dims, None)
        if problems and source is not None:
            raise report(source, [problem.under("mesh") for problem in problems])
        if problems:
            raise report(type(self).__name__, problems)
        return resolve(self.dims, number)

    def layout(self, world: int | None, source: str | None = None) -> Layout:
        """Return the layout of the ranks. Raises ConfigError if `world` does not fit the dims. source: as for `sizes`."""
        return Layout(
            self.sizes(world, source),
            rank_order=self.ranks if self.rank_order is None else self.rank_order,
            views=self.views or None,
            merge=self.merge or None,
        )

    def plan(self, world: int | None, source: str | None = None) -> Plan:
        """Return the plan of all groups and their options. Raises ConfigError if `world` does not fit the dims.

        world: number of processes in the job. It may be None if every size is given. source: as for `sizes`.
        """
        return Plan(
            self.layout(world, source),
            defaults=GroupOptions(backend=self.backend, timeout_s=self.timeout_s),
            options={name: self._group_options(options) for name, options in self.options.items()},
            device=self.device,
        )

    def resolved(self, world: int | None, source: str | None = None) -> MeshConfig:
        """Return the same mesh with every -1 resolved. Raises ConfigError if `world` does not fit the dims. source: as
        for `sizes`.
        """
        layout = self.layout(world, source)
        views = Table({name: Table(sizes) for name, sizes in layout.views.items()})
        return self.model_copy(update={"dims": Table(layout.dims), "views": views})

    def merging(self, dims: tuple[str, ...]) -> MeshConfig:
        """Return the same mesh with a merged dim over `dims`. If `dims` is a single dim, or a merged dim already covers
        exactly these dims, the mesh is returned unchanged.
        """
        if len(dims) < 2 or dims in self.merge.values():
            return self
        views = [name for sizes in self.views.values() for name in sizes]
        taken = {*self.dims, *self.merge, *self.views, *views}
        merge = Table({**self.merge, merged_name(dims, taken): dims})
        return self.model_copy(update={"merge": merge})

    def _group_options(self, options: DimOptions) -> GroupOptions:
        return GroupOptions(
            backend=self.backend if options.backend is None else options.backend,
            timeout_s=self.timeout_s if options.timeout_s is None else options.timeout_s,
            comm_id=options.comm_id,
            extra=options.backend_options(),
        )
