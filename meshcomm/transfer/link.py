"""`meshcomm.link`: tensors from the ranks of one mesh to the ranks of another, whatever splits both have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshcomm.comm.checks import check_in_place, share_memory
from meshcomm.errors import (
    LaunchError,
    LayoutError,
    MeshClosed,
    MeshcommError,
    MeshMismatchError,
    ShapeError,
    UnsupportedOp,
)
from meshcomm.layout.sizes import fold, ranks_text, whole
from meshcomm.mesh import Mesh, init
from meshcomm.mesh.runtime import WORLD
from meshcomm.predict.links import nodes_of
from meshcomm.transfer.agree import (
    Options,
    Part,
    TensorFacts,
    agree_on_options,
    agree_on_tensor,
    agree_on_weights,
)
from meshcomm.transfer.placement import check_pattern
from meshcomm.transfer.plan import BUCKET_BYTES, Ends, Plan, located
from meshcomm.transfer.run import Room, Run, Schedule
from meshcomm.transfer.sides import BOTH, LINK, SideName, Sides
from meshcomm.transfer.tensors import checked_memory, placement_of, regions
from meshcomm.transport.connections import Connections
from meshcomm.watching.verdict import alike, majority

if TYPE_CHECKING:
    from meshcomm.mesh.stats import Stats
    from meshcomm.transfer.agree import Atomic, Staging
    from meshcomm.transfer.weights import Model, Weights

# How many agreements a rank remembers. A call like a forgotten one agrees again.
_MOST_AGREED = 1000
# Within one job.
_AFTER = (
    "after a loss, mesh.elastic.reopen() of the program's first mesh, meshcomm.init of the others, and "
    "meshcomm.link(source, target) again"
)


def link(
    source: Mesh | None = None,
    target: Mesh | None = None,
    *,
    name: str | None = None,
    store: str | None = None,
    timeout_s: float | None = None,
    secret: str | None = None,
    stripes: Sequence[str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Link:
    """Connect the ranks of two meshes, so that tensors can be sent from any split on one to any split on the other.

        trainer = meshcomm.init(dims={"fsdp": 2, "tp": 2}, ranks=range(4))           # one job
        generator = meshcomm.init(dims={"copy": 2, "tp": 2}, ranks=range(4, 8))
        link = meshcomm.link(trainer, generator)

        link = meshcomm.link(source=mesh, name="policy", store="tcp://10.0.0.7:29700")   # two jobs: the trainer's
        link = meshcomm.link(target=mesh, name="policy", store="tcp://10.0.0.7:29700")   # and the generator's

    source, target: open meshes. Of one job, both: with different ranks, some ranks in both, or the same; they may be one mesh. Of
                    two jobs, which have their own launchers, stores and default groups, each job gives its own.
    name, store:    of two jobs: the link's name, and where they meet. The process of the source's lowest rank serves a TCPStore
                    there, unless a program already listens.
    timeout_s:      seconds to wait for the ranks of both sides, and the timeout of each call. By default, the larger one of both
                    meshes; of two jobs, that of the own mesh.
    secret:         of two jobs: a text that both know, with which the values in the store are signed. None and "" mean no secret.
    stripes:        dims of the target along which copies receive different stripes of a tensor, which they then gather from
                    each other: first copies on different nodes, then copies that share a node. By default, copies that share a
                    node, and all copies if the target has more ranks than the source; none if all ranks are on one node, or if
                    a rank is on both sides.
    bucket_bytes:   how many bytes a rank sends, and receives, at once. A rank allocates at most two such buckets for each.
    Called by:      of one job, every process, including ranks outside both meshes, whose `is_member` is False; of two jobs, every
                    rank of both meshes, in any order.
    Raises:         TransferTimeout, with the side or the ranks that did not come; LaunchError, MeshMismatchError.
    """
    if whole(bucket_bytes, "bucket_bytes") < 1:
        raise LayoutError(
            "a link without room for a byte",
            given=f"bucket_bytes={bucket_bytes}",
            expected="1 or more bytes; some megabytes are fast",
        )
    given: tuple[tuple[str, Any], ...] = (("source", source), ("target", target))
    for of, end in given:
        if end is not None and not isinstance(end, Mesh):
            raise LayoutError(
                f"the {of} of a link is a {type(end).__name__}",
                given=repr(end),
                expected="an open mesh",
                hint="meshcomm.init(...)",
            )
        if end is not None and end._state.closed:
            raise MeshClosed(
                f"the {of} of a link is closed",
                given=repr(end),
                expected="an open mesh",
                hint="meshcomm.init(...) again",
            )
    if stripes is not None:
        stripes = _dims_of(stripes, target)
    if name is None and store is None and source is not None and target is not None:
        sides = _of_one_job(source, target, timeout_s)
        return Link(sides, stripes, bucket_bytes)
    mesh = source if target is None else target
    if name is None or store is None or mesh is None or (source is not None and target is not None):
        raise LaunchError(
            "link was not told what to connect",
            given=", ".join(
                f"{key}={value!r}"
                for key, value in {"source": source, "target": target, "name": name, "store": store}.items()
                if value is not None
            )
            or "nothing",
            expected="both meshes of one job; or one mesh, the name of the link and the store where two jobs meet",
            hint='meshcomm.link(trainer, generator); meshcomm.link(source=mesh, name="policy", store="tcp://HOST:PORT")',
        )
    side: SideName = "source" if target is None else "target"
    limit_s = mesh.plan.defaults.timeout_s if timeout_s is None else timeout_s

    def reopen() -> Sides:
        from meshcomm.transfer.meeting import meet

        return meet(side, mesh, name, store, limit_s, secret=secret)

    return Link(reopen(), stripes, bucket_bytes, reopen)


def _dims_of(stripes: Any, target: Mesh | None) -> tuple[str, ...]:
    """Return dims of the target, of which one may be given as text."""
    if isinstance(stripes, str) or not isinstance(stripes, Iterable):
        stripes = (stripes,)
    dims = tuple(stripes)
    if target is not None:
        for dim in dims:
            target.layout.digits(dim)
    return dims


def _of_one_job(source: Mesh, target: Mesh, timeout_s: float | None) -> Sides:
    if source.device.type != target.device.type:
        raise LayoutError(
            "the two meshes of a link are on different types of devices",
            given=f"{source.device.type} of the source, {target.device.type} of the target",
            expected="one device type",
        )
    layouts = source.layout, target.layout
    ranks = sorted({int(rank) for layout in layouts for rank in layout.ranks.flat})
    defaults = [side.plan.defaults for side in (source, target)]
    # An error that is kept may keep a group, and its connections, so a rank that leaves after an error cuts them.
    connections = Connections() if WORLD.get() is None else None
    with connections.making() if connections else nullcontext():
        mesh = init(
            dims={LINK: len(ranks)},
            ranks=ranks,
            device=source.device.type,
            backend=defaults[0].backend,
            timeout_s=max(options.timeout_s for options in defaults) if timeout_s is None else timeout_s,
        )
    if connections:
        mesh._state.held.aborts.append(connections.cut)
    if mesh.is_member:
        texts = dict(zip(ranks, mesh.objects.all_gather(LINK, " -> ".join(map(repr, layouts))), strict=True))
        if odd := majority(texts)[1]:
            mesh.close()
            raise MeshMismatchError(
                "the ranks of a link connect different meshes",
                given="\n".join(f"{texts[at[0]]} on {ranks_text(at)}" for at in alike(ranks, texts)),
                expected="the same source and the same target on every rank",
                hint="meshcomm.link(source, target), in this order on all ranks",
                mismatched_ranks=tuple(odd),
            )
    ends = Ends.of(*layouts, partial(nodes_of, mesh.topology))
    return Sides(mesh, ends, source if source.is_member else None, target if target.is_member else None)


@final
class Link:
    """A connection between the ranks of two meshes. Created by `meshcomm.link`.

    Attributes:
        mesh: a mesh with one dim `link` over all ranks of both sides, whose `stats` count what was transferred.
        is_member: whether this rank is on a side.
    """

    def __init__(
        self,
        sides: Sides,
        stripes: Sequence[str] | None,
        bucket_bytes: int,
        reopen: Callable[[], Sides] | None = None,
    ) -> None:
        self._bucket_bytes, self._asked_stripes, self._meet_again = bucket_bytes, stripes, reopen
        self._weights: list[Weights] = []
        self._connect(sides)

    def _connect(self, sides: Sides) -> None:
        self.mesh, self.is_member, self._sides = sides.mesh, sides.mesh.is_member, sides
        if self._meet_again is None:
            sides.use.hint = (
                "the meshes of both sides remain open; meshcomm.link(source, target) again, if no rank is lost; "
                + _AFTER
            )
        self._stripes = sides.ends.levels(self._asked_stripes)
        # Compared with each first transfer.
        stripes = ["".join(map(str, splits)) for splits in self._stripes]
        self._settings = {"bucket_bytes": self._bucket_bytes, "stripes": stripes}
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
                   x, out and placement are passed by position, as these names may be those of sections.
        Called by: every rank of both sides, in the same order. The first call with new arguments agrees on them.
        Raises:    TransferMismatch, on every rank of both sides; TransferFailed, with the ranks that are lost or have not come;
                   CommunicationError.
        """
        given = self._facts(x, out, into, placement, sizes)
        out = into if out is None else out
        with self._sides.calling("a tensor"):
            self._transfer(given, x, out)
        return out

    def _transfer(self, given: TensorFacts, x: Tensor | None, out: Tensor | None) -> None:
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

    def weights(
        self,
        model: Model,
        *,
        into: Model | None = None,
        cast: torch.dtype | None = None,
        only: str | Collection[str] | None = None,
        skip: str | Collection[str] = (),
        staging: Staging = "whole",
        atomic: Atomic = "copy",
        on_commit: Callable[[int], object] | None = None,
    ) -> Weights:
        """Agree on the tensors of a model, by name, and plan their transfer.

        model:     this rank's model: a module, whose parameters and persistent buffers are transferred, `Trainer.modules`, or tensors
                   by name, as a dict. Entries that are not tensors have to be left out by skip. A ModelSpec's module and a model of transformers have the names of their folder: an expert may have
                   tensors of its own there. See `meshcomm.transfer.naming`.
        into:      on a rank of both sides, the target's model; `model` is then the source's. Only there.
        cast:      the dtype to which the source converts floating-point tensors before they are sent. The target may pass the same.
        only, skip: patterns of names to transfer, and not to transfer, such as "*.bias". Those of both sides count.
        staging:   equal on all ranks. "whole": a version arrives in memory of its own, as large as this rank's parts, and the old one can be read in
                   the meantime. "buckets": a version is written in place, and the weights are torn until it is complete.
        atomic:    equal on all ranks. "copy": each copy of the model on the target has a version as a whole. "all": all copies together.
        on_commit: called on ranks of the target with each version that has arrived, for caches that depend on the weights. Readers
                   wait for its end. If it raises an error, that rank refuses to be read, and every rank raises TransferFailed.
        Called by: every rank of both sides.
        Raises:    TransferMismatch on every rank, which lists missing and extra names, shapes, dtypes, splits and ties.
        """
        from meshcomm.transfer.weights import Weights, faults_of

        models: dict[SideName, Model] = {}
        problems = []
        on_both = all(self._sides.position(side) is not None for side in BOTH)
        if on_both != (into is not None):
            problems = (
                ["on both sides: pass the target's model as into="]
                if on_both
                else ["passed into=, but is not on both sides"]
            )
        for side in BOTH:
            if self._sides.position(side) is not None:
                given = into if side == "target" and on_both and into is not None else model
                problems += [fault for fault in faults_of(given) if fault not in problems]
                models[side] = given
        commit: Any = on_commit
        if commit is not None and not callable(commit):
            problems.append(f"on_commit={commit!r}, which cannot be called")
        options = Options.checked(only, skip, cast, problems, staging=staging, atomic=atomic)
        weights = Weights(models, options, on_commit, lazy=WORLD.get() is not None)
        self._agree(weights)
        self._weights.append(weights)
        return weights

    def _agree(self, weights: Weights) -> None:
        with self._sides.calling("the list of tensors"):
            choice = agree_on_options(self._sides, weights._options, self._settings)
            rows, names = weights._rows_by_side(self._sides, choice)
            agreement = agree_on_weights(self._sides, rows, choice, names)
            self._count += 1
            weights._connect(self._sides, self._plan(agreement.entries), agreement, self._count)

    def reopen(self) -> None:
        """Connect again after ranks were lost, with the jobs that are there now, and agree again on all `weights` of this link.

        A target keeps the version that it has. A process that started again calls `link` and `weights` instead, in the same order.

        Called by: every rank of both sides that is left, of two jobs.
        Raises:    what `link` and `weights` raise; UnsupportedOp for a link within one job.
        """
        if self._meet_again is None:
            raise UnsupportedOp(
                "a link within one job cannot be reopened",
                given=repr(self),
                expected="two jobs, of which one can start again: link(source=mesh, name=..., store=...)",
                hint=_AFTER,
            )
        with suppress(MeshcommError):
            self.close()
        self._connect(self._meet_again())
        for weights in self._weights:
            self._agree(weights)

    def _facts(
        self, x: object, out: object, into: object, pattern: object, sizes: dict[str, int]
    ) -> TensorFacts:
        """Return what this rank brings to a transfer, or why it cannot take part, which all ranks learn."""
        problems = []
        parts: dict[SideName, tuple[Any, ...]] = {}
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
                    parts[side] = tuple(Part(facts, tuple(memory[-1].shape), memory[-1].dtype))
            except MeshcommError as error:
                problems.append(f"{error.what}: {error.given}")
        try:
            if pattern is not None:
                check_pattern(pattern, sizes)
            elif given := sizes.keys() & {"x", "out", "placement"}:
                problems.append(
                    f"passed {' and '.join(sorted(given))} by keyword, which is by position: transfer(x, out, pattern)"
                )
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
        return TensorFacts(text, known, self._settings, parts, problems, shared)

    def _memory(self, name: str, tensor: Any, pattern: object) -> Tensor:
        """Return this rank's memory for a tensor. Raises ShapeError, AutogradError and LayoutError."""
        if pattern is not None and isinstance(tensor, DTensor):
            raise ShapeError(
                f"{name} is a DTensor, which knows its splits, but a pattern is given, too",
                given=f"placements {tensor.placements} and {pattern!r}",
                expected="a DTensor without a pattern, or its to_local() with one",
            )
        kinds = (self.mesh.device.type,)
        if isinstance(tensor, Tensor) and name == "out":
            check_in_place(tensor, partial(str, f"link.transfer into {name}"), "")
        return checked_memory(tensor, partial(str, f"link.transfer of {name}"), kinds, written=name == "out")

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
        """Close the link, once a push under way has ended; both meshes stay open. Called by: every process that opened it.

        Raises: the error of the last push, if nobody has waited for it.
        """
        push = self._sides.use.push
        self._sides.use.refuse_inside("link.close()")
        try:
            if push is not None:
                push._end()
        finally:
            self.mesh.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        # After an error, the other side may never take part in a push under way.
        self.mesh.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        sizes = [self._sides.layout(side).dims for side in BOTH]
        return f"Link({' -> '.join(str(dict(dims)) for dims in sizes)}; ranks {fold(self.mesh.layout.ranks)})"
