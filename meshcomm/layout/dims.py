"""What do a mesh's names mean: base dims, the dims of views, merged dims, and tuples of them?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NoReturn, TypeAlias, final

from meshcomm.errors import LayoutError, UnknownDim
from meshcomm.layout.digits import Digits
from meshcomm.layout.names import check_name, did_you_mean
from meshcomm.layout.sizes import check_sizes, resolve, toml_dims

Dims: TypeAlias = str | tuple[str, ...]


@final
class DimTable:
    """Every name of a mesh, and how positions are read along it.

    dims, views, merge: as `Layout` takes them; kept as read-only mappings, a view's -1 filled in.
    known: the digits of every name, and of every tuple of names that was asked for. Whoever looks
        up often may look here first, and ask `digits` for what is missing.

    Raises LayoutError where names or sizes do not go together.
    """

    __slots__ = ("_homes", "dims", "known", "merge", "views", "world_size")

    dims: Final[Mapping[str, int]]
    views: Final[Mapping[str, Mapping[str, int]]]
    merge: Final[Mapping[str, tuple[str, ...]]]
    world_size: Final[int]
    known: Final[dict[Dims, Digits]]

    def __init__(
        self,
        dims: Mapping[str, int],
        views: Mapping[str, Mapping[str, int]],
        merge: Mapping[str, Sequence[str]],
    ) -> None:
        check_sizes(dims, "dims")
        self.world_size = math.prod(dims.values())
        self.known = {}
        # Which factorisation a name belongs to, "" for the base.
        self._homes: dict[str, str] = {}
        known_views: dict[str, Mapping[str, int]] = {}
        known_merge: dict[str, tuple[str, ...]] = {}
        self.dims = MappingProxyType(dict(dims))
        self.views = MappingProxyType(known_views)
        self.merge = MappingProxyType(known_merge)

        self._add_factorisation("", self.dims)
        for view, sizes in views.items():
            check_name(view, "view")
            check_sizes(sizes, f"views.{view}", open_dim=True)
            filled = resolve(sizes, self.world_size, f"view {view}")
            self._add_factorisation(view, filled)
            known_views[view] = MappingProxyType(filled)
        # Put in place at the end: a merged dim does not merge merged dims.
        merged: dict[str, tuple[str, ...]] = {}
        for name, parts in merge.items():
            self._check_merged(name, parts)
            names = tuple(parts)
            digits, home = self._read(names), self.home(names)
            merged[name] = names
            self.known[name] = digits
            self._homes[name] = home
        known_merge.update(merged)

    def _add_factorisation(self, view: str, sizes: Mapping[str, int]) -> None:
        stride = self.world_size
        for name, size in sizes.items():
            stride //= size
            digits = Digits([(size, stride)])
            known = self.known.get(name)
            if known is None:
                self.known[name] = digits
                self._homes[name] = view
            elif known.canonical() != digits.canonical():
                where = self._homes[name]
                raise LayoutError(
                    f"view {view} and {'the base' if not where else f'view {where}'} share the dim "
                    f'"{name}", but it has other groups there',
                    given=f"size {size}, stride {stride} in {view}; "
                    f"size {known[0][0]}, stride {known[0][1]} in {where or 'dims'}",
                    expected="a shared dim that means the same ranks in both",
                    hint=f"rename it in views.{view}, or place and size it as in {where or 'dims'}",
                )

    def _check_merged(self, name: str, parts: Sequence[str]) -> None:
        check_name(name, "merged dim")
        if name in self.known:
            raise LayoutError(
                f"merge.{name} has the name of a dim",
                given=f"merge.{name} = {list(parts)}, dims {toml_dims(self.dims)}",
                expected="a name that no dim has",
                hint=f"merge.{name}_{'_'.join(parts)}",
            )
        if len(parts) < 2:
            raise LayoutError(
                f"merge.{name} merges {len(parts)} dim(s)",
                given=f"merge.{name} = {list(parts)}",
                expected="two or more dims",
                hint=f"use the dim {parts[0]} itself" if parts else "remove the line",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every single name: base dims, view dims, merged dims."""
        return tuple(name for name in self.known if isinstance(name, str))

    def digits(self, dims: Dims) -> Digits:
        """How positions are read along `dims`. Raises UnknownDim."""
        try:
            return self.known[dims]
        except (KeyError, TypeError):
            return self._read(dims)

    def expand(self, dims: Dims) -> tuple[str, ...]:
        """`dims` with merged names replaced by the dims they merge."""
        names = (dims,) if isinstance(dims, str) else dims
        flat: list[str] = []
        for name in names:
            flat.extend(self.merge.get(name, (name,)))
        return tuple(flat)

    def home(self, dims: Dims) -> str:
        """The view that `dims` belong to, "" for the base. Raises UnknownDim where they share none."""
        names = self.expand(dims)
        for name in names:
            if name not in self._homes:
                self.unknown(name)
        homes = dict.fromkeys(self._homes[name] for name in names)
        for candidate in ("", *homes):
            sizes = self.factorisation(candidate)
            if all(name in sizes for name in names):
                return candidate
        raise UnknownDim(
            f"{_quoted(names)} do not belong to one factorisation of the mesh",
            given=", ".join(f"{name} of {self._homes[name] or 'the base'}" for name in names),
            expected="dims of the base, or dims of one view",
            hint="declare a view that has them all",
        )

    def factorisation(self, view: str) -> Mapping[str, int]:
        """The dims and sizes of a view, of the base for ""."""
        return self.views[view] if view else self.dims

    def others(self, dims: Dims) -> tuple[str, ...]:
        """The names of the factorisation of `dims` that `dims` are not."""
        names = self.expand(dims)
        return tuple(name for name in self.factorisation(self.home(names)) if name not in names)

    def _read(self, dims: Dims) -> Digits:
        if isinstance(dims, str):
            self.unknown(dims)
        if not isinstance(dims, tuple) or not dims:
            raise UnknownDim(
                f"not a dim or a tuple of dims: {dims!r}",
                given=repr(dims),
                expected="a name, or a tuple of names",
                hint=self._listed(),
            )
        names = self.expand(dims)
        for name in names:
            if name not in self.known:
                self.unknown(name)
        if len(set(names)) != len(names):
            raise UnknownDim(
                f"{_quoted(names)} name a dim twice",
                given=_quoted(names),
                expected="each dim once",
                hint=_quoted(tuple(dict.fromkeys(names))),
            )
        sizes = self.factorisation(self.home(names))
        digits: list[tuple[int, int]] = []
        for name in names:
            inner = list(sizes.values())[list(sizes).index(name) + 1 :]
            digits.append((sizes[name], math.prod(inner)))
        result = Digits(digits)
        self.known[dims] = result
        return result

    def unknown(self, name: object) -> NoReturn:
        """Raise UnknownDim for a name that the mesh does not have."""
        raise UnknownDim(
            f"the mesh has no dim {name!r}",
            given=repr(name),
            expected=self._listed(),
            hint=did_you_mean(str(name), self.names) or "one of these, or a tuple of them",
        )

    def _listed(self) -> str:
        text = "one of " + ", ".join(f"{name} ({size})" for name, size in self.dims.items())
        for view, sizes in self.views.items():
            text += f"; of view {view}: " + ", ".join(f"{n} ({s})" for n, s in sizes.items())
        if self.merge:
            text += "; merged: " + ", ".join(f"{n} {_quoted(parts)}" for n, parts in self.merge.items())
        return text


def _quoted(names: Sequence[str]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ")"
