"""A mesh over process groups that the program has created, given as DeviceMeshes or as this rank's groups by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any, Final, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcomm.config.mesh import MeshConfig
from meshcomm.errors import LaunchError, LayoutError
from meshcomm.layout import Dims, Layout
from meshcomm.layout.layout import Digits
from meshcomm.layout.sizes import fold
from meshcomm.mesh.source import mesh_of
from meshcomm.transport.torch_private import backend_of, flattened_of, ranks_of, root_of, without_modes

# Keys of `[mesh]` that the existing groups determine.
_DECIDED: Final = ("dims", "rank_order", "ranks")


class Existing(NamedTuple):
    """A `[mesh]` section for existing groups, and this rank's groups by name. Names without a usable group get new groups."""

    mesh: MeshConfig
    groups: Mapping[str, dist.ProcessGroup]


def of_device_meshes(meshes: Sequence[DeviceMesh], given: Mapping[str, Any]) -> Existing:
    """The first DeviceMesh defines the dims, each further DeviceMesh defines a view, and flattened dims become merged dims.

    given: further keys of `[mesh]`. Raises LayoutError if the DeviceMeshes are slices, or do not fit together.
    """
    _refuse(given, (*_DECIDED, "device"), "a DeviceMesh")
    if not meshes or not all(isinstance(mesh, DeviceMesh) for mesh in meshes):
        raise LayoutError(
            "init was given a list that does not consist of DeviceMeshes",
            given=f"{list(meshes)!r}",
            expected="one or more torch DeviceMeshes",
            hint='meshcomm.init(dims={"dp": 2, "tp": 4}) for a mesh with its own groups',
        )
    _check_started("init was given a DeviceMesh")
    with without_modes():
        grids = [mesh.mesh.flatten().tolist() for mesh in meshes]
        for mesh in meshes:
            _check(mesh)
    first, order = meshes[0], tuple(grids[0])
    dims = dict(zip(first.mesh_dim_names or (), first.shape, strict=True))
    views, groups = dict(given.get("views", {})), _groups(first)
    for mesh, grid in zip(meshes[1:], grids[1:], strict=True):
        if tuple(grid) != order or mesh.device_type != first.device_type:
            raise LayoutError(
                "the DeviceMeshes are not factorizations of the same ranks",
                given=f"{first} of ranks {fold(order)}, and {mesh} of ranks {fold(grid)}",
                expected="the same ranks in the same order, and one device type",
                hint="open one mesh for each: meshcomm.init(first), meshcomm.init(second)",
            )
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        if new := [name for name in sizes if name not in dims]:
            views["_".join((*new, "view"))] = sizes
        groups = {**_groups(mesh), **groups}
    merge = dict(given.get("merge", {}))
    whole = Layout(dims, order)
    taken = {*dims, *merge, *(name for sizes in views.values() for name in sizes)}
    for name, group in flattened_of(first).items():
        parts = _parts(whole, _digits(map(whole.position, ranks_of(group))))
        if name not in taken and parts is not None and len(parts) > 1:
            merge[name], groups[name] = parts, group
    part = None if len(order) == dist.get_world_size() else tuple(sorted(order))
    derived = {"dims": dims, "rank_order": order, "ranks": part, "device": first.device_type}
    return _existing({**given, **derived, "merge": merge, "views": views}, groups)


def of_groups(groups: Mapping[str, dist.ProcessGroup], given: Mapping[str, Any]) -> Existing:
    """Derive the dims, merged dims and views from the ranks in each of this rank's groups.

    Coords along a dim follow the order of the group's ranks. Every rank must derive the same dims in the same order;
    otherwise, the comparison before the mesh opens reports the ranks that differ.
    Raises LayoutError if the groups do not form a grid of all ranks.
    """
    _refuse(given, _DECIDED, "groups")
    _check_started("from_groups was called")
    world = dist.get_world_size()
    lists = {name: _ranks(name, group) for name, group in groups.items()}
    digits, odd = _digits_of(lists)
    single = {name: of_group[0] for name, of_group in digits.items() if len(of_group) == 1}
    base = max(_chains(single, world), key=len, default=None)
    if base is None:
        raise odd or _incomplete(single, world, lists)
    dims = {name: 1 for name, ranks in lists.items() if len(ranks) == 1}
    dims.update((name, single[name][0]) for name in base)
    layout = Layout(dims, _order([lists[name] for name in base]))
    # From here on, ranks are counted by their position in the grid.
    digits, odd = _digits_of(lists, layout.position)
    if odd is not None:
        raise odd
    single = {name: of_group[0] for name, of_group in digits.items() if len(of_group) == 1}
    merge, views = dict(given.get("merge", {})), dict(given.get("views", {}))
    placed = {*dims, *merge}
    for name, digits_of_group in digits.items():
        if name in placed:
            continue
        parts = _parts(layout, digits_of_group)
        if parts is not None and len(parts) > 1:
            orders = permutations(parts)
            merge[name] = next((o for o in orders if _has(layout, o, lists[name])), parts)
            continue
        chains = (chain for chain in _chains(single, world) if name in chain)
        chain = max(chains, key=lambda chain: len({*chain} - placed), default=None)
        if chain is None:
            raise _incomplete(single, world, lists, name)
        new = tuple(name for name in chain if name not in placed)
        views["_".join((*new, "view"))] = {name: single[name][0] for name in chain}
        placed.update(new)
    keys = {"dims": dims, "rank_order": layout.rank_order, "merge": merge, "views": views}
    return _existing({**given, **keys}, groups, decide=True)


def _existing(
    keys: dict[str, Any], groups: Mapping[str, dist.ProcessGroup], decide: bool = False
) -> Existing:
    """Add the groups that are usable for calls. A backend may be "fake", and a DeviceMesh may have sorted a group's ranks,
    which only the mesh's own groups then have in the order of the DeviceMesh.

    decide: whether the groups themselves decide the order of ranks. Raises LayoutError if a group is in another order.
    """
    mesh = mesh_of({name: value for name, value in keys.items() if value is not None})
    layout = mesh.layout(dist.get_world_size())
    fake = dist.get_backend() == "fake"
    usable = {}
    for name, group in groups.items():
        # The same on every rank: whether torch's sorting leaves all groups along this dim as they are.
        if decide or (np.diff(layout.groups(name)) > 0).all():
            if not _has(layout, name, ranks := ranks_of(group)):
                raise LayoutError(
                    f'the ranks along "{name}" are in another order than in the other groups',
                    given=f"ranks {ranks}",
                    expected=f"ranks {layout.group_of(dist.get_rank(), name).tolist()}, in the order of the dims "
                    f"{', '.join(layout.expand(name))}",
                    hint="dist.new_group(ranks, sort_ranks=False) with the ranks in that order",
                )
            if fake or backend_of(group) != "fake":
                usable[name] = group
    return Existing(mesh, usable)


def _has(layout: Layout, dims: Dims, ranks: Sequence[int]) -> bool:
    """Return whether this rank's group along `dims` has these ranks, in this order."""
    return bool(layout.group_of(dist.get_rank(), dims).tolist() == list(ranks))


def _order(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the rank at each position of the grid whose dims, outermost first, have this rank's groups `lists`."""
    order = np.zeros(1, dtype=np.int64)
    for ranks in lists:
        order = (order[:, None] + (np.array(ranks) - min(ranks))).reshape(-1)
    return [int(rank) for rank in order]


def _refuse(given: Mapping[str, Any], decided: Iterable[str], source: str) -> None:
    if both := [name for name in decided if name in given]:
        raise LaunchError(
            f"init got {source}, and arguments that set the same values",
            given=f"{source} and {', '.join(both)}",
            expected="merge, views, options, timeout_s, validate_calls or warm_up in addition",
            hint=f"leave out {', '.join(both)}",
        )


def _check_started(what: str) -> None:
    if not dist.is_initialized():
        raise LaunchError(
            f"{what} before torch's default group existed, or after it was destroyed",
            given="torch.distributed is not initialized",
            expected="groups created by dist.new_group, a DeviceMesh or a framework",
            hint="call dist.init_process_group first; meshcomm.init(dims=...) creates its own groups",
        )


def _groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    # A rank outside a DeviceMesh has none of its groups.
    names = () if mesh.get_coordinate() is None else mesh.mesh_dim_names or ()
    try:
        groups = {name: mesh.get_group(name) for name in names}
    except RuntimeError as error:  # torch looks them up by name
        raise _destroyed(f"the groups of {mesh}") from error
    for name, group in groups.items():
        _ranks(name, group)
    return groups


def _check(device_mesh: DeviceMesh) -> None:
    names = device_mesh.mesh_dim_names
    if not names:
        raise LayoutError(
            "the DeviceMesh has no names for its dims",
            given=f"a DeviceMesh of shape {tuple(device_mesh.shape)}",
            expected="mesh_dim_names",
            hint='init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))',
        )
    root = root_of(device_mesh)
    if root.mesh.numel() != device_mesh.mesh.numel():
        sizes = ", ".join(
            f"{name}={size}" for name, size in zip(root.mesh_dim_names or (), root.shape, strict=False)
        )
        raise LayoutError(
            "the DeviceMesh is a slice, whose ranks differ between ranks; a mesh is the same on all ranks",
            given=f"a slice along {', '.join(names)} of the DeviceMesh {sizes}; on this rank, it has the ranks "
            f"{fold(device_mesh.mesh.flatten().tolist())}",
            expected="the DeviceMesh that it was sliced from",
            hint="mesh = meshcomm.init(device_mesh), without [...]; "
            f'its calls take the dims by name: mesh.all_reduce("{names[0]}", x)',
        )


def _ranks(name: str, group: Any) -> list[int]:
    if not isinstance(group, dist.ProcessGroup):
        raise LayoutError(
            f'this rank has no process group along "{name}"',
            given=f"{group!r}, a {type(group).__name__}, on rank {dist.get_rank()}",
            expected="a torch ProcessGroup that this rank is in",
            hint="name only groups that exist on every rank; dist.group.WORLD is the default group",
        )
    try:
        return ranks_of(group)
    except KeyError:
        raise _destroyed(f'the group along "{name}"') from None


def _destroyed(what: str) -> LayoutError:
    return LayoutError(
        f"{what} was destroyed",
        given=f"a group that torch no longer has, on rank {dist.get_rank()}",
        expected="groups that exist, of the default group that is open now",
        hint="create the groups again, or open the mesh before dist.destroy_process_group",
    )


def _digits_of(
    lists: Mapping[str, Sequence[int]], place: Callable[[int], int] = int
) -> tuple[dict[str, Digits], LayoutError | None]:
    """Return the digits that generate the places of each list's ranks, by name, and the error about a list without digits."""
    digits, odd = {}, None
    for name, ranks in lists.items():
        places = [*map(place, ranks)]
        factors = _digits(places)
        if factors is None or any(min(places) // stride % size for size, stride in factors):
            odd = odd or LayoutError(
                f'the ranks along "{name}" are not evenly spaced',
                given=f"ranks {fold(ranks)}",
                expected="ranks along one or more dims of a row-major grid of all ranks",
                hint="meshcomm.init(DeviceMesh(...)) takes ranks in any order",
            )
        else:
            digits[name] = factors
    return digits, odd


def _digits(ranks: Iterable[int]) -> Digits | None:
    """Return the canonical (size, stride) pairs that generate `ranks`; None if there are none."""
    places = np.array(sorted(ranks))
    digits: list[tuple[int, int]] = []
    while len(places) > 1:
        steps = np.diff(places)
        uneven = np.flatnonzero(steps != steps[0])
        size = int(uneven[0]) + 1 if len(uneven) else len(places)
        if len(places) % size:
            return None
        blocks = places.reshape(-1, size)
        if (np.diff(blocks) != steps[0]).any():
            return None
        digits.insert(0, (size, int(steps[0])))
        places = blocks[:, 0]
    return Digits(digits)


def _parts(layout: Layout, digits: Digits | None) -> tuple[str, ...] | None:
    """Return the base dims that together generate the same ranks, in the order of the base."""
    names = [name for name, size in layout.dims.items() if size > 1]
    for count in range(len(names) + 1):
        for parts in combinations(names, count):
            if Digits(digit for name in parts for digit in layout.digits(name)).canonical() == digits:
                return parts
    return None


def _chains(single: Mapping[str, tuple[int, int]], world: int, stride: int = 1) -> Iterator[tuple[str, ...]]:
    """Yield the name chains from `stride` to all ranks, outermost first. Each stride is the product of the inner sizes."""
    if stride == world:
        yield ()
    for name, (size, own_stride) in single.items():
        if own_stride == stride and world % (stride * size) == 0:
            for outer in _chains(single, world, stride * size):
                yield (*outer, name)


def _incomplete(
    single: Mapping[str, tuple[int, int]],
    world: int,
    lists: Mapping[str, Sequence[int]],
    name: str | None = None,
) -> LayoutError:
    def reach(stride: int) -> int:
        nexts = (
            stride * size
            for size, own_stride in single.values()
            if own_stride == stride and world % (stride * size) == 0
        )
        return max(map(reach, nexts), default=stride)

    stride = reach(1)
    along = f'along "{name}" and its neighbours' if name is not None else "named"
    missing = world // stride
    return LayoutError(
        f"the groups {along} do not reach all {world} ranks",
        given="; ".join(f"{name}: ranks {fold(ranks)}" for name, ranks in lists.items()),
        expected=f"groups along dims whose sizes multiply to {world}",
        hint=f"name the groups of the other dims, too; for example {missing} ranks that are {stride} apart"
        if missing > 1
        else "name the groups of the other dims of its view, too",
    )
