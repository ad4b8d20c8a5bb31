"""Batches from the user, as an iterable such as a DataLoader or a function of the step, with tensors or dictionaries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
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
from meshcomm.errors import ObjectError, ShapeError, TrainingError, UnsupportedOp
from meshcomm.layout.sizes import ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.models.assumptions import OWN_LOSS
from meshcomm.parallel.compose import Engine
from meshcomm.parallel.tree import tensors_of, with_tensors, without_arrays
from meshcomm.train.data.corpus import IGNORED

# Inputs and targets, which may be trees, and, if given, the document number of each token; or a dictionary: see `named_of`.
GivenBatch: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
# A function of the number of a step, from 1, that returns the step's batch; or an iterable of one batch per step.
Data: TypeAlias = Callable[[int], GivenBatch] | Iterable[GivenBatch]

# The name of a loader's state in a checkpoint, with the rank's coord along data and shard, and the number of coords.
STATE: Final = "run.data.{}.of.{}"
# A rank's batch size, as an expression of the program.
SHARE: Final = "train.global_batch_size // mesh.data_world_size"
_NOTHING: Final[Any] = object()
_PLAIN: Final = ("inputs", "targets", "documents")
_OF_TRANSFORMERS: Final = ("input_ids", "labels", "attention_mask", "position_ids")


def placed(engine: Engine, batch: Any, whose: str) -> tuple[Any, ...]:
    """Return inputs, targets and, if given, documents on the mesh's device. Floating-point tensors are cast to train.dtype.

    whose: a name such as "step 3", for errors. Raises TrainingError unless `batch` is inputs and targets, or a dictionary
    of them.
    """
    batch = without_arrays(batch)
    _check_padding(engine, batch, whose)
    if isinstance(batch, Mapping):
        batch = _of_mapping(engine, batch, whose)
    if isinstance(batch, (tuple, list)) and len(batch) == 3 and batch[2] is None:
        batch = batch[:2]
    if (
        not isinstance(batch, (tuple, list))
        or len(batch) not in (2, 3)
        or not all(
            tensors_of(each) or (place == 1 and engine.model.own_loss is not None)
            for place, each in enumerate(batch)
        )
    ):
        held = batch if isinstance(batch, (tuple, list)) else ()
        kinds = ", ".join(type(each).__name__ for each in held[:4])
        raise TrainingError(
            f"the data of {whose} are not inputs and targets",
            given=f"a {type(batch).__name__}" + (f" of {len(held)}: {kinds}" if held else ""),
            expected="two tensors or trees of tensors, each with this rank's samples along axis 0, and optionally a third that "
            f"numbers documents; or a dictionary with {', '.join(_PLAIN[:2])}, or with {', '.join(_OF_TRANSFORMERS[:2])}",
            hint="a generator that yields (inputs, targets), or (inputs, None) for a loss of your own that needs no targets",
        )
    device, dtype = engine.mesh.device, engine.split.dtype
    # The engine rejects documents if the model's attention crosses document boundaries.

    def moved(x: Tensor) -> Tensor:
        kept = _tracked(x, whose).to(device, dtype if x.is_floating_point() else x.dtype, non_blocking=True)
        return kept.requires_grad_() if x.requires_grad else kept

    return tuple(with_tensors(moved, each) for each in batch)


def _of_mapping(engine: Engine, batch: Mapping[str, Any], whose: str) -> tuple[Any, ...]:
    """Return inputs, targets and, if given, documents from a dictionary. See `named_of`.

    A loss of one's own may also take the outputs of a model that is called with the dictionary, if it has further names.
    """
    others = {*batch} - {*_OF_TRANSFORMERS}
    own = engine.model.own_loss is not None and not engine.model.counts_all_tokens
    if own and others and not others & {*_PLAIN}:
        return batch, None
    found = named_of(batch, whose)
    if engine.look_named is not None and "input_ids" in batch:
        look, engine.look_named = engine.look_named, None
        device = engine.mesh.device
        look({name: each.to(device) for name, each in batch.items()}, lambda given: named_of(given, whose))
    return found


def _tracked(x: Tensor, whose: str) -> Tensor:
    """Return a tensor that autograd can save and that is in no graph: a copy of one that was made in inference mode.

    Raises UnsupportedOp for a tensor through which gradients would flow to parameters outside of the model.
    """
    if not x.requires_grad:
        return x.clone() if x.is_inference() else x
    left, seen = [x.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [each for each, _ in node.next_functions]
        if isinstance(parameter := getattr(node, "variable", None), nn.Parameter):
            raise UnsupportedOp(
                f"the data of {whose} are computed from parameters that this step would not train",
                given=f"a tensor of shape {tuple(x.shape)} with gradients to a parameter of shape {tuple(parameter.shape)}",
                expected="data without gradients, or with gradients that a loss takes with torch.autograd.grad",
                hint="compute the data under torch.no_grad(), or x.detach(); or move the computation into the model's forward",
            )
    return x.detach()


def named_of(batch: Mapping[str, Any], whose: str) -> tuple[Any, ...]:
    """Return inputs, targets and, if given, documents from a dictionary that uses these names or the names in
    transformers.

    In transformers, labels are not shifted relative to the tokens. Without labels, input_ids are the labels. attention_mask
    may mask tokens at the end, which are then not targets. A position_id of 0 starts a document.

    Raises TrainingError for unknown or missing names; UnsupportedOp for masked tokens before others.
    """
    known = _OF_TRANSFORMERS if "input_ids" in batch else _PLAIN
    missing = [] if "input_ids" in batch else [name for name in _PLAIN[:2] if name not in batch]
    unknown = [str(name) for name in batch if name not in known]
    are = torch.is_tensor if "input_ids" in batch else tensors_of
    if missing or unknown or not all(map(are, batch.values())):
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in batch.items())
        raise TrainingError(
            f"the data of {whose} are not inputs and targets",
            given=f"a dictionary of {kinds or 'nothing'}",
            expected=f"tensors under {', '.join(known)}"
            if unknown
            else f"tensors: {', '.join(_PLAIN[:2])}, or {', '.join(_OF_TRANSFORMERS[:2])}",
            hint=_way_out(batch, unknown) if unknown else "yield the loader's tensors under these names",
        )
    if known is _PLAIN:
        return tuple(batch[name] for name in _PLAIN if name in batch)
    shapes = {name: tuple(each.shape) for name, each in batch.items()}
    tokens: Tensor = batch["input_ids"]
    if tokens.ndim != 2 or len(set(shapes.values())) > 1:
        raise ShapeError(
            f"the data of {whose} do not fit together",
            given=", ".join(f"{name} {shape}" for name, shape in shapes.items()),
            expected="the same shape (samples, tokens) for all tensors",
            hint=f"for labels that are not tokens, train with the model's own loss: {OWN_LOSS}"
            if "labels" in batch
            else None,
        )
    labels, mask = batch.get("labels", tokens), batch.get("attention_mask")
    if mask is not None:
        if "labels" in batch and bool(((labels != IGNORED) & (mask == 0))[:, 1:].any()):
            raise TrainingError(
                f"labels of {whose} count in the padding",
                given="labels other than -100 where attention_mask is 0",
                expected="labels of -100 there: transformers' models would learn to predict the padding",
                hint="labels.masked_fill(attention_mask == 0, -100); or leave out labels, if they are the input_ids",
            )
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            inside = bool(((mask[:, 1:] > mask[:, :-1]) & (mask[:, :-1].cumsum(1) > 0)).any())
            raise UnsupportedOp(
                f"the attention_mask of {whose} masks tokens in the middle"
                if inside
                else f"the samples of {whose} are padded at the start",
                given=f"an attention_mask {tuple(mask.shape)} that masks tokens before others",
                expected="padding at the end, where no token attends to it",
                hint="remove these tokens; or keep them, with labels of -100 if they are not to be predicted"
                if inside
                else 'tokenizer.padding_side = "right"',
            )
        labels = labels.masked_fill(mask == 0, IGNORED)
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    begins = _begins(batch, mask, whose)
    if begins is None:
        return tokens, targets
    # The first token of a document is not predicted from the document before it.
    return tokens, targets.masked_fill(begins.roll(-1, 1), IGNORED), begins.cumsum(1) - 1


def _way_out(batch: Mapping[str, Any], unknown: Sequence[str]) -> str:
    """Return the hint for a dictionary with names of other models than causal language models."""
    if "num_items_in_batch" in unknown:
        return "leave out num_items_in_batch: a step's loss is the mean over all labels of the global batch"
    if not {"input_ids", "labels"} & {*batch}:
        return f"leave out {', '.join(unknown)}; or train with a loss of your own, for which such a dictionary is the model's named arguments"
    if "labels" in batch:
        return f"train with the model's own loss: {OWN_LOSS}"
    return "train with the model's own loss: loss=lambda outputs, targets: outputs.loss, for which a dictionary is the model's named arguments"


def _begins(batch: Mapping[str, Tensor], mask: Tensor | None, whose: str) -> Tensor | None:
    """Return where documents begin; None if each sample is a single document.

    Raises TrainingError if the positions in a document do not count up from 0.
    """
    positions = batch.get("position_ids")
    if positions is None:
        return None
    begins, places = positions == 0, torch.arange(positions.shape[1], device=positions.device)
    counted = places - places.where(begins, torch.zeros_like(places)).cummax(1).values
    counts = torch.ones_like(begins) if mask is None else mask != 0
    if not bool(begins[:, 0].all()) or bool(((positions != counted) & counts).any()):
        raise TrainingError(
            f"the position_ids of {whose} do not describe consecutive documents",
            given=f"position_ids {positions[0, :8].tolist()}, ...",
            expected="0, 1, 2, ... in each document, with 0 at its start",
            hint="omit position_ids if each sample is a single document",
        )
    begins = begins & counts
    return begins if bool(begins[:, 1:].any()) else None


def _check_padding(engine: Engine, batch: Any, whose: str) -> None:
    """Raise UnsupportedOp for masked tokens that a model's own loss would count."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if engine.model.counts_all_tokens and torch.is_tensor(mask) and bool((mask == 0).any()):
        raise UnsupportedOp(
            f"the routers' auxiliary loss would count the padding of {whose}",
            given="output_router_logits = true in config.json, and an attention_mask that masks tokens",
            expected="samples without padding: transformers leaves masked tokens out of this loss",
            hint="pack samples to equal lengths, or set output_router_logits = false",
        )


@final
class GivenBatches:
    """Batches from the user, with the same methods as `Batches`.

    When an iterable ends, its own `set_epoch` and that of its samplers are called with the epoch's number, and the iterable
    is restarted. If it has `state_dict` and `load_state_dict`, like torchdata's StatefulDataLoader, checkpoints store its
    state. Without these methods, or if ranks along data now read different shares, the batches of earlier steps are read and
    skipped.

    after: the number of steps completed before this attempt. saved: the result of `saved` after these steps, if any.
    """

    def __init__(self, data: Data, engine: Engine, after: int, saved: Tensor | None = None) -> None:
        self._engine, self._data = engine, data
        self._name = STATE.format(engine.data_coord, engine.data_size)
        self._epoch = 0
        # The batch of the last step, which a loss of ranks may undo.
        self._last, self._held = after, _NOTHING
        self._resumes = False
        if not isinstance(data, Iterable):
            self._of = data
            return
        check_epoch(data, engine)
        self._resumes = all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))
        goes_on = saved is not None and self._resumes
        # The number of batches read in this epoch, and whether a saved state is that of an epoch's end.
        self._read, self._at_end = 0, False
        if saved is not None and goes_on:
            self._put_back(saved)
        follow = self._repeated(data, goes_on)
        for _ in range(0 if goes_on else after):
            next(follow)
        self._of = lambda step: next(follow)

    def __call__(self, step: int) -> tuple[Any, ...]:
        """Return this rank's share of the step. Raises TrainingError if there are no data, and the errors of `placed`."""
        if self._held is _NOTHING or step != self._last:
            self._held, self._last = self._of(step), step
        self._engine.epoch = self._epoch
        return placed(self._engine, self._held, f"step {step}")

    @property
    def has_state(self) -> bool:
        """Whether the loader's own state is saved and restored."""
        return self._resumes

    def goes_on(self, engine: Engine, step: int) -> None:
        """Continue after `step` with another engine, as if later steps had not been requested.

        Raises TrainingError if the data would have to restart, because a sampler may then choose a different order.
        """
        before, self._engine = self._engine, engine
        if not isinstance(self._data, Iterable):
            # If a step is repeated, this rank's share of the batch may be different.
            self._held = _NOTHING
        share = (before.data_coord, before.data_size)
        if isinstance(self._data, Iterable) and share != (engine.data_coord, engine.data_size):
            raise TrainingError(
                "after ranks were lost, this rank has a different share of each global batch, but its data still yield the old share",
                given=f"a {type(self._data).__name__} for share {share[0]} of {share[1]}; now {engine.data_coord} of {engine.data_size}",
                expected="data requested by step number, for the current mesh.data_rank and mesh.data_world_size",
                hint="use trainer.run(lambda step: ...), or remove elastic.min",
            )
        if isinstance(self._data, Iterable) and self._last not in (step, step + 1):
            raise TrainingError(
                "a rank's data cannot go back to an earlier step in the same process",
                given=f"a {type(self._data).__name__} that has yielded step {self._last}; step {step + 1} is next",
                expected="data requested by step number, or a rank that holds the lost rank's state",
                hint="use trainer.run(lambda step: ...), or --max-restarts instead of --replace",
            )

    def read(self, step: int) -> None:
        """Return None, because only steps are counted here."""
        return

    def saved(self) -> dict[str, Tensor]:
        """Return the loader's state for a checkpoint, under the name of this rank's share. Raises TrainingError."""
        if not self._resumes:
            return {}
        at_end = _length(self._data) == self._read
        facts = {"epoch": self._epoch + at_end, "read": 0 if at_end else self._read, "at_end": at_end}
        try:
            state = encode({**facts, "loader": self._data.state_dict()})  # type: ignore[union-attr]
        except ObjectError as error:
            raise TrainingError(
                f"the state of the {type(self._data).__name__} cannot be saved",
                given=error.what,
                expected="a state_dict of plain data and tensors",
                hint="use numbers instead of an object",
            ) from error
        return {self._name: state}

    def _put_back(self, saved: Tensor) -> None:
        held = decode(saved, torch.device("cpu"))
        self._epoch, self._read, self._at_end = held["epoch"], held.get("read", 0), held.get("at_end", False)
        # At the end of an epoch, a loader may start the next one itself, with the sampler's epoch.
        self._set_epoch()
        try:
            self._data.load_state_dict(held["loader"])  # type: ignore[union-attr]
        except Exception as error:
            kind = type(self._data).__name__
            raise TrainingError(
                f"the {kind} cannot load the state that it returned for the checkpoint",
                given=f"{type(error).__name__}: {error}",
                expected=f"a {kind} as before: with the same dataset, batch size and number of workers",
                hint="use the same loader as the run that wrote the checkpoint",
            ) from error

    def _repeated(self, data: Iterable[GivenBatch], goes_on: bool) -> Iterator[GivenBatch]:
        """Yield the items of `data` repeatedly. Raises TrainingError if a restart yields no items, as with a generator."""
        while True:
            if not goes_on:
                self._set_epoch()
                self._read = 0
            empty = True
            of_workers = _OfWorkers(data)
            for item in data:
                empty = False
                self._read += 1
                of_workers.check(item)
                yield item
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
        told: list[Any] = []
        left: list[Any] = [self._data]
        while left:
            each = left.pop(0)
            if each is None or any(each is other for other in told):
                continue
            told.append(each)
            if callable(of_epoch := getattr(each, "set_epoch", None)):
                of_epoch(self._epoch)
            if isinstance(each, (DataLoader, Sampler)) or each is self._data:
                left += [getattr(each, name, None) for name in ("sampler", "batch_sampler", "dataset")]


class _OfWorkers:
    """Compares the first batches of the workers of a DataLoader whose IterableDataset each worker has a copy of."""

    def __init__(self, data: Any) -> None:
        several = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
        self._workers = data.num_workers if several and data.in_order else 0
        self._first: list[Tensor] = []
        self._read = 0

    def check(self, batch: Any) -> None:
        """Raise TrainingError once it is known that two workers read the same samples: after a batch of each, and one more.

        Batches that stay the same, as in a benchmark, are no evidence.
        """
        if self._workers < 2 or self._read > self._workers:
            return
        mine, self._read = tensors_of(batch), self._read + 1
        if self._read == 1:
            self._first = [x.clone() for x in mine]
            return
        same = bool(mine) and len(mine) == len(self._first) and all(map(torch.equal, mine, self._first))
        if self._read == 2 and not same:
            self._workers = 0
        elif self._read > self._workers and not same:
            raise TrainingError(
                "the workers of the DataLoader read the same samples",
                given=f"num_workers = {self._workers}, whose first batches are equal, of an IterableDataset that each worker reads from the start",
                expected="different samples from each worker",
                hint="in __iter__, use torch.utils.data.get_worker_info() to yield every num_workers-th sample from the id of the worker; "
                "or num_workers=1",
            )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def check_data(data: Any) -> None:
    """Raise TrainingError unless `data` are a function of the step or an iterable."""
    if isinstance(data, Iterable):
        return
    if not callable(data):
        raise no_batches(data, "train on", "a function of the step, or an iterable of batches")
    if not takes_one(data):
        raise TrainingError(
            "the data are a function that takes no step",
            given=f"{getattr(data, '__qualname__', type(data).__name__)}{inspect.signature(data)}",
            expected="a function of the step's number, from 1, that returns the step's inputs and targets",
            hint="trainer.run(lambda step: (inputs, targets))",
        )


def check_batches(batches: Any) -> None:
    """Raise TrainingError unless the batches of an evaluation can be iterated. The items of a Dataset are samples."""
    in_turn = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    if not in_turn or (isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)):
        raise no_batches(batches, "evaluate", "an iterable of batches")


def no_batches(data: Any, purpose: str, expected: str) -> TrainingError:
    """Return the error of data that yield no batches. purpose: completes "the data to"."""
    function = inspect.isroutine(data)
    kind = "function" if function else type(data).__name__
    sampler = "DistributedSampler(dataset, mesh.data_world_size, mesh.data_rank, drop_last=True)"
    indexed = hasattr(data, "__getitem__")
    return TrainingError(
        f"the data to {purpose} yield no batches",
        given=f"a {kind}, which yields no batches" if function or indexed else f"{data!r:.80}",
        expected=expected,
        hint=f"DataLoader(dataset, batch_size={SHARE}, sampler={sampler})"
        if indexed
        else "a DataLoader, or a list of (inputs, targets)",
    )


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
    lengths = of_every_rank(mesh, _length(data))
    known = [each for each in lengths if each is not None]
    if len(set(known)) > 1 and steps > min(known):
        raise TrainingError(
            "the data have different numbers of batches on the ranks",
            given="; ".join(
                f"{count} on {ranks_text([rank for rank, each in zip(ranks_of(mesh), lengths, strict=True) if each == count])}"
                for count in sorted(set(known))
            ),
            expected=f"the same number on every rank, because a rank with fewer starts its next epoch earlier; or train.steps = {steps} batches",
            hint="DistributedSampler(..., drop_last=True), or leave out the last batches of the longer data",
        )


def _check_shares(batches: Sequence[Any], steps: int, share: int, label: str) -> None:
    """Raise TrainingError if a step would train on a batch of a list that is not this rank's share."""
    for number, batch in enumerate(batches[:steps], 1):
        if isinstance(batch, Mapping):
            first = batch.get("input_ids", batch.get("inputs"))
        else:
            first = batch[0] if isinstance(batch, (tuple, list)) and batch else None
        lengths = [len(each) for each in tensors_of(first) if each.ndim]
        if lengths and share not in lengths:
            raise TrainingError(
                f"the batch of step {number} has {lengths[0]} samples on this rank",
                given=f"{lengths[0]} samples in batch {number} of {len(batches)} on {label}",
                expected=f"{share} samples: this rank's share of train.global_batch_size",
                hint="leave out a short last batch",
            )


def check_epoch(data: Any, engine: Engine) -> None:
    """Raise TrainingError if training reaches the end of a DataLoader whose last batch is short or repeats samples.

    A DistributedSampler repeats samples until every rank has the same number, so the batches of an epoch would depend on the
    number of ranks.
    """
    train = engine.sections.train
    share = train.global_batch_size // engine.data_size
    if isinstance(data, (list, tuple)):
        _check_shares(data, train.steps, share, engine.mesh.label)
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
    what, hint = "", "drop_last=True in the DataLoader"
    if last and not chosen.drop_last:
        what = f"has only {last} samples on this rank"
    elif type(sampler) is DistributedSampler and read > (_length(sampler.dataset) or 0):
        what, hint = "repeats samples of the epoch", "DistributedSampler(..., drop_last=True)"
    if what:
        raise TrainingError(
            f"the last batch of an epoch, step {batches}, {what}",
            given=f"a DataLoader of {batches} batches from {samples} samples on {engine.mesh.label}, with train.steps = {train.steps}",
            expected=f"{share} samples that the epoch has not read before in each of the steps",
            hint=hint,
        )
