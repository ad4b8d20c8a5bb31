"""Shows the differences between two meshes: their settings, groups, and coords of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from meshcomm.config import Config
from meshcomm.config.write import key_path, toml
from meshcomm.layout import Layout, Plan, Ranks
from meshcomm.layout.sizes import coords_text, fold
from meshcomm.show.page import Cells, Facts, Line, PagePart, View, page_view

# How many ranks, and how many groups along one dim, are listed as examples.
_RANKS: Final = 8
_GROUPS: Final = 3


def diff_facts(a: Config, b: Config, plan_a: Plan, plan_b: Plan) -> Facts:
    """Return the output of `meshcomm plan --diff` as JSON-serializable data. a, b: the configs, with every -1 filled in.

    Pairs and rows end with the values of a and b; a missing value is None. groups: every dim whose groups differ.
    "also": the name of a dim that has the same groups on the other side.
    "reordered": the number of groups whose ranks are the same but in a different order.
    ranks: "moved" ranks have different coords along the base dims, or along view dims that both sides have. A base dim that
    one side lacks counts as a dim of size 1.
    """
    settings = [*_differing(_given(a.model_dump()), _given(b.model_dump()), ())]
    sizes = {
        f"mesh.views.{view}": (inside, b.mesh.views.get(view, {})) for view, inside in a.mesh.views.items()
    }
    for key, (ours, theirs) in {"mesh.dims": (a.mesh.dims, b.mesh.dims), **sizes}.items():
        if list(ours) != list(theirs) and sorted(ours) == sorted(theirs):
            settings.append([f"{key}, order", " ".join(ours), " ".join(theirs)])
    return {
        "sources": [a.source, b.source],
        "equal": not settings and plan_a.facts() == plan_b.facts(),
        "world_size": [plan_a.layout.world_size, plan_b.layout.world_size],
        "fingerprint": [plan_a.fingerprint, plan_b.fingerprint],
        "dims": [dict(plan_a.layout.dims), dict(plan_b.layout.dims)],
        "settings": settings,
        "groups": _groups(plan_a, plan_b),
        "ranks": _ranks(plan_a.layout, plan_b.layout),
    }


def _differing(one: Any, other: Any, path: tuple[str, ...]) -> Iterator[list[Any]]:
    """Yield the innermost settings that differ. A table that one side lacks counts as one setting."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            yield from _differing(one.get(key), other.get(key), (*path, key))
    elif one != other:
        yield [key_path(path), one, other]


def _given(value: Any) -> Any:
    """Return plain data, without None values and empty tables."""
    if isinstance(value, Mapping):
        inside = {key: _given(item) for key, item in value.items()}
        return {key: item for key, item in inside.items() if item is not None and item != {}}
    return list(value) if isinstance(value, tuple) else value


def _groups(a: Plan, b: Plan) -> list[Facts]:
    """Return the dims whose groups differ. The order of the groups is ignored, because ranks do not depend on it."""
    ours, theirs = (
        {family.name: plan.layout.groups(family.name) for family in plan.families} for plan in (a, b)
    )
    changed = [_changed(name, ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs])]
    for facts in changed:
        name, status = facts["name"], facts["status"]
        if status != "changed" and (facts["only_a"] or facts["only_b"]):
            groups, across = (ours[name], theirs) if name in ours else (theirs[name], ours)
            facts["also"] = next((n for n, others in across.items() if np.array_equal(others, groups)), None)
    return [facts for facts in changed if facts["status"] != "same"]


def _changed(name: str, a: Ranks | None, b: Ranks | None) -> Facts:
    """Return how the groups along one dim changed. a, b: the groups, or None if that side does not have the dim."""
    ours, theirs = _by_members(a), _by_members(b)
    common = ours.keys() & theirs.keys()
    same = sum(bool((ours[key] == theirs[key]).all()) for key in common)
    only_a = [ours[key].tolist() for key in ours if key not in common]
    only_b = [theirs[key].tolist() for key in theirs if key not in common]
    if a is None or b is None:
        status = "only in a" if b is None else "only in b"
    else:
        status = "changed" if only_a or only_b or same < len(common) else "same"
    return {
        "name": name,
        "status": status,
        "also": None,
        "size": [None if groups is None else groups.shape[1] for groups in (a, b)],
        "count": [None if a is None else len(ours), None if b is None else len(theirs)],
        "same": same,
        "reordered": len(common) - same,
        "only_a": len(only_a),
        "only_b": len(only_b),
        "examples": [only_a[:_GROUPS], only_b[:_GROUPS]],
    }


def _by_members(groups: Ranks | None) -> dict[bytes, Ranks]:
    """Return the groups by their sorted ranks. Groups of one rank are left out."""
    if groups is None or groups.shape[1] == 1:
        return {}
    return {key.tobytes(): row for key, row in zip(np.sort(groups, axis=1), groups, strict=True)}


def _ranks(a: Layout, b: Layout) -> Facts:
    common = np.intersect1d(a.ranks, b.ranks)
    in_views = [name for sizes in a.views.values() for name in sizes]
    shared = {name for sizes in b.views.values() for name in sizes}.intersection(in_views)
    names = [*dict.fromkeys([*a.dims, *b.dims, *(name for name in in_views if name in shared)])]
    ours, theirs = _coords(a, names, common), _coords(b, names, common)
    moved = np.flatnonzero((ours != theirs).any(axis=1))
    examples = []
    for index in moved[:_RANKS]:
        pairs = zip(names, ours[index].tolist(), theirs[index].tolist(), strict=True)
        coords = {name: [before, after] for name, before, after in pairs if before != after}
        examples.append({"rank": int(common[index]), "coords": coords})
    return {
        "common": len(common),
        "moved": len(moved),
        "only_a": a.world_size - len(common),
        "only_b": b.world_size - len(common),
        "examples": examples,
    }


def _coords(layout: Layout, names: list[str], ranks: Ranks) -> Ranks:
    """Return coords with a row for each rank and a column for each name. Coords along missing dims are 0."""
    places = np.argsort(layout.ranks)
    positions = places[np.searchsorted(layout.ranks, ranks, sorter=places)]
    coords = np.zeros((len(ranks), len(names)), dtype=np.int64)
    for column, name in enumerate(names):
        if name in layout.names:
            coords[:, column] = layout.digits(name).coord(positions)
    return coords


def diff_view(facts: Facts) -> View:
    """Return `diff_facts` for a rich console."""
    return page_view(_page(facts))


def _page(facts: Facts) -> list[PagePart]:
    sources = [Line(f"{side}: {source}") for side, source in zip("ab", facts["sources"], strict=True)]
    first, second = facts["fingerprint"]
    if facts["equal"]:
        text = f"equal: {facts['world_size'][0]:,} ranks, plan {first}; every setting is the same"
        return [Line(text), *sources]
    meshes = f"the meshes are equal, plan {first}" if first == second else f"plans {first} and {second}"
    parts: list[PagePart] = [Line(f"different: {meshes}"), *sources]
    if facts["settings"]:
        # The last two entries are the values of a and b.
        texts = (
            (key, *("-" if value is None else toml(value) for value in pair))
            for key, *pair in facts["settings"]
        )
        parts += [Line("settings"), Cells(("setting", "a", "b"), tuple(texts))]
    if facts["groups"]:
        columns = ("dim", "groups", "a", "b", "same", "gone, as", "new, as")
        parts += [Line("groups"), Cells(columns, tuple(map(_group_row, facts["groups"])))]
    ranks = facts["ranks"]
    only = (f"{ranks[f'only_{side}']:,} ranks are only in {side}" for side in "ab" if ranks[f"only_{side}"])
    parts += [
        *map(Line, only),
        Line(f"{ranks['moved']:,} of {ranks['common']:,} ranks have different coords"),
    ]
    if moved := tuple(map(_moved_row, ranks["examples"])):
        parts.append(Cells(("rank", "a", "b"), moved, right=("rank",)))
    rest = ranks["moved"] - len(moved)
    return [*parts, Line(f"and {rest:,} more")] if rest else parts


def _group_row(row: Facts) -> tuple[str, ...]:
    sides = zip(row["count"], row["size"], strict=True)
    shapes = ("-" if size is None else f"{count:,} x {size:,}" for count, size in sides)
    also = f"; the groups of {row['also']}" if row["also"] else ""
    reordered = f" + {row['reordered']:,} reordered" if row["reordered"] else ""
    examples = ("; ".join(map(fold, groups[:2])) or "-" for groups in row["examples"])
    return (row["name"], row["status"] + also, *shapes, f"{row['same']:,}{reordered}", *examples)


def _moved_row(moved: Facts) -> tuple[str, ...]:
    coords = ({name: pair[side] for name, pair in moved["coords"].items()} for side in (0, 1))
    return (str(moved["rank"]), *map(coords_text, coords))
