"""Agreement before bytes: what both sides hold, and one error on every rank of both sides if it does not fit together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from meshcomm.comm.codec import decode, encode
from meshcomm.errors import LayoutError, MeshcommError
from meshcomm.layout import Layout
from meshcomm.transfer.placement import Placement, axes_of, placements_of
from meshcomm.transfer.plan import Entry, located
from meshcomm.transfer.sides import BOTH, SideName, Sides, by_value

_HINTS: Final = {
    "tensor": "every rank makes the same call; the tensor's shape and dtype are those of its own part",
    "weights": "only= and skip= choose names, cast= the dtype; state dicts of both models have the same names",
}

Staging: TypeAlias = Literal["whole", "buckets"]
Atomic: TypeAlias = Literal["copy", "all"]
_CHOICES: Final = {"staging": get_args(Staging), "atomic": get_args(Atomic)}


# -- one tensor -----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A rank's tensor on one side. placement: its facts, if they follow from the tensor; else None. shape: of this rank's part."""

    placement: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFacts(NamedTuple):
    """What a rank brings to `Link.transfer`, as plain data.

    pattern, sizes: as given. settings: of the link. parts: a Part for each side. problems: why this rank cannot take part.
    shared: whether x and out have the same memory ("all") or overlap in another way ("some"), else "".
    """

    pattern: str | None
    sizes: dict[str, int]
    settings: dict[str, Any]
    parts: dict[SideName, tuple[Any, ...]]
    problems: list[str]
    shared: str = ""


def agree_on_tensor(sides: Sides, mine: TensorFacts) -> tuple[Entry, torch.dtype]:
    """Return the entry for one tensor. Called by: every rank of the link. Raises TransferMismatch on every rank."""
    facts = [TensorFacts(*plain) for plain in sides.of_all([*mine])]
    reasons = by_value([tuple(fact.problems) for fact in facts])
    problems = [
        f"{sides.ranks(numbers)}: {problem}" for reason, numbers in reasons.items() for problem in reason
    ]
    if not problems:
        problems += sides.differences("the pattern", [fact.pattern for fact in facts])
        problems += sides.differences("sizes", [sorted(fact.sizes.items()) for fact in facts])
    for setting in mine.settings:
        problems += sides.differences(setting, [fact.settings[setting] for fact in facts])
    placements: dict[SideName, Placement] = {}
    dtypes: dict[SideName, torch.dtype] = {}
    for side in BOTH if not problems else ():
        parts = [Part(*facts[number].parts[side]) for number in sides.numbers(side)]
        try:
            placements[side] = _placement(sides, side, facts[0], parts, problems)
        except MeshcommError as error:
            problems.append(f"{side}: {error.what}: {error.given}")
        dtypes[side] = parts[0].dtype
    if len(placements) == 2 and placements["source"].shape != placements["target"].shape:
        shapes = (f"{placements[side].shape} of the {side} ({placements[side]})" for side in BOTH)
        problems.append(f"the full shape is {', but '.join(shapes)}")
    if len(dtypes) == 2 and dtypes["source"] != dtypes["target"]:
        problems.append(f"{dtypes['source']} of the source, but {dtypes['target']} of the target")
    if not problems:
        entry = Entry("", dtypes["source"].itemsize, placements["source"], placements["target"])
        problems += _overlapping(sides, entry, facts)
    if problems:
        raise sides.refuse("the two sides of a transfer do not fit together", problems, _HINTS["tensor"])
    return entry, dtypes["source"]


def _placement(
    sides: Sides, side: SideName, facts: TensorFacts, parts: Sequence[Part], problems: list[str]
) -> Placement:
    """Return the placement of a side's tensor; add what its ranks differ in to `problems`."""
    layout = sides.layout(side)
    problems += sides.differences("the placement", [part.placement for part in parts], side)
    problems += sides.differences("the dtype", [part.dtype for part in parts], side)
    if facts.pattern is None:
        placement = Placement.of_facts(parts[0].placement)
    else:
        text = placements_of(facts.pattern)[side == "target"]
        placement = Placement.read(text, _full_shape(text, layout, parts), facts.sizes)
    where = located(placement, layout)
    _ = where.blocks  # raises for dims that do not go together
    unfit = by_value([(part.shape, where.local_shape(at)) for at, part in enumerate(parts)])
    problems += [
        f'{sides.ranks_of(side, at)}: a part of shape {shape}; "{placement}" of {placement.shape} gives {expected}'
        for (shape, expected), at in unfit.items()
        if shape != expected
    ]
    return placement


def _overlapping(sides: Sides, entry: Entry, facts: Sequence[TensorFacts]) -> list[str]:
    """Return a text for the ranks whose x and out share memory, but are not the same part of the tensor."""
    source, target = located(entry.source, sides.ends.source), located(entry.target, sides.ends.target)

    def clash(number: int) -> bool:
        at, to = sides.position("source", number), sides.position("target", number)
        if at is None or to is None or not facts[number].shared:
            return False
        return facts[number].shared == "some" or {*source.boxes(at)} != {*target.boxes(to)}

    numbers = [number for number in range(len(facts)) if clash(number)]
    text = "x and out share memory, but are not the same part of the tensor"
    return [f"{sides.ranks(numbers)}: {text}"] if numbers else []


def _full_shape(text: str, layout: Layout, parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the shape of the full tensor, from the shape of each rank's part."""
    axes = axes_of(text)
    if any(len(part.shape) != len(axes) for part in parts):
        return parts[0].shape
    shape = []
    for axis, sections in enumerate(axes):
        if any(section.splits != sections[0].splits for section in sections):
            shape.append(-1)  # sizes have to say it
            continue
        # One rank for each part along the axis.
        (cuts,) = located(Placement(((sections[0]._replace(size=0),),)), layout).blocks[0].cuts
        shape.append(sum(parts[int(offset)].shape[axis] for offset in cuts.offsets))
    return tuple(shape)


# -- weights --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A tensor of a model on one rank.

    tied: the first name of the tensors that share its memory. problem: why it cannot be sent, or "".
    """

    name: str
    dtype: torch.dtype
    placement: Any
    tied: str
    problem: str = ""


class Options(NamedTuple):
    """What a side chooses in `Link.weights`. only, skip: patterns of names. cast: the dtype that the source sends."""

    only: tuple[str, ...] | None
    skip: tuple[str, ...]
    cast: torch.dtype | None


class Agreement(NamedTuple):
    """The tensors that both sides transfer.

    entries: each tensor once; of names that are tied on both sides, the first.
    dtypes: of the elements of each entry on their way.
    """

    entries: list[Entry]
    dtypes: list[torch.dtype]


def agree_on_weights(
    sides: Sides, mine: Mapping[SideName, Sequence[Row]], options: Options, settings: Mapping[str, Any]
) -> Agreement:
    """Return the tensors that both sides transfer. Called by: every rank of the link.

    mine: this rank's rows on each side that it is on. Equal rows of several ranks are sent once. options: equal on the ranks of
    each side. settings: equal on all ranks. Raises TransferMismatch on every rank.
    """
    sides.meet("link.weights()")
    encoded = {side: encode([[*row] for row in rows]) for side, rows in mine.items()}
    heads = {side: tuple(head_of(rows, encoded[side])) for side, rows in mine.items()}
    records = sides.of_all([heads, [*options], dict(settings)])
    problems = [
        text for name in settings for text in sides.differences(name, [record[2][name] for record in records])
    ]
    for name, choices in _CHOICES.items():
        if records[0][2][name] not in choices:
            problems.append(f"{name}={records[0][2][name]!r}, which is neither {' nor '.join(choices)}")
    chosen: dict[SideName, Options] = {}
    rows: dict[SideName, list[_Shared]] = {}
    for side in BOTH:
        of_side = [records[number] for number in sides.numbers(side)]
        given = [Options(*record[1]) for record in of_side]
        for name in ("only", "skip", "cast") if side == "source" else ("only", "skip"):
            problems += sides.differences(f"{name}=", [getattr(each, name) for each in given], side)
        chosen[side] = given[0]
        rows[side] = _received(sides, side, [_Head(*record[0][side]) for record in of_side], encoded)
    cast = chosen["source"].cast
    if cast is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        problems.append(f"cast={cast!r} of the source, which is no dtype of floating-point numbers")
    tensors = {side: _of_side(sides, side, rows[side], problems) for side in BOTH}
    if not problems:
        entries = _matched(chosen, tensors, problems)
    if problems:
        raise sides.refuse(
            "the two sides of a link's weights do not fit together", problems, _HINTS["weights"]
        )
    return entries


def agree_on_source(sides: Sides, mine: Sequence[Row]) -> dict[str, tuple[torch.dtype, Placement]]:
    """Return the dtype and the placement of each tensor that a rank of the source has, by name, in an order that is equal on all
    ranks. Called by: every rank of the source, all of which take part. Raises TransferMismatch on every rank.
    """
    problems: list[str] = []
    encoded = encode([[*row] for row in mine])
    heads = [_Head(*head) for head in sides.of_all(tuple(head_of(mine, encoded)))]
    rows = _received(sides, "source", heads, {"source": encoded})
    tensors = _of_side(sides, "source", rows, problems)
    if problems:
        hint = "ranks that have a tensor of the same name have parts of the same tensor"
        raise sides.refuse("the ranks of a mesh have tensors that do not fit together", problems, hint)
    return {name: (tensor.row.dtype, tensor.placement) for name, tensor in tensors.items()}


class _Head(NamedTuple):
    """What all ranks learn of a rank's rows before these are sent. nbytes: of their encoding, which may differ for equal rows."""

    hash: str
    nbytes: int


def head_of(rows: Sequence[Row], encoded: Tensor) -> _Head:
    """Return what all ranks learn of the rows that a rank brings."""
    return _Head(hashlib.sha256(repr(rows).encode()).hexdigest(), encoded.numel())


# The rows of some ranks of a side, and their positions.
_Shared: TypeAlias = tuple[list[Row], list[int]]


def _received(
    sides: Sides, side: SideName, heads: Sequence[_Head], encoded: Mapping[SideName, Tensor]
) -> list[_Shared]:
    """Return the different rows of a side, and the positions of the ranks that bring them.

    heads: by position. encoded: this rank's rows. They are sent as tensors, because an object would need an answer of every rank.
    """
    received = []
    numbers = sides.numbers(side).tolist()
    for positions in by_value([head.hash for head in heads]).values():
        giver = numbers[positions[0]]
        mine = giver == sides.me
        data = encoded[side] if mine else torch.empty(heads[positions[0]].nbytes, dtype=torch.uint8)
        data = sides.mesh.broadcast(sides.dim, data.to(sides.mesh.device), src=giver)
        received.append(([Row(*row) for row in decode(data, torch.device("cpu"))], positions))
    return received


class _Tensor(NamedTuple):
    """A tensor of one side: the row on all its ranks, and the placement with the coords of these ranks."""

    row: Row
    placement: Placement


def _of_side(
    sides: Sides, side: SideName, received: Sequence[_Shared], problems: list[str]
) -> dict[str, _Tensor]:
    """Return a side's tensors by name, in the order in which its ranks have them; add what its ranks differ in to `problems`."""
    # By name and by what is said about the tensor, the numbers of the manifests that say it.
    rows: dict[str, dict[Row, list[int]]] = {}
    for number, (of_ranks, _) in enumerate(received):
        for row in of_ranks:
            key = row._replace(placement=repr(row.placement))
            rows.setdefault(row.name, {}).setdefault(key, []).append(number)
    layout = sides.layout(side)
    # Most tensors are on the same ranks as others.
    places: dict[tuple[int, ...], list[_At]] = {}

    def positions_of(numbers: Iterable[int]) -> list[int]:
        return [at for number in numbers for at in received[number][1]]

    by_name = {row.name: row for of_ranks, _ in received for row in of_ranks}
    tensors = {}
    for name, variants in rows.items():
        row = by_name[name]
        if len(variants) > 1:
            listed = (
                f"{_text(by_rank)} on {sides.ranks_of(side, positions_of(numbers))}"
                for by_rank, numbers in variants.items()
            )
            problems.append(f"{name} differs among the ranks of the {side}: {'; '.join(listed)}")
            continue
        if row.problem:
            problems.append(f"{name} of the {side}: {row.problem}")
            continue
        numbers = tuple(*variants.values())
        if numbers not in places:
            places[numbers] = _places_of(layout, positions_of(numbers))
        placement = Placement.of_facts(row.placement)
        at = _held_at(layout, places[numbers], placement)
        if at is None:
            ranks = sides.ranks_of(side, positions_of(numbers))
            problems.append(f"{name} has gaps: {ranks} have it, and no dims tell which parts are missing")
            continue
        tensors[name] = _Tensor(row, Placement(placement.axes, at))
    return tensors


def _text(row: Row) -> str:
    tied = f", tied to {row.tied}" if row.tied != row.name else ""
    return f"{row.dtype}, {row.placement}{tied}{row.problem and ', ' + row.problem}"


_At: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The coords of some ranks, by dim; along all other dims, they are the ranks at all coords."""


def _places_of(layout: Layout, positions: Sequence[int]) -> list[_At]:
    """Return the coords that the ranks at `positions`, and no others, have: in each factorization of the mesh in which there are any."""
    if len(positions) == layout.world_size:
        return [()]
    places = []
    for sizes in (layout.dims, *layout.views.values()):
        coords = {dim: np.unique(layout.digits(dim).coord(np.array(positions))) for dim in sizes}
        if prod(map(len, coords.values())) == len(positions):
            some = {dim: held for dim, held in coords.items() if len(held) < sizes[dim]}
            places.append(tuple((dim, tuple(held.tolist())) for dim, held in some.items()))
    return places


def _held_at(layout: Layout, places: Sequence[_At], placement: Placement) -> _At | None:
    """Return at which of these coords ranks hold a tensor. None if they are along dims that split it: then parts are missing."""
    split = {split.dim for split in placement.splits}
    for at in places:
        if not at:
            return at
        if not any(dim in split for dim, _ in at):
            try:
                layout.home((*placement.dims, *(dim for dim, _ in at)))
            except LayoutError:
                continue
            return at
    return None


def _matched(
    options: Mapping[SideName, Options],
    tensors: Mapping[SideName, dict[str, _Tensor]],
    problems: list[str],
) -> Agreement:
    filters, cast = [options[side][:2] for side in BOTH], options["source"].cast

    def chosen(name: str) -> bool:
        return all(
            (only is None or any(fnmatchcase(name, pattern) for pattern in only))
            and not any(fnmatchcase(name, pattern) for pattern in skip)
            for only, skip in filters
        )

    source, target = (
        {name: tensor for name, tensor in tensors[side].items() if chosen(name)} for side in BOTH
    )
    problems += [
        f"{name} of the target is missing in the source"
        for name, wanted in target.items()
        # A name that shares memory with another one gets that one's values. A folder may have only one of the two.
        if name not in source and (wanted.row.tied == name or wanted.row.tied not in source)
    ]
    problems += [f"{name} of the source is missing in the target" for name in source if name not in target]
    for (only, skip), side in product(filters, BOTH):
        for pattern in (*(only or ()), *skip):
            if not any(fnmatchcase(name, pattern) for name in {**tensors["source"], **tensors["target"]}):
                problems.append(f"no tensor is named {pattern!r}, in only= or skip= of the {side}")
    entries = Agreement([], [])
    for name, given in source.items():
        if name not in target:
            continue
        wanted = target[name]
        dtype = cast if cast is not None and given.row.dtype.is_floating_point else given.row.dtype
        if given.placement.shape != wanted.placement.shape:
            problems.append(
                f"{name} has the shape {given.placement.shape} in the source, but {wanted.placement.shape} in the target"
            )
        if dtype != wanted.row.dtype:
            text = f"{dtype} of cast={cast}" if dtype != given.row.dtype else f"{dtype} of the source"
            problems.append(f"{name} has the dtype {text}, but {wanted.row.dtype} in the target")
        # Names that share memory in the target need equal values.
        if wanted.row.tied != name and wanted.row.tied in target:
            first = source.get(wanted.row.tied)
            if first is not None and first.row.tied != given.row.tied:
                problems.append(f"{name} is tied to {wanted.row.tied} in the target, but not in the source")
            continue
        entries.entries.append(Entry(name, dtype.itemsize, given.placement, wanted.placement))
        entries.dtypes.append(dtype)
    if not problems and not entries.entries:
        problems.append("no tensor is left to transfer")
    return entries
