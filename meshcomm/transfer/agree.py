"""Agreement before bytes: what both sides hold, and one error on every rank of both sides if it does not fit together."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from meshcomm.comm.codec import decode, encode
from meshcomm.errors import LayoutError, MeshcommError, TransferMismatch
from meshcomm.layout import Layout
from meshcomm.layout.names import listed
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
    problems = _of_ranks(sides, [fact.problems for fact in facts])
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


def _of_ranks(sides: Sides, problems: Sequence[Sequence[str]]) -> list[str]:
    """Return the problems of ranks, by their coord along `link`, as text that names the ranks."""
    reasons = by_value([tuple(of_rank) for of_rank in problems])
    return [f"{sides.ranks(numbers)}: {problem}" for reason, numbers in reasons.items() for problem in reason]


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

    tied: the first name of the tensors that have the same memory. problem: why it cannot be sent, or "". overlaps: earlier tensors
    with which it shares memory in another way, and in which way.
    """

    name: str
    dtype: torch.dtype | None
    placement: Any
    tied: str
    problem: str = ""
    overlaps: Sequence[Sequence[str]] = ()


class Options(NamedTuple):
    """What a rank chooses in `Link.weights`, as plain data. only, skip: patterns of names. cast: the dtype that the source sends.

    problems: why this rank cannot take part.
    """

    only: tuple[str, ...] | None
    skip: tuple[str, ...]
    cast: torch.dtype | None
    staging: str
    atomic: str
    problems: list[str]

    @classmethod
    def checked(cls, only: Any, skip: Any, cast: Any, problems: Sequence[str], **choices: Any) -> Options:
        """Return the options as a caller has given them. choices: staging and atomic."""
        problems = [*problems]
        for name, choice in choices.items():
            if choice not in _CHOICES[name]:
                problems.append(f"{name}={choice!r}, which is neither {' nor '.join(_CHOICES[name])}")
                choices[name] = ""
        if cast is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
            problems.append(f"cast={cast!r}, which is no dtype of floating-point numbers")
            cast = None
        only, skip = (_patterns(name, given, problems) for name, given in (("only", only), ("skip", skip)))
        return cls(only, skip or (), cast, problems=problems, **choices)


def _patterns(name: str, given: Any, problems: list[str]) -> tuple[str, ...] | None:
    """Return patterns of names in an order that all ranks have, of a set, too. One text is one pattern."""
    if given is None:
        return None
    listed = [*given] if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    problems += [
        f"{name}= has {pattern!r}, which is no pattern of names"
        for pattern in listed
        if not isinstance(pattern, str)
    ]
    return tuple(sorted({pattern for pattern in listed if isinstance(pattern, str)}))


class Choice(NamedTuple):
    """The tensors that both sides choose. only, skip: of each side. cast: of the source."""

    only: list[tuple[str, ...] | None]
    skip: list[tuple[str, ...]]
    cast: torch.dtype | None

    def has(self, name: str) -> bool:
        return all(only is None or _matches(name, only) for only in self.only) and not any(
            _matches(name, skip) for skip in self.skip
        )

    def unused(self, names: Collection[str]) -> list[list[str]]:
        """Return the patterns of each side that no name matches."""
        return [
            [
                pattern
                for pattern in (*(only or ()), *skip)
                if not any(fnmatchcase(name, pattern) for name in names)
            ]
            for only, skip in zip(self.only, self.skip, strict=True)
        ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Agreement(NamedTuple):
    """The tensors that both sides transfer.

    entries: each tensor once; of names that are tied on both sides, the first.
    dtypes: of the elements of each entry on their way.
    """

    entries: list[Entry]
    dtypes: list[torch.dtype]


def agree_on_options(sides: Sides, mine: Options, settings: Mapping[str, Any]) -> Choice:
    """Return what both sides choose. Called by: every rank of the link. Raises TransferMismatch on every rank.

    mine: only and skip are equal on the ranks of each side, cast on those of the source, staging and atomic on all. settings: of
    the link.
    """
    sides.meet("link.weights()")
    records = sides.of_all([[*mine], dict(settings)])
    given = [Options(*record[0]) for record in records]
    problems = _of_ranks(sides, [options.problems for options in given])
    for name in settings:
        problems += sides.differences(name, [record[1][name] for record in records])
    for name in _CHOICES if not problems else ():
        problems += sides.differences(name, [getattr(options, name) for options in given])
    of_sides = {side: [given[number] for number in sides.numbers(side)] for side in BOTH}
    for side in BOTH if not problems else ():
        for name in ("only", "skip", "cast") if side == "source" else ("only", "skip"):
            problems += sides.differences(
                f"{name}=", [getattr(options, name) for options in of_sides[side]], side
            )
    source, target = (of_sides[side][0] for side in BOTH)
    other = [at for at, options in enumerate(of_sides["target"]) if options.cast not in (None, source.cast)]
    if other and not problems:
        where = sides.ranks_of("target", other)
        problems.append(
            f"cast={of_sides['target'][other[0]].cast} on {where}, but {source.cast} on the source, which converts"
        )
    if problems:
        raise _unfit(sides, problems)
    return Choice([source.only, target.only], [source.skip, target.skip], source.cast)


def agree_on_weights(
    sides: Sides, mine: Mapping[SideName, Sequence[Row]], choice: Choice, names: Collection[str]
) -> Agreement:
    """Return the tensors that both sides transfer. Called by: every rank of the link.

    mine: this rank's rows on each side that it is on, of chosen tensors. Equal rows of several ranks are sent once. names: of all
    tensors of this rank. Raises TransferMismatch on every rank.
    """
    encoded = {side: encode([[*row] for row in rows]) for side, rows in mine.items()}
    heads = {side: tuple(head_of(rows, encoded[side])) for side, rows in mine.items()}
    records = sides.of_all([heads, choice.unused(names)])
    problems: list[str] = []
    for number, side in enumerate(BOTH):
        unused = [record[1][number] for record in records]
        problems += [
            f"no tensor is named {pattern!r}, in only= or skip= of the {side}"
            for pattern in unused[0]
            if all(pattern in of_rank for of_rank in unused)
        ]
    tensors = {}
    for side in BOTH:
        of_side = [_Head(*records[number][0][side]) for number in sides.numbers(side)]
        tensors[side] = _of_side(sides, side, _received(sides, side, of_side, encoded), problems)
    if not problems:
        agreement = _matched(choice.cast, tensors["source"], tensors["target"], problems)
    if problems:
        raise _unfit(sides, problems)
    return agreement


def _unfit(sides: Sides, problems: Sequence[str]) -> TransferMismatch:
    return sides.refuse("the two sides of a link's weights do not fit together", problems, _HINTS["weights"])


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
    return {
        name: (tensor.row.dtype, tensor.placement)
        for name, tensor in tensors.items()
        if tensor.row.dtype is not None
    }


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
        data = (
            encoded[side]
            if mine
            else torch.empty(heads[positions[0]].nbytes, dtype=torch.uint8, device="cpu")
        )
        data = sides.mesh.broadcast(sides.dim, data.to(sides.mesh.device), src=giver)
        received.append(([Row(*row) for row in decode(data, torch.device("cpu"))], positions))
    return received


class _Tensor(NamedTuple):
    """A tensor of one side: the row on all its ranks, the placement with the coords of these ranks, and the side as text, with these
    ranks if they are not all.
    """

    row: Row
    placement: Placement
    where: str


def _of_side(
    sides: Sides, side: SideName, received: Sequence[_Shared], problems: list[str]
) -> dict[str, _Tensor]:
    """Return a side's tensors by name, in the order in which its ranks have them; add what its ranks differ in to `problems`."""
    # By name, what is said about the tensor, each with the numbers of the rows that say it.
    rows: dict[str, list[tuple[Row, list[int]]]] = {}
    for number, (of_ranks, _) in enumerate(received):
        for row in of_ranks:
            variants = rows.setdefault(row.name, [])
            same = next((numbers for other, numbers in variants if other == row), None)
            if same is None:
                variants.append((row, [number]))
            else:
                same.append(number)
    layout = sides.layout(side)

    def positions_of(numbers: Iterable[int]) -> list[int]:
        return [at for number in numbers for at in received[number][1]]

    @cache
    def held_by(numbers: tuple[int, ...]) -> tuple[str, list[_At]]:
        """Return ranks as text, and their places. Most tensors are on the same ranks as others."""
        positions = positions_of(numbers)
        is_whole = len(positions) == layout.world_size
        where = f"the {side}" if is_whole else sides.ranks_of(side, positions)
        return where, _places_of(layout, positions)

    tensors = {}
    for name, variants in rows.items():
        if len(variants) > 1:
            texts = (
                f"{_text(row)} on {sides.ranks_of(side, positions_of(numbers))}" for row, numbers in variants
            )
            problems.append(f"{name} differs among the ranks of the {side}: {'; '.join(texts)}")
            continue
        ((row, numbers),) = variants
        where, places = held_by(tuple(numbers))
        if row.problem:
            problems.append(f"{name} of {where}: {row.problem}")
            continue
        placement = Placement.of_facts(row.placement)
        at = _held_at(layout, places, placement)
        if at is None:
            problems.append(f"{name} has gaps: {where} have it, and no dims tell which parts are missing")
            continue
        tensors[name] = _Tensor(row, Placement(placement.axes, at), where)
    return tensors


def _text(row: Row) -> str:
    if row.problem:
        return row.problem
    placement = Placement.of_facts(row.placement)
    tied = f", tied to {row.tied}" if row.tied != row.name else ""
    shared = f", in the memory of {row.overlaps[0][0]}" if row.overlaps else ""
    return f"{row.dtype} of shape {placement.shape}, split as {str(placement) or 'a scalar'}{tied}{shared}"


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
    cast: torch.dtype | None,
    source: Mapping[str, _Tensor],
    target: Mapping[str, _Tensor],
    problems: list[str],
) -> Agreement:
    problems += [
        f"{name} of {wanted.where} is missing in the source"
        for name, wanted in target.items()
        # A name that shares memory with another one gets that one's values. A folder may have only one of the two.
        if name not in source and (wanted.row.tied == name or wanted.row.tied not in source)
    ]
    problems += [
        f"{name} of {given.where} is missing in the target"
        for name, given in source.items()
        if name not in target
    ]
    agreement = Agreement([], [])
    for name, given in source.items():
        if name not in target:
            continue
        wanted = target[name]
        assert given.row.dtype is not None
        dtype = cast if cast is not None and given.row.dtype.is_floating_point else given.row.dtype
        if given.placement.shape != wanted.placement.shape:
            problems.append(
                f"{name} has the shape {given.placement.shape} in the source, but {wanted.placement.shape} in the target"
            )
        if dtype != wanted.row.dtype:
            text = f"{dtype} of cast={cast}" if dtype != given.row.dtype else f"{dtype} of the source"
            problems.append(f"{name} has the dtype {text}, but {wanted.row.dtype} in the target")
        # Names that share memory in the target need equal values.
        is_whole = not given.placement.splits and not wanted.placement.splits
        if wanted.row.overlaps and not (is_whole and wanted.row.overlaps == given.row.overlaps):
            others = listed([other for other, _ in wanted.row.overlaps])
            problems.append(
                f"{name} shares memory with {others} in the target, but not in the same way in the source"
            )
        if wanted.row.tied != name:
            first = source.get(wanted.row.tied)
            if first is not None and first.row.tied != given.row.tied:
                problems.append(f"{name} is tied to {wanted.row.tied} in the target, but not in the source")
            continue
        agreement.entries.append(Entry(name, dtype.itemsize, given.placement, wanted.placement))
        agreement.dtypes.append(dtype)
    if not problems and not agreement.entries:
        problems.append("no tensor is left to transfer")
    return agreement
