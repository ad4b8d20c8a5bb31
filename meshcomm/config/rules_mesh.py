"""Rules for the settings of `[mesh]`: sizes that fit, unambiguous names, and backends that support the device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Final

from meshcomm.config.problems import Problem, refused
from meshcomm.config.spelling import misspelt
from meshcomm.config.write import key_path, toml
from meshcomm.errors import LayoutError
from meshcomm.layout import Layout
from meshcomm.layout.names import nearest_name
from meshcomm.layout.sizes import check_name, fold, is_name, nearest_fits, resolve, times, toml_dims

if TYPE_CHECKING:
    from meshcomm.config.mesh import MeshConfig

# Planning this many ranks takes seconds and about a gigabyte of memory. No job comes close to this number.
MOST_RANKS: Final = 2**24

# -- sizes ------------------------------------------------------------------------------------------


def _sizes(mesh: MeshConfig) -> Iterator[Problem]:
    """Check dims and views separately, then what is known of the sizes without the number of processes."""
    problems = list(_factorisation("dims", mesh.dims, "the mesh"))
    yield from problems
    for view, sizes in mesh.views.items():
        yield from _factorisation(key_path(["views", view]), sizes, f"view {view}")
    yield from _ranks(mesh, None) if problems else world_fits(mesh, None, mesh.count(None))


def world_fits(mesh: MeshConfig, world: int | None, number: int | None) -> Iterator[Problem]:
    """Check the rules that depend on the numbers of processes and of the mesh's ranks, which are None if they are unknown."""
    problems = list(_ranks(mesh, world))
    if not problems and number is not None:
        problems = list(_rank_order(mesh, number)) or list(_fits(mesh, number, world))
    yield from problems


def _factorisation(key: str, sizes: Mapping[str, int], what: str) -> Iterator[Problem]:
    """Yield the problems in `dims` (what: "the mesh") or in one view."""
    if not sizes:
        # The roles of [parallel] may need other dims.
        way = "a dim for each role, as in mesh.dims = { dp = 8 }" if key == "dims" else f"remove mesh.{key}"
        yield Problem(key, "no dim", "at least one dim", [way], f"{key} = {{}}")
    named = all(map(is_name, sizes))
    for name, size in sizes.items():
        if named and (size >= 1 or size == -1):
            continue
        path = f"{key}.{key_path([name])}"
        yield from refused(path, check_name, name, "dim")
        if size < 1 and size != -1:
            expected = "an integer of 1 or more, or -1 on one dim"
            yield Problem(path, f"{size} is not a size", expected, [f"mesh.{path} = 1"], f"{name} = {size}")
    if math.prod(abs(size) for size in sizes.values()) > MOST_RANKS:
        fault, expected = f"too many ranks: {times(sizes)}", f"sizes that multiply to at most {MOST_RANKS}"
        yield Problem(key, fault, expected, ["smaller sizes"], f"{key} = {toml_dims(sizes)}")
    if list(sizes.values()).count(-1) > 1:
        yield from refused(key, resolve, sizes, None, what, f"mesh.{key}")


def _ranks(mesh: MeshConfig, world: int | None) -> Iterator[Problem]:
    ranks = mesh.ranks
    if ranks is None:
        return
    ascending = sorted({rank for rank in ranks if rank >= 0})
    given = f"ranks = {toml(ranks)}"
    if ascending != list(ranks) or not ranks:
        expected = "one or more ranks of the world, each once, ascending; use rank_order for any other order"
        way = f"mesh.ranks = {toml(ascending)}" if ascending else "remove mesh.ranks: all ranks"
        yield Problem("ranks", "not a list of ranks in ascending order", expected, [way], given)
    elif world is not None and ranks[-1] >= world:
        what, given = f"rank {ranks[-1]} is not in a world of {world}", f"{given}, {world} processes"
        yield Problem("ranks", what, f"ranks from 0 to {world - 1}", [f"{ranks[-1] + 1} processes"], given)


def _rank_order(mesh: MeshConfig, number: int) -> Iterator[Problem]:
    order = mesh.rank_order
    if order is None:
        return
    wanted = set(range(number) if mesh.ranks is None else mesh.ranks)
    wrong = [rank for rank, seen in Counter(order).items() if seen > 1 or rank not in wanted]
    if len(order) != number:
        arithmetic = f"{times(mesh.dims)}, " if -1 not in mesh.dims.values() else ""
        what = f"{len(order)} ranks for a mesh of {number}: {arithmetic}rank_order lists {len(order)}"
    elif wrong:
        what = f"rank {wrong[0]} is {'listed twice' if wrong[0] in wanted else 'not in the mesh'}"
    else:
        return
    all_ranks = f"0 to {number - 1}" if mesh.ranks is None else f"mesh.ranks: {fold(mesh.ranks)}"
    way = "remove mesh.rank_order: the ranks are then in ascending order"
    yield Problem("rank_order", what, f"a permutation of {all_ranks}", [way], f"rank_order = {toml(order)}")


def _fits(mesh: MeshConfig, number: int, world: int | None) -> Iterator[Problem]:
    """Check that dims, then views, fit the number of ranks."""
    misfit = refused("dims", resolve, mesh.dims, number, where="mesh.dims")
    if misfit and (mesh.ranks is not None or world is None):
        name = "rank_order" if mesh.ranks is None else "ranks"
        what = f"the mesh does not fit its ranks: {times(mesh.dims)}, {name} lists {number}"
        ways = [f"mesh.dims = {toml_dims(fit)}" for fit in nearest_fits(mesh.dims, number)]
        given = f"dims = {toml_dims(mesh.dims)}, {name} = {toml(getattr(mesh, name))}"
        misfit = [Problem("dims", what, f"sizes that multiply to {number}", ways, given)]
    if misfit:
        yield from misfit
        return
    if not mesh.views:
        return
    base = resolve(mesh.dims, number)
    fitting: dict[str, dict[str, int]] = {}
    for view, sizes in mesh.views.items():
        key = key_path(["views", view])
        if list(_factorisation(key, sizes, f"view {view}")):
            continue
        try:
            fitting[view] = resolve(sizes, number, f"view {view}")
        except LayoutError:
            fits = nearest_fits(sizes, number, limit=None)
            # A dim that is also in the base mesh must contain the same ranks there.
            shared = [fit for fit in fits if not refused(key, Layout, base, views={view: fit})]
            ways = [f"mesh.{key} = {toml_dims(fit)}" for fit in (shared or fits)[:3]]
            what = f"does not fit the mesh: {times(sizes)}, the mesh has {number} rank{'s' * (number > 1)}"
            yield Problem(key, what, f"sizes that multiply to {number}", ways, f"{key} = {toml_dims(sizes)}")
    # A view may conflict with the base mesh or only with another view. Check each view, then all together.
    each = [refused(key_path(["views", view]), Layout, base, views={view: fitting[view]}) for view in fitting]
    yield from chain.from_iterable(each if any(each) else [refused("views", Layout, base, views=fitting)])


# -- names ------------------------------------------------------------------------------------------


def _merged(mesh: MeshConfig) -> Iterator[Problem]:
    """Yield the problems with merged dims, found by creating a layout in which every size is 1."""
    if not mesh.merge:
        return
    dims = dict.fromkeys(mesh.dims, 1)
    views = {view: dict.fromkeys(sizes, 1) for view, sizes in mesh.views.items()}
    if refused("", Layout, dims, views=views):
        return  # other rules report these names
    for name, parts in mesh.merge.items():
        path, given = key_path(["merge", name]), f"{name} = {toml(parts)}"
        remove = f"remove mesh.{path}"
        if name in mesh.views:
            yield Problem(path, "a view has this name", "a name that no dim and no view has", [remove], given)
        try:
            Layout(dims, views=views, merge={name: parts})
        except LayoutError as error:
            expected, ways = (error.expected or "").replace(" (1)", ""), [error.hint or "", remove]
            yield Problem(path, error.what, expected, ways, given)


def _options(mesh: MeshConfig) -> Iterator[Problem]:
    of_views = [name for sizes in mesh.views.values() for name in sizes]
    names = list(dict.fromkeys([*mesh.dims, *mesh.merge, *of_views]))
    for name, options in mesh.options.items():
        if name not in names:
            near, path = nearest_name(name, names), key_path(["options", name])
            way = f"remove mesh.{path}" if near is None else f'did you mean "mesh.options.{near}"?'
            given = f"options.{name} = {toml(options)}"
            yield Problem(path, f"no dim {name}", "one of " + ", ".join(names), [way], given)


def _view_names(mesh: MeshConfig) -> Iterator[Problem]:
    for view in mesh.views:
        path = key_path(["views", view])
        yield from refused(path, check_name, view, "view")
        if view in mesh.dims or any(view in sizes for sizes in mesh.views.values()):
            way = f"rename it, as in mesh.views.{view}_view"
            given = f"the view {view}, and the dim {view}"
            yield Problem(path, "a dim has this name", "a name that no dim has", [way], given)


# -- backends ---------------------------------------------------------------------------------------

# The backend that "auto" selects on each device type.
DEFAULTS: Final = {"cpu": "gloo", "cuda": "nccl"}
_NAME: Final = re.compile("[a-z][a-z0-9_-]*")
_PAIRS: Final = re.compile("[a-z][a-z0-9_-]*:[a-z][a-z0-9_-]*(,[a-z][a-z0-9_-]*:[a-z][a-z0-9_-]*)*")
_DEVICE: Final = re.compile("[a-z][a-z0-9_]*")
# torch's device types, and their other names. A script may add a type with any other name.
_DEVICES: Final = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "npu", "meta")
_ALSO: Final = {
    "gpu": "cuda",
    "gpus": "cuda",
    "nvidia": "cuda",
    "hip": "cuda",
    "rocm": "cuda",
    "tpu": "xla",
    "any": "auto",
}
_NO_DEVICES: Final = ("no", "yes", "on", "off", "true", "false", "none", "null")


def backends(text: str) -> dict[str, str] | None:
    """Return a mapping from device type ("" for any device) to backend, or None if the text is not a backend.

    >>> backends("gloo"), backends("cpu:gloo,cuda:nccl")
    ({'': 'gloo'}, {'cpu': 'gloo', 'cuda': 'nccl'})
    """
    if _NAME.fullmatch(text):
        return {"": text}
    if not _PAIRS.fullmatch(text):
        return None
    pairs = [pair.partition(":")[::2] for pair in text.split(",")]
    by_device = dict(pairs)
    return by_device if len(by_device) == len(pairs) else None


def chosen(mesh: MeshConfig, backend: str) -> str | None:
    """Return the backend that a group uses, or None if it is chosen only when the process starts."""
    by_device = backends(backend) or {}
    device = "" if mesh.device == "auto" else mesh.device
    name = by_device.get(device, by_device.get("", "auto"))
    return DEFAULTS.get(device) if name == "auto" else name


def may_use_nccl(mesh: MeshConfig) -> bool:
    """Return whether any group of the mesh may run on NCCL."""
    options = [mesh.backend, *(o.backend for o in mesh.options.values() if o.backend is not None)]
    return any(chosen(mesh, backend) in (None, "nccl") for backend in options)


def _devices(mesh: MeshConfig) -> Iterator[Problem]:
    """Check the device type, then the backends for it."""
    plain = _DEVICE.match(mesh.device.lower())
    kind = plain.group() if plain else "auto"
    # torch does not know these names. Without this check, the error would appear only when a rank starts.
    meant = _ALSO.get(kind) or (None if kind in _DEVICES else misspelt(kind, ("auto", *_DEVICES)))
    meant = None if meant == kind else meant
    if meant or kind in _NO_DEVICES or kind != mesh.device:
        what = f"{toml(mesh.device)} is not a device type"
        expected = "auto, cpu, cuda, or another of torch's device types, without an index"
        way = f'mesh.device = "{"auto" if kind in _NO_DEVICES else meant or kind}"'
        yield Problem("device", what, expected, [way], f"device = {toml(mesh.device)}")
    else:
        yield from _backends(mesh)
        yield from _nccl_options(mesh)


def _backends(mesh: MeshConfig) -> Iterator[Problem]:
    yield from _backend(mesh, "backend", mesh.backend)
    for name, options in mesh.options.items():
        if options.backend is not None:
            yield from _backend(mesh, f"{key_path(['options', name])}.backend", options.backend)


def _backend(mesh: MeshConfig, key: str, backend: str) -> Iterator[Problem]:
    by_device, device = backends(backend), mesh.device
    if by_device is None:
        lower = backend.lower().replace(" ", "")
        expected = 'auto, a backend\'s name in lower case, or device:name pairs as in "cpu:gloo,cuda:nccl"'
        way = f'mesh.{key} = "{lower if backends(lower) else "auto"}"'
        yield Problem(key, f"{toml(backend)} is not a backend", expected, [way], f"backend = {toml(backend)}")
    elif device != "auto" and "" not in by_device and device not in by_device:
        way = f'mesh.{key} = "{device}:{"gloo" if device == "cpu" else "nccl"},{backend}"'
        given = f'backend = {toml(backend)}, mesh.device = "{device}"'
        yield Problem(key, f"no backend for device {device}", f"a backend for {device}", [way], given)
    elif device == "cpu" and chosen(mesh, backend) == "nccl":
        ways = [f'mesh.{key} = "gloo"', 'mesh.device = "cuda"']
        given = f'backend = {toml(backend)}, mesh.device = "cpu"'
        yield Problem(key, "nccl does not run on device cpu", "gloo on cpu, nccl on cuda", ways, given)


def _nccl_options(mesh: MeshConfig) -> Iterator[Problem]:
    for name, options in mesh.options.items():
        path, backend = key_path(["options", name]), options.backend or mesh.backend
        used = chosen(mesh, backend)
        if backends(backend) is None or used in (None, "nccl"):
            continue
        for option, value in options.backend_options():
            what, expected = f"no effect: {used} has no {option}", f"{option} only if the backend is nccl"
            remove = f"remove mesh.{path}.{option}"
            ways = [remove, f'mesh.{path}.backend = "nccl" and mesh.device = "cuda"']
            given = f'{option} = {toml(value)}, backend = {toml(backend)}, mesh.device = "{mesh.device}"'
            yield Problem(f"{path}.{option}", what, expected, ways, given)


def _ctas(mesh: MeshConfig) -> Iterator[Problem]:
    for name, options in mesh.options.items():
        least, most, path = options.min_ctas, options.max_ctas, key_path(["options", name])
        if least is not None and most is not None and least > most:
            what = f"at least {least} thread blocks, and at most {most}"
            ways = [f"mesh.{path}.min_ctas = {most}", f"mesh.{path}.max_ctas = {least}"]
            given = f"min_ctas = {least}, max_ctas = {most}"
            yield Problem(f"{path}.min_ctas", what, "min_ctas no larger than max_ctas", ways, given)


RULES: Final = (_sizes, _merged, _options, _view_names, _devices, _ctas)
