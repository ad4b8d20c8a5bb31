"""One weight on the first stage and the last: equal values, and one gradient for both."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from meshcomm.errors import LayoutError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import local


@final
class TiedWeight:
    """The embedding on coord 0 along a pipeline and the head on its last coord are one weight.

    The two holders send each other what they have and add it up; ranks between them do nothing,
    where an all_reduce would take all of them through the whole table with zeros. Both compute
    own + other, and addition of two numbers does not depend on their order: the sums are equal to
    the last bit, so that equal optimisers keep the copies equal.

    Where the weight is split along other dims (vocabulary, data) each rank exchanges its part, so
    both holders must split it alike; it is the same parameter twice, not a transposed one.

    Args:
        mesh, dim: the pipeline's.
        weight: the holder's parameter, None on coords between the first and the last. On a
            pipeline of one rank nothing is exchanged: there, both modules must use the same object.

    Called by, each of the three: every rank along `dim`.
    Raises LayoutError where coord and weight do not go together.
    """

    def __init__(self, mesh: Mesh, dim: str, weight: nn.Parameter | None) -> None:
        self._mesh = mesh
        self._dim = dim
        self._weight = weight
        size, coord = mesh.size(dim), mesh.coord(dim)
        holds = coord in (0, size - 1)
        if holds != (weight is not None):
            raise LayoutError(
                f"coord {coord} of {size} along {dim} {'holds' if holds else 'does not hold'} the tied weight",
                given="no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}",
                expected="the embedding's on coord 0, the head's on the last, None on all others",
                hint="TiedWeight(mesh, dim, parameter if this rank has it else None)",
            )
        self.is_owner = coord == 0
        """Whether this rank counts the weight: where norms, sizes and checkpoints take it once."""
        self._other = (size - 1 - coord) if size > 1 and holds else None

    @torch.no_grad()
    def copy(self) -> None:
        """The last coord's values become those of coord 0. Call once, after both are initialised."""
        if self._weight is None or self._other is None:
            return
        part = local(self._weight)
        if self.is_owner:
            self._mesh.send(self._dim, part, self._other)
        else:
            part.copy_(self._mesh.recv(self._dim, torch.empty_like(part), src=self._other))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Both gradients become their sum, in place. Call after the step's last backward pass.

        Before or after the sum along data's dims, but not while that is under way. Raises
        TrainingError where this rank's weight has no gradient; its message goes out all the same.
        """
        if self._weight is None or self._other is None:
            return
        gradient = self._weight.grad
        mine = torch.zeros_like(local(self._weight)) if gradient is None else local(gradient)
        theirs: Tensor = torch.empty_like(mine)
        self._mesh.exchange(self._dim, [(mine, self._other)], [(theirs, self._other)])
        if gradient is None:
            raise TrainingError(
                "the tied weight got no gradient",
                given=f"the {'embedding' if self.is_owner else 'head'} of shape {tuple(self._weight.shape)}",
                expected="a .grad on both holders",
                hint="call sum_gradients after the last backward pass, and use the weight in forward",
            )
        mine.add_(theirs)
