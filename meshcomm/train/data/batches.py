"""The samples that one data rank reads in each step, in an order that depends only on the seed and the position."""

from __future__ import annotations

import os
import signal
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from mmap import mmap
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.job.reaper import end_with_parent
from meshcomm.parallel.compose import Engine
from meshcomm.train.data.corpus import Corpus, Samples

Indices = NDArray[np.int64]

_ROUNDS = 6


def permuted(positions: Indices, size: int, key: Sequence[int]) -> Indices:
    """Return the images of `positions` under a permutation of range(size) that depends on the key.

    This is a balanced Feistel network over the next power of four, applied repeatedly until the value is below size (Black
    and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Its rounds mix bits like splitmix64.

    >>> sorted(permuted(np.arange(7), 7, [0, 1]).tolist())
    [0, 1, 2, 3, 4, 5, 6]
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        value = values[outside]
        high, low = value >> half, value & mask
        for round_key in keys:
            high, low = low, high ^ (_mixed(low ^ round_key) & mask)
        values[outside] = value = (high << half) | low
        outside[outside] = value >= size
    return values.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@final
class Order:
    """Epochs over the samples of several parts. Each epoch has a different order.

    sizes: the number of samples in each part.
    weights: the relative share of each part in an epoch. If empty, each sample occurs once per epoch.

    A part with more samples than an epoch uses continues in the next epoch. A part with fewer samples is repeated in a
    different order.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes, self.seed = list(sizes), seed
        total = sum(self.sizes)
        if weights:
            shares = [weight / sum(weights) * total for weight in weights]
            self.counts = [max(1, round(share)) for share in shares]
        else:
            self.counts = self.sizes
        self.epoch = sum(self.counts)
        self._ends = np.cumsum(self.counts)

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the part and the sample at each position. Positions are counted from the start of training."""
        parts, samples = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(positions // self.epoch):
            in_epoch = positions // self.epoch == epoch
            slots = permuted(positions[in_epoch] % self.epoch, self.epoch, [self.seed, 0, int(epoch)])
            part = np.searchsorted(self._ends, slots, side="right")
            parts[in_epoch] = part
            within_part = np.empty_like(slots)
            for index in np.unique(part):
                count, size, of_part = self.counts[index], self.sizes[index], part == index
                within = slots[of_part] - (self._ends[index] - count)
                within_part[of_part] = (
                    within if count == size else self._again(within + epoch * count, size, int(index))
                )
            samples[in_epoch] = within_part
        return parts, samples

    def _again(self, running: Indices, size: int, part: int) -> Indices:
        """Return the samples at the given running positions of a part that has its own epochs."""
        samples = np.empty_like(running)
        for round_ in np.unique(running // size):
            in_round = running // size == round_
            samples[in_round] = permuted(running[in_round] % size, size, [self.seed, part + 1, int(round_)])
        return samples


class Source(AbstractContextManager["Source"]):
    """What a run reads its batches from. As a context manager, it ends the processes that read for it."""

    # Whether the source saves and restores a state, which may be ahead of the step.
    has_state = False

    @abstractmethod
    def __call__(self, step: int) -> tuple[Any, ...]:
        """Return inputs, targets and, if any, documents of a step: this rank's share, on its device."""

    def read(self, step: int) -> int | None:
        """Return the number of samples read by the end of `step`; None if only steps are counted."""
        return None

    def saved(self) -> dict[str, Tensor]:
        """Return the state to save in a checkpoint."""
        return {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None


@final
class Batches(Source):
    """The samples that one data rank reads in each step.

    Position p is the p-th sample that all ranks together read during training. Each step reads the next B positions, where
    B is the global batch size. The sample at position p depends only on the seed and p (in a stream, only on p), so the global batch does not depend
    on the mesh. Coord c of n along data reads positions [c * B / n, (c + 1) * B / n) of each step's B positions. Ranks along
    tensor and pipeline have the same coord and read the same samples.

    Args:
        corpus: the data to read.
        global_batch_size: samples per step, over all ranks.
        seed: the run's seed.
        coord, size: the coord of this rank along data, and the number of coords.
        device: the device for the batches.
        dtype: the dtype for floating-point data. If None, the data keep their dtype.
        after: a completed step, and the number of samples read up to and including that step.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        global_batch_size: int,
        seed: int,
        coord: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        after: tuple[int, int] = (0, 0),
        dtype: torch.dtype | None = None,
    ) -> None:
        share = global_batch_size // size
        self._parts = corpus.parts
        self._global_batch = global_batch_size
        self._mine = slice(coord * share, (coord + 1) * share)
        self._device, self._dtype = device, dtype
        self.device_type = "cpu" if device is None else device.type
        self._after, self._shuffled = after, corpus.shuffled
        self.order = Order([len(part) for part in corpus.parts], corpus.weights, seed)

    def read(self, step: int) -> int:
        """See Source."""
        return self._after[1] + (step - self._after[0]) * self._global_batch

    def places(self, step: int) -> tuple[Indices, Indices]:
        """Return the part that contains each of this rank's samples in `step`, and the sample's index in that part."""
        first = self.read(step - 1)
        positions = np.arange(first, first + self._global_batch)[self._mine]
        return self.order.at(positions) if self._shuffled else (np.zeros_like(positions), positions)

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        """See Source. Each tensor has the shape (global_batch_size / size, ...). Tokens are int64 of shape (..., sequence)."""
        return self.on_device(self.held(step))

    def held(self, step: int) -> tuple[Tensor, ...]:
        """Return the same tensors as `__call__`, but in host memory."""
        return _tensors(self._samples(*self.places(step)), self._dtype)

    def in_order(self, most: int | None) -> Iterator[tuple[Tensor, ...]]:
        """Yield this rank's share of at most `most` full global batches, in the order in which samples are stored."""
        ends = np.cumsum([len(part) for part in self._parts])
        whole = int(ends[-1]) // self._global_batch
        for batch in range(whole if most is None else min(most, whole)):
            first = batch * self._global_batch
            numbers = np.arange(first, first + self._global_batch)[self._mine]
            parts = np.searchsorted(ends, numbers, side="right")
            starts = np.array([0, *ends[:-1]])
            yield self.on_device(_tensors(self._samples(parts, numbers - starts[parts]), self._dtype))

    def _samples(self, parts: Indices, numbers: Indices) -> Samples:
        rows, samples = [], []
        for index in np.unique(parts):
            of_part = np.flatnonzero(parts == index)
            rows.append(of_part)
            samples.append(self._parts[index].read(numbers[of_part]))
        back = np.argsort(np.concatenate(rows))
        return tuple(np.concatenate(arrays)[back] for arrays in zip(*samples, strict=True))

    def on_device(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors in `held`, copied to the device."""
        if self.device_type != "cuda":
            return held
        # Copies from pinned memory are asynchronous; from other memory, they block.
        pinned = (x if x.is_pinned() else x.pin_memory() for x in held)
        return tuple(x.to(self._device, non_blocking=True) for x in pinned)


def _tensors(samples: Samples, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    tensors = (torch.from_numpy(np.ascontiguousarray(sample)) for sample in samples)
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


def batches_of(engine: Engine, corpus: Corpus, after: tuple[int, int] = (0, 0)) -> Batches:
    """Return the samples that this rank reads in each step. after: see `Batches`."""
    _, _, data, train = engine.sections
    assert data is not None
    if data.build is None:
        # `Batches` selects samples by role, so ranks need not compare them, unless a user's function returned them.
        engine.checked_steps = 0
    return Batches(
        corpus,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        coord=engine.data_coord,
        size=engine.data_size,
        device=engine.mesh.device,
        after=after,
        dtype=engine.split.dtype,
    )


@final
class ReadAhead(Source):
    """Reads the steps of `batches` up to `last` through torch's DataLoader, in `workers` processes, each two steps ahead.

    The samples do not depend on the workers. For CUDA, one of the loader's threads pins memory. As a context manager, it ends
    the processes on exit. A worker error, which torch may raise at any point in the program, is converted to a
    TrainingError.

    timeout_s: how long to wait for a step before raising an error.
    """

    def __init__(self, batches: Batches, last: int, workers: int, timeout_s: float) -> None:
        self._batches, self._last, self._workers, self._timeout_s = batches, last, workers, timeout_s
        self._steps: Iterator[Any] | None = None
        # A byte that the workers share: whether the run has ended.
        self._ended = mmap(-1, 1)

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        """See Source. Called for the first step to read, and then for each subsequent step."""
        if self._steps is None:
            self._steps = self._begun(step)
        held = next(self._steps)
        if isinstance(held, MeshcommError):
            raise held
        return self._batches.on_device(held)

    def read(self, step: int) -> int | None:
        """See Source."""
        return self._batches.read(step)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended[0], self._steps = 1, None
        # torch raises the error from a signal handler, at any line of the program: within a call, another error follows it.
        while error is not None and not (
            isinstance(error, RuntimeError) and str(error).startswith("DataLoader")
        ):
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
            worker_init_fn=partial(_begin, self._ended),
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


def _begin(ended: mmap, _: int) -> None:
    """Make a worker exit when its rank exits, even if the rank is killed, but not on signals that ask a job to save.

    ended: whether the run has ended.
    """
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def told(*_: object) -> None:
        # Slurm sends one SIGTERM to all processes of a job. After the run, torch and an exiting Python send one to a worker that
        # hangs, and Python waits for it. As in torch's own handler, this is no failure of the worker.
        if ended[0]:
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, told)
