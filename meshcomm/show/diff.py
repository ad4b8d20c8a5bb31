"""What differs between two meshes: settings, groups and their options, and who sits where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from meshcomm.config import Config
from meshcomm.config.write import key_path, toml
from meshcomm.layout import Family, Layout, Plan, Ranks
from meshcomm.layout.sizes import fold
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
    settings = _settings(a, b)
    facts: Facts = {
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
    return facts


def _settings(a: Config, b: Config) -> list[list[Any]]:
    found = list(_differing(_given(a.model_dump()), _given(b.model_dump()), ()))
    found += _order("mesh.dims", a.mesh.dims, b.mesh.dims)
    for view in a.mesh.views:
        if view in b.mesh.views:
            found += _order(f"mesh.views.{view}", a.mesh.views[view], b.mesh.views[view])
    return found


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
    names = {family.name: family for family in b.families}
    found = []
    for family in a.families:
        other = names.get(family.name)
        if other is None:
            continue
        ours, theirs = _option_facts(family), _option_facts(other)
        for key in dict.fromkeys([*ours, *theirs]):
            if ours.get(key) != theirs.get(key):
                found.append([family.name, key, ours.get(key), theirs.get(key)])
    return found


def _option_facts(family: Family) -> Facts:
    facts = family.options.facts()
    return {**{key: facts[key] for key in facts if key != "extra"}, **facts["extra"], "shares": family.shares}


def _groups(a: Plan, b: Plan) -> list[Facts]:
    ours = {family.name: a.layout.groups(family.name) for family in a.families}
    theirs = {family.name: b.layout.groups(family.name) for family in b.families}
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            found.append(_alone(name, one, other, theirs if other is None else ours))
        elif one.shape != other.shape or (one != other).any():
            changed = _changed(name, one, other)
            # The same groups in another order are nothing that a rank would notice.
            if changed["only_a"] or changed["only_b"] or changed["reordered"]:
                found.append(changed)
    return found


def _alone(name: str, one: Ranks | None, other: Ranks | None, across: Mapping[str, Ranks]) -> Facts:
    mine = one if one is not None else other
    assert mine is not None
    same = [n for n, groups in across.items() if groups.shape == mine.shape and (groups == mine).all()]
    counts = [None if groups is None else _count(groups) for groups in (one, other)]
    return {
        "name": name,
        "status": "only in a" if other is None else "only in b",
        "also": same[0] if same and mine.shape[1] > 1 else None,
        "size": [None if groups is None else groups.shape[1] for groups in (one, other)],
        "count": counts,
        "same": 0,
        "reordered": 0,
        "only_a": counts[0] or 0,
        "only_b": counts[1] or 0,
        "examples": [_examples(groups) for groups in (one, other)],
    }


def _changed(name: str, one: Ranks, other: Ranks) -> Facts:
    rows = [{row.tobytes() for row in groups} for groups in (one, other)]
    sets = [{row.tobytes() for row in np.sort(groups, axis=1)} for groups in (one, other)]
    same = len(rows[0] & rows[1])
    common = len(sets[0] & sets[1])
    only = [
        np.array([row for row in groups if np.sort(row).tobytes() not in others]).reshape(-1, groups.shape[1])
        for groups, others in ((one, sets[1]), (other, sets[0]))
    ]
    return {
        "name": name,
        "status": "changed",
        "also": None,
        "size": [one.shape[1], other.shape[1]],
        "count": [_count(one), _count(other)],
        "same": same if one.shape[1] > 1 else 0,
        "reordered": common - same if one.shape[1] > 1 else 0,
        "only_a": _count(only[0]),
        "only_b": _count(only[1]),
        "examples": [_examples(only[0]), _examples(only[1])],
    }


def _count(groups: Ranks) -> int:
    """Number of groups; those of one rank are none."""
    return len(groups) if groups.shape[1] > 1 else 0


def _examples(groups: Ranks | None) -> list[list[int]]:
    return [] if groups is None or groups.shape[1] == 1 else groups[:_GROUPS].tolist()


def _ranks(a: Layout, b: Layout) -> Facts:
    common = np.intersect1d(a.ranks, b.ranks)
    shared = [name for name in _view_dims(a) if name in _view_dims(b)]
    names = list(dict.fromkeys([*a.dims, *b.dims, *shared]))
    moved = np.zeros(len(common), dtype=bool)
    coords: dict[str, tuple[Ranks, Ranks]] = {}
    for name in names:
        pair = _coords_of(a, name, common), _coords_of(b, name, common)
        coords[name] = pair
        moved |= pair[0] != pair[1]
    examples = []
    for index in np.flatnonzero(moved)[:_RANKS].tolist():
        changed = {
            name: [int(one[index]), int(other[index])]
            for name, (one, other) in coords.items()
            if one[index] != other[index]
        }
        examples.append({"rank": int(common[index]), "coords": changed})
    return {
        "common": len(common),
        "moved": int(moved.sum()),
        "only_a": a.world_size - len(common),
        "only_b": b.world_size - len(common),
        "examples": examples,
    }


def _view_dims(layout: Layout) -> list[str]:
    return [name for sizes in layout.views.values() for name in sizes]


def _coords_of(layout: Layout, name: str, ranks: Ranks) -> Ranks:
    """The coord of each of `ranks`; 0 where the layout has no such dim."""
    if name not in layout.names:
        return np.zeros(len(ranks), dtype=np.int64)
    order = layout.ranks
    places = np.argsort(order)
    positions = places[np.searchsorted(order, ranks, sorter=places)]
    return layout.digits(name).coord(positions)


def diff_page(facts: Facts) -> list[Part]:
    """`diff_facts` as lines and tables."""
    one, other = facts["sources"]
    lines: list[Part] = [Line(f"a: {one}"), Line(f"b: {other}")]
    first, second = facts["fingerprint"]
    if facts["equal"]:
        text = f"equal: {facts['world_size'][0]:,} ranks, plan {first}; every setting is the same"
        return [Line(text, heading=True), *lines]
    meshes = f"the meshes are equal, plan {first}" if first == second else f"plans {first} and {second}"
    lines.insert(0, Line(f"different: {meshes}", heading=True))
    lines += _settings_table(facts)
    if facts["options"]:
        rows = tuple((n, key, _text(old), _text(new)) for n, key, old, new in facts["options"])
        lines += [Line("options of groups that both have"), Cells(("dim", "option", "a", "b"), rows)]
    if facts["groups"]:
        lines += [Line("groups"), _groups_table(facts["groups"])]
    lines += _ranks_lines(facts["ranks"])
    return lines


def _settings_table(facts: Facts) -> list[Part]:
    rows = tuple((key, _text(old), _text(new)) for key, old, new in facts["settings"])
    return [Line("settings"), Cells(("setting", "a", "b"), rows)] if rows else []


def _groups_table(found: list[Facts]) -> Cells:
    rows = []
    for each in found:
        pairs = zip(each["count"], each["size"], strict=True)
        size = ["-" if ranks is None else f"{count:,} x {ranks:,}" for count, ranks in pairs]
        status = each["status"]
        if each["also"] is not None:
            status += f"; the groups of {each['also']}"
        kept = f"{each['same']:,}" + (f" + {each['reordered']:,} reordered" if each["reordered"] else "")
        examples = ["; ".join(fold(ranks) for ranks in ranks_of[:2]) or "-" for ranks_of in each["examples"]]
        rows.append((each["name"], status, *size, kept, *examples))
    return Cells(("dim", "groups", "a", "b", "same", "gone, as", "new, as"), tuple(rows))


def _ranks_lines(ranks: Facts) -> list[Part]:
    lines: list[Part] = []
    for key, where in (("only_a", "a"), ("only_b", "b")):
        if ranks[key]:
            lines.append(Line(f"{ranks[key]:,} ranks are only in {where}"))
    text = f"{ranks['moved']:,} of {ranks['common']:,} ranks have other coords"
    lines.append(Line(text))
    rows = tuple(
        (
            str(one["rank"]),
            " ".join(f"{name}={old}" for name, (old, _) in one["coords"].items()),
            " ".join(f"{name}={new}" for name, (_, new) in one["coords"].items()),
        )
        for one in ranks["examples"]
    )
    if rows:
        lines.append(Cells(("rank", "a", "b"), rows, frozenset({"rank"})))
        left = ranks["moved"] - len(rows)
        lines += [Line(f"and {left:,} more")] if left else []
    return lines


def _text(value: Any) -> str:
    return "-" if value is None else toml(value)
