"""Worker processes that read the samples of upcoming steps while this process computes."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.job.reaper import end_with_parent
from meshcomm.train.data.batches import Batches

# The start of torch's error messages about a worker.
_WORKER = "DataLoader"


@final
class ReadAhead:
    """Reads the steps of `batches` up to `last` through torch's DataLoader, in `workers` processes, each two steps ahead.

    The samples do not depend on the workers. For CUDA, one of the loader's threads pins memory. As a context manager, it ends
    the processes on exit. A worker error, which torch may raise at any point in the program, is converted to a
    TrainingError.

    timeout_s: how long to wait for a step before raising an error.
    """

    def __init__(self, batches: Batches, last: int, workers: int, timeout_s: float) -> None:
        self._batches, self._last, self._workers, self._timeout_s = batches, last, workers, timeout_s
        self._steps: Iterator[Any] | None = None

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        """See Batches. Called for the first step to read, and then for each subsequent step."""
        if self._steps is None:
            self._steps = self._begun(step)
        held = next(self._steps)
        if isinstance(held, MeshcommError):
            raise held
        return self._batches.on_device(held)

    def read(self, step: int) -> int:
        """See Batches."""
        return self._batches.read(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps = None
        # torch raises the error from a signal handler, at any line of the program: within a call, another error follows it.
        while error is not None and not (isinstance(error, RuntimeError) and str(error).startswith(_WORKER)):
            error = error.__cause__ or error.__context__
        if error is not None:
            raise TrainingError(
                "a worker process that reads samples has ended or is not responding",
                given=f"data.workers = {self._workers}: {str(error).splitlines()[0]}",
                expected="a step's samples within mesh.timeout_s",
                hint="check the host's memory and /dev/shm; with data.workers = 0, the rank reads samples itself",
            ) from error

    def _begun(self, first: int) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            _Steps(self._batches),
            batch_size=None,
            sampler=range(first, self._last + 1),
            num_workers=self._workers,
            collate_fn=_as_it_is,
            pin_memory=self._batches.device_type == "cuda",
            timeout=self._timeout_s,
            worker_init_fn=_begin,
            # A separate generator, so that the program's random numbers do not depend on the workers.
            generator=torch.Generator(),
            # Data mapped from a file are not copied.
            multiprocessing_context="fork",
        )
        with warnings.catch_warnings():
            # Python 3.12 and later warn about a fork in a process with threads. A worker needs none of these threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            return iter(loader)


class _Steps(Dataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> tuple[Tensor, ...] | MeshcommError:
        try:
            return self._batches.held(step)
        except MeshcommError as error:
            # If the error were raised here, torch would add a traceback to its message.
            return error


def _as_it_is(held: Any) -> Any:
    return held


def _begin(_: int) -> None:
    """Make a worker exit when its rank exits, even if the rank is killed, but not on signals that ask a job to save."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # Slurm sends one SIGTERM to all processes of a job. torch sends one to a worker that does not end.
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
