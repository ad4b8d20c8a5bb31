"""The groups that a layout needs, with their options and creation order. Computed without creating any group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshcomm.layout.layout import Digits, Dims, Layout, Ranks
from meshcomm.layout.sizes import coords_text, rank_text

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options used to create a group.

    backend: "auto" (NCCL for cuda, Gloo for cpu), or any name that torch.distributed accepts.
    timeout_s: seconds after which an unfinished operation in the group raises an error.
    comm_id: groups with equal ranks and options share one communicator unless their comm_ids differ.
    extra: backend-specific options, as ("name", value) pairs.
    """

    backend: str = "auto"
    timeout_s: float = 600.0
    comm_id: str = ""
    extra: tuple[tuple[str, Scalar], ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return the options as plain data."""
        facts = {name: getattr(self, name) for name in self.__slots__}
        return {**facts, "extra": dict(self.extra)}


@dataclass(frozen=True, slots=True)
class Family:
    """All groups along one name: along a dim, a merged dim, or a dim of a view.

    shares: the name of the earlier family whose groups this family reuses, or None. A family with `shares`
        set creates no groups of its own.
    """

    name: str
    dims: tuple[str, ...]
    kind: str
    size: int
    count: int
    options: GroupOptions
    shares: str | None = None

    @property
    def creates(self) -> bool:
        """Whether this family creates groups."""
        return self.size > 1 and self.shares is None


@dataclass(frozen=True, slots=True)
class Group:
    """One group: its ranks in coord order, and its options.

    index: the group's index in its family. coords: the coords that all ranks in the group share, by dim.
    """

    name: str
    dims: tuple[str, ...]
    index: int
    ranks: tuple[int, ...]
    coords: Mapping[str, int]
    options: GroupOptions
    shares: str | None = None

    @property
    def label(self) -> str:
        """The name and the shared coords, such as `tp[pp=0 dp=1]`; only the name if all ranks are in one group."""
        return f"{self.name}[{coords_text(self.coords)}]" if self.coords else self.name

    def facts(self) -> dict[str, Any]:
        """Return the group as plain data."""
        return {
            "name": self.name,
            "dims": list(self.dims),
            "index": self.index,
            "ranks": list(self.ranks),
            "coords": dict(self.coords),
            "shares": self.shares,
            **self.options.facts(),
        }


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan for one rank: the rank's coords, and its group for each name, in plan order.

    Names of size 1 have no group and are not in `groups`.
    """

    rank: int
    coords: Mapping[str, int]
    groups: tuple[Group, ...]

    @property
    def label(self) -> str:
        """The rank and its coords, as by Layout.label."""
        return rank_text(self.rank, self.coords)

    @property
    def creations(self) -> int:
        """The number of groups that this rank creates."""
        return sum(group.shares is None for group in self.groups)


@dataclass(frozen=True)
class Plan:
    """All groups of a layout, in a fixed order: base dims, merged dims, then the dims of views.

    Args:
        layout: the placement of ranks.
        defaults: the options for names without an entry in `options`.
        options: the options for each name: a dim, a merged dim or a view's dim.
        device: "auto", "cpu", "cuda", ...
    """

    layout: Layout
    defaults: GroupOptions = field(default_factory=GroupOptions)
    options: Mapping[str, GroupOptions] = field(default_factory=dict)
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in self.options:
            self.layout.digits(name)

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.layout.dims.items())
        return f"Plan({dims}; {self.fingerprint})"

    def _kinds(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Return the kind and the dims of each name, in plan order."""
        kinds: dict[str, tuple[str, tuple[str, ...]]] = {name: ("dim", (name,)) for name in self.layout.dims}
        kinds.update((name, ("merged", parts)) for name, parts in self.layout.merge.items())
        for view, sizes in self.layout.views.items():
            for name in sizes:
                kinds.setdefault(name, (f"view {view}", (name,)))
        return kinds

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """The families of all names, in plan order. A family is the set of groups along one name."""
        layout = self.layout
        owners: dict[tuple[Digits, GroupOptions], str] = {}
        families: list[Family] = []
        for name, (kind, dims) in self._kinds().items():
            digits, options = layout.digits(name), self.options.get(name, self.defaults)
            owner = name if digits.size == 1 else owners.setdefault((digits.canonical(), options), name)
            shares = None if owner == name else owner
            count = layout.world_size // digits.size
            families.append(Family(name, dims, kind, digits.size, count, options, shares))
        return tuple(families)

    def family(self, name: str) -> Family:
        """Return the family of one name. Raises UnknownDim."""
        self.layout.digits(name)
        return next(family for family in self.families if family.name == name)

    def covering(self, dims: Dims) -> Family | None:
        """Return the first family whose groups equal those of `dims`, under any name; None if there is none.

        Raises UnknownDim, and LayoutError if `dims` is neither a name nor a tuple of names.
        """
        wanted = self.layout.digits(dims).canonical()
        matching = (
            family for family in self.families if self.layout.digits(family.name).canonical() == wanted
        )
        return next(matching, None)

    def groups(self) -> Iterator[Group]:
        """Yield the groups of all names, in creation order."""
        for family in self.families:
            if family.size > 1:
                for ranks in self.layout.groups(family.name):
                    yield self._group(family, ranks)

    def for_rank(self, rank: int) -> RankPlan:
        """Return the coords and groups of `rank`.

        Time and memory grow with the sizes of the rank's groups, not with the world size.
        """
        # A process requests its own plan many times.
        last: RankPlan | None = self.__dict__.get("_last")
        if last is None or last.rank != rank:
            last = self.__dict__["_last"] = self._for_rank(rank)
        return last

    def _for_rank(self, rank: int) -> RankPlan:
        layout = self.layout
        wider = (family for family in self.families if family.size > 1)
        groups = tuple(self._group(family, layout.group_of(rank, family.name)) for family in wider)
        return RankPlan(rank=rank, coords=layout.coords(rank), groups=groups)

    def _group(self, family: Family, ranks: Ranks) -> Group:
        layout, members = self.layout, tuple(ranks.tolist())
        first, index = layout.position(members[0]), layout.group_index(members[0], family.dims)
        common = {name: layout.digits(name).coord(first) for name in layout.rest(family.dims)}
        return Group(family.name, family.dims, index, members, common, family.options, family.shares)

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on every rank, as plain data."""
        layout = self.layout
        order = layout.rank_order
        return {
            "dims": dict(layout.dims),
            "rank_order": None if order is None else list(order),
            "views": {name: dict(sizes) for name, sizes in layout.views.items()},
            "merge": {name: list(parts) for name, parts in layout.merge.items()},
            "device": self.device,
            "options": {name: self.options.get(name, self.defaults).facts() for name in self._kinds()},
        }

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the SHA-256 of `facts()` before `on` fills in device and backend.

        A config therefore has the same plan id on every device type. The id depends on the order of names.
        """
        text = json.dumps(self.facts(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def on(self, device: str, backend: str) -> Plan:
        """Return this plan with "auto" replaced by the given device and backend."""

        def fill(options: GroupOptions) -> GroupOptions:
            return replace(options, backend=backend) if options.backend == "auto" else options

        filled = {name: fill(options) for name, options in self.options.items()}
        plan = Plan(self.layout, fill(self.defaults), filled, device)
        plan.__dict__["fingerprint"] = self.fingerprint
        return plan
