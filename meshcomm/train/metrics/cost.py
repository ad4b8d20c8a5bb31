"""What does a step cost over all ranks: FLOPs, their share of what the devices can do, and peak memory?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple, final

import torch

from meshcomm.config import TrainConfig
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.train.metrics.flops import FlopCounter, peak_flops


class Memory(NamedTuple):
    """The most that a rank has had, and which rank. kind: what is counted."""

    nbytes: int
    rank: int
    kind: str


class Rates(NamedTuple):
    """FLOP/s of the model on a rank, as the mean over ranks; and shares of what the devices can do, where that is known."""

    model_flops_per_s: float
    mfu: float | None
    hfu: float | None


@final
class Cost:
    """Of one training step. Every rank of the mesh has one, and all are told the same.

    FLOPs are those of the first step that was counted; peak memory is that of the last comparison.
    """

    def __init__(self, mesh: Mesh, train: TrainConfig) -> None:
        self._mesh, self._train = mesh, train
        self._counter: FlopCounter | None = None
        self._model = self._hardware = 0
        self._peak: float | None = None
        self.memory: Memory | None = None
        # Optimisers make their state in the first step, so the second one may need more.
        self._comparisons_due = 2

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the first step that runs inside; any other runs as it is."""
        if self._counter is not None:
            yield
            return
        self._counter = FlopCounter()
        with self._counter:
            yield

    def looked(self) -> None:
        """A line is about to be told: compare ranks at the first two. Called by: every rank."""
        if self._comparisons_due:
            self._comparisons_due -= 1
            self.compare()

    def compare(self) -> None:
        """Sum FLOPs up over the ranks and find the largest peak memory. Called by: every rank; one gather of objects."""
        counter = self._counter or FlopCounter()
        peak = peak_flops(self._train, self._mesh.device)
        nbytes, kind = peak_memory(self._mesh.device)
        table = of_every_rank(self._mesh, [counter.model, counter.hardware, peak, nbytes])
        model, hardware, peaks, most = zip(*table, strict=True)
        self._model, self._hardware = sum(model), sum(hardware)
        self._peak = None if None in peaks else sum(peaks)
        nbytes = max(most)
        self.memory = Memory(nbytes, ranks_of(self._mesh)[most.index(nbytes)], kind)

    def rates(self, steps_per_s: float) -> Rates | None:
        """Of so many steps a second; None while nothing was counted, or where there was nothing that counts."""
        if not self._model or not steps_per_s:
            return None
        ranks = len(ranks_of(self._mesh))
        share = None if self._peak is None else steps_per_s / self._peak
        return Rates(
            self._model * steps_per_s / ranks,
            None if share is None else self._model * share,
            None if share is None else self._hardware * share,
        )


def peak_memory(device: torch.device) -> tuple[int, str]:
    """The most bytes so far, and of what: on CUDA of what torch has allocated, else of this process.

    torch.cuda.max_memory_allocated, or getrusage's ru_maxrss: what came before the run counts too. Waits for nothing.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocated by torch"
    # Not on Windows.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident in the process"
