"""How a model is split, in one object for whoever builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from meshcomm.mesh import Mesh
from meshcomm.parallel.context import ContextSplit
from meshcomm.parallel.random_numbers import Draws
from meshcomm.parallel.tensor import TensorSplit


@final
@dataclass(frozen=True)
class Splits:
    """Along which dims of the mesh weights, the sequence and the experts are split.

    tensor:         weights, and with sequence_parallel activations between layers.
    context:        the sequence.
    expert:         the dim of a view along which experts are spread; None: every rank has all.
    balance_weight: what the balance loss of a microbatch is multiplied by.
    data:           the dims whose ranks have other samples.
    draws:          what sets the default generators; None: nothing does.
    """

    tensor: TensorSplit
    context: ContextSplit
    expert: str | None = None
    balance_weight: float = 0.0
    data: tuple[str, ...] = ()
    draws: Draws | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of all of them."""
        return self.tensor.mesh

    @classmethod
    def of(cls, tensor: TensorSplit) -> Splits:
        """Only weights are split."""
        return cls(tensor, ContextSplit(tensor.mesh, None))
