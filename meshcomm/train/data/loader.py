"""How the batches of a program are read: a function of the step, or an iterable such as a DataLoader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from meshcomm.comm.codec import decode, encode
from meshcomm.errors import ObjectError, TrainingError
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.tree import sliced, tensors_of
from meshcomm.train.data.batch import UserBatch, placed
from meshcomm.train.data.batches import Source

# A function of the number of a step, from 1, that returns the step's batch; or an iterable of one batch per step.
Data: TypeAlias = Callable[[int], UserBatch] | Iterable[UserBatch]

# The name of a loader's state in a checkpoint, with the rank's coord along data and shard, and the number of coords.
STATE: Final = "run.data.{}.of.{}"
# A rank's batch size, as an expression of the program.
SHARE: Final = "train.global_batch_size // mesh.data_world_size"
_NOTHING: Final[Any] = object()


class UserBatches(Source):
    """The batches of a program, for an engine that changes when ranks are lost."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # An earlier run's iterable may have ended in another epoch on other ranks.
        engine.epoch = 0

    def goes_on(self, engine: Engine, step: int) -> None:
        """Continue after `step` with another engine, as if later steps had not been requested."""
        self._engine = engine

    def close(self) -> None:
        """End the reading when the run ends, and with it the workers of a DataLoader."""


@final
class ByStep(UserBatches):
    """The batches that a function of the step returns."""

    def __init__(self, function: Callable[[int], UserBatch], engine: Engine) -> None:
        super().__init__(engine)
        self._function = function

    def __call__(self, step: int) -> tuple[Any, ...]:
        """See Source. Raises the errors of `placed`."""
        return placed(self._engine, self._function(step), f"step {step}")


@final
class InEpochs(UserBatches):
    """The batches of an iterable.

    When it ends, its own `set_epoch` and that of its samplers are called with the epoch's number, and the iterable
    is restarted. If it has `state_dict` and `load_state_dict`, like torchdata's StatefulDataLoader, checkpoints store its
    state. Without these methods, or if ranks along data now read different shares, the batches of earlier steps are read and
    skipped.

    after: the number of steps completed before this attempt. saved: the result of `saved` after these steps, if any.
    """

    def __init__(
        self, data: Iterable[UserBatch], engine: Engine, after: int = 0, saved: Tensor | None = None
    ) -> None:
        super().__init__(engine)
        check_epoch(data, engine)
        self._data: Any = data
        self._share = (engine.data_coord, engine.data_size)
        self.has_state = all(
            callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict")
        )
        # The number of batches read in this epoch, and whether a saved state is that of an epoch's end.
        self._epoch, self._read, self._at_end = 0, 0, False
        # The batch of the last step, which a loss of ranks may undo.
        self._last, self._held = after, _NOTHING
        if saved is not None and self.has_state:
            self._put_back(saved)
            self._batches = self._repeated(goes_on=True)
        else:
            self._batches = self._repeated()
            for _ in range(after):
                next(self._batches)

    def close(self) -> None:
        """See UserBatches."""
        # The generator refers to this object. In a garbage collection, torch would wait five seconds for each worker.
        self._batches.close()

    def __call__(self, step: int) -> tuple[Any, ...]:
        """See Source. Raises TrainingError if there are no data, and the errors of `placed`."""
        if self._held is _NOTHING or step != self._last:
            self._held, self._last = next(self._batches), step
        self._engine.epoch = self._epoch
        return placed(self._engine, self._held, f"step {step}")

    def goes_on(self, engine: Engine, step: int) -> None:
        """See UserBatches. Raises TrainingError if the data would have to restart, because a sampler may then choose a
        different order.
        """
        super().goes_on(engine, step)
        (coord, size), share = self._share, (engine.data_coord, engine.data_size)
        if share != self._share:
            raise TrainingError(
                "after ranks were lost, this rank has a different share of each global batch, but its data still yield the old share",
                given=f"a {type(self._data).__name__} for share {coord} of {size}; now {share[0]} of {share[1]}",
                expected="data requested by step number, for the current mesh.data_rank and mesh.data_world_size",
                hint="use trainer.run(lambda step: ...), or remove elastic.min",
            )
        if self._last not in (step, step + 1):
            raise TrainingError(
                "a rank's data cannot go back to an earlier step in the same process",
                given=f"a {type(self._data).__name__} that has yielded step {self._last}; step {step + 1} is next",
                expected="data requested by step number, or a rank that holds the lost rank's state",
                hint="use trainer.run(lambda step: ...), or --max-restarts instead of --replace",
            )

    def saved(self) -> dict[str, Tensor]:
        """See Source. The name is that of this rank's share. Raises TrainingError."""
        if not self.has_state:
            return {}
        at_end = _length(self._data) == self._read
        facts = {"epoch": self._epoch + at_end, "read": 0 if at_end else self._read, "at_end": at_end}
        try:
            state = encode({**facts, "loader": self._data.state_dict()})
        except ObjectError as error:
            raise TrainingError(
                f"the state of the {type(self._data).__name__} cannot be saved",
                given=error.what,
                expected="a state_dict of plain data and tensors",
                hint="use numbers instead of an object",
            ) from error
        return {STATE.format(*self._share): state}

    def _put_back(self, saved: Tensor) -> None:
        held = decode(saved, torch.device("cpu"))
        self._epoch, self._read, self._at_end = held["epoch"], held.get("read", 0), held.get("at_end", False)
        # At the end of an epoch, a loader may start the next one itself, with the sampler's epoch.
        self._set_epoch()
        try:
            self._data.load_state_dict(held["loader"])
        except Exception as error:
            kind = type(self._data).__name__
            raise TrainingError(
                f"the {kind} cannot load the state that it returned for the checkpoint",
                given=f"{type(error).__name__}: {error}",
                expected=f"a {kind} as before: with the same dataset, batch size and number of workers",
                hint="use the same loader as the run that wrote the checkpoint",
            ) from error

    def _repeated(self, goes_on: bool = False) -> Generator[UserBatch, None, None]:
        """Yield the batches of one epoch after the other. Raises TrainingError if a restart yields no items, as with a generator."""
        while True:
            if not goes_on:
                self._set_epoch()
                self._read = 0
            empty = True
            for batch in _from_workers(self._data):
                empty = False
                self._read += 1
                yield batch
            # A loader that continues may have been at the end of an epoch.
            if empty and not goes_on:
                raise TrainingError(
                    "the data ended before the training",
                    given="an exhausted iterable",
                    expected="enough data for train.steps, or an iterable that can restart, such as a DataLoader or a list",
                    hint="use a class with __iter__ instead of a generator",
                )
            if not (empty and self._at_end):
                self._epoch += 1
            goes_on = self._at_end = False

    def _set_epoch(self) -> None:
        """Tell the loader, its dataset and its samplers, one within the other, which epoch begins."""
        seen: list[Any] = []
        unvisited: list[Any] = [self._data]
        while unvisited:
            part = unvisited.pop(0)
            if part is None or any(part is seen_before for seen_before in seen):
                continue
            seen.append(part)
            if callable(of_epoch := getattr(part, "set_epoch", None)):
                of_epoch(self._epoch)
            if isinstance(part, (DataLoader, Sampler)) or part is self._data:
                unvisited += [getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset")]


def _from_workers(data: Any) -> Iterator[UserBatch]:
    """Yield the batches of one epoch.

    Raises TrainingError if two workers of a DataLoader read the same samples, because each has a copy of its IterableDataset.
    This is known after a batch of each, and one more: batches that stay the same, as in a benchmark, are no evidence.
    """
    several = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) and data.in_order
    workers = data.num_workers if several else 0
    first: list[Tensor] = []
    for number, batch in enumerate(data, 1):
        if 2 <= workers >= number - 1:
            tensors = tensors_of(batch)
            same = bool(tensors) and len(tensors) == len(first) and all(map(torch.equal, tensors, first))
            if number == 1:
                first = [x.clone() for x in tensors]
            elif number == 2 and not same:
                workers = 0
            elif number > workers and not same:
                raise TrainingError(
                    "the workers of the DataLoader read the same samples",
                    given=f"num_workers = {workers}, whose first batches are equal, of an IterableDataset that each worker reads from the start",
                    expected="different samples from each worker",
                    hint="in __iter__, use torch.utils.data.get_worker_info() to yield every num_workers-th sample from the id of the worker; "
                    "or num_workers=1",
                )
        yield batch


def user_batches(data: Data, engine: Engine, after: int = 0, saved: Tensor | None = None) -> UserBatches:
    """Return the batches of the steps after `after`. saved: see `InEpochs`."""
    return InEpochs(data, engine, after, saved) if isinstance(data, Iterable) else ByStep(data, engine)


def evaluated(batches: Any, engine: Engine) -> Iterator[tuple[Any, ...]]:
    """Yield the batches of an evaluation, with empty ones at the end on ranks that have fewer. Called by: every rank.

    Raises TrainingError if a rank has no batches, or data that yield none.
    """
    in_turn = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    # The items of a Dataset are samples.
    if not in_turn or (isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)):
        raise _no_batches(batches, "evaluate", "an iterable of batches")
    length = _length(batches)
    lengths = [length] if engine.mesh.is_fake else of_every_rank(engine.mesh, length)
    known_lengths = [length for length in lengths if length is not None]
    most = max(known_lengths) if len(known_lengths) == len(lengths) else 0
    if most and not min(known_lengths):
        raise TrainingError(
            "some ranks have nothing to evaluate",
            given=f"0 to {most} batches on the ranks of the mesh",
            expected="at least one batch on each rank",
            hint="more data, or fewer ranks along data and shard",
        )
    last: tuple[Any, ...] = ()
    count = 0
    for batch in batches:
        last, count = placed(engine, batch, "an evaluation"), count + 1
        yield last
    for _ in range(count, most):
        yield sliced(last, slice(0))


def _length(data: Any) -> int | None:
    """Return the length, or None if it is unknown."""
    with suppress(TypeError, NotImplementedError):
        return len(data)
    return None


def check_data(data: Any) -> None:
    """Raise TrainingError unless `data` are a function of the step or an iterable."""
    if isinstance(data, Iterable):
        return
    if not callable(data):
        raise _no_batches(data, "train on", "a function of the step, or an iterable of batches")
    if not takes_one(data):
        raise TrainingError(
            "the data are a function that takes no step",
            given=f"{getattr(data, '__qualname__', type(data).__name__)}{inspect.signature(data)}",
            expected="a function of the step's number, from 1, that returns the step's inputs and targets",
            hint="trainer.run(lambda step: (inputs, targets))",
        )


def _no_batches(data: Any, purpose: str, expected: str) -> TrainingError:
    """Return the error of data that yield no batches. purpose: completes "the data to"."""
    given, hint = f"{data!r:.80}", "a DataLoader, or a list of (inputs, targets)"
    if inspect.isroutine(data):
        given = "a function, which yields no batches"
    if hasattr(data, "__getitem__"):
        given = f"a {type(data).__name__}, which yields no batches"
        sampler = "DistributedSampler(dataset, mesh.data_world_size, mesh.data_rank, drop_last=True)"
        hint = f"DataLoader(dataset, batch_size={SHARE}, sampler={sampler})"
    return TrainingError(f"the data to {purpose} yield no batches", given=given, expected=expected, hint=hint)


def takes_one(function: Callable[..., Any]) -> bool:
    """Return whether a function may be called with one argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin may not say.
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def check_lengths(data: Data, mesh: Mesh, steps: int) -> None:
    """Raise TrainingError on every rank if ranks would restart their iterables after different numbers of batches.

    Called by: every rank of the mesh.
    """
    ranks: dict[int, list[int]] = {}
    for rank, length in zip(ranks_of(mesh), of_every_rank(mesh, _length(data)), strict=True):
        if length is not None:
            ranks.setdefault(length, []).append(rank)
    if len(ranks) > 1 and steps > min(ranks):
        raise TrainingError(
            "the data have different numbers of batches on the ranks",
            given="; ".join(f"{length} on {ranks_text(of)}" for length, of in sorted(ranks.items())),
            expected=f"the same number on every rank, because a rank with fewer starts its next epoch earlier; or train.steps = {steps} batches",
            hint="DistributedSampler(..., drop_last=True), or leave out the last batches of the longer data",
        )


def check_epoch(data: Any, engine: Engine) -> None:
    """Raise TrainingError if a batch of a list is not this rank's share, or if training reaches the end of a DataLoader whose
    last batch is short or repeats samples.

    A DistributedSampler repeats samples until every rank has the same number, so the batches of an epoch would depend on the
    number of ranks.
    """
    train = engine.sections.train
    share = train.global_batch_size // engine.data_size
    for number, batch in enumerate(data[: train.steps] if isinstance(data, (list, tuple)) else (), 1):
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else None
        if isinstance(batch, Mapping):
            inputs = batch.get("input_ids", batch.get("inputs"))
        lengths = [len(x) for x in tensors_of(inputs) if x.ndim]
        if lengths and share not in lengths:
            raise TrainingError(
                f"the batch of step {number} has {lengths[0]} samples on this rank",
                given=f"{lengths[0]} samples in batch {number} of {len(data)} on {engine.mesh.label}",
                expected=f"{share} samples: this rank's share of train.global_batch_size",
                hint="leave out a short last batch",
            )
    if not isinstance(data, DataLoader):
        return
    # With batch_size=None, the sampler may choose whole batches.
    chosen: Any = (
        data.sampler if data.batch_size is None and data.batch_sampler is None else data.batch_sampler
    )
    # A batch sampler of one's own decides itself, unless it only chooses other arguments for torch's.
    if not isinstance(chosen, BatchSampler) or any(
        getattr(type(chosen), name) is not getattr(BatchSampler, name) for name in ("__iter__", "__len__")
    ):
        return
    if (
        data.batch_size is not None
        and data.collate_fn is default_collate
        and share != (size := chosen.batch_size)
    ):
        raise TrainingError(
            "the DataLoader's batches are not this rank's share of the global batch",
            given=f"batch_size = {size} on {engine.mesh.label}",
            expected=f"{share}: train.global_batch_size = {train.global_batch_size} / {engine.data_size} ranks along data and shard",
            hint=f"batch_size={share}, or {SHARE}",
        )
    sampler: Any = chosen.sampler
    batches, samples = _length(chosen), _length(sampler)
    if isinstance(data.dataset, IterableDataset) and not data.num_workers:
        batches, samples = _length(data), _length(data.dataset)
    if not batches or samples is None or train.steps < batches:
        return
    last, read = samples % chosen.batch_size, batches * train.global_batch_size
    fault, hint = "", "drop_last=True in the DataLoader"
    if last and not chosen.drop_last:
        fault = f"has only {last} samples on this rank"
    elif type(sampler) is DistributedSampler and read > (_length(sampler.dataset) or 0):
        fault, hint = "repeats samples of the epoch", "DistributedSampler(..., drop_last=True)"
    if fault:
        raise TrainingError(
            f"the last batch of an epoch, step {batches}, {fault}",
            given=f"a DataLoader of {batches} batches from {samples} samples on {engine.mesh.label}, with train.steps = {train.steps}",
            expected=f"{share} samples that the epoch has not read before in each of the steps",
            hint=hint,
        )
