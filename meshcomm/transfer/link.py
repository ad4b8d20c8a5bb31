"""`meshcomm.link`: tensors from the ranks of one mesh to the ranks of another, whatever splits both have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.errors import LayoutError, MeshcommError, PatternError
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh, init
from meshcomm.mesh.runtime import WORLD
from meshcomm.transfer.agree import Manifest, TensorFacts, agree_on_tensor, agree_on_weights
from meshcomm.transfer.placement import axes_of
from meshcomm.transfer.plan import Ends, Plan, located
from meshcomm.transfer.run import Room, Run
from meshcomm.transfer.sides import BOTH, LINK, SideName, Sides
from meshcomm.transfer.tensors import Parted, placement_of, regions

if TYPE_CHECKING:
    from meshcomm.mesh.stats import Stats
    from meshcomm.transfer.weights import Atomic, Model, Staging, Weights

_BUCKET_BYTES = 64 << 20


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
    own_source, own_target = (side if side.is_member else None for side in (source, target))
    return Link(Sides(mesh, ends, own_source, own_target), stripes, bucket_bytes)


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
        for dim in self._stripes:
            sides.ends.target.digits(dim)
        # Agreements by this rank's call, and the number that all ranks know each of them by.
        self._agreed: dict[Any, tuple[int, Plan, torch.dtype]] = {}
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

        x:         this rank's part on the source, or a DTensor; None on a rank that is only on the target.
        out, into: where this rank's part on the target is written, or a DTensor; None on a rank that is only on the source.
        placement: the axes of the full tensor on both sides, each with the dims that split it, outermost first. Ranks along
                   other dims hold copies. Uneven parts follow torch.chunk. See docs/guide/transfer.md.
        sizes:     sizes of the sections of an axis such as (q+k+v)/tp.
        Called by: every rank of both sides, in the same order. The first call with new arguments agrees on them.
        Raises:    TransferMismatch, on every rank of both sides; CommunicationError.
        """
        out = into if out is None else out
        mine: dict[SideName, TensorFacts | str] = {}
        for side, tensor in zip(BOTH, (x, out), strict=True):
            if self._sides.position(side) is not None:
                mine[side] = self._facts(side, tensor, placement, sizes)
            elif tensor is not None:
                raise LayoutError(
                    f"this rank is not on the {side}, and has no part there",
                    given=f"a tensor of shape {tuple(tensor.shape)} as {'x' if side == 'source' else 'out'}",
                    expected="None",
                )
        plan, dtype = self._plan_for(mine)
        rooms: list[dict[int, Room]] = []
        entry = plan.entries[0]
        for side, tensor in zip(BOTH, (x, out), strict=True):
            position, layout = self._sides.position(side), self._sides.layout(side)
            where = located(entry.source if side == "source" else entry.target, layout)
            rooms.append({})
            if position is not None and tensor is not None and where.holds(position):
                rooms[-1][0] = Room(regions(tensor, where, position), dtype)
        Run(plan, self._sides, *rooms)()
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

        model:     this rank's model: a module, whose parameters and persistent buffers are transferred, `Trainer.modules`, or tensors
                   by name. A ModelSpec's module and a model of transformers have the names of their folder: an expert may have
                   tensors of its own there. See `meshcomm.transfer.naming`.
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
        from meshcomm.transfer.weights import Weights, rows_of, tensors_of

        models: dict[SideName, dict[str, Parted]] = {}
        manifests: dict[SideName, Manifest] = {}
        patterns = None if only is None else tuple(only), tuple(skip)
        for side in BOTH:
            if (mesh := self._sides.own(side)) is not None:
                given = into if side == "target" and self._sides.source is not None else model
                models[side] = {} if given is None else tensors_of(given)
                rows = rows_of(models[side], mesh)
                manifests[side] = Manifest(rows, *patterns, cast if side == "source" else None)
        settings = {"bucket_bytes": self._bucket_bytes, "stripes": " ".join(self._stripes), "atomic": atomic}
        agreement = agree_on_weights(self._sides, manifests, settings)
        lazy = WORLD.get() is not None
        plan = self._plan(agreement.entries)
        return Weights(self._sides, plan, agreement, models, staging, atomic, on_commit, lazy)

    def _facts(
        self, side: SideName, tensor: Tensor | None, text: str | None, sizes: dict[str, int]
    ) -> TensorFacts | str:
        """Return what this rank brings to a transfer on a side it is on, or why it cannot."""
        mesh = self._sides.own(side)
        assert mesh is not None
        if not isinstance(tensor, Tensor):
            return f"passed {'x' if side == 'source' else 'out'}={tensor!r}"
        try:
            if text is not None:
                own = _side_of(text, side)
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                names = {section.name for axis in axes_of(own) for section in axis}
                known = {name: size for name, size in sizes.items() if name in names}
                return TensorFacts(own, None, tuple(local.shape), tensor.dtype, known)
            placement = placement_of(tensor, mesh.layout, mesh.rank)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            return TensorFacts("", placement.facts(), tuple(local.shape), tensor.dtype, {})
        except MeshcommError as error:
            return f"{error.what}: {error.given}"

    def _plan_for(self, mine: Mapping[SideName, TensorFacts | str]) -> tuple[Plan, torch.dtype]:
        """Return the plan for a tensor. Calls like an earlier one of all ranks need only compare its number."""
        key = repr(sorted(mine.items()))
        number, plan, dtype = self._agreed.get(key, (0, None, None))
        ours = torch.tensor([number, -number], dtype=torch.int64, device=self.mesh.device)
        least, most = self.mesh.all_reduce(LINK, ours, op="min").tolist()
        if plan is None or dtype is None or least != number or -most != number:
            entry, dtype = agree_on_tensor(self._sides, mine)
            plan = self._plan([entry])
            self._count += 1
            self._agreed[key] = self._count, plan, dtype
        return plan, dtype

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


def _side_of(text: str, side: SideName) -> str:
    """Return one side of `left -> right`. Raises PatternError."""
    sides = text.split("->") if isinstance(text, str) else []
    if len(sides) != 2:
        raise PatternError(
            "a transfer needs two placements",
            given=repr(text),
            expected='the placement on the source, "->", and the placement on the target, as in "n/tp/fsdp k -> n/tp k"',
        )
    names = [[section.name for axis in axes_of(part) for section in axis] for part in sides]
    if names[0] != names[1]:
        raise PatternError(
            "the two placements have different axes",
            given=f"{' '.join(names[0])} -> {' '.join(names[1])}",
            expected="the same axes and sections in the same order: a transfer only changes where parts lie",
            hint="rearrange the tensor before or after it",
        )
    return sides[0 if side == "source" else 1].strip()


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
