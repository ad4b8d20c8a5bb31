"""Refuses a loss that communicates with the ranks that have other samples while it is given one of several microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from meshcomm.errors import UnsupportedOp
from meshcomm.mesh import Mesh


@final
class LossCalls:
    """Counts the collectives in calls of a loss function.

    dims: the dims along which ranks have different samples. microbatches: the number of microbatches of a step on each rank.
    micro_batch_size: the number of samples in each microbatch.
    """

    def __init__(self, mesh: Mesh, dims: Sequence[str], microbatches: int, micro_batch_size: int) -> None:
        self._mesh, self._dims = mesh, [dim for dim in dims if mesh.size(dim) > 1]
        self._microbatches, self._samples = microbatches, micro_batch_size
        if microbatches == 1:
            self._dims = []
        # By the label of a group: whether it has ranks with other samples.
        self._apart: dict[str, bool] = {}

    @contextmanager
    def refused(self) -> Iterator[None]:
        """In this context, collectives along the dims raise UnsupportedOp, on every rank that made them, after they are made."""
        if not self._dims:
            yield
            return
        before = self._made()
        yield
        for label, count in self._made().items():
            if count > before.get(label, 0):
                each = self._microbatches * self._samples
                raise UnsupportedOp(
                    "a loss that communicates with other ranks is given only one microbatch of their samples at a time",
                    given=f"a collective on {label} in the loss, and {self._microbatches} microbatches per step on {self._mesh.label}",
                    expected=f"train.micro_batch_size = {each}: one microbatch, so that the loss sees the global batch",
                    hint=f"train.micro_batch_size = {each}; or return (sum, count) or named terms, which add up over all "
                    "microbatches and ranks. train.check = false trains with the mean over microbatches",
                )

    def _made(self) -> dict[str, int]:
        """Return the number of collectives in each group whose ranks have different samples, by its label."""
        recorders = self._mesh.debug.metrics.recorders.values()
        return {each.label: each.started for each in recorders if self._is_apart(each.label, each.ranks)}

    def _is_apart(self, label: str, ranks: Sequence[int]) -> bool:
        if label not in self._apart:
            coords = [self._mesh.get_coords(rank) for rank in ranks]
            self._apart[label] = len({tuple(each[dim] for dim in self._dims) for each in coords}) > 1
        return self._apart[label]
