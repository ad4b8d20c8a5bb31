"""The two sides of a link: which rank of the link is which rank of the source and of the target."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import RLock
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

import numpy as np
import torch

from meshcomm.errors import (
    CommunicationError,
    MeshClosed,
    MeshcommError,
    PeerLost,
    RankLost,
    SourceChanged,
    StoreError,
    TransferFailed,
    TransferMismatch,
    UnsupportedOp,
)
from meshcomm.layout import Layout
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.groups import merged
from meshcomm.rendezvous.store import within
from meshcomm.transfer.plan import Ends
from meshcomm.watching.words import SILENT

# The single dim of a link's mesh.
LINK: Final = "link"

SideName: TypeAlias = Literal["source", "target"]
BOTH: Final[tuple[SideName, SideName]] = ("source", "target")

T = TypeVar("T")

# How the mesh of a link names its ranks, which only the link's own code knows.
_NUMBERED: Final = re.compile(rf"rank \d+ \({LINK}=(\d+)\)")
_GONE: Final = {text for state, text in SILENT.items() if state != "runs"}
# How long a store may take to answer that is not lost.
_ANSWERS_S: Final = 2.0


class Cause(NamedTuple):
    """Why a transfer failed. what: in words. missing: the ranks that are to blame, by their coords along the dim."""

    what: str
    missing: tuple[int, ...] = ()


class UnderWay(Protocol):
    """A push that may still use the link."""

    def _settle(self) -> None:
        """Return once it no longer does."""

    def _end(self) -> None:
        """The same; raise its error, if nobody has seen it."""


@final
class Use:
    """What this rank does with a link. Ranks make its calls in the same order, so only one at a time.

    push:   the last push, which may be under way in a thread of its own.
    failed: the error after which this rank and the others may no longer be at the same call; None while they are.
    is_busy: whether a call is under way. hint: what to do after a failure.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.push: UnderWay | None = None
        self.failed: BaseException | None = None
        self.is_busy = False
        self.hint = "the meshes of both sides remain open; link.reopen() connects the ranks that are left"

    def refuse_inside(self, call: str) -> None:
        """Raise UnsupportedOp in `on_commit`, which this thread is in if it has the lock while a call is under way."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.is_busy:
                raise UnsupportedOp(
                    "a call on a link inside on_commit would wait for ranks that wait for this one",
                    given=f"{call} in on_commit",
                    expected="the call after pull() has returned",
                )
        finally:
            self.lock.release()


class Host(NamedTuple):
    """Who serves the store where two jobs met. number: as a coord along the dim; None if it is no rank of this link."""

    who: str
    number: int | None


@final
@dataclass(frozen=True, eq=False)
class Sides:
    """The sides of a transfer, as this rank sees them.

    mesh:           the mesh that carries the transfer, with a dim over all ranks of both sides.
    ends:           the layouts of both sides, and the coord along this dim of each of their ranks.
    source, target: this process's own mesh on each side; None on a side that this process is not on.
    dim:            the name of the dim.
    host:           of a link between two jobs.
    """

    mesh: Mesh
    ends: Ends
    source: Mesh | None
    target: Mesh | None
    dim: str = LINK
    host: Host | None = None
    use: Use = field(default_factory=Use, init=False)

    @classmethod
    def to_rank(cls, mesh: Mesh, rank: int) -> Sides:
        """Return the sides of a transfer from all ranks of a mesh to one of them. Called by: every rank of the mesh.

        Any two ranks may have to exchange a piece, so all ranks need a dim in common. It is a merged dim, whose group is created
        the first time, and not a second mesh: the mesh keeps one watchdog, one store, one order of its calls. Along the mesh's
        own dims, a piece would be passed on from dim to dim, and ranks would hold what others want.
        """
        dim = dim_of_all(mesh)
        source, target = mesh.layout, Layout({"rank": 1}, [rank])
        positions = np.arange(source.world_size)
        ends = Ends(source, target, positions, positions[[source.position(rank)]])
        return cls(mesh, ends, mesh, mesh if mesh.rank == rank else None, dim)

    @classmethod
    def along(cls, mesh: Mesh, dim: str) -> Sides:
        """Return the sides of a transfer among the ranks along a dim of a mesh, which are all on both sides."""
        layout, numbers = Layout({dim: mesh.size(dim)}), np.arange(mesh.size(dim))
        return cls(mesh, Ends(layout, layout, numbers, numbers), mesh, mesh, dim)

    @contextmanager
    def calling(self, what: str, by: UnderWay | None = None) -> Iterator[None]:
        """In this context, this rank makes calls that every rank of the link makes. Waits for another push than `by`.

        what: is transferred.
        Raises TransferFailed at once if an earlier call failed, and in place of an error of the link's mesh or store. An error
        that only some ranks may have makes all later calls fail.
        """
        use = self.use
        if use.push is not None and use.push is not by:
            use.push._settle()
        with use.lock:
            use.refuse_inside("link.transfer, link.weights, push or pull")
            if use.failed is not None:
                raise TransferFailed(
                    "the link cannot be used any more, because an earlier transfer failed",
                    given=str(use.failed) or type(use.failed).__name__,
                    expected="a link whose ranks have all made the same calls",
                    hint=self.use.hint,
                    version=getattr(use.failed, "version", None),
                    missing=use.failed.missing if isinstance(use.failed, TransferFailed) else (),
                ) from use.failed
            self.mesh._state.usable()
            use.is_busy = True
            try:
                try:
                    yield
                except TransferFailed:
                    raise
                except (CommunicationError, StoreError) as error:
                    raise self.failure(what, self._first(self.cause(error)), str(error)) from error
            except (TransferMismatch, SourceChanged):
                raise  # on every rank, at the same call
            except BaseException as error:
                use.failed = error
                # Its connections break, so that no other rank waits for this one until the timeout.
                with suppress(MeshcommError, RuntimeError):
                    self.mesh._state.close(compare=False)
                raise
            finally:
                use.is_busy = False

    @cached_property
    def _positions(self) -> dict[SideName, dict[int, int]]:
        return {side: {number: at for at, number in enumerate(self.numbers(side).tolist())} for side in BOTH}

    @property
    def me(self) -> int:
        """This rank's coord along the dim."""
        return self.mesh.coord(self.dim)

    def own(self, side: SideName) -> Mesh | None:
        """Return this process's mesh on a side."""
        return self.source if side == "source" else self.target

    def layout(self, side: SideName) -> Layout:
        """Return the layout of a side."""
        return self.ends.source if side == "source" else self.ends.target

    def numbers(self, side: SideName) -> Any:
        """Return the coord along `link` of each rank of a side, by its position in the side's layout."""
        return self.ends.source_ranks if side == "source" else self.ends.target_ranks

    def position(self, side: SideName, number: int | None = None) -> int | None:
        """Return the position in a side's layout of a coord along `link`, by default this rank's; None if it is not on it."""
        return self._positions[side].get(self.me if number is None else number)

    def label(self, number: int) -> str:
        """Return a rank by its coord along `link` as text, such as `rank 2 of the target (copy=1 tp=0)`."""
        names = []
        for side in BOTH:
            position = self.position(side, number)
            if position is not None:
                layout = self.layout(side)
                rank = layout.rank_of(position)
                coords = " ".join(f"{dim}={coord}" for dim, coord in layout.coords(rank).items())
                names.append(f"rank {rank} of the {side} ({coords})")
        return " and ".join(names)

    def cause(self, error: BaseException) -> Cause:
        """Return the cause that an error of a call along the link names. Without ranks, it is the error's first line."""
        missing: Sequence[int] = () if isinstance(error, TransferFailed) else getattr(error, "missing", ())
        doing = {rank: text for rank, _, text, _ in getattr(error, "chain", ())}
        # Without a chain, no rank could be asked.
        asks = isinstance(error, CommunicationError | StoreError) and not doing
        if asks and (without_store := self._without_store()) is not None:
            return without_store
        lost, stopped, left, late = list[int](), list[int](), list[int](), list[int]()
        for rank in missing:
            text = doing.get(rank, "")
            if text == SILENT["stopped"]:
                stopped.append(rank)
            elif text in _GONE or (not text and isinstance(error, PeerLost | RankLost)):
                lost.append(rank)
            else:
                (left if text.startswith("has closed") else late).append(rank)
        # Those that live may only wait for the lost ones.
        limit = f"did not come within {self.mesh.plan.defaults.timeout_s:g} s"
        for ranks, what in (
            (lost, "was lost"),
            (stopped, SILENT["stopped"]),
            (left, "left the link"),
            (late, limit),
        ):
            if numbers := self._known(ranks):
                return self.blame(numbers, what)
        return Cause(self._named(str(error).split("\n")[0]))

    def lost(self, ranks: Iterable[int]) -> Cause:
        """Return the cause that blames global ranks of the link's mesh, which were lost."""
        return self.blame(self._known(ranks), "was lost")

    def _known(self, ranks: Iterable[int]) -> list[int]:
        known = self.mesh.layout.ranks.tolist()
        return [known.index(rank) for rank in ranks if rank in known]

    def _named(self, text: str) -> str:
        return _NUMBERED.sub(lambda match: self.label(int(match[1])), text)

    def _without_store(self) -> Cause | None:
        """Return the cause if the store where two jobs met is lost."""
        if self.host is None:
            return None
        try:
            within(_ANSWERS_S, partial(self.mesh.store.torch_store.check, ["any"]))
        except (RuntimeError, TimeoutError):
            who, number = self.host
            return (
                Cause(f"the link's store is lost, which {who} served")
                if number is None
                else self.blame([number], "was lost")
            )
        except MeshClosed:
            pass
        return None

    def _first(self, cause: Cause) -> Cause:
        """Return the cause of the first rank that could name ranks, if this one cannot. Each rank calls it once at most."""
        key = f"transfer/{self.mesh._state.held.prefix}/failed"
        with suppress(MeshcommError):
            if cause.missing:
                self.mesh.store.compare_set(key, "", json.dumps(cause))
            elif self.mesh.store.check([key]):
                what, missing = json.loads(self.mesh.store.get(key))
                return Cause(what, tuple(missing))
        return cause

    def blame(self, numbers: Iterable[int], what: str) -> Cause:
        """Return the cause that blames ranks, by their coords along the dim."""
        numbers = tuple(numbers)
        what = "were lost" if what == "was lost" and len(numbers) != 1 else what
        return Cause(f"{', '.join(map(self.label, numbers))} {what}", numbers)

    def failure(
        self,
        what: str,
        cause: Cause,
        given: str,
        version: int | None = None,
        failed: str = "was not transferred",
    ) -> TransferFailed:
        """Return the error of a transfer that failed. what: is transferred. failed: what is wrong with it."""
        return TransferFailed(
            f"{what} {failed}: {cause.what}",
            given=self._named(given),
            expected="every rank of both sides to take part to the end",
            hint=self.use.hint,
            version=version,
            missing=tuple(
                (side, self.layout(side).rank_of(position))
                for number in cause.missing
                for side in BOTH
                if (position := self.position(side, number)) is not None
            ),
        )

    def meet(self, call: str, *values: int) -> list[int]:
        """Return the greatest of each value on all ranks. Every call along the link begins with this.

        call: equal on all ranks. values: at most three, each of 64 bits.
        Called by: every rank of the link. Raises TransferMismatch on all ranks if their calls differ.
        """
        code = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7])
        last, first, *greatest = self._reduced("max", code, -code, *values, *[0] * (3 - len(values)))
        if first != -last:
            calls = by_value(self.of_all(call))
            raise self.refuse(
                "the ranks of a link make different calls",
                [f"{call} on {self.ranks(numbers)}" for call, numbers in calls.items()],
                "all ranks of both sides make the same calls in the same order; push() on one side meets pull() on the other",
            )
        return greatest[: len(values)]

    def sum(self, *values: int) -> list[int]:
        """Return the sum of each value over all ranks, in 64 bits. Called by: every rank of the link, at one point of a call."""
        return self._reduced("sum", *values)

    def _reduced(self, op: Any, *values: int) -> list[int]:
        ours = torch.tensor(values, dtype=torch.int64, device=self.mesh.device)
        total: list[int] = self.mesh.all_reduce(self.dim, ours, op=op).tolist()
        return total

    def of_all(self, mine: Any) -> list[Any]:
        """Return each rank's plain data, by coord along the dim. Called by: every rank of both sides."""
        return self.mesh.objects.all_gather(self.dim, mine)

    def refuse(self, what: str, problems: Sequence[str], hint: str, **facts: Any) -> TransferMismatch:
        """Return the error of ranks that do not agree on a transfer."""
        shown = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
        return TransferMismatch(
            what,
            given="\n".join(shown),
            expected="the same tensors on both sides, split in any way",
            hint=hint,
            problems=tuple(problems),
            **facts,
        )

    def ranks(self, numbers: Iterable[int]) -> str:
        """Return ranks as text, from their coords along `link`."""
        numbers = [*numbers]
        return " and ".join(
            self.ranks_of(side, positions)
            for side in BOTH
            if (positions := [at for n in numbers if (at := self.position(side, n)) is not None])
        )

    def differences(self, what: str, values: Sequence[Any], side: SideName | None = None) -> list[str]:
        """Return a text if not all values are equal, which are listed by the coord along `link`, or by the position on a side."""
        by_rank = by_value(values, repr)
        if len(by_rank) < 2:
            return []
        where, ranks = ("", self.ranks)
        if side is not None:
            where, ranks = f" among the ranks of the {side}", partial(self.ranks_of, side)
        return [
            f"{what} differs{where}: {', '.join(f'{value} on {ranks(at)}' for value, at in by_rank.items())}"
        ]

    def ranks_of(self, side: SideName, positions: Iterable[int]) -> str:
        """Return ranks of a side as text, from their positions."""
        return f"{ranks_text(sorted(self.layout(side).rank_of(at) for at in positions))} of the {side}"


def dim_of_all(mesh: Mesh) -> str:
    """Return the name of a dim of all ranks of a mesh. Called by: every rank of the mesh. Creates its group the first time."""
    sizes = mesh.layout.dims
    return merged(mesh, tuple(dim for dim, size in sizes.items() if size > 1) or tuple(sizes)[:1])


def by_value(values: Sequence[T], key: Callable[[T], Any] = lambda value: value) -> dict[Any, list[int]]:
    """Return the indices of equal values, by value."""
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(key(value), []).append(index)
    return groups
