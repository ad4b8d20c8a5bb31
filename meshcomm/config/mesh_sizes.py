"""Do the sizes of `[mesh]`, its views and its lists of ranks fit each other and the world?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.wording import key_path, toml
from meshcomm.errors import LayoutError
from meshcomm.layout import Layout
from meshcomm.layout.names import check_name
from meshcomm.layout.sizes import fold, nearest_fits, resolve, times, toml_dims

if TYPE_CHECKING:
    from meshcomm.config.mesh import MeshConfig

# What is planned in seconds and about a gigabyte; no job comes near.
MOST_RANKS: Final = 2**24


def count(mesh: MeshConfig, world: int | None) -> int | None:
    """How many ranks the mesh has, or None where nothing says it."""
    if mesh.ranks is not None:
        return len(mesh.ranks)
    if world is not None:
        return world
    if -1 not in mesh.dims.values():
        return math.prod(mesh.dims.values())
    return None if mesh.rank_order is None else len(mesh.rank_order)


def factorisation_problems(key: str, sizes: Mapping[str, int], what: str) -> Iterator[Problem]:
    """What is wrong with `dims` (what: "the mesh") or one view by itself."""
    if not sizes:
        hint = f"mesh.{key} = {{ dp = 1 }}" if key == "dims" else f"remove mesh.{key}"
        yield Problem(key, "no dim", f"{key} = {{}}", "at least one dim", hint)
    for name, size in sizes.items():
        path = f"{key}.{key_path([name])}"
        try:
            check_name(name, "dim")
        except LayoutError as error:
            yield Problem.of(path, error)
        if size < 1 and size != -1:
            yield Problem(
                path,
                f"{size} is not a size",
                given=f"{name} = {size}",
                expected="a whole number of 1 or more, or -1 on one dim",
                hint=f"mesh.{path} = 1",
            )
    ranks = math.prod(abs(size) for size in sizes.values())
    if ranks > MOST_RANKS:
        yield Problem(
            key,
            f"more ranks than are planned: {times(sizes)}",
            given=f"{key} = {toml_dims(sizes)}",
            expected=f"sizes that multiply to at most {MOST_RANKS}",
            hint="smaller sizes",
        )
    if list(sizes.values()).count(-1) > 1:
        try:
            resolve(sizes, None, what)
        except LayoutError as error:
            yield _of_sizes(key, error)


def _of_sizes(key: str, error: LayoutError) -> Problem:
    """An error about some sizes, with the setting's own name where it says `dims`."""

    def rekey(text: str | None, name: str) -> str | None:
        return None if text is None else text.replace("dims = {", f"{name} = {{")

    return Problem(key, error.what, rekey(error.given, key), error.expected, rekey(error.hint, f"mesh.{key}"))


def rank_problems(mesh: MeshConfig, world: int | None) -> Iterator[Problem]:
    """What is wrong with `ranks` by itself, or in a world of `world` processes."""
    ranks = mesh.ranks
    if ranks is None:
        return
    right = sorted({rank for rank in ranks if rank >= 0})
    if not ranks:
        yield Problem("ranks", "no rank", "ranks = []", "at least one rank", "remove mesh.ranks: all ranks")
    elif right != list(ranks):
        fault = _list_fault(ranks)
        order = f" and mesh.rank_order = {toml(ranks)}" if fault is None and mesh.rank_order is None else ""
        yield Problem(
            "ranks",
            fault or "not ascending",
            given=f"ranks = {toml(ranks)}",
            expected="ranks of the world, each once, ascending; rank_order puts them in another order",
            hint=f"mesh.ranks = {toml(right)}{order}",
        )
    elif world is not None and ranks[-1] >= world:
        inside = [rank for rank in ranks if rank < world]
        yield Problem(
            "ranks",
            f"rank {ranks[-1]} is not in a world of {world}",
            given=f"ranks = {toml(ranks)}, {world} processes",
            expected=f"ranks from 0 to {world - 1}",
            hint=either(
                [
                    f"{ranks[-1] + 1} processes",
                    *([f"mesh.ranks = {toml(inside)} and dims to match"] if inside else []),
                ]
            ),
        )


def _list_fault(ranks: Sequence[int]) -> str | None:
    negative = [rank for rank in ranks if rank < 0]
    if negative:
        return f"rank {negative[0]} is negative"
    repeated = [rank for rank, seen in Counter(ranks).items() if seen > 1]
    return f"rank {repeated[0]} is there twice" if repeated else None


def size_problems(mesh: MeshConfig, broken: Broken, world: int | None) -> Iterator[Problem]:
    """Problems of arithmetic, where `dims` and `ranks` are right by themselves."""
    number = count(mesh, world)
    order = list(_rank_order(mesh, number))
    yield from order
    if order and world is None and mesh.ranks is None and -1 in mesh.dims.values():
        number = None  # it was the length of the faulty list
    sizes: dict[str, int] | None = None
    if number is not None:
        try:
            sizes = resolve(mesh.dims, number)
        except LayoutError as error:
            if mesh.ranks is not None:
                yield _on_list(mesh, "ranks", number)
            elif world is None:
                yield _on_list(mesh, "rank_order", number)
            else:
                yield _of_sizes("dims", error)
    if not broken.touches("views"):
        yield from _views(mesh, sizes, number)


def _on_list(mesh: MeshConfig, name: str, number: int) -> Problem:
    """The dims do not fit the list of ranks that says how many they are."""
    fits = [f"mesh.dims = {toml_dims(fit)}" for fit in nearest_fits(mesh.dims, number)]
    return Problem(
        "dims",
        f"the mesh does not fit its ranks: {times(mesh.dims)}, {name} lists {number}",
        given=f"dims = {toml_dims(mesh.dims)}, {name} = {toml(getattr(mesh, name))}",
        expected=f"sizes that multiply to {number}",
        hint=either(fits),
    )


def _rank_order(mesh: MeshConfig, number: int | None) -> Iterator[Problem]:
    order = mesh.rank_order
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
        yield Problem(
            "rank_order",
            what,
            given=f"rank_order = {toml(order)}",
            expected=f"a permutation of {whole}",
            hint="remove mesh.rank_order: the ranks are then in ascending order",
        )


def _views(mesh: MeshConfig, sizes: Mapping[str, int] | None, number: int | None) -> Iterator[Problem]:
    fitting: dict[str, dict[str, int]] = {}
    for view, written in mesh.views.items():
        key = key_path(["views", view])
        found = list(factorisation_problems(key, written, f"view {view}"))
        yield from found
        if found:
            continue
        if number is None:
            yield from _never_fits(mesh, key, written)
            continue
        if sizes is None and _same_size(written, mesh.dims):
            continue  # it fits the dims, and it is them that do not fit
        try:
            fitting[view] = resolve(written, number, f"view {view}")
        except LayoutError as error:
            yield _unfit_view(key, number, _of_sizes(key, error))
    if sizes is None:
        return
    # A view may clash with the base, or only with another view: try each, then all.
    alone = True
    for view, filled in fitting.items():
        try:
            Layout(sizes, views={view: filled})
        except LayoutError as error:
            alone = False
            yield Problem.of(key_path(["views", view]), error)
    if alone and len(fitting) > 1:
        try:
            Layout(sizes, views=fitting)
        except LayoutError as error:
            yield Problem.of("views", error)


def _same_size(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return -1 not in (*one.values(), *other.values()) and math.prod(one.values()) == math.prod(other.values())


def _unfit_view(key: str, number: int, problem: Problem) -> Problem:
    """A view must fit the mesh, whose size is settled: another number of processes is no way out."""
    ranks = f"the mesh has {number} rank{'s' * (number > 1)}"
    ways = [way for way in (problem.hint or "").split(", or\n") if "processes" not in way]
    return Problem(
        key,
        problem.what.replace("the world", "the mesh").replace(f"world is {number}", ranks),
        given=(problem.given or "").replace(f"{number} processes", ranks),
        expected=problem.expected,
        hint=either(ways),
    )


def _never_fits(mesh: MeshConfig, key: str, view: Mapping[str, int]) -> Iterator[Problem]:
    known = math.prod(size for size in mesh.dims.values() if size != -1)
    product = math.prod(view.values())
    if -1 not in view.values() and product % known:
        yield Problem(
            key,
            f"the view fits no world that the mesh fits: {times(view)}, the mesh has a multiple of "
            f"{times(mesh.dims)}",
            given=f"{key} = {toml_dims(view)}, dims = {toml_dims(mesh.dims)}",
            expected=f"sizes that multiply to a multiple of {known}",
            hint=either(
                f"mesh.{key} = {toml_dims(fit)}" for fit in nearest_fits(view, -(-product // known) * known)
            ),
        )
