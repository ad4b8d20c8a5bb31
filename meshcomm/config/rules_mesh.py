"""What must hold between the settings of `[mesh]`: sizes that fit, names that mean one thing, backends for the device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from meshcomm.config.mesh import MOST_RANKS, MeshConfig
from meshcomm.config.problems import Problem
from meshcomm.config.section import rule
from meshcomm.config.write import key_path, toml, whole_toml
from meshcomm.errors import LayoutError
from meshcomm.layout import Layout
from meshcomm.layout.names import check_name, nearest_name
from meshcomm.layout.sizes import fold, nearest_fits, resolve, times, toml_dims

# -- sizes ------------------------------------------------------------------------------------------


@rule(MeshConfig, "dims")
def _dims(mesh: MeshConfig) -> Iterator[Problem]:
    return _factorisation("dims", mesh.dims, "the mesh")


def _factorisation(key: str, sizes: Mapping[str, int], what: str) -> Iterator[Problem]:
    """What is wrong with `dims` (what: "the mesh") or one view by itself."""
    if not sizes:
        way = f"mesh.{key} = {{ dp = 1 }}" if key == "dims" else f"remove mesh.{key}"
        yield Problem("no dim", "at least one dim", [way], f"{key} = {{}}", key)
    for name, size in sizes.items():
        path = f"{key}.{key_path([name])}"
        yield from _name(name, "dim", path)
        if size < 1 and size != -1:
            expected = "a whole number of 1 or more, or -1 on one dim"
            yield Problem(f"{size} is not a size", expected, [f"mesh.{path} = 1"], f"{name} = {size}", path)
    if math.prod(abs(size) for size in sizes.values()) > MOST_RANKS:
        yield Problem(
            f"more ranks than are planned: {times(sizes)}",
            f"sizes that multiply to at most {MOST_RANKS}",
            ["smaller sizes"],
            f"{key} = {toml_dims(sizes)}",
            key,
        )
    if list(sizes.values()).count(-1) > 1:
        try:
            resolve(sizes, None, what)
        except LayoutError as error:
            yield _of_sizes(key, error)


def _name(name: str, what: str, path: str) -> Iterator[Problem]:
    try:
        check_name(name, what)
    except LayoutError as error:
        yield Problem.of(path, error)


def _of_sizes(key: str, error: LayoutError) -> Problem:
    """An error about some sizes, with the setting's own name where it says `dims`."""
    given, hint = (error.given or "").replace("dims = {", f"{key} = {{"), error.hint or ""
    tries = hint.replace("dims = {", f"mesh.{key} = {{").split(", or\n")
    return Problem(error.what, error.expected, tries, given, key)


@rule(MeshConfig, "ranks")
def _ranks(mesh: MeshConfig) -> Iterator[Problem]:
    ranks, world = mesh.ranks, mesh._world
    if ranks is None:
        return
    right = sorted({rank for rank in ranks if rank >= 0})
    if not ranks:
        yield Problem("no rank", "at least one rank", ["remove mesh.ranks: all ranks"])
    elif right != list(ranks):
        fault = _list_fault(ranks)
        order = f" and mesh.rank_order = {toml(ranks)}" if fault is None and mesh.rank_order is None else ""
        expected = "ranks of the world, each once, ascending; rank_order puts them in another order"
        yield Problem(fault or "not ascending", expected, [f"mesh.ranks = {toml(right)}{order}"])
    elif world is not None and ranks[-1] >= world:
        inside = [rank for rank in ranks if rank < world]
        yield Problem(
            f"rank {ranks[-1]} is not in a world of {world}",
            f"ranks from 0 to {world - 1}",
            [
                f"{ranks[-1] + 1} processes",
                *([f"mesh.ranks = {toml(inside)} and dims to match"] if inside else []),
            ],
            f"ranks = {toml(ranks)}, {world} processes",
        )


def _list_fault(ranks: Sequence[int]) -> str | None:
    negative = [rank for rank in ranks if rank < 0]
    repeated = [rank for rank, seen in Counter(ranks).items() if seen > 1]
    if negative:
        return f"rank {negative[0]} is negative"
    return f"rank {repeated[0]} is there twice" if repeated else None


@rule(MeshConfig, "rank_order", "dims", "ranks", after=("dims", "ranks"))
def _rank_order(mesh: MeshConfig) -> Iterator[Problem]:
    order, number = mesh.rank_order, mesh.count(mesh._world)
    if order is None or number is None:
        return
    wanted: Sequence[int] = range(number) if mesh.ranks is None else mesh.ranks
    outside = sorted(set(order).difference(wanted)) if len(order) == number else []
    what = _list_fault(order)
    if what is None and len(order) != number:
        closed = f"{times(mesh.dims)}, " if -1 not in mesh.dims.values() else ""
        what = f"{len(order)} ranks for a mesh of {number}: {closed}rank_order lists {len(order)}"
    elif what is None and outside:
        what = f"rank {outside[0]} is not in the mesh"
    if what is not None:
        whole = f"0 to {number - 1}" if mesh.ranks is None else f"mesh.ranks: {fold(mesh.ranks)}"
        way = "remove mesh.rank_order: the ranks are then in ascending order"
        yield Problem(what, f"a permutation of {whole}", [way], f"rank_order = {toml(order)}")


@rule(MeshConfig, "dims", "ranks", "rank_order", after=("dims", "ranks"))
def _sizes(mesh: MeshConfig) -> Iterator[Problem]:
    number, world = _number(mesh), mesh._world
    if number is None:
        return
    try:
        resolve(mesh.dims, number)
    except LayoutError as error:
        if mesh.ranks is None and world is not None:
            yield _of_sizes("dims", error)
            return
        name = "rank_order" if mesh.ranks is None else "ranks"
        yield Problem(
            f"the mesh does not fit its ranks: {times(mesh.dims)}, {name} lists {number}",
            f"sizes that multiply to {number}",
            [f"mesh.dims = {toml_dims(fit)}" for fit in nearest_fits(mesh.dims, number)],
            f"dims = {toml_dims(mesh.dims)}, {name} = {toml(getattr(mesh, name))}",
        )


def _number(mesh: MeshConfig) -> int | None:
    """How many ranks the mesh has; None where only a list that is wrong itself says it."""
    if mesh._world is None and mesh.ranks is None and -1 in mesh.dims.values() and list(_rank_order(mesh)):
        return None
    return mesh.count(mesh._world)


@rule(MeshConfig, "views", "dims", "ranks", "rank_order", after=("ranks",))
def _views(mesh: MeshConfig) -> Iterator[Problem]:
    if list(_dims(mesh)):
        return
    number = _number(mesh)
    base = None if number is None or list(_sizes(mesh)) else resolve(mesh.dims, number)
    fitting: dict[str, dict[str, int]] = {}
    for view, written in mesh.views.items():
        key = key_path(["views", view])
        found = list(_factorisation(key, written, f"view {view}"))
        yield from found
        if found:
            continue
        if number is None:
            yield from _never_fits(mesh, key, written)
        elif base is not None or not _same_size(written, mesh.dims):
            # Else it fits the dims, and it is them that do not fit.
            try:
                fitting[view] = resolve(written, number, f"view {view}")
            except LayoutError as error:
                fits = nearest_fits(written, number, limit=None)
                # A dim that the base has too means the same ranks there.
                shared = [fit for fit in fits if base is None or not _clash(base, {view: fit}, [])]
                yield _unfit_view(number, _of_sizes(key, error), (shared or fits)[:3])
    if base is None:
        return
    # A view may clash with the base, or only with another view: try each, then all.
    clashes = [clash for view in fitting for clash in _clash(base, {view: fitting[view]}, ["views", view])]
    yield from clashes or _clash(base, fitting, ["views"])


def _clash(base: Mapping[str, int], views: Mapping[str, Mapping[str, int]], path: list[str]) -> list[Problem]:
    try:
        Layout(base, views=views)
    except LayoutError as error:
        return [Problem.of(key_path(path), error)]
    return []


def _same_size(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return -1 not in (*one.values(), *other.values()) and math.prod(one.values()) == math.prod(other.values())


def _unfit_view(number: int, problem: Problem, fits: Sequence[Mapping[str, int]]) -> Problem:
    """A view must fit the mesh, whose size is settled: another number of processes is no way out."""
    ranks = f"the mesh has {number} rank{'s' * (number > 1)}"
    return Problem(
        problem.what.replace("the world", "the mesh").replace(f"world is {number}", ranks),
        problem.expected,
        [f"mesh.{problem.key} = {toml_dims(fit)}" for fit in fits],
        (problem.given or "").replace(f"{number} processes", ranks),
        problem.key,
    )


def _never_fits(mesh: MeshConfig, key: str, view: Mapping[str, int]) -> Iterator[Problem]:
    known = math.prod(size for size in mesh.dims.values() if size != -1)
    product = math.prod(view.values())
    if -1 not in view.values() and product % known:
        more = -(-product // known) * known
        yield Problem(
            f"the view fits no world that the mesh fits: {times(view)}, the mesh has a multiple of "
            f"{times(mesh.dims)}",
            f"sizes that multiply to a multiple of {known}",
            [f"mesh.{key} = {toml_dims(fit)}" for fit in nearest_fits(view, more)],
            f"{key} = {toml_dims(view)}, dims = {toml_dims(mesh.dims)}",
            key,
        )


# -- names ------------------------------------------------------------------------------------------


@rule(MeshConfig, "merge", "dims", "views")
def _merged(mesh: MeshConfig) -> Iterator[Problem]:
    homes = {"": mesh.dims, **mesh.views}
    dims = list(dict.fromkeys(name for sizes in homes.values() for name in sizes))
    for name, parts in mesh.merge.items():
        path = key_path(["merge", name])
        given = f"{name} = {toml(parts)}"
        once = list(dict.fromkeys(parts))
        remove = f"remove mesh.{path}"
        yield from _name(name, "merged dim", path)
        if name in dims or name in mesh.views:
            what = f"a {'dim' if name in dims else 'view'} has this name"
            way = "rename it, as in " + key_path(["mesh", "merge", "_".join(parts)])
            yield Problem(what, "a name that no dim and no view has", [way], given, path)
        unknown = [part for part in parts if part not in dims]
        if unknown:
            merged = [part for part in unknown if part in mesh.merge]
            what = f"{merged[0]} is itself merged" if merged else f"no dim {', '.join(unknown)}"
            mended = _mended(mesh, name, dims)
            way = f"mesh.{path} = {whole_toml(mended)}" if mended else remove
            yield Problem(what, "dims out of " + ", ".join(dims), [way], given, path)
        elif len(parts) < 2:
            way = f"use the dim {parts[0]} itself, and {remove}" if parts else remove
            yield Problem(
                f"merges {len(parts)} dim{'s' * (not parts)}", "two or more dims", [way], given, path
            )
        elif len(once) != len(parts):
            what = f"names {next(part for part in parts if parts.count(part) > 1)} twice"
            way = f"mesh.{path} = {whole_toml(once)}" if len(once) > 1 else remove
            yield Problem(what, "each dim once", [way], given, path)
        elif not any(all(part in sizes for part in parts) for sizes in homes.values()):
            whose = {part: next(v for v, sizes in homes.items() if part in sizes) for part in parts}
            yield Problem(
                "its dims do not belong to one factorisation of the ranks",
                "dims of the base, or dims of one view",
                ["declare a view that has them all"],
                ", ".join(
                    f"{part} of {f'view {view}' if view else 'the base'}" for part, view in whose.items()
                ),
                path,
            )


def _mended(mesh: MeshConfig, name: str, dims: Sequence[str]) -> list[str]:
    """The parts of a merged dim with the dims that were probably meant; nothing where one has none."""
    mended: list[str] = []
    for part in mesh.merge[name]:
        if part in mesh.merge and part != name:
            mended.extend(mesh.merge[part])
        else:
            mended.append(part if part in dims else nearest_name(part, dims) or "")
    return [] if "" in mended or len(mended) < 2 else list(dict.fromkeys(mended))


@rule(MeshConfig, "dims", "merge", "views")
def _options(mesh: MeshConfig) -> Iterator[Problem]:
    of_views = [name for sizes in mesh.views.values() for name in sizes]
    names = list(dict.fromkeys([*mesh.dims, *mesh.merge, *of_views]))
    for name, options in mesh.options.items():
        if name not in names:
            near, path = nearest_name(name, names), key_path(["options", name])
            way = f"remove mesh.{path}" if near is None else f'did you mean "mesh.options.{near}"?'
            given = f"options.{name} = {toml(options)}"
            yield Problem(f"no dim {name}", "one of " + ", ".join(names), [way], given, path)


@rule(MeshConfig, "views")
def _view_names(mesh: MeshConfig) -> Iterator[Problem]:
    for view in mesh.views:
        path = key_path(["views", view])
        yield from _name(view, "view", path)
        if view in mesh.dims or any(view in sizes for sizes in mesh.views.values()):
            way = f"rename it, as in mesh.views.{view}_view"
            given = f"the view {view}, and the dim {view}"
            yield Problem("a dim has this name", "a name that no dim has", [way], given, path)


# -- backends ---------------------------------------------------------------------------------------

# What "auto" is on a device.
DEFAULTS: Final = {"cpu": "gloo", "cuda": "nccl"}
_NAME: Final = "[a-z][a-z0-9_-]*"


def backends(text: str) -> dict[str, str] | None:
    """Device type -> backend, "" for any device; None where the text is no backend.

    >>> backends("gloo"), backends("cpu:gloo,cuda:nccl")
    ({'': 'gloo'}, {'cpu': 'gloo', 'cuda': 'nccl'})
    """
    if re.fullmatch(_NAME, text):
        return {"": text}
    if not re.fullmatch(f"{_NAME}:{_NAME}(,{_NAME}:{_NAME})*", text):
        return None
    pairs = [pair.partition(":")[::2] for pair in text.split(",")]
    by_device = dict(pairs)
    return by_device if len(by_device) == len(pairs) else None


def chosen(mesh: MeshConfig, backend: str) -> str | None:
    """The backend that a group gets, or None where the process decides that at its start."""
    by_device = backends(backend) or {}
    device = "" if mesh.device == "auto" else mesh.device
    name = by_device.get(device, by_device.get("", "auto"))
    return DEFAULTS.get(device) if name == "auto" else name


def may_use_nccl(mesh: MeshConfig) -> bool:
    """Whether some group of the mesh may run on NCCL."""
    options = [mesh.backend, *(o.backend for o in mesh.options.values() if o.backend is not None)]
    return any(chosen(mesh, backend) in (None, "nccl") for backend in options)


@rule(MeshConfig, "device")
def _device(mesh: MeshConfig) -> Iterator[Problem]:
    plain = re.match("[a-z][a-z0-9_]*", mesh.device.lower())
    kind = plain.group() if plain else "auto"
    # Not torch's word: without this, only a rank would find that its host has no such device.
    if kind == "gpu" or kind != mesh.device:
        expected = "auto, cpu, cuda, or another of torch's device types, without an index"
        way = f'mesh.device = "{"cuda" if kind == "gpu" else kind}"'
        yield Problem(f"{toml(mesh.device)} is not a device type", expected, [way])


@rule(MeshConfig, "backend", "device", after=("device",))
def _mesh_backend(mesh: MeshConfig) -> Iterator[Problem]:
    return _backend(mesh, "backend", mesh.backend)


@rule(MeshConfig, "device", after=("device",))
def _backends_of_dims(mesh: MeshConfig) -> Iterator[Problem]:
    for name, options in mesh.options.items():
        path = key_path(["options", name])
        if options.backend is not None:
            yield from _backend(mesh, f"{path}.backend", options.backend)


def _backend(mesh: MeshConfig, key: str, backend: str) -> Iterator[Problem]:
    by_device, device = backends(backend), mesh.device
    given = f'backend = {toml(backend)}, mesh.device = "{device}"'
    if by_device is None:
        lower = backend.lower().replace(" ", "")
        expected = 'auto, a backend\'s name in lower case, or device:name pairs as in "cpu:gloo,cuda:nccl"'
        way = f'mesh.{key} = "{lower if backends(lower) else "auto"}"'
        yield Problem(f"{toml(backend)} is not a backend", expected, [way], f"backend = {toml(backend)}", key)
    elif device != "auto" and "" not in by_device and device not in by_device:
        way = f'mesh.{key} = "{device}:{"gloo" if device == "cpu" else "nccl"},{backend}"'
        yield Problem(f"no backend for device {device}", f"a backend for {device}", [way], given, key)
    elif device == "cpu" and chosen(mesh, backend) == "nccl":
        ways = [f'mesh.{key} = "gloo"', 'mesh.device = "cuda"']
        yield Problem("nccl does not run on device cpu", "gloo on cpu, nccl on cuda", ways, given, key)


@rule(MeshConfig, "options", "backend", "device", after=("device",))
def _nccl_options(mesh: MeshConfig) -> Iterator[Problem]:
    for name, options in mesh.options.items():
        path, backend = f"mesh.{key_path(['options', name])}", options.backend or mesh.backend
        used = chosen(mesh, backend)
        if backends(backend) is None or used in (None, "nccl"):
            continue
        for option, value in options.backend_options():
            yield Problem(
                f"no effect: {used} has no {_NCCL_WORDS[option]}",
                f"{option} only where the backend is nccl",
                [f"remove {path}.{option}", f'{path}.backend = "nccl" and mesh.device = "cuda"'],
                f'{option} = {toml(value)}, backend = {toml(backend)}, mesh.device = "{mesh.device}"',
                f"{path.removeprefix('mesh.')}.{option}",
            )


_NCCL_WORDS: Final = {
    "high_priority": "high-priority streams",
    "min_ctas": "thread blocks",
    "max_ctas": "thread blocks",
    "cga_cluster_size": "clusters of thread blocks",
    "split_share": "communicator that is split",
}


@rule(MeshConfig, "options")
def _ctas(mesh: MeshConfig) -> Iterator[Problem]:
    for name, options in mesh.options.items():
        least, most = options.min_ctas, options.max_ctas
        if least is not None and most is not None and least > most:
            path = key_path(["options", name])
            yield Problem(
                f"at least {least} thread blocks, and at most {most}",
                "min_ctas no larger than max_ctas",
                [f"mesh.{path}.min_ctas = {most}", f"mesh.{path}.max_ctas = {least}"],
                f"min_ctas = {least}, max_ctas = {most}",
                f"{path}.min_ctas",
            )
