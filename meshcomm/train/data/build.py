"""The data that the function in `[data]` build returns: a dataset whose samples are accessed by index, or a stream."""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from meshcomm.config import DataConfig
from meshcomm.errors import ConfigError, MeshcommError, TrainingError, UnsupportedOp
from meshcomm.models.build import function_of
from meshcomm.train.data.batch import OF_TRANSFORMERS, named_of
from meshcomm.train.data.batches import permuted
from meshcomm.train.data.corpus import IGNORED, Corpus, DataPart, Samples, held_back, of_function, outside

# The number of samples that the digest of a dataset covers.
_LOOKS = 16
_EXPECTED = (
    "tokens (up to seq_len + 1 integers), a pair of inputs and targets, or a dict with input_ids and, "
    "as in transformers, labels; with data.tokenizer, a dict with a text"
)


def built(config: DataConfig, data: Any, vocab_size: int | None) -> Corpus:
    """Return the samples in `data`, the result of `called`. Raises TrainingError if the first are invalid."""
    name = str(config.build)
    form = SampleForm(name, config.seq_len, vocab_size, config.document_mask)
    if not by_index(data):
        return streamed(config, data, form.joined)
    part = Indexed(data, form)
    part.read(np.zeros(1, dtype=np.int64))
    numbers = np.unique(np.linspace(0, len(part) - 1, _LOOKS).astype(np.int64))
    digest = hashlib.sha256(f"{name} {len(data)}".encode() + _content(part, numbers)).digest()
    return Corpus((part,), digest, len(data), "samples").cut(config.validation)


def called(config: DataConfig, seed: int) -> Any:
    """Call the function that `config.build` names. It receives seed and seq_len if it has parameters with these names.

    Returns a dataset that is accessed by index, or an iterable that can be read several times.
    Raises TrainingError if the call fails or returns something else.
    """
    name = config.build
    assert name is not None
    hint = "put its module into the folder where meshcomm is started, or into a folder in PYTHONPATH"
    try:
        function = function_of(name)
        signature, facts = inspect.signature(function), {"seed": seed, "seq_len": config.seq_len}
        args = {key: facts[key] for key in facts if key in signature.parameters} | dict(config.args)
        hint = f"data.args has the arguments of {name}{signature}"
        signature.bind(**args)
        hint = "call it in Python, without meshcomm: the function itself raises the error"
        data = function(**args)
        size = len(data) if by_index(data) else 0
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            f"data.build could not be called: {type(error).__name__}: {error}",
            given=f"build = {name!r}, args = {dict(config.args)}",
            expected="a function that every rank can import, and that accepts args by name",
            hint=hint,
        ) from error
    kind, hint = type(data).__name__, "for an iterable of batches, use a script with Trainer.run"
    fault = kind
    if isinstance(data, DataLoader):
        fault, hint = f"{kind}, which yields batches", "return its dataset"
    elif isinstance(data, Mapping) and 0 not in data:
        fault = f"{kind} of {', '.join(map(str, data)) or 'nothing'}"
        hint = 'return one of its splits; for datasets.load_dataset, data.args.split = "train"'
    elif by_index(data):
        fault = "" if size else f"{kind}, without samples"
    elif isinstance(data, Iterable):
        with of_function(name, "the stream"):
            fault = f"{kind}, which can be read only once" if iter(data) is data else ""
    if fault:
        raise TrainingError(
            "data.build does not return a dataset",
            given=f"{name} returned {fault}",
            expected="the samples of all ranks, with __getitem__ and a __len__ above 0; or as a stream, whose __iter__ starts again",
            hint=hint,
        )
    return data


def by_index(data: Any) -> bool:
    """Return whether samples are accessed by index."""
    has_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return has_index and not isinstance(data, IterableDataset)


def streamed(
    config: DataConfig,
    data: Iterable[Any],
    joined: Callable[[Sequence[tuple[int, Any]]], Samples],
    samples: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> Corpus:
    """Return the samples of a stream. joined, samples: see `Streamed`.

    Raises ConfigError for settings that need an index; TrainingError if the stream begins differently when it is read again.
    """
    for setting, why in (
        ("validation", "the end of a stream is unknown"),
        ("workers", "each worker would read the whole stream, and some streams are divided among workers"),
    ):
        if getattr(config, setting):
            raise ConfigError(
                f"data.{setting}: not possible with a stream",
                given=f"{config.written(setting)}, and {config.build} returned a {type(data).__name__}",
                expected=f"a dataset that is accessed by index: {why}",
                hint=f"remove data.{setting}"
                + ("; train.evaluate for an evaluation of your own" if setting == "validation" else ""),
            )
    part = Streamed(data, str(config.build), joined, samples)
    content = _content(part, np.arange(_LOOKS))
    if not content:
        raise TrainingError(
            "the stream of data.build begins with other samples when it is read again",
            given=f"{config.build} returned a {type(data).__name__}",
            expected="the same samples in the same order, so that a run can resume",
            hint="shuffle with a fixed seed",
        )
    digest = hashlib.sha256(f"{config.build}".encode() + content).digest()
    return Corpus((part,), digest, unit="samples of a stream", shuffled=False)


def _content(part: DataPart, numbers: NDArray[np.int64]) -> bytes:
    """Return a digest of samples; or nothing if samples are random, and so differ if they are read twice."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        first, again = (
            [hashlib.sha256(array.tobytes()).digest() for row in numbers for array in part.read(row[None])]
            for _ in range(2)
        )
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    return b"".join(first) if first == again else b""


class SampleForm:
    """Checks samples and converts them to arrays. name: the function's name, for errors. packed: whether samples may consist
    of packed documents, which begin where position_ids are 0.
    """

    def __init__(self, name: str, seq_len: int, vocab_size: int | None, packed: bool = False) -> None:
        self.name, self._seq_len, self._vocab_size, self._packed = name, seq_len, vocab_size, packed

    def joined(self, samples: Sequence[tuple[int, Any]]) -> Samples:
        """Return the samples in (index, sample) pairs as arrays.

        Token samples are padded to the sequence length, with targets that the loss ignores.
        """
        arrays_of_samples = [self._arrays(number, sample) for number, sample in samples]
        try:
            inputs, targets, documents = (np.stack(arrays) for arrays in zip(*arrays_of_samples, strict=True))
        except ValueError as error:
            raise self._wrong(samples[0][0], f"samples of different shapes: {error}") from error
        return (inputs, targets, documents) if self._packed else (inputs, targets)

    def _arrays(self, number: int, sample: Any) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return inputs, targets, and the document number of each token."""
        documents: NDArray[Any] = np.zeros(0, dtype=np.int64)
        if isinstance(sample, Mapping) and "input_ids" in sample:
            # A batch of one sample has the meaning that it has in Trainer.step.
            if others := [str(name) for name in sample if name not in OF_TRANSFORMERS]:
                raise self._wrong(number, f"a dict with {', '.join(map(str, sample))}", _without(others))
            arrays = {name: self._array(number, value, name) for name, value in sample.items()}
            if arrays["input_ids"].dtype.kind not in "ui":
                raise self._wrong(number, f"input_ids of {arrays['input_ids'].dtype}")
            rows = {name: torch.from_numpy(array.astype(np.int64))[None] for name, array in arrays.items()}
            # The last token has no target.
            parts = [x[0, :-1].numpy() for x in named_of(rows, f"sample {number} of {self.name}")]
            sample, documents = (parts[0], parts[1]), parts[2] if len(parts) > 2 else documents
            if len(documents) and not self._packed:
                raise UnsupportedOp(
                    f"sample {number} of data.build consists of several documents",
                    given=f"{self.name}: position_ids that restart at 0, and data.document_mask = false",
                    expected="samples of one document each; or data.document_mask = true",
                    hint="data.document_mask = true",
                )
        inputs, targets = self._pair(number, sample)
        more = inputs.shape[-1] - len(documents) if self._packed else 0
        return inputs, targets, np.pad(documents, (0, more), mode="edge" if len(documents) else "constant")

    def _pair(self, number: int, sample: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        targets: Any = None
        shifted = False
        if isinstance(sample, Mapping):
            text = next((name for name, value in sample.items() if isinstance(value, str)), None)
            names = ", ".join(map(str, sample)) or "nothing"
            raise self._wrong(number, f"a dict with {names}", None if text is None else _texts_in(text))
        if isinstance(sample, tuple):
            if len(sample) != 2:
                raise self._wrong(number, f"a tuple of {len(sample)}")
            sample, targets = sample
        inputs = self._array(number, sample)
        labels = None if targets is None else self._array(number, targets)
        # Integers with a class or with numbers as the target are features, which are not padded.
        are_features = labels is not None and (labels.ndim != 1 or labels.dtype.kind not in "ui")
        if inputs.ndim != 1 or inputs.dtype.kind not in "ui" or are_features:
            if labels is None:
                raise self._wrong(
                    number,
                    f"inputs of shape {inputs.shape} and {inputs.dtype}, without targets",
                    "return one sample for each index, not a batch; for inputs that are not tokens, a pair (inputs, targets)",
                )
            return inputs, labels
        inputs = inputs.astype(np.int64)
        if labels is None:
            labels, shifted = inputs, True
        labels = labels.astype(np.int64)
        if len(labels) != len(inputs):
            shapes = ". Integers that are not tokens have a target of another shape than (n,), such as (), (n, 1) or (1, n)"
            raise self._wrong(number, f"{len(inputs)} tokens and {len(labels)} targets{shapes}")
        if shifted:
            inputs, labels = inputs[:-1], labels[1:]
        if not 0 < len(inputs) <= self._seq_len:
            raise self._wrong(
                number,
                f"{len(inputs) + shifted} tokens, with data.seq_len = {self._seq_len}",
                "set data.seq_len to the length of the longest sample, or truncate samples in the function",
            )
        if inputs.min() < 0 or (self._vocab_size is not None and inputs.max() >= self._vocab_size):
            place = int(inputs.argmin() if inputs.min() < 0 else inputs.argmax())
            where = f"position {place} of sample {number} of {self.name}"
            raise outside(int(inputs[place]), self._vocab_size, where)
        more = self._seq_len - len(inputs)
        return np.pad(inputs, (0, more)), np.pad(labels, (0, more), constant_values=IGNORED)

    def _array(self, number: int, value: Any, name: str = "") -> NDArray[Any]:
        """Return numbers as an array. name: the column that has them."""
        what = f"{name}: {type(value).__name__}" if name else type(value).__name__
        try:
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        except (TypeError, ValueError) as error:
            raise self._wrong(number, f"{what}: {error}") from error
        if array.dtype.kind not in "uifb":
            hint = _without([name]) if name else _texts_in("text") if isinstance(value, str) else None
            raise self._wrong(number, what, hint)
        return array

    def _wrong(self, number: int, what: str, hint: str | None = None) -> TrainingError:
        return TrainingError(
            f"sample {number} of data.build is invalid",
            given=f"{self.name}: {what}",
            expected=_EXPECTED,
            hint=hint or "convert or leave out this sample in the function",
        )


def _without(columns: list[str]) -> str:
    """Return the hint for columns that are not numbers, or have another meaning than those of transformers."""
    return f"leave out {', '.join(columns)}, as by dataset.remove_columns({columns})"


def _texts_in(column: str) -> str:
    """Return the hint for samples that are texts."""
    return f'for rows of texts, {{"{column}": "..."}}, set data.tokenizer, also "bytes", and data.column = "{column}"'


@final
class Indexed:
    """A user's indexable dataset. kept: the range of samples to use, in a fixed random order; None to use all samples."""

    def __init__(self, data: Any, form: SampleForm, kept: tuple[int, int] | None = None) -> None:
        self._data, self._form, self._kept = data, form, kept

    def __len__(self) -> int:
        return len(self._data) if self._kept is None else self._kept[1] - self._kept[0]

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """See DataPart."""
        if self._kept is not None:
            samples = permuted(samples + self._kept[0], len(self._data), [0])
        pairs = []
        for number in samples.tolist():
            with of_function(self._form.name, f"sample {number} of {len(self._data)}"):
                pairs.append((number, self._data[number]))
        return self._form.joined(pairs)

    def cut(self, share: float) -> tuple[Indexed, Indexed]:
        """See DataPart. Samples may be sorted by kind, so the held-out samples are chosen at random."""
        count = len(self._data)
        place = count - held_back(count, share)
        before, after = (Indexed(self._data, self._form, bounds) for bounds in ((0, place), (place, count)))
        return before, after


@final
class Streamed:
    """A user's stream, which every rank reads in full. Sample n is the n-th from the start of training, over all epochs.

    name: the function's name, for errors. joined: returns the arrays of (number, sample) pairs. samples: makes the samples of an
    epoch from its items. Before each epoch, the stream's `set_epoch`, if it has one, is called with the epoch's number. To go
    back, or to continue a training, the stream is read again from the start.
    """

    def __init__(
        self,
        data: Iterable[Any],
        name: str,
        joined: Callable[[Sequence[tuple[int, Any]]], Samples],
        samples: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        self._data, self._name, self._joined, self._samples = data, name, joined, samples
        self._reader, self._next = self._epochs(), 0

    def __len__(self) -> int:
        """Return the highest possible number of samples, as the end is unknown."""
        return sys.maxsize

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """See DataPart. Raises TrainingError if an epoch has no samples."""
        if samples[0] < self._next:
            self._reader, self._next = self._epochs(), 0
        pairs = []
        for number in samples.tolist():
            while self._next <= number:
                with of_function(self._name, f"sample {self._next}"):
                    sample = next(self._reader)
                self._next += 1
            pairs.append((number, sample))
        return self._joined(pairs)

    def cut(self, share: float) -> tuple[DataPart, DataPart]:
        """See DataPart. `streamed` refuses it."""
        raise NotImplementedError

    def _epochs(self) -> Iterator[Any]:
        for epoch in count():
            if callable(set_epoch := getattr(self._data, "set_epoch", None)):
                set_epoch(epoch)
            empty = True
            for sample in self._samples(iter(self._data)):
                empty = False
                yield sample
            if empty:
                raise TrainingError(
                    "the stream of data.build has no samples",
                    given=f"{self._name} returned a {type(self._data).__name__}, which yields nothing in epoch {epoch}",
                    expected="one or more samples in each epoch",
                )
