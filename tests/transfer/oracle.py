"""Random layouts and placements, and where torch.chunk puts the elements. Independent of meshcomm."""

from __future__ import annotations

import random
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """A mesh: sizes by dim, and the rank at each position."""

    dims: dict[str, int]
    order: list[int]

    def coords(self, position: int) -> dict[str, int]:
        """Return the coords of a position of the row-major grid."""
        coords: dict[str, int] = {}
        for dim, size in reversed(self.dims.items()):
            coords[dim] = position % size
            position //= size
        return coords


class Sectioned(NamedTuple):
    """A section of an axis: its name, its size and its splits, as (dim, number of different parts)."""

    name: str
    size: int
    splits: list[tuple[str, int]]


class Case(NamedTuple):
    """A side of a transfer: the grid, the sections of each axis, and the coords at which ranks hold the tensor."""

    grid: Grid
    axes: list[list[Sectioned]]
    at: dict[str, list[int]]

    @property
    def text(self) -> str:
        """The placement as a user writes it."""

        def section_text(section: Sectioned) -> str:
            return section.name + "".join(
                f"/{dim}" + ("" if parts == self.grid.dims[dim] else f":{parts}")
                for dim, parts in section.splits
            )

        texts = (
            section_text(axis[0]) if len(axis) == 1 else f"({'+'.join(map(section_text, axis))})"
            for axis in self.axes
        )
        return " ".join(texts)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each section."""
        return {section.name: section.size for axis in self.axes for section in axis}

    def part(self, whole: Tensor, position: int) -> Tensor | None:
        """Return what the rank at a position holds of a tensor, by torch.chunk; None if it holds nothing."""
        coords = self.grid.coords(position)
        if any(coords[dim] not in held for dim, held in self.at.items()):
            return None
        for axis, sections in enumerate(self.axes):
            held = []
            for section in whole.split([section.size for section in sections], axis):
                splits = sections[len(held)].splits
                for dim, parts in splits:
                    number = coords[dim] * parts // self.grid.dims[dim]
                    chunks = section.chunk(parts, axis)
                    empty = section.narrow(axis, 0, 0)
                    section = chunks[number] if number < len(chunks) else empty
                held.append(section)
            whole = torch.cat(held, axis)
        return whole


def random_grid(draw: random.Random, names: str, first: int, most: int = 8) -> Grid:
    """Return a grid of at most `most` ranks, from rank `first` on, in a random order."""
    while True:
        dims = {
            name: draw.choice([1, 2, 2, 3, 4]) for name in draw.sample(names, draw.randint(1, len(names)))
        }
        if prod(dims.values()) <= most:
            break
    order = list(range(first, first + prod(dims.values())))
    if draw.random() < 0.3:
        draw.shuffle(order)
    return Grid(dims, order)


def random_axes(draw: random.Random, ndim: int) -> list[list[tuple[str, int]]]:
    """Return the names and sizes of the sections of each axis."""
    axes = []
    for number in range(ndim):
        count = draw.choice([1, 1, 1, 2, 3])
        axes.append(
            [
                (f"{'abcd'[number]}{section}", draw.choice([0, 1, 2, 3, 4, 5, 7, 8, 12]))
                for section in range(count)
            ]
        )
    return axes


def random_case(draw: random.Random, grid: Grid, axes: list[list[tuple[str, int]]], at: bool) -> Case:
    """Return a random placement of a tensor with these sections on a grid. at: whether some ranks may hold nothing."""
    free = list(grid.dims)
    held = {}
    if at and free and draw.random() < 0.3:
        dim = free.pop(draw.randrange(len(free)))
        held[dim] = sorted(draw.sample(range(grid.dims[dim]), draw.randint(1, grid.dims[dim])))
    draw.shuffle(free)
    sectioned = []
    for axis in axes:
        dims = [free.pop() for _ in range(draw.randint(0, min(2, len(free))))]
        sections = []
        for name, size in axis:
            splits = []
            for dim in dims:
                divisors = [n for n in range(2, grid.dims[dim] + 1) if grid.dims[dim] % n == 0]
                parts = draw.choice(divisors) if divisors and draw.random() < 0.3 else grid.dims[dim]
                if draw.random() < 0.9:
                    splits.append((dim, parts))
            sections.append(Sectioned(name, size, splits))
        sectioned.append(sections)
    return Case(grid, sectioned, held)
