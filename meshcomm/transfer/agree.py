"""Agreement before bytes: what both sides hold, and one error on every rank of both sides if it does not fit together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from meshcomm.errors import LayoutError, MeshcommError
from meshcomm.layout import Layout
from meshcomm.transfer.placement import Placement, axes_of
from meshcomm.transfer.plan import Entry, located
from meshcomm.transfer.sides import BOTH, SideName, Sides, by_value

_HINTS: Final = {
    "tensor": "every rank makes the same call; the tensor's shape and dtype are those of its own part",
    "weights": "only= and skip= choose names, cast= the dtype; state dicts of both models have the same names",
}


# -- one tensor -----------------------------------------------------------------------------------------


class TensorFacts(NamedTuple):
    """What a rank brings to `Link.transfer` on one side.

    text: the side's placement as it was written; "" if it follows from the tensor, see `placement`.
    placement: the facts of the placement, or None. shape: of this rank's part. sizes: as given.
    """

    text: str
    placement: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: dict[str, int]


def agree_on_tensor(sides: Sides, mine: Mapping[SideName, TensorFacts | str]) -> tuple[Entry, torch.dtype]:
    """Return the entry for one tensor. Called by: every rank of the link.

    mine: this rank's facts by side, or why it has none. Raises TransferMismatch on every rank.
    """
    records = sides.of_all(
        {side: facts if isinstance(facts, str) else [*facts] for side, facts in mine.items()}
    )
    problems: list[str] = []
    placements: dict[SideName, Placement] = {}
    dtypes: dict[SideName, torch.dtype] = {}
    for side in BOTH:
        held = [records[number].get(side, "has no tensor") for number in sides.numbers(side)]
        wrong = by_value([fact if isinstance(fact, str) else "" for fact in held])
        wrong.pop("", None)
        problems += [f"{sides.ranks_of(side, at)} {why}" for why, at in wrong.items()]
        if wrong:
            continue
        facts = [
            TensorFacts(text, placement, tuple(shape), dtype, sizes)
            for text, placement, shape, dtype, sizes in held
        ]
        try:
            placements[side] = _placement(sides, side, facts, problems)
        except MeshcommError as error:
            problems.append(f"{side}: {error.what}: {error.given}")
        dtypes[side] = facts[0].dtype
    if len(placements) == 2 and placements["source"].shape != placements["target"].shape:
        shapes = (f"{placements[side].shape} of the {side} ({placements[side]})" for side in BOTH)
        problems.append(f"shape {', but '.join(shapes)}")
    if len(dtypes) == 2 and dtypes["source"] != dtypes["target"]:
        problems.append(f"{dtypes['source']} of the source, but {dtypes['target']} of the target")
    if problems:
        raise sides.refuse("the two sides of a transfer do not fit together", problems, _HINTS["tensor"])
    dtype = dtypes["source"]
    return Entry("", dtype.itemsize, placements["source"], placements["target"]), dtype


def _placement(sides: Sides, side: SideName, facts: Sequence[TensorFacts], problems: list[str]) -> Placement:
    """Return the placement of a side's tensor; add what its ranks differ in to `problems`."""
    layout = sides.layout(side)
    for what, differing in (
        ("the placement", by_value(facts, lambda fact: fact.text or repr(fact.placement))),
        ("the dtype", by_value(facts, lambda fact: fact.dtype)),
        ("sizes", by_value(facts, lambda fact: tuple(sorted(fact.sizes.items())))),
    ):
        if len(differing) > 1:
            listed = [
                f"{key if isinstance(key, str) else repr(key)} on {sides.ranks_of(side, at)}"
                for key, at in differing.items()
            ]
            problems.append(f"{what} differs: {', '.join(listed)}")
    first = facts[0]
    if first.text:
        placement = Placement.read(first.text, _full_shape(first.text, layout, facts), first.sizes)
    else:
        placement = Placement.of_facts(first.placement)
    where = located(placement, layout)
    unfit = [at for at, fact in enumerate(facts) if where.local_shape(at) != fact.shape]
    if unfit:
        problems.append(
            f"{sides.ranks_of(side, unfit)}: a part of shape {facts[unfit[0]].shape}; "
            f'"{placement}" gives {where.local_shape(unfit[0])}'
        )
    return placement


def _full_shape(text: str, layout: Layout, facts: Sequence[TensorFacts]) -> tuple[int, ...]:
    """Return the shape of the full tensor, from the shape of each rank's part."""
    axes = axes_of(text)
    if any(len(fact.shape) != len(axes) for fact in facts):
        return facts[0].shape
    shape = []
    for axis, sections in enumerate(axes):
        if any(section.splits != sections[0].splits for section in sections):
            shape.append(-1)  # sizes have to say it
            continue
        # One rank for each part along the axis.
        (cuts,) = located(Placement(((sections[0]._replace(size=0),),)), layout).blocks[0].cuts
        shape.append(sum(facts[int(offset)].shape[axis] for offset in cuts.offsets))
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


class Manifest(NamedTuple):
    """What a rank brings to `Link.weights` on one side. only, skip: patterns of names. cast: of the source, or None."""

    rows: list[Row]
    only: tuple[str, ...] | None
    skip: tuple[str, ...]
    cast: torch.dtype | None = None

    def plain(self) -> Any:
        """Return the manifest as lists, for other processes."""
        return [[[*row] for row in self.rows], self.only, self.skip, self.cast]

    def hash(self) -> str:
        """Return a text that is equal for equal manifests."""
        return hashlib.sha256(repr(self.plain()).encode()).hexdigest()

    @classmethod
    def of_plain(cls, plain: Any) -> Manifest:
        rows, only, skip, cast = plain
        return cls([Row(*row) for row in rows], only, skip, cast)


class Agreement(NamedTuple):
    """The tensors that both sides transfer.

    entries: each tensor once; of names that are tied on both sides, the first.
    dtypes: of the elements of each entry on their way.
    """

    entries: list[Entry]
    dtypes: list[torch.dtype]


def agree_on_weights(
    sides: Sides, mine: Mapping[SideName, Manifest], settings: Mapping[str, Any]
) -> Agreement:
    """Return the tensors that both sides transfer. Called by: every rank of the link.

    settings: what must be equal on all ranks. Equal manifests are sent once.
    Raises TransferMismatch on every rank.
    """
    hashes = {side: manifest.hash() for side, manifest in mine.items()}
    records = sides.of_all([hashes, dict(settings)])
    problems = [
        f"{name}={', '.join(f'{value!r} on {_ranks(sides, at)}' for value, at in values.items())}"
        for name in settings
        if len(values := by_value(records, lambda record: record[1].get(name))) > 1  # noqa: B023
    ]
    manifests = {
        side: _manifests(sides, side, [record[0].get(side, "") for record in records], mine, problems)
        for side in BOTH
    }
    tensors = {side: _of_side(sides, side, manifests[side], problems) for side in BOTH}
    if not problems:
        entries = _matched(manifests, tensors, problems)
    if problems:
        raise sides.refuse(
            "the two sides of a link's weights do not fit together", problems, _HINTS["weights"]
        )
    return entries


def agree_on_source(sides: Sides, mine: Manifest) -> dict[str, tuple[torch.dtype, Placement]]:
    """Return the dtype and the placement of each tensor that a rank of the source has, by name, in an order that is equal on all
    ranks. Called by: every rank of the source, all of which take part. Raises TransferMismatch on every rank.
    """
    problems: list[str] = []
    manifests = _manifests(sides, "source", sides.of_all(mine.hash()), {"source": mine}, problems)
    tensors = _of_side(sides, "source", manifests, problems)
    if problems:
        hint = "ranks that have a tensor of the same name have parts of the same tensor"
        raise sides.refuse("the ranks of a mesh have tensors that do not fit together", problems, hint)
    return {name: (tensor.row.dtype, tensor.placement) for name, tensor in tensors.items()}


def _manifests(
    sides: Sides,
    side: SideName,
    hashes: Sequence[str],
    mine: Mapping[SideName, Manifest],
    problems: list[str],
) -> list[tuple[Manifest, list[int]]]:
    """Return the different manifests of a side, and the positions of the ranks that bring each. hashes: of all ranks."""
    manifests = []
    numbers = sides.numbers(side).tolist()
    for key, positions in by_value([hashes[number] for number in numbers]).items():
        if not key:
            problems.append(f"{sides.ranks_of(side, positions)} brought no model for this side")
            continue
        giver = numbers[positions[0]]
        plain = mine[side].plain() if giver == sides.me else None
        plain = sides.mesh.objects.broadcast(sides.dim, plain, src=giver)
        manifests.append((Manifest.of_plain(plain), positions))
    return manifests


def _ranks(sides: Sides, numbers: Sequence[int]) -> str:
    return "; ".join(
        sides.ranks_of(side, positions)
        for side in BOTH
        if (positions := [at for n in numbers if (at := sides.position(side, n)) is not None])
    )


class _Tensor(NamedTuple):
    """A tensor of one side: the row on all its ranks, and the placement with the coords of these ranks."""

    row: Row
    placement: Placement


def _of_side(
    sides: Sides, side: SideName, manifests: Sequence[tuple[Manifest, list[int]]], problems: list[str]
) -> dict[str, _Tensor]:
    """Return a side's tensors by name, in the order in which its ranks have them; add what its ranks differ in to `problems`."""
    rows: dict[str, dict[Row, list[int]]] = {}
    for manifest, positions in manifests:
        for row in manifest.rows:
            key = row._replace(placement=repr(row.placement))
            rows.setdefault(row.name, {}).setdefault(key, []).extend(positions)
    by_name = {row.name: row for manifest, _ in manifests for row in manifest.rows}
    tensors = {}
    for name, variants in rows.items():
        row = by_name[name]
        if len(variants) > 1:
            listed = (f"{_text(by_rank)} on {sides.ranks_of(side, at)}" for by_rank, at in variants.items())
            problems.append(f"{name} differs among the ranks of the {side}: {'; '.join(listed)}")
            continue
        if row.problem:
            problems.append(f"{name} of the {side}: {row.problem}")
            continue
        (positions,) = variants.values()
        placement = Placement.of_facts(row.placement)
        layout = sides.layout(side)
        at = _held_at(layout, positions, placement)
        if at is None:
            problems.append(
                f"{name} has gaps: {sides.ranks_of(side, positions)} have it, and no dims tell which parts are missing"
            )
            continue
        tensors[name] = _Tensor(row, Placement(placement.axes, at))
    for what, differing in (
        ("only", by_value(manifests, lambda pair: pair[0].only)),
        ("skip", by_value(manifests, lambda pair: pair[0].skip)),
        ("cast", by_value(manifests, lambda pair: pair[0].cast)),
    ):
        if len(differing) > 1:
            listed = (
                f"{value!r} on {sides.ranks_of(side, [at for n in numbers for at in manifests[n][1]])}"
                for value, numbers in differing.items()
            )
            problems.append(f"{what}= differs among the ranks of the {side}: {', '.join(listed)}")
    return tensors


def _text(row: Row) -> str:
    tied = f", tied to {row.tied}" if row.tied != row.name else ""
    return f"{row.dtype}, {row.placement}{tied}{row.problem and ', ' + row.problem}"


def _held_at(
    layout: Layout, positions: Sequence[int], placement: Placement
) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """Return the coords at which the ranks at `positions` hold a tensor, by dim. None if they are not all ranks at some coords,
    or if these are coords along dims that split the tensor: then parts are missing.
    """
    if len(positions) == layout.world_size:
        return ()
    split = {split.dim for split in placement.splits}
    for sizes in (layout.dims, *layout.views.values()):
        at = []
        for dim, size in sizes.items():
            coords = sorted({int(layout.digits(dim).coord(position)) for position in positions})
            if len(coords) < size:
                at.append((dim, tuple(coords)))
        count = layout.world_size
        for dim, held in at:
            count = count // sizes[dim] * len(held)
        if count == len(positions) and not any(dim in split for dim, _ in at):
            try:
                layout.home((*placement.dims, *(dim for dim, _ in at)))
            except LayoutError:
                continue
            return tuple(at)
    return None


def _matched(
    manifests: Mapping[SideName, Sequence[tuple[Manifest, list[int]]]],
    tensors: Mapping[SideName, dict[str, _Tensor]],
    problems: list[str],
) -> Agreement:
    filters = [(manifest.only, manifest.skip) for side in BOTH for manifest, _ in manifests[side][:1]]
    cast = manifests["source"][0][0].cast

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
