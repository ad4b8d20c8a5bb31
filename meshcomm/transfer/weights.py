"""The weights of a model, sent as versions: a target has a whole version, or refuses to be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from meshcomm.errors import (
    CommunicationError,
    MeshcommError,
    SourceChanged,
    TransferFailed,
    TransferMismatch,
    UnsupportedOp,
    WeightsTorn,
)
from meshcomm.layout.names import listed
from meshcomm.layout.sizes import whole
from meshcomm.mesh import Mesh
from meshcomm.transfer.agree import Agreement, Row
from meshcomm.transfer.fused import Kept
from meshcomm.transfer.naming import stored_parts
from meshcomm.transfer.plan import Plan, located
from meshcomm.transfer.run import Room, Run
from meshcomm.transfer.sides import BOTH, LINK, SideName, Sides
from meshcomm.transfer.tensors import Cutout, Parted, Region, memory_of, placement_of, regions

Staging: TypeAlias = Literal["whole", "buckets"]
Atomic: TypeAlias = Literal["copy", "all"]
Model: TypeAlias = nn.Module | Mapping[str, Parted]


def tensors_of(model: Model) -> dict[str, Parted]:
    """Return the tensors of a model by name: its parameters and persistent buffers, see `stored_parts`, or the entries of a dict."""
    if isinstance(model, nn.Module):
        return stored_parts(model)
    return {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor | Kept | Cutout)}


def rows_of(tensors: Mapping[str, Parted], mesh: Mesh) -> list[Row]:
    """Return what this rank of a mesh says about its tensors."""
    rows: list[Row] = []
    first_of: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = memory_of(tensor)
        # Two tensors without elements, or without memory, are not tied.
        cut = tensor.cut if isinstance(tensor, Cutout) else None
        place = memory.data_ptr(), memory.storage_offset(), (*memory.shape, *memory.stride()), cut
        tied = first_of.setdefault(place, name) if memory.numel() else name
        facts, problem = None, ""
        try:
            facts = placement_of(tensor, mesh.layout, mesh.rank).facts()
        except MeshcommError as error:
            problem = f"{error.what}: {error.given}"
        rows.append(Row(name, memory.dtype, facts, tied, problem))
    return rows


@final
class Push:
    """A version on its way to the target. The source's weights must not change before `wait` returns."""

    def __init__(self, weights: Weights, version: int, lazy: bool) -> None:
        self.version = version
        self._weights, self._error = weights, None
        self._done = False
        self._thread: threading.Thread | None = None
        if not lazy:
            run = copy_context().run
            self._thread = threading.Thread(
                target=run, args=(self._carry,), name="meshcomm-push", daemon=True
            )
            self._thread.start()

    _error: BaseException | None

    def _carry(self) -> None:
        try:
            self._weights._carry(self)
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._done = True

    def wait(self) -> None:
        """Block until the target has the version, or the transfer has failed.

        Called by: every rank of the source.
        Raises:    SourceChanged, TransferFailed, TransferMismatch. May be called again, and raises the same.
        """
        if self._thread is not None:
            self._thread.join()
        elif not self._done:
            self._weights._check_alone()
            self._carry()
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done


@final
class Weights:
    """The weights of a model on both sides of a link. Created by `Link.weights`.

    Attributes:
        version: on the target, the version of the weights; None if they are not of one version. On the source, the last version
                 that has arrived.
        names:   the names of the tensors that are sent.
    """

    def __init__(
        self,
        sides: Sides,
        plan: Plan,
        agreement: Agreement,
        models: Mapping[SideName, Mapping[str, Parted]],
        staging: Staging,
        atomic: Atomic,
        on_commit: Callable[[int], object] | None,
        lazy: bool,
    ) -> None:
        self._sides, self._plan, self._staging, self._on_commit = sides, plan, staging, on_commit
        self._lazy = lazy
        self.names = tuple(entry.name for entry in agreement.entries)
        self.version: int | None = None
        self._torn = "no version has arrived"
        self._push: Push | None = None
        self._readers = threading.Condition()
        self._reading = 0
        self._agreement = agreement
        self._sources = self._rooms("source", models)
        self._targets = self._rooms("target", models)
        # Where arriving values wait until all ranks of the copy have theirs.
        self._spare = (
            {number: _spare(room) for number, room in self._targets.items()} if staging == "whole" else {}
        )
        self._whole_copy = self._copy_dims(atomic)

    def _rooms(self, side: SideName, models: Mapping[SideName, Mapping[str, Parted]]) -> dict[int, Room]:
        position = self._sides.position(side)
        if position is None:
            return {}
        layout, tensors = self._sides.layout(side), models[side]
        rooms = {}
        for number, (entry, dtype) in enumerate(zip(*self._agreement, strict=True)):
            where = located(entry.source if side == "source" else entry.target, layout)
            if where.holds(position):
                rooms[number] = Room(regions(tensors[entry.name], where, position), dtype)
        return rooms

    def _copy_dims(self, atomic: Atomic) -> tuple[str, ...]:
        """Return the dims of the target along which ranks hold the parts of one copy."""
        layout = self._sides.ends.target
        used = {dim for entry in self._plan.entries for dim in layout.expand(entry.target.dims or ())}
        if atomic == "all" or not used <= layout.dims.keys():
            return tuple(layout.dims)
        # Copies that gather stripes from each other have a version together.
        return tuple(dim for dim in layout.dims if dim in used or dim in self._plan.stripes)

    # -- the source ---------------------------------------------------------------------------------

    def push(self, version: int) -> Push:
        """Begin to send this rank's weights as a version. Returns at once; `Push.wait` waits until the target has it.

        The next push first waits for this one. Change the weights only after `wait`; a change in between raises SourceChanged on
        all ranks of both sides. On a rank of both sides, `pull` carries the push out.

        Called by: every rank of the source, with the same version: an integer of 0 or more.
        """
        if not self._sources and self._sides.source is None:
            raise UnsupportedOp(
                "push on a rank that is not on the source",
                given=self._sides.label(self._sides.me),
                expected="a rank of the source",
                hint="pull() on ranks of the target",
            )
        number = whole(version, "version")
        if self._push is not None:
            self._push.wait()
        self._before = self._marks()
        self._push = Push(self, number, self._lazy or self._sides.target is not None)
        return self._push

    def _marks(self) -> dict[int, int]:
        """Return the version counter of each source tensor, which torch increases with each change in place."""
        return {
            number: -1 if region.held.is_inference() else region.held._version
            for number, room in self._sources.items()
            for region in room.regions[:1]
        }

    def _check_alone(self) -> None:
        if self._sides.target is not None:
            raise UnsupportedOp(
                "this rank is on both sides: its push is carried out by pull()",
                given="push(...).wait() before pull()",
                expected="pull() between the two",
            )

    # -- the target ---------------------------------------------------------------------------------

    def pull(self) -> int:
        """Wait for the source's next version, write it into this rank's weights, and return it.

        Called by: every rank of the target.
        Raises:    TransferFailed, SourceChanged, TransferMismatch. With `staging="whole"`, the weights are then those of before;
                   with "buckets", they are torn unless the error came before the first byte.
        """
        if self._sides.target is None:
            raise UnsupportedOp(
                "pull on a rank that is not on the target",
                given=self._sides.label(self._sides.me),
                expected="a rank of the target",
                hint="push(version=...) on ranks of the source",
            )
        push = self._push if self._sides.source is not None else None
        if self._sides.source is not None and (push is None or push.done):
            raise UnsupportedOp(
                "this rank is on both sides, and pull() came before push()",
                given="pull()",
                expected="push(version=...) first",
            )
        try:
            version = self._carry(push)
        except BaseException as error:
            if push is not None:
                push._error = error
            raise
        finally:
            if push is not None:
                push._done = True
        return version

    @contextmanager
    def reading(self) -> Iterator[int]:
        """In this context, the target's weights are those of one version, which is the context's value; a pull waits for its end.

        Raises WeightsTorn if no version has arrived, or if the last one was interrupted.
        """
        with self._readers:
            if self.version is None:
                raise WeightsTorn(
                    f"the weights on {self._sides.label(self._sides.me)} are not those of one version",
                    given=self._torn,
                    expected="a version that all ranks of this copy have received",
                    hint="pull() until it returns a version",
                )
            self._reading += 1
            version = self.version
        try:
            yield version
        finally:
            with self._readers:
                self._reading -= 1
                self._readers.notify_all()

    # -- a transfer -----------------------------------------------------------------------------------

    def _carry(self, push: Push | None) -> int:
        """Carry out a transfer on this rank, in whatever roles it has."""
        arrived, version, error = False, None, None
        try:
            version = self._agreed(push)
            if self._targets and self._staging == "buckets":
                self._tear(f"version {version} was interrupted")
            self._run()
            self._unchanged(version)
            arrived = True
        except MeshcommError as failure:
            error = self._told(failure, version)
        if self._sides.target is not None and version is not None:
            self._commit(version, arrived, error)
        if error is not None:
            raise error from error.__cause__
        assert version is not None
        self._confirmed(version)
        if self._sides.source is not None and self._sides.target is None:
            self.version = version
        return version

    def _agreed(self, push: Push | None) -> int:
        """Return the version that all sources push. Raises TransferMismatch."""
        number = -1 if push is None else push.version
        source = self._sides.source is not None
        ours = [number, -number] if source else [-1, -(2**62)]
        reduced = self._reduced(ours)
        most, least = reduced[0], -reduced[1]
        if most != least:
            versions = self._sides.of_all(number)
            problems = [
                f"version {versions[n]} on {self._sides.label(n)}"
                for n in self._sides.numbers("source").tolist()
            ]
            raise self._sides.refuse(
                "the ranks of the source push different versions",
                problems,
                "push(version=step) with the same step",
            )
        return most

    def _reduced(self, values: list[int]) -> list[int]:
        mesh = self._sides.mesh
        x = torch.tensor(values, dtype=torch.int64, device=mesh.device)
        greatest: list[int] = mesh.all_reduce(LINK, x, op="max").tolist()
        return greatest

    def _run(self) -> None:
        Run(self._plan, self._sides, self._sources, self._spare or self._targets)()

    def _unchanged(self, version: int) -> None:
        """Raise SourceChanged on every rank if a source tensor is another than when it was pushed."""
        changed = []
        if self._sources:
            now = self._marks()
            changed = [self.names[number] for number, mark in self._before.items() if now[number] != mark]
        if self._reduced([len(changed)])[0]:
            names = sorted({name for names in self._sides.of_all(changed) for name in names})
            raise SourceChanged(
                f"the weights of version {version} changed while they were sent",
                given=listed(names),
                expected="no change before Push.wait() returns",
                hint="handle.wait() before the optimizer's step",
                names=tuple(names),
            )

    def _commit(self, version: int, arrived: bool, error: MeshcommError | None) -> None:
        """Make a version that all ranks of this copy have received theirs. The votes are exchanged on the target's own mesh."""
        mesh = self._sides.target
        assert mesh is not None
        votes: list[Any] = [[mesh.rank, arrived]]
        try:
            for dim in reversed(self._whole_copy):
                votes = [vote for part in mesh.objects.all_gather(dim, votes) for vote in part]
        except MeshcommError as failure:
            self._tear(f"the ranks of this copy could not tell each other whether version {version} arrived")
            raise self._told(error or failure, version) from failure
        without = [rank for rank, has in votes if not has]
        if without:
            if error is None:
                raise TransferFailed(
                    f"version {version} did not arrive on all ranks of this copy",
                    given=f"not on ranks {listed([mesh.layout.label(rank) for rank in without])}",
                    expected="all ranks of a copy to receive it, or none to use it",
                    hint="look at the errors of those ranks",
                    version=version,
                    missing=tuple(("target", rank) for rank in without),
                )
            return
        with self._readers:
            self._readers.wait_for(lambda: not self._reading)
            for number, room in self._spare.items():
                for region, values in zip(self._targets[number].regions, room.regions, strict=True):
                    region.write(region.box.begin, region.box.end, values.held)
            self.version = version
        if self._on_commit is not None:
            self._on_commit(version)

    def _confirmed(self, version: int) -> None:
        """Tell the source that the target has the version."""
        try:
            self._reduced([version])
        except MeshcommError as failure:
            if self._sides.target is None:
                raise self._told(failure, version) from failure

    def _tear(self, why: str) -> None:
        with self._readers:
            self._readers.wait_for(lambda: not self._reading)
            self.version, self._torn = None, why

    def _told(self, failure: MeshcommError, version: int | None) -> MeshcommError:
        """Return the error of a transfer, from an error of the link's mesh."""
        numbers = tuple(getattr(failure, "missing", ()))
        if isinstance(failure, TransferFailed | TransferMismatch | SourceChanged) or not isinstance(
            failure, CommunicationError
        ):
            return failure
        ranks = self._sides.mesh.layout.ranks.tolist()
        missing = [ranks.index(rank) for rank in numbers if rank in ranks]
        what = "the next version" if version is None else f"version {version}"
        error = TransferFailed(
            f"{what} was not transferred: {', '.join(map(self._sides.label, missing)) or failure.what}",
            given=str(failure),
            expected="every rank of both sides to take part until all copies have it",
            hint="the meshes of both sides remain open; link.reopen() connects the ranks that are left",
            version=version,
            missing=tuple(
                (side, self._sides.layout(side).rank_of(position))
                for number in missing
                for side in BOTH
                if (position := self._sides.position(side, number)) is not None
            ),
        )
        error.__cause__ = failure
        return error


def _spare(room: Room) -> Room:
    """Return newly allocated memory for arriving values."""
    return Room(
        [
            Region(
                region.box, torch.empty(region.box.shape, dtype=region.held.dtype, device=region.held.device)
            )
            for region in room.regions
        ],
        room.dtype,
    )
