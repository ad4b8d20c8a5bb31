"""What differs between two meshes: settings, groups and their options, and who sits where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from meshcomm.config import Config
from meshcomm.config.write import key_path, toml
from meshcomm.layout import Family, Layout, Plan, Ranks
from meshcomm.layout.sizes import coords_text, fold
from meshcomm.show.page import Cells, Line, Part

Facts = dict[str, Any]

# Ranks, and groups of one name, that are listed as examples.
_RANKS: Final = 8
_GROUPS: Final = 3


def diff_facts(a: Config, b: Config, plan_a: Plan, plan_b: Plan) -> Facts:
    """What `meshcomm plan --diff` shows, as data that JSON can hold. a, b: with every -1 filled in.

    Keys: sources, equal; world_size and fingerprint, each a pair; dims: a pair of name -> size;
    settings: [key, a, b] of every setting that differs, None where one side has none; options: [name,
    option, a, b] of groups that both have; groups: for each name of either side that differs its
    status ("only in a", "only in b", "changed"), also (where only one side has it: the name that has
    the same groups on the other), size and count (pairs), same, reordered (same ranks in another
    order), only_a and only_b (numbers of groups), and examples of those two; ranks: common (on both
    sides), moved (how many of them have other coords), only_a, only_b, and examples of moved ones.
    Coords are those of base dims, and of views' dims that both have. A base dim that one side does not
    have counts as one of size 1: every rank's coord is 0.
    """
    settings = [*_differing(_given(a.model_dump()), _given(b.model_dump()), ())]
    settings += _order("mesh.dims", a.mesh.dims, b.mesh.dims)
    for view in a.mesh.views:
        settings += _order(f"mesh.views.{view}", a.mesh.views[view], b.mesh.views.get(view, {}))
    return {
        "sources": [a.source, b.source],
        "equal": not settings and plan_a.facts() == plan_b.facts(),
        "world_size": [plan_a.layout.world_size, plan_b.layout.world_size],
        "fingerprint": [plan_a.fingerprint, plan_b.fingerprint],
        "dims": [dict(plan_a.layout.dims), dict(plan_b.layout.dims)],
        "settings": settings,
        "options": _options(plan_a, plan_b),
        "groups": _groups(plan_a, plan_b),
        "ranks": _ranks(plan_a.layout, plan_b.layout),
    }


def _differing(one: Any, other: Any, path: tuple[str, ...]) -> Iterator[list[Any]]:
    """The innermost settings that differ; a table that one side does not have is one of them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*one, *other]):
            yield from _differing(one.get(key), other.get(key), (*path, key))
    elif one != other:
        yield [key_path(path), one, other]


def _given(value: Any) -> Any:
    """As plain data, without what is None or an empty table."""
    if isinstance(value, Mapping):
        inside = {key: _given(item) for key, item in value.items()}
        return {key: item for key, item in inside.items() if item is not None and item != {}}
    return list(value) if isinstance(value, tuple) else value


def _order(key: str, a: Mapping[str, int], b: Mapping[str, int]) -> list[list[Any]]:
    """Order of the names, where that differs and the names do not."""
    differs = list(a) != list(b) and sorted(a) == sorted(b)
    return [[f"{key}, order", " ".join(a), " ".join(b)]] if differs else []


def _options(a: Plan, b: Plan) -> list[list[Any]]:
    """Options of groups that both have."""
    theirs = {family.name: _option_facts(family) for family in b.families}
    found = []
    for family in a.families:
        one, other = _option_facts(family), theirs.get(family.name)
        for key in dict.fromkeys([*one, *(other or {})]):
            if other is not None and one.get(key) != other.get(key):
                found.append([family.name, key, one.get(key), other.get(key)])
    return found


def _option_facts(family: Family) -> Facts:
    facts = family.options.facts()
    extra = facts.pop("extra")
    return {**facts, **extra, "shares": family.shares}


def _groups(a: Plan, b: Plan) -> list[Facts]:
    """Names whose groups differ; the same groups in another order are nothing that a rank would notice."""
    sides = [{family.name: plan.layout.groups(family.name) for family in plan.families} for plan in (a, b)]
    found = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(name) for side in sides]
        # Groups by their members; those of one rank are none.
        ours, theirs = (
            {}
            if groups is None or groups.shape[1] == 1
            else {key.tobytes(): row for key, row in zip(np.sort(groups, axis=1), groups, strict=True)}
            for groups in pair
        )
        common = ours.keys() & theirs.keys()
        same = sum(bool((ours[key] == theirs[key]).all()) for key in common)
        only = [[side[key].tolist() for key in side if key not in common] for side in (ours, theirs)]
        status, also = "changed", None
        if name in sides[0] and name in sides[1]:
            if only == [[], []] and same == len(common):
                continue
        else:
            here = 0 if name in sides[0] else 1
            status, across = f"only in {'ab'[here]}", sides[1 - here].items()
            also = next(
                (n for n, groups in across if only[here] and np.array_equal(groups, sides[here][name])), None
            )
        found.append(
            {
                "name": name,
                "status": status,
                "also": also,
                "size": [None if groups is None else groups.shape[1] for groups in pair],
                "count": [
                    None if groups is None else len(side)
                    for groups, side in zip(pair, (ours, theirs), strict=True)
                ],
                "same": same,
                "reordered": len(common) - same,
                "only_a": len(only[0]),
                "only_b": len(only[1]),
                "examples": [groups[:_GROUPS] for groups in only],
            }
        )
    return found


def _ranks(a: Layout, b: Layout) -> Facts:
    common = np.intersect1d(a.ranks, b.ranks)
    views = [[name for sizes in layout.views.values() for name in sizes] for layout in (a, b)]
    names = dict.fromkeys([*a.dims, *b.dims, *(name for name in views[0] if name in views[1])])
    coords = [_coords(layout, names, common) for layout in (a, b)]
    changed = coords[0] != coords[1]
    moved = changed.any(axis=0)
    examples = [
        {
            "rank": int(common[index]),
            "coords": {
                name: [int(side[row, index]) for side in coords]
                for row, name in enumerate(names)
                if changed[row, index]
            },
        }
        for index in np.flatnonzero(moved)[:_RANKS]
    ]
    return {
        "common": len(common),
        "moved": int(moved.sum()),
        "only_a": a.world_size - len(common),
        "only_b": b.world_size - len(common),
        "examples": examples,
    }


def _coords(layout: Layout, names: Mapping[str, None], ranks: Ranks) -> Ranks:
    """A row for each name: the coords of `ranks`; 0 where the layout has no such dim."""
    places = np.argsort(layout.ranks)
    positions = places[np.searchsorted(layout.ranks, ranks, sorter=places)]
    zeros = np.zeros(len(ranks), dtype=np.int64)
    return np.array(
        [layout.digits(name).coord(positions) if name in layout.names else zeros for name in names]
    )


def diff_page(facts: Facts) -> list[Part]:
    """`diff_facts` as lines and tables."""
    sources = [Line(f"{side}: {source}") for side, source in zip("ab", facts["sources"], strict=True)]
    first, second = facts["fingerprint"]
    if facts["equal"]:
        text = f"equal: {facts['world_size'][0]:,} ranks, plan {first}; every setting is the same"
        return [Line(text, heading=True), *sources]
    meshes = f"the meshes are equal, plan {first}" if first == second else f"plans {first} and {second}"
    parts: list[Part] = [Line(f"different: {meshes}", heading=True), *sources]
    for title, rows, columns in (
        ("settings", facts["settings"], ("setting", "a", "b")),
        ("options of groups that both have", facts["options"], ("dim", "option", "a", "b")),
    ):
        # The last two are values.
        texts = [(*row[:-2], *("-" if value is None else toml(value) for value in row[-2:])) for row in rows]
        parts += [Line(title), Cells(columns, tuple(texts))] if rows else []
    if facts["groups"]:
        parts += [Line("groups"), _groups_table(facts["groups"])]
    return [*parts, *_ranks_lines(facts["ranks"])]


def _groups_table(found: list[Facts]) -> Cells:
    def size(each: Facts, side: int) -> str | None:
        ranks = each["size"][side]
        return None if ranks is None else f"{each['count'][side]:,} x {ranks:,}"

    def examples(each: Facts, side: int) -> str | None:
        return "; ".join(map(fold, each["examples"][side][:2])) or None

    columns = {
        "dim": lambda each: each["name"],
        "groups": lambda each: each["status"] + (f"; the groups of {each['also']}" if each["also"] else ""),
        "a": lambda each: size(each, 0),
        "b": lambda each: size(each, 1),
        "same": lambda each: (
            f"{each['same']:,}" + (f" + {each['reordered']:,} reordered" if each["reordered"] else "")
        ),
        "gone, as": lambda each: examples(each, 0),
        "new, as": lambda each: examples(each, 1),
    }
    return Cells.of(found, columns)


def _ranks_lines(ranks: Facts) -> Iterator[Part]:
    for side in ("a", "b"):
        if ranks[f"only_{side}"]:
            yield Line(f"{ranks[f'only_{side}']:,} ranks are only in {side}")
    yield Line(f"{ranks['moved']:,} of {ranks['common']:,} ranks have other coords")
    if ranks["examples"]:
        columns = {
            ">rank": lambda one: str(one["rank"]),
            "a": lambda one: coords_text({name: pair[0] for name, pair in one["coords"].items()}),
            "b": lambda one: coords_text({name: pair[1] for name, pair in one["coords"].items()}),
        }
        yield Cells.of(ranks["examples"], columns)
        left = ranks["moved"] - len(ranks["examples"])
        if left:
            yield Line(f"and {left:,} more")
