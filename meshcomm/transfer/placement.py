"""Where the parts of a tensor lie: the dims that split each axis, written as text such as `n/tp/fsdp k`.

`n/tp/fsdp k` splits the axis n along tp, and each of these parts along fsdp. Every other dim of the mesh holds copies. A split
follows torch.chunk's rule, as DTensor does, so the last parts may be smaller or empty. `n/tp:4` has four different parts,
each on a run of neighbors along tp, as for key and value heads that are fewer than the ranks. `(q+k+v)/tp d` splits each
section of an axis separately: a rank holds its part of q, then of k, then of v. The notation with slashes is that of
[seqax](https://github.com/MatX-inc/seqax).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, product
from operator import add, le, sub
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.errors import LayoutError, PatternError, ShapeError
from meshcomm.layout import Layout
from meshcomm.layout.layout import Digits
from meshcomm.layout.names import listed

Ints: TypeAlias = NDArray[np.int64]

_AXES: Final = re.compile(r"(?:\([^()]*\)|[^\s()])+|\S+")
_NAMED: Final = re.compile(r"(?:(?P<name>[^\W\d]\w*)|\((?P<sections>[^()]+)\))(?P<splits>(?:/[^/]+)*)")
_SPLIT: Final = re.compile(r"(?P<dim>[^\W\d]\w*)(?::(?P<distinct>[1-9]\d*))?")


class Split(NamedTuple):
    """A split of an axis along a dim.

    distinct: the number of different parts, or 0 for one on each rank along the dim.
    inner:    whether neighbors along the dim have different parts, which repeat. Otherwise runs of neighbors have the same part.
    """

    dim: str
    distinct: int = 0
    inner: bool = False

    def __str__(self) -> str:
        return f"/{self.dim}" + (f"{'%' if self.inner else ':'}{self.distinct}" if self.distinct else "")

    def digits(self, layout: Layout) -> Digits:
        """Return the digits of a position whose coord is the number of the part. Raises UnknownDim and ShapeError."""
        digits = layout.digits(self.dim)
        if not self.distinct:
            return digits
        number = digits.size // self.distinct if self.inner else self.distinct
        return divided(digits, number, f"{self.dim} has {digits.size} ranks")[self.inner]


class Section(NamedTuple):
    """A run of an axis that is split by itself. An ordinary axis has one section.

    size: the number of elements along the axis. splits: outermost first. unit: a split only cuts at multiples of it.
    whole: if the splits cut a longer run, of which the section is a range, the size of that run. first: where the range begins.
    """

    name: str
    size: int
    splits: tuple[Split, ...] = ()
    unit: int = 1
    first: int = 0
    whole: int = 0

    def __str__(self) -> str:
        return self.name + "".join(map(str, self.splits))


Axis: TypeAlias = tuple[Section, ...]


@final
@dataclass(frozen=True)
class Placement:
    """How a tensor is split over a mesh.

    axes: the sections of each axis of the full tensor.
    at:   the coords at which ranks hold the tensor at all, by dim. Along all other dims, every rank holds its part.
    """

    axes: tuple[Axis, ...]
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def read(
        cls,
        text: str,
        shape: Sequence[int] | None = None,
        sizes: Mapping[str, int] | None = None,
        at: Mapping[str, Sequence[int]] | None = None,
    ) -> Placement:
        """Return the placement that a text describes.

        shape: of the full tensor. sizes: of sections and axes by name, which `shape` may leave out.
        Raises PatternError for a text that is not a placement, and ShapeError if shape and sizes do not determine it.

        >>> Placement.read("n/tp/fsdp k", (8, 3)).splits
        (Split(dim='tp', distinct=0, inner=False), Split(dim='fsdp', distinct=0, inner=False))
        """
        axes = _sized(text, axes_of(text), shape, dict(sizes or {}))
        return cls(axes, tuple((dim, tuple(coords)) for dim, coords in (at or {}).items()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return tuple(sum(section.size for section in axis) for axis in self.axes)

    @property
    def splits(self) -> tuple[Split, ...]:
        """All splits, in order."""
        return tuple(split for axis in self.axes for section in axis for split in section.splits)

    @property
    def dims(self) -> tuple[str, ...]:
        """The dims along which ranks hold different parts or none, each once."""
        return tuple(dict.fromkeys([*(split.dim for split in self.splits), *(dim for dim, _ in self.at)]))

    @cached_property
    def whole(self) -> Placement:
        """The placement of the full tensor on every rank."""
        return Placement(tuple((Section(f"a{axis}", size),) for axis, size in enumerate(self.shape)))

    def split_further(self, axis: int, splits: Sequence[Split]) -> Placement:
        """Return the placement in which the parts of an axis are split further."""
        axes = [*self.axes]
        axes[axis] = tuple(section._replace(splits=(*section.splits, *splits)) for section in axes[axis])
        return Placement(tuple(axes), self.at)

    def cut(self, begin: Sequence[int], end: Sequence[int], axes: Sequence[int]) -> Placement:
        """Return the placement of a box of the tensor, without the axes that are not listed, and with the others in this order."""
        return Placement(tuple(_range(self.axes[axis], begin[axis], end[axis]) for axis in axes), self.at)

    def __str__(self) -> str:
        text = " ".join(_axis_text(axis) for axis in self.axes)
        where = ", ".join(f"{dim}={','.join(map(str, coords))}" for dim, coords in self.at)
        return f"{text} at {where}" if where else text

    def facts(self) -> list[Any]:
        """Return the placement as lists, text and numbers, for another process. See `of_facts`."""
        facts: list[Any] = json.loads(json.dumps([self.axes, self.at]))
        return facts

    @classmethod
    def of_facts(cls, facts: Any) -> Placement:
        """Return the placement from its `facts`."""
        axes, at = facts
        return cls(
            tuple(
                tuple(
                    Section(name, size, tuple(Split(*split) for split in splits), *rest)
                    for name, size, splits, *rest in axis
                )
                for axis in axes
            ),
            tuple((dim, tuple(coords)) for dim, coords in at),
        )


def _range(axis: Axis, begin: int, end: int) -> Axis:
    """Return a range of an axis. Its parts are those of the full axis, as far as they are in the range."""
    sections, at = [], 0
    for section in axis:
        first, last = max(begin - at, 0), min(end - at, section.size)
        at += section.size
        if first < last and last - first < section.size:
            whole = section.whole or section.size
            section = section._replace(size=last - first, first=section.first + first, whole=whole)
        if first < last:
            sections.append(section)
    return tuple(sections) or (axis[0]._replace(size=0, splits=()),)


def axes_of(text: object) -> tuple[Axis, ...]:
    """Return the axes that a text names, with sizes of -1. Raises PatternError."""
    if not isinstance(text, str):
        raise _fault(text, f"it is a {type(text).__name__}")
    axes: list[Axis] = []
    for match in _AXES.finditer(text):
        named = _NAMED.fullmatch(match[0])
        if named is None:
            raise _fault(text, f"{text[match.start() :].strip()!r} is not an axis")
        splits = _splits(text, named["splits"])
        sections = [
            _NAMED.fullmatch(part.strip()) for part in (named["name"] or named["sections"]).split("+")
        ]
        if not all(section and section["name"] for section in sections):
            raise _fault(text, f"({named['sections']}) does not list sections")
        axes.append(
            tuple(
                Section(section["name"], -1, (*_splits(text, section["splits"]), *splits))
                for section in sections
                if section
            )
        )
    names = Counter(section.name for axis in axes for section in axis)
    if twice := [name for name, count in names.items() if count > 1]:
        raise _fault(text, f"{twice[0]} is named twice")
    earlier: set[str] = set()
    for axis in axes:
        splitting = [[split.dim for split in section.splits] for section in axis]
        for dims in splitting:
            if again := [dim for dim in dims if dim in earlier or dims.count(dim) > 1]:
                raise _fault(text, f"{again[0]} splits it twice")
        earlier.update(*splitting)
    return tuple(axes)


def placements_of(text: object) -> tuple[str, str]:
    """Return both sides of `placement -> placement`, with the same axes. Raises PatternError."""
    sides = text.split("->") if isinstance(text, str) else []
    if len(sides) != 2:
        raise PatternError(
            "a transfer needs two placements",
            given=repr(text),
            expected='the placement on the source, "->", and the placement on the target, as in "n/tp/fsdp k -> n/tp k"',
        )
    names = [[[section.name for section in axis] for axis in axes_of(part)] for part in sides]
    if names[0] != names[1]:
        raise PatternError(
            "the two placements have different axes",
            given=str(text),
            expected="the same axes and sections in the same order: a transfer only changes where parts lie",
            hint="rearrange the tensor before or after it",
        )
    return sides[0].strip(), sides[1].strip()


def check_pattern(pattern: Any, sizes: Mapping[str, object]) -> None:
    """Raise PatternError unless a text is two placements of the same axes, and ShapeError for sizes of anything else."""
    known = [section.name for axis in axes_of(placements_of(pattern)[0]) for section in axis]
    for name, size in sizes.items():
        if name not in known or not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ShapeError(
                f"{name} is not an axis or section with a size",
                given=f"{name}={size!r}",
                expected=f"integers of 0 or more for {listed(known) or 'no axis'}",
            )


def _splits(text: str, listed_splits: str) -> tuple[Split, ...]:
    splits = []
    for part in listed_splits.split("/")[1:]:
        match = _SPLIT.fullmatch(part.strip())
        if match is None:
            raise _fault(text, f"/{part} is not a dim")
        splits.append(Split(match["dim"], int(match["distinct"] or 0)))
    return tuple(splits)


def _fault(text: object, what: str) -> PatternError:
    return PatternError(
        f"not a placement: {what}",
        given=repr(text),
        expected='the axes of the full tensor, each with the dims that split it, as in "n/tp/fsdp k"',
        hint="n: a whole axis; n/tp: split along tp; n/tp:4: in four different parts; (q+k+v)/tp: each section split",
    )


def _sized(
    text: str, axes: tuple[Axis, ...], shape: Sequence[int] | None, sizes: dict[str, int]
) -> tuple[Axis, ...]:
    """Return axes with the sizes of their sections. Raises ShapeError."""
    if shape is not None and len(shape) != len(axes):
        raise ShapeError(
            f'"{text}" does not fit the tensor',
            given=f"shape {tuple(shape)}, {len(shape)} axes",
            expected=f"a full tensor of {len(axes)} axes",
        )
    sized = []
    for number, axis in enumerate(axes):
        known = [sizes.get(section.name, -1) for section in axis]
        length = -1 if shape is None else int(shape[number])
        if known.count(-1) == 1 and length >= 0:
            known[known.index(-1)] = length - sum(size for size in known if size != -1)
        wrong = length >= 0 and -1 not in known and sum(known) != length
        if min(known) < 0 or wrong:
            lacking = [section.name for section, size in zip(axis, known, strict=True) if size < 0]
            raise ShapeError(
                f'the sizes along {_axis_text(axis)} of "{text}" do not determine its sections',
                given=f"length {length if length >= 0 else 'unknown'}, sizes {sizes}",
                expected=f"a size for {' and '.join(lacking)}"
                if lacking and not wrong
                else f"sizes that add up to {length}",
                hint=f"{(lacking or [axis[0].name])[0]}=...",
            )
        sized.append(tuple(section._replace(size=size) for section, size in zip(axis, known, strict=True)))
    return tuple(sized)


def _axis_text(axis: Axis) -> str:
    if len(axis) == 1:
        return str(axis[0])
    first = axis[0].splits
    if all(section.splits == first for section in axis):
        return f"({'+'.join(section.name for section in axis)}){''.join(map(str, first))}"
    return f"({'+'.join(map(str, axis))})"


# -- on a layout --------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A part of a tensor. begin, end: in the full tensor. local: where it begins in the memory of the rank that holds it.

    >>> Box.at((0,), (4,)).common(Box.at((2,), (6,)))
    Box(begin=(2,), end=(4,), local=())
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    local: tuple[int, ...] = ()

    @classmethod
    def at(cls, begin: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the box of a shape that begins at a place."""
        return cls(tuple(begin), tuple(map(add, begin, shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.end, self.begin))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.begin, self.end))

    def common(self, other: Box) -> Box | None:
        """Return what two boxes have in common; None if they have no element in common."""
        begin, end = tuple(map(max, self.begin, other.begin)), tuple(map(min, self.end, other.end))
        return Box(begin, end) if all(a < b for a, b in zip(begin, end, strict=True)) else None

    def contains(self, begin: Sequence[int], end: Sequence[int]) -> bool:
        """Return whether a box of the full tensor lies in this one."""
        return all(map(le, self.begin, begin)) and all(map(le, end, self.end))


class Cuts(NamedTuple):
    """The parts of one section of one axis, in the order of their coords.

    begins, ends: in the full axis, neither ever decreases.  offsets: what each part's coords add to a rank's position.
    digits: of the splits, outermost first. Their coord is the number of the part that a rank holds.
    """

    begins: Ints
    ends: Ints
    offsets: Ints
    digits: Digits

    def of(self, position: int) -> Cuts:
        """Return the part that the rank at a position holds."""
        number = self.digits.coord(position)
        begins, ends, offsets = (values[number : number + 1] for values in self[:3])
        return Cuts(begins, ends, offsets, self.digits)


class Block(NamedTuple):
    """A section of each axis: a box of the full tensor, cut along each axis by itself.

    cuts:   for each axis.
    copies: what the coords along the other dims add to the position of a rank that holds a part, for each copy.
    """

    cuts: tuple[Cuts, ...]
    copies: Ints

    def of(self, position: int | None) -> Block:
        """Return the part that the rank at a position holds, if it holds any; all parts without a position."""
        return self if position is None else self._replace(cuts=tuple(cut.of(position) for cut in self.cuts))


@final
@dataclass(frozen=True)
class Located:
    """A placement on a layout. Raises UnknownDim, and ShapeError for parts that the dim's size does not allow."""

    placement: Placement
    layout: Layout

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the tensor, which do not overlap and cover it."""
        return tuple(Block(cuts, self._copies(cuts)) for cuts in product(*self._cuts))

    @cached_property
    def _cuts(self) -> list[list[Cuts]]:
        """The parts of each section of each axis."""
        return [
            [*map(self._cuts_of, axis, accumulate((section.size for section in axis), initial=0))]
            for axis in self.placement.axes
        ]

    def _cuts_of(self, section: Section, begin: int) -> Cuts:
        digits = [split.digits(self.layout) for split in section.splits]
        begins = np.array([begin - section.first], dtype=np.int64)
        sizes = np.array([section.whole or section.size], dtype=np.int64)
        offsets = np.zeros(1, dtype=np.int64)
        for digit in digits:
            most = -(-(sizes // section.unit) // digit.size) * section.unit
            inside = np.minimum(sizes[:, None], np.arange(digit.size) * most[:, None])
            begins = (begins[:, None] + inside).ravel()
            sizes = np.minimum(most[:, None], sizes[:, None] - inside).ravel()
            offsets = (offsets[:, None] + digit.offsets()).ravel()
        begins, ends = (np.clip(at, begin, begin + section.size) for at in (begins, begins + sizes))
        return Cuts(begins, ends, offsets, Digits(chain(*digits)))

    def _copies(self, cuts: Sequence[Cuts]) -> Ints:
        self.layout.home(self.placement.dims)
        present = [(self.layout.digits(dim), coords) for dim, coords in self.placement.at]
        used = [cut.digits for cut in cuts] + [digits for digits, _ in present]
        offsets = rest(used, self.layout.world_size).offsets()
        for digits, coords in present:
            held = digits.offset(np.array(coords, dtype=np.int64))
            offsets = (held[:, None] + offsets).ravel()
        return offsets

    def holds(self, position: int) -> bool:
        """Return whether the rank at a position holds a part, which may be empty."""
        return all(self.layout.digits(dim).coord(position) in coords for dim, coords in self.placement.at)

    def boxes(self, position: int) -> list[Box]:
        """Return the boxes that the rank at a position holds, one for each block. A rank that holds none has no box."""
        if not self.holds(position):
            return []
        axes = []
        for cuts in self._cuts:
            parts = [cut.of(position) for cut in cuts]
            spans = [(int(part.begins[0]), int(part.ends[0])) for part in parts]
            places = accumulate((end - begin for begin, end in spans), initial=0)
            axes.append([(*span, local) for span, local in zip(spans, places, strict=False)])
        return [Box(*zip(*corner, strict=True)) if corner else Box((), ()) for corner in product(*axes)]

    def local_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of the memory of the rank at a position, which holds its boxes without gaps."""
        # The last box has the last section of each axis.
        last = self.boxes(position)[-1:]
        return tuple(at + size for box in last for at, size in zip(box.local, box.shape, strict=True))

    @property
    def most(self) -> int:
        """The largest number of elements that a rank holds."""
        return sum(
            math.prod(int((cut.ends - cut.begins).max()) for cut in block.cuts) for block in self.blocks
        )


def divided(digits: Digits, distinct: int, what: str) -> tuple[Digits, Digits]:
    """Return the outer digits, which take `distinct` values together, and the inner ones. Raises ShapeError.

    >>> divided(Digits([(8, 1)]), 4, "")
    (((4, 2),), ((2, 1),))
    """
    parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
    left = distinct
    for size, stride in digits:
        number = math.gcd(left, size)
        if number != min(left, size):
            break
        parts[0].append((number, stride * (size // number)))
        parts[1].append((size // number, stride))
        left //= number
    if left != 1:
        raise ShapeError(
            f"{distinct} different parts do not divide the ranks evenly",
            given=f"{distinct} parts, but {what}",
            expected="a number of parts that divides the number of ranks",
        )
    outer, inner = (Digits(digit for digit in part if digit[0] > 1) for part in parts)
    return outer, inner


def rest(used: Sequence[Digits], positions: int) -> Digits:
    """Return the digits of a position that are not among the used ones, outermost first. Raises LayoutError if these overlap.

    >>> rest([Digits([(2, 2)])], 8)
    ((2, 4), (2, 1))
    """
    free, stride = [], 1
    for size, place in sorted((digit for digits in used for digit in digits), key=lambda digit: digit[1]):
        if size == 1:
            continue
        if place < stride:
            raise LayoutError(
                "dims that split the same tensor overlap",
                given=f"digits {', '.join(str(digits) for digits in used)} of a rank's position, as (size, stride)",
                expected="dims that share no coords, not a merged dim and one of its own dims",
            )
        if place > stride:
            free.append((place // stride, stride))
        stride = place * size
    if positions > stride:
        free.append((positions // stride, stride))
    return Digits(reversed(free))
