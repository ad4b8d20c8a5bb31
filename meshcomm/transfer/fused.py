"""Weights with several parts, such as q, k and v, in the layout that a rank keeps of them.

Such a weight has the shape (units, rows of all parts in a unit, ...). Each rank needs its share of every part, which is not a
contiguous slice of the rows. A unit contains an equal share of each part, and a rank holds a contiguous run of units. The
number of units depends only on the parts, and the extra axis shows that the rows are in a different order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

# The module attribute that maps each multi-part weight to its parts.
FUSED: Final = "meshcomm_fused"


class Parts(NamedTuple):
    """The parts of one weight: their sizes along an axis of the full weight."""

    sizes: tuple[int, ...]
    axis: int = 0

    @property
    def units(self) -> int:
        """The number of equal shares into which every part can be cut. The number of ranks must divide it."""
        return math.gcd(*self.sizes)

    def shape(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the full weight's original shape, given its shape `kept` with a units axis."""
        axis = self.axis
        return (*kept[:axis], sum(self.sizes), *kept[axis + 2 :])


class Kept(NamedTuple):
    """A tensor in the layout of a multi-part weight: the weight, its gradient, or optimizer state."""

    tensor: Tensor
    parts: Parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, in the original layout."""
        return self.parts.shape(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def kept(whole: Tensor, parts: Parts) -> Tensor:
    """Group rows by unit: (..., sum of sizes, ...) in the parts' order -> (..., units, rows in a unit, ...).

    >>> kept(torch.tensor([0, 1, 2, 3, 10, 11]), Parts((4, 2))).tolist()
    [[0, 1, 10], [2, 3, 11]]
    """
    n, axis = parts.units, parts.axis
    return torch.cat(
        [part.unflatten(axis, (n, -1)) for part in whole.split(list(parts.sizes), axis)], axis + 1
    )


def joined(units_held: Tensor, parts: Parts) -> Tensor:
    """Return the rows of some or all units in the parts' order: the inverse of `kept`."""
    n, axis = parts.units, parts.axis
    rows = units_held.split([size // n for size in parts.sizes], axis + 1)
    return torch.cat([part.flatten(axis, axis + 1) for part in rows], axis)


def fused_parts(module: nn.Module) -> dict[str, Parts]:
    """Return the parts of each multi-part weight, by its name in the state dict."""
    return {
        f"{prefix}.{key}".lstrip("."): parts
        for prefix, part in module.named_modules(remove_duplicate=False)
        for key, parts in getattr(part, FUSED, {}).items()
    }


def unfused(tensors: Mapping[str, Tensor], *modules: nn.Module) -> dict[str, Tensor | Kept]:
    """Return tensors by their names in a module, such as gradients, those of multi-part weights as `Kept`."""
    fused = {name: parts for module in modules for name, parts in fused_parts(module).items()}
    return {name: Kept(tensor, fused[name]) if name in fused else tensor for name, tensor in tensors.items()}
