"""`meshcomm.link`: tensors from the ranks of one mesh to the ranks of another, whatever splits both have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.comm.checks import check_in_place, check_input, share_memory
from meshcomm.errors import LayoutError, MeshcommError, ShapeError
from meshcomm.layout.sizes import fold, whole
from meshcomm.mesh import Mesh, init
from meshcomm.mesh.runtime import WORLD
from meshcomm.transfer.agree import Part, TensorFacts, agree_on_tensor, agree_on_weights
from meshcomm.transfer.placement import check_pattern
from meshcomm.transfer.plan import Ends, Plan, located
from meshcomm.transfer.run import Room, Run, Schedule
from meshcomm.transfer.sides import BOTH, LINK, SideName, Sides
from meshcomm.transfer.tensors import memory_of, placement_of, regions

if TYPE_CHECKING:
    from meshcomm.mesh.stats import Stats
    from meshcomm.parallel.tensor.parameters import Kept
    from meshcomm.transfer.weights import Atomic, Model, Staging, Weights

_BUCKET_BYTES = 64 << 20
# How many agreements a rank remembers. A call like a forgotten one agrees again.
_MOST_AGREED = 1000


def link(
    source: Mesh, target: Mesh, *, stripes: Sequence[str] | None = None, bucket_bytes: int = _BUCKET_BYTES
) -> Link:
    """Connect the ranks of two meshes, so that tensors can be sent from any split on one to any split on the other.

        trainer = meshcomm.init(dims={"fsdp": 2, "tp": 2}, ranks=range(4))
        generator = meshcomm.init(dims={"copy": 2, "tp": 2}, ranks=range(4, 8))
        link = meshcomm.link(trainer, generator)

    source, target: open meshes of one job, with different ranks, some ranks in both, or the same. They may be one mesh.
    stripes:        dims of the target along which copies receive different stripes of a tensor, which they then gather from
                    each other. By default, dims within a node, and all dims with copies if the target has more ranks than the
                    source; none if all ranks are on one node.
    bucket_bytes:   how many bytes a rank sends, and receives, at once. A rank allocates at most two such buckets for each.
    Called by:      every process of the job, including ranks outside both meshes, whose `is_member` is False.
    Raises:         what `init` raises.
    """
    if source.device.type != target.device.type:
        raise LayoutError(
            "the two meshes of a link are on different types of devices",
            given=f"{source.device.type} of the source, {target.device.type} of the target",
            expected="one device type",
        )
    if whole(bucket_bytes, "bucket_bytes") < 1:
        raise LayoutError(
            "a link without room for a byte",
            given=f"bucket_bytes={bucket_bytes}",
            expected="1 or more bytes; some megabytes are fast",
        )
    for dim in stripes or ():
        target.layout.digits(dim)
    layouts = source.layout, target.layout
    ranks = sorted({int(rank) for layout in layouts for rank in layout.ranks.flat})
    defaults = source.plan.defaults
    mesh = init(
        dims={LINK: len(ranks)},
        ranks=ranks,
        device=source.device.type,
        backend=defaults.backend,
        timeout_s=max(defaults.timeout_s, target.plan.defaults.timeout_s),
    )
    numbers = [
        np.searchsorted(ranks, [layout.rank_of(at) for at in range(layout.world_size)]) for layout in layouts
    ]
    per_node = mesh.topology.ranks_per_node
    nodes = None if per_node is None else np.array(ranks) // per_node
    ends = Ends(*layouts, numbers[0], numbers[1], nodes)
    members = [side if side.is_member else None for side in (source, target)]
    return Link(Sides(mesh, ends, *members), stripes, bucket_bytes)


@final
class Link:
    """A connection between the ranks of two meshes. Created by `meshcomm.link`.

    Attributes:
        mesh: a mesh with one dim `link` over all ranks of both sides, whose `stats` count what was transferred.
        is_member: whether this rank is on a side.
    """

    def __init__(self, sides: Sides, stripes: Sequence[str] | None, bucket_bytes: int) -> None:
        self.mesh, self.is_member = sides.mesh, sides.mesh.is_member
        self._sides, self._bucket_bytes = sides, bucket_bytes
        self._stripes = _default_stripes(sides.ends) if stripes is None else tuple(stripes)
        # Compared with each first transfer.
        self._settings = {"bucket_bytes": bucket_bytes, "stripes": [*self._stripes]}
        # Agreements by this rank's call, and the number that all ranks know each of them by.
        self._agreed: dict[str, tuple[int, Plan, Schedule, torch.dtype]] = {}
        self._count = 0

    def transfer(
        self,
        x: Tensor | None = None,
        out: Tensor | None = None,
        placement: str | None = None,
        /,
        *,
        into: Tensor | None = None,
        **sizes: int,
    ) -> Tensor | None:
        """Send a tensor from the source's ranks to the target's ranks, and return this rank's part on the target.

            link.transfer(x, out, "n/tp/fsdp k -> n/tp k")     parts of this rank; None on the other side
            link.transfer(dtensor, into=other)                 DTensors know their own splits

        x:         this rank's part on the source, or a DTensor; None on a rank that is only on the target. Values are sent without
                   their autograd graph.
        out, into: where this rank's part on the target is written, or a DTensor; None on a rank that is only on the source. It
                   must not require gradients, except under torch.no_grad(). On a rank of both sides, x and out may be the same
                   memory if they are the same part; they must not overlap otherwise. Both may have any strides.
        placement: the axes of the full tensor on both sides, each with the dims that split it, outermost first. Ranks along
                   other dims hold copies. Uneven parts follow torch.chunk. See docs/guide/transfer.md. Without it, DTensors say
                   how they are split, and a plain tensor is whole on every rank.
        sizes:     sizes of the sections of an axis such as (q+k+v)/tp.
        Called by: every rank of both sides, in the same order. The first call with new arguments agrees on them.
        Raises:    TransferMismatch, on every rank of both sides; CommunicationError.
        """
        given = self._facts(x, out, into, placement, sizes)
        out = into if out is None else out
        plan, schedule, dtype = self._agreed_on(given)
        rooms: list[dict[int, Room]] = []
        entry = plan.entries[0]
        for side, tensor in zip(BOTH, (x, out), strict=True):
            position = self._sides.position(side)
            rooms.append({})
            if position is not None and tensor is not None:
                where = located(entry.source if side == "source" else entry.target, self._sides.layout(side))
                rooms[-1][0] = Room(regions(tensor, where, position), dtype)
        Run(schedule, *rooms)()
        return out

    def weights(
        self,
        model: Model,
        *,
        into: Model | None = None,
        cast: torch.dtype | None = None,
        only: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        staging: Staging = "whole",
        atomic: Atomic = "copy",
        on_commit: Callable[[int], object] | None = None,
    ) -> Weights:
        """Agree on the tensors of a model, by name, and plan their transfer.

        model:     this rank's model: a module, whose parameters and persistent buffers are transferred, or tensors by name.
        into:      on a rank of both sides, the target's model; `model` is then the source's.
        cast:      the dtype to which the source converts floating-point tensors before they are sent.
        only, skip: patterns of names to transfer, and not to transfer. Those of both sides count.
        staging:   "whole": a version arrives in memory of its own, as large as this rank's parts, and the old one can be read in
                   the meantime. "buckets": a version is written in place, and the weights are torn until it is complete.
        atomic:    "copy": each copy of the model on the target has a version as a whole. "all": all copies together.
        on_commit: called on ranks of the target with each version that has arrived, for caches that depend on the weights.
        Called by: every rank of both sides.
        Raises:    TransferMismatch on every rank, which lists missing and extra names, shapes, dtypes, splits and ties.
        """
        from meshcomm.transfer.weights import Weights, manifest_of, tensors_of

        models: dict[SideName, dict[str, Tensor | Kept]] = {}
        for side in BOTH:
            if self._sides.position(side) is not None:
                given = into if side == "target" and self._sides.source is not None else model
                models[side] = {} if given is None else tensors_of(given)
        manifests = {
            side: manifest_of(self._sides, side, tensors, only, skip, cast if side == "source" else None)
            for side, tensors in models.items()
        }
        agreement = agree_on_weights(self._sides, manifests, {**self._settings, "atomic": atomic})
        lazy = WORLD.get() is not None
        plan = self._plan(agreement.entries)
        self._count += 1
        call = f"push() or pull() of link.weights() number {self._count}"
        return Weights(self._sides, plan, agreement, models, staging, atomic, on_commit, lazy, call)

    def _facts(
        self, x: object, out: object, into: object, pattern: object, sizes: dict[str, int]
    ) -> TensorFacts:
        """Return what this rank brings to a transfer, or why it cannot take part, which all ranks learn."""
        problems = []
        parts: dict[SideName, Part] = {}
        memory: list[Tensor] = []
        if out is not None and into is not None:
            problems.append("passed both out and into, which are the same argument")
        target = into if out is None else out
        for side, name, tensor in zip(BOTH, ("x", "out"), (x, target), strict=True):
            mesh = self._sides.own(side)
            try:
                if mesh is None and tensor is not None:
                    problems.append(f"passed {name}, but is not on the {side}: pass None there")
                elif mesh is not None:
                    memory.append(self._memory(name, tensor, pattern))
                    facts = None
                    if pattern is None and isinstance(tensor, Tensor):
                        facts = placement_of(tensor, mesh.layout, mesh.rank).facts()
                    parts[side] = Part(facts, tuple(memory[-1].shape), memory[-1].dtype)
            except MeshcommError as error:
                problems.append(f"{error.what}: {error.given}")
        try:
            if pattern is not None:
                check_pattern(pattern, sizes)
            elif sizes:
                problems.append(f"passed the sizes {sizes}, but no pattern")
        except MeshcommError as error:
            problems.append(f"{error.what}: {error.given}")
        shared = ""
        if len(memory) == 2 and all(held.numel() for held in memory) and share_memory(*memory):
            places = [(held.data_ptr(), held.shape, held.stride(), held.dtype) for held in memory]
            shared = "all" if places[0] == places[1] else "some"
        # Sizes of an unknown type are a problem, which is text.
        known = {} if problems else sizes
        text = None if pattern is None else str(pattern)
        return TensorFacts(text, known, self._settings, parts, tuple(problems), shared)

    def _memory(self, name: str, tensor: Any, pattern: object) -> Tensor:
        """Return this rank's memory for a tensor. Raises ShapeError, AutogradError and LayoutError."""
        if pattern is not None and isinstance(tensor, DTensor):
            raise ShapeError(
                f"{name} is a DTensor, which knows its splits, but a pattern is given, too",
                given=f"placements {tensor.placements} and {pattern!r}",
                expected="a DTensor without a pattern, or its to_local() with one",
            )
        kinds = (self.mesh.device.type,)
        held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(held, Tensor):
            if name == "out":
                check_in_place(tensor, partial(str, f"link.transfer into {name}"), "")
            held = held.detach()
        check_input(held, kinds, partial(str, f"link.transfer of {name}"), None, written=name == "out")
        return memory_of(tensor)

    def _agreed_on(self, mine: TensorFacts) -> tuple[Plan, Schedule, torch.dtype]:
        """Return the plan for a tensor. Calls like an earlier one of all ranks need only compare its number."""
        key = repr(mine)
        number = self._agreed[key][0] if key in self._agreed else 0
        most, least = self._sides.meet("link.transfer()", number, -number)
        if not -least == most == number > 0:
            entry, dtype = agree_on_tensor(self._sides, mine)
            plan = self._plan([entry])
            self._count += 1
            self._agreed[key] = self._count, plan, Schedule(plan, self._sides), dtype
            if len(self._agreed) > _MOST_AGREED:
                del self._agreed[next(iter(self._agreed))]
        return self._agreed[key][1:]

    def _plan(self, entries: Sequence[Any]) -> Plan:
        return Plan(self._sides.ends, entries, stripes=self._stripes, bucket_bytes=self._bucket_bytes)

    def stats(self) -> Stats:
        """Return this rank's calls and bytes along the link. See `Mesh.stats`."""
        return self.mesh.stats()

    def close(self) -> None:
        """Close the link; both meshes stay open. Called by: every process that opened it."""
        self.mesh.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mesh.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        sizes = [self._sides.layout(side).dims for side in BOTH]
        return f"Link({' -> '.join(str(dict(dims)) for dims in sizes)}; ranks {fold(self.mesh.layout.ranks)})"


def _default_stripes(ends: Ends) -> tuple[str, ...]:
    """Return the dims of the target along which copies share what they receive: see `link`."""
    nodes, layout = ends.nodes, ends.target
    if nodes is None or len(set(nodes.tolist())) == 1 or ends.overlap:
        return ()
    if ends.source.world_size < layout.world_size:
        return tuple(layout.dims)
    groups = {dim: nodes[ends.target_ranks[_positions(layout, dim)]] for dim in layout.dims}
    return tuple(dim for dim, places in groups.items() if (places == places[:, :1]).all())


def _positions(layout: Any, dim: str) -> Any:
    """Return the positions of each group along a dim, of shape (groups, size)."""
    return layout.others(dim).offsets()[:, None] + layout.digits(dim).offsets()
