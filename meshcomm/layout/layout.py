"""The coords and groups of every rank in a mesh. Coords are mixed-radix numbers computed from grid positions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar, final, overload

import numpy as np
from numpy.typing import NDArray

from meshcomm.errors import LayoutError, UnknownDim
from meshcomm.layout.names import did_you_mean
from meshcomm.layout.sizes import (
    check_coord,
    check_mapping,
    check_name,
    check_sizes,
    fold,
    rank_text,
    resolve,
    times,
    toml_dims,
    whole,
)

Dims: TypeAlias = str | tuple[str, ...]
Ranks: TypeAlias = NDArray[np.int64]
Ints = TypeVar("Ints", int, Ranks)
# Larger than any rank in any job.
_RANKS: Final = 1 << 31


class Digits(tuple[tuple[int, int], ...]):
    """The digits that map positions to coords along some dims: (size, stride) pairs, outermost first.

    A position is a rank's index in the row-major rank grid. Its coord is the mixed-radix number
    whose digits are `position // stride % size`. Two dims have the same groups, in the same
    order, if and only if their canonical digits are equal.
    """

    __slots__ = ()

    @property
    def size(self) -> int:
        """The number of coords."""
        return math.prod(size for size, _ in self)

    def canonical(self) -> Digits:
        """Return the digits with size-1 digits dropped, and adjacent digits merged where their strides allow it."""
        joined: list[tuple[int, int]] = []
        for size, stride in self:
            if size == 1:
                continue
            if joined and joined[-1][1] == size * stride:
                size *= joined.pop()[0]
            joined.append((size, stride))
        return Digits(joined)

    def coord(self, position: Ints) -> Ints:
        """Return the coord of a position, or the coords of an array of positions."""
        value = position * 0
        for size, stride in self:
            value = value * size + position // stride % size
        return value

    def offset(self, coord: Ints) -> Ints:
        """Return the distance from the position with coord 0 to the position with this coord, for one coord or an
        array of coords.
        """
        value = coord * 0
        for size, stride in reversed(self):
            value = value + coord % size * stride
            coord = coord // size
        return value

    def offsets(self) -> Ranks:
        """Return the `offset` of every coord, as an array of shape (size,)."""
        return self.offset(np.arange(self.size, dtype=np.int64))


@final
class Layout:
    """A mesh as a value: the dims, their sizes, and the rank at each position. Creates no processes or groups.

    Immutable, hashable, picklable and copyable; equal layouts have equal hashes.

    Args:
        dims: name -> size, outermost first. The rank grid is row-major in this order, so neighbors along
            the last dim have consecutive positions.
        rank_order: the rank at each position of the row-major grid; 0, 1, 2, ... by default. A
            layout over part of a world lists the ranks in that part.
        views: name -> another {dim: size} factorization of the same positions; one size may be -1.
            A dim name that occurs in a view and in the base must have the same groups in both.
        merge: name -> dims that share a single coord, row-major in the given order.

    Integers may be Python's or NumPy's. A bool, a float, a string where a list is expected, or a set of arguments
    that does not form a mesh raises LayoutError.

    >>> layout = Layout({"pp": 2, "dp": 2, "tp": 2}, merge={"model": ("pp", "tp")})
    >>> layout.coords(6)
    {'pp': 1, 'dp': 1, 'tp': 0}
    >>> layout.groups("dp").tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> layout.group_of(6, "model").tolist()
    [2, 3, 6, 7]
    """

    __slots__ = ("_digits", "_factorisations", "_order", "_positions", "dims", "merge", "views", "world_size")

    dims: Mapping[str, int]
    views: Mapping[str, Mapping[str, int]]
    merge: Mapping[str, tuple[str, ...]]
    world_size: int
    _digits: dict[Dims, Digits]
    _factorisations: dict[str, Mapping[str, int]]
    _order: Ranks | None
    _positions: Mapping[int, int] | range

    def __init__(
        self,
        dims: Mapping[str, int],
        rank_order: Sequence[int] | None = None,
        views: Mapping[str, Mapping[str, int]] | None = None,
        merge: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        sizes = check_sizes(dims, "dims")
        known_views: dict[str, Mapping[str, int]] = {}
        known_merge: dict[str, tuple[str, ...]] = {}
        self._keep(
            dims=MappingProxyType(sizes),
            world_size=math.prod(sizes.values()),
            views=MappingProxyType(known_views),
            merge=MappingProxyType(known_merge),
            # The digits of each name, and of each tuple of names requested so far.
            _digits={},
            # "" is the base.
            _factorisations={},
        )
        self._add_factorisation("", self.dims)
        views = {} if views is None else check_mapping(views, "views", "sizes by name")
        for view, given in views.items():
            check_name(view, "view")
            sizes = check_sizes(given, f"views.{view}", open_dim=True)
            known_views[view] = MappingProxyType(resolve(sizes, self.world_size, f"view {view}"))
            self._add_factorisation(view, known_views[view])
        lists = {} if merge is None else check_mapping(merge, "merge", "lists of dims")
        merged = {name: self._merged(name, parts) for name, parts in lists.items()}
        for name, digits in merged.items():
            known_merge[name], self._digits[name] = tuple(lists[name]), digits
        order = None if rank_order is None else _checked_order(rank_order, self.dims)
        positions = range(self.world_size)
        self._keep(
            _order=order,
            # Maps each rank to its position.
            _positions=positions if order is None else dict(zip(order.tolist(), positions, strict=True)),
        )

    def _keep(self, **facts: Any) -> None:
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise LayoutError(
            f"a layout cannot be changed: {name}",
            given=f"layout.{name} = {value!r}",
            expected="a new layout instead of a changed one",
            hint="create a Layout(...) with the changed arguments",
        )

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        views = {name: dict(sizes) for name, sizes in self.views.items()}
        return Layout, (dict(self.dims), self.rank_order, views, dict(self.merge))

    def _add_factorisation(self, view: str, sizes: Mapping[str, int]) -> None:
        stride = self.world_size
        for name, size in sizes.items():
            stride //= size
            digits = Digits([(size, stride)])
            earlier = self._digits.setdefault(name, digits)
            if earlier.canonical() != digits.canonical():
                other = self.home(name)
                raise LayoutError(
                    f"view {view} and {f'view {other}' if other else 'the base'} share the dim "
                    f'"{name}", but its groups differ between them',
                    given=f"size {size}, stride {stride} in {view}; "
                    f"size {earlier[0][0]}, stride {earlier[0][1]} in {other or 'dims'}",
                    expected="a shared dim with the same groups in both",
                    hint=f"rename it in views.{view}, or place and size it as in {other or 'dims'}",
                )
        self._factorisations[view] = sizes

    def _merged(self, name: str, parts: Any) -> Digits:
        check_name(name, "merged dim")
        if isinstance(parts, str) or not isinstance(parts, Sequence):
            raise LayoutError(
                f"merge.{name} is not a list of dims",
                given=f"merge.{name} = {parts!r}, a {type(parts).__name__}",
                expected="a list or tuple of two or more dims",
                hint=f"merge.{name} = {list(self.dims)[:2]}",
            )
        given = f"merge.{name} = {list(parts)}"
        if name in self._digits:
            raise LayoutError(
                f"merge.{name} has the same name as a dim",
                given=f"{given}, dims {toml_dims(self.dims)}",
                expected="a name that no dim has",
                hint=f"merge.{name}_{'_'.join(parts)}",
            )
        if len(parts) < 2:
            raise LayoutError(
                f"merge.{name} merges {len(parts)} dim(s)",
                given=given,
                expected="two or more dims",
                hint=f"use the dim {parts[0]} itself" if parts else "remove the line",
            )
        return self._read(tuple(parts))

    # -- values ---------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        order = None if self._order is None else self._order.tobytes()
        views = tuple((name, tuple(sizes.items())) for name, sizes in self.views.items())
        return (tuple(self.dims.items()), order, views, tuple(self.merge.items()))

    def __repr__(self) -> str:
        parts = [f"dims={dict(self.dims)}"]
        if self._order is not None:
            parts.append(f"rank_order={self._order.tolist()}")
        if self.views:
            parts.append(f"views={ {name: dict(sizes) for name, sizes in self.views.items()} }")
        if self.merge:
            parts.append(f"merge={dict(self.merge)}")
        return f"Layout({', '.join(parts)})"

    # -- dims -----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """All names that calls accept: base dims, views' dims and merged dims."""
        return tuple(name for name in self._digits if isinstance(name, str))

    def digits(self, dims: Dims) -> Digits:
        """Return the digits that map positions to coords along `dims`. Raises UnknownDim."""
        try:
            return self._digits[dims]
        except (KeyError, TypeError):
            digits = self._digits[dims] = self._read(dims)
            return digits

    def size(self, dims: Dims) -> int:
        """Return the number of ranks along `dims`."""
        return self.digits(dims).size

    def expand(self, dims: Dims) -> tuple[str, ...]:
        """Return `dims` with each merged name replaced by the dims that it merges. Raises UnknownDim."""
        names = (dims,) if isinstance(dims, str) else dims
        parts = tuple(part for name in names for part in self.merge.get(name, (name,)))
        for name in parts:
            if name not in self._digits:
                self._unknown(name)
        return parts

    def home(self, dims: Dims) -> str:
        """Return the view that contains `dims`, or "" for the base. Raises UnknownDim if no view contains all these dims."""
        names = self.expand(dims)
        for view, sizes in self._factorisations.items():
            if all(name in sizes for name in names):
                return view
        raise UnknownDim(
            f"{_quoted(names)} do not belong to one factorization of the mesh",
            given=", ".join(f"{name} of {self.home(name) or 'the base'}" for name in names),
            expected="dims of the base, or dims of one view",
            hint="declare a view with all these dims",
        )

    def rest(self, dims: Dims) -> tuple[str, ...]:
        """Return the other dims of the factorization that contains `dims`."""
        names = self.expand(dims)
        return tuple(name for name in self._factorisations[self.home(names)] if name not in names)

    def others(self, dims: Dims) -> Digits:
        """Return the digits that map positions to coords along all dims except `dims`."""
        return Digits(digit for name in self.rest(dims) for digit in self._digits[name])

    def _read(self, dims: Dims) -> Digits:
        if isinstance(dims, str):
            self._unknown(dims)
        if not isinstance(dims, tuple) or not dims or not all(isinstance(name, str) for name in dims):
            self._not_dims(dims)
        names = self.expand(dims)
        if len(set(names)) != len(names):
            raise UnknownDim(
                f"{_quoted(names)} name a dim twice",
                given=_quoted(names),
                expected="each dim once",
                hint=_quoted(tuple(dict.fromkeys(names))),
            )
        self.home(names)
        return Digits(digit for name in names for digit in self._digits[name])

    def _unknown(self, name: object) -> NoReturn:
        raise UnknownDim(
            f"the mesh has no dim {name!r}",
            given=repr(name),
            expected=self._listed(),
            hint=did_you_mean(str(name), self.names) or "one of these, or a tuple of them",
        )

    def _not_dims(self, given: object) -> NoReturn:
        items = list(given) if isinstance(given, (list, tuple)) else [given]
        if any(hasattr(item, "shape") for item in items):
            raise UnknownDim(
                f"got a {type(given).__name__} where dims are expected",
                given=f"a {type(given).__name__} as the first argument",
                expected=f"the dims first, then the tensor: {self._listed()}",
                hint=f'swap the arguments, as in mesh.all_reduce("{next(iter(self.dims))}", x)',
            )
        raise UnknownDim(
            f"not a dim or a tuple of dims: {given!r}",
            given=repr(given),
            expected=f"a name, or a tuple of names: {self._listed()}",
            hint=f"{tuple(given)!r}" if isinstance(given, list) and given else "one of these names",
        )

    def _listed(self) -> str:
        text = "one of " + ", ".join(f"{name} ({size})" for name, size in self.dims.items())
        for view, sizes in self.views.items():
            text += f"; of view {view}: " + ", ".join(f"{n} ({s})" for n, s in sizes.items())
        if self.merge:
            text += "; merged: " + ", ".join(f"{n} {_quoted(parts)}" for n, parts in self.merge.items())
        return text

    # -- ranks ----------------------------------------------------------------------------------

    @property
    def rank_order(self) -> tuple[int, ...] | None:
        """The rank at each position, or None if ranks equal positions."""
        return None if self._order is None else tuple(self._order.tolist())

    @property
    def ranks(self) -> Ranks:
        """All ranks of the layout, in grid order, as a new array."""
        return np.arange(self.world_size, dtype=np.int64) if self._order is None else self._order.copy()

    def __contains__(self, rank: object) -> bool:
        if type(rank) is int:
            return rank in self._positions
        try:
            return whole(rank, "rank") in self._positions
        except LayoutError:
            return False

    def position(self, rank: int) -> int:
        """Return the index of `rank` in the row-major rank grid.

        Raises LayoutError if the rank is not in the layout.
        """
        if type(rank) is not int:
            rank = whole(rank, "rank")
        if rank in self._positions:
            return self._positions[rank]
        ranks = fold(sorted(self._positions))
        raise LayoutError(
            f"rank {rank} is not in the mesh",
            given=f"rank {rank}",
            expected=f"0 to {self.world_size - 1}" if self._order is None else f"one of {ranks}",
            hint=f"the mesh has {times(self.dims)} ranks",
        )

    def rank_of(self, position: int) -> int:
        """Return the rank at a position in the row-major rank grid. Raises LayoutError if the position is outside the grid."""
        if type(position) is not int:
            position = whole(position, "position")
        if not 0 <= position < self.world_size:
            raise LayoutError(
                f"the mesh has no position {position}",
                given=f"position {position}",
                expected=f"0 to {self.world_size - 1}",
                hint="layout.position(rank) gives the position of a rank",
            )
        return position if self._order is None else int(self._order[position])

    def _ranks_of(self, positions: Ranks) -> Ranks:
        return positions if self._order is None else self._order[positions]

    def coords(self, rank: int, view: str | None = None) -> dict[str, int]:
        """Return the coords of `rank` by dim, in the base or in a view."""
        sizes = self.dims if view is None else self.views.get(view)
        if sizes is None:
            raise UnknownDim(
                f"the mesh has no view {view!r}",
                given=f"view={view!r}",
                expected=f"one of {', '.join(self.views)}" if self.views else "no view: the mesh has none",
                hint=did_you_mean(str(view), self.views) or "leave out the view to get coords in the base",
            )
        position = self.position(rank)
        return {name: self._digits[name].coord(position) for name in sizes}

    def label(self, rank: int) -> str:
        """Return the rank and its coords in the base as text, such as `rank 5 (pp=1 dp=0 tp=1)`.

        A rank outside the layout is labeled as such.
        """
        return rank_text(rank, self.coords(rank)) if rank in self else f"rank {rank} (not in the mesh)"

    def coord(self, rank: int, dims: Dims) -> int:
        """Return the coord of `rank` along `dims`."""
        return self.digits(dims).coord(self.position(rank))

    def get_rank(self, **coords: int) -> int:
        """Return the rank at the given coords. Pass one coord for each dim of the base, or for each dim of one view."""
        sizes = next((s for s in self._factorisations.values() if set(s) == set(coords)), None)
        if sizes is None:
            for name in coords:
                if name not in self._digits:
                    self._unknown(name)
            missing = [name for name in self.dims if name not in coords]
            raise LayoutError(
                "the coords do not identify one rank",
                given=", ".join(f"{n}={c}" for n, c in coords.items()) or "nothing",
                expected="one coord for each of " + ", ".join(self.dims),
                hint=f"add {', '.join(missing)}" if missing else "leave out the others",
            )
        checked = {name: check_coord(name, coords[name], size) for name, size in sizes.items()}
        return self.rank_of(sum(self._digits[name].offset(coord) for name, coord in checked.items()))

    def groups(self, dims: Dims) -> Ranks:
        """Return all groups along `dims`, as an array of shape (number of groups, size).

        Row i, column c is the rank with coord c in group i. Groups are in row-major order of the coords along
        the other dims.
        """
        return self._ranks_of(self.others(dims).offsets()[:, None] + self.digits(dims).offsets())

    def group_of(self, rank: int, dims: Dims) -> Ranks:
        """Return the ranks in `rank`'s group along `dims`, in coord order: element c has coord c."""
        digits, position = self.digits(dims), self.position(rank)
        return self._ranks_of(position - digits.offset(digits.coord(position)) + digits.offsets())

    def group_index(self, rank: int, dims: Dims) -> int:
        """Return the row of `groups(dims)` that contains `rank`."""
        return self.others(dims).coord(self.position(rank))

    @overload
    def neighbor_rank(self, rank: int, dims: Dims, offset: int, *, wrap: Literal[True] = ...) -> int: ...
    @overload
    def neighbor_rank(self, rank: int, dims: Dims, offset: int, *, wrap: bool) -> int | None: ...
    def neighbor_rank(self, rank: int, dims: Dims, offset: int, *, wrap: bool = True) -> int | None:
        """Return the rank `offset` coords further along `dims`. With wrap=False, return None past the edge."""
        digits, position = self.digits(dims), self.position(rank)
        coord = digits.coord(position)
        target = coord + whole(offset, "offset")
        if not (wrap or 0 <= target < digits.size):
            return None
        return self.rank_of(position - digits.offset(coord) + digits.offset(target % digits.size))


def _checked_order(rank_order: Any, dims: Mapping[str, int]) -> Ranks | None:
    """Return `rank_order` as a read-only array, or None if it is 0, 1, 2, ..."""
    world = math.prod(dims.values())
    listed = rank_order.tolist() if isinstance(rank_order, np.ndarray) else rank_order
    expected = f"a list of {world} different ranks, each 0 or more and below {_RANKS}"
    hint = "one rank for each position of the row-major grid, or no rank_order"
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        given = f"{rank_order!r}, a {type(rank_order).__name__}"
        raise LayoutError("rank_order is not a list of ranks", given=given, expected=expected, hint=hint)
    ranks = [whole(rank, "rank") for rank in listed]
    if len(ranks) != world:
        what, given = (
            f"rank_order lists {len(ranks)} ranks for a mesh of {world}",
            f"{len(ranks)} ranks, {times(dims)}",
        )
        raise LayoutError(what, given=given, expected=expected, hint=hint)
    wrong = [rank for rank, seen in Counter(ranks).items() if seen > 1 or not 0 <= rank < _RANKS]
    if wrong:
        given = f"rank {wrong[0]}{' twice' if 0 <= wrong[0] < _RANKS else ''}"
        raise LayoutError("rank_order is not a permutation", given=given, expected=expected, hint=hint)
    order = np.array(ranks, dtype=np.int64)
    if (order == np.arange(world)).all():
        return None
    order.setflags(write=False)
    return order


def _quoted(names: Sequence[str]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ")"
