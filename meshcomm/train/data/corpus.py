"""The training data, which consist of parts with random access and have a digest for comparison between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig
from meshcomm.errors import MeshcommError, TrainingError

# The digest of a large file covers _LOOKS ranges of _STRETCH tokens.
_LOOKS = 64
_STRETCH = 32_768
# A target that the loss ignores.
IGNORED = -100


# The inputs and targets of some samples, along axis 0. If attention stays within documents, also the document number of
# each token, in ascending order.
Samples: TypeAlias = tuple[NDArray[Any], ...]


class DataPart(Protocol):
    """One source of samples."""

    def __len__(self) -> int:
        """Return the number of non-overlapping samples."""
        ...

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """Return the samples with these numbers."""
        ...

    def cut(self, share: float) -> tuple[DataPart, DataPart]:
        """Split off the last `share` of the samples. Return the remaining samples and the split-off samples."""
        ...


@final
class Stream:
    """The tokens of all documents, concatenated, in memory or mapped from a file. A sample may extend past a document's end.

    tokens: an array (n,) of a signed or unsigned integer type.
    name: the file's name, for errors.
    vocab_size: an upper bound for the ids; None if it is unknown or already checked.
    first: the position of the first token in the file `name`.
    eos: the token after each document, which is used to number documents. ends: instead, the positions in the file after each
    document. If both are None, documents are not numbered.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        seq_len: int,
        name: str = "",
        vocab_size: int | None = None,
        first: int = 0,
        eos: int | None = None,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        self.tokens, self.name, self.vocab_size, self._first = tokens, name, vocab_size, first
        self._eos, self._ends = eos, ends
        self._window = np.arange(seq_len + 1)
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self._seq_len)

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """See DataPart. All arrays are int64 of shape (samples, sequence). Targets are shifted by one token."""
        offsets = samples * self._seq_len
        tokens = self.tokens[offsets[:, None] + self._window].astype(np.int64)
        for worst in (tokens.argmax(), tokens.argmin()) if tokens.size else ():
            sample, place = divmod(int(worst), tokens.shape[1])
            position = int(offsets[sample]) + place
            token = int(self.tokens[position])
            if not 0 <= token < (self.vocab_size or 2**63):
                raise outside(token, self.vocab_size, f"position {self._first + position} of {self.name}")
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self._ends is not None:
            after = self._first + offsets[:, None] + self._window[1:]
            ends = self._ends.take(np.searchsorted(self._ends, after), mode="clip") == after
        elif self._eos is not None:
            ends = inputs == self._eos
        else:
            return inputs, targets
        # The first token of a document is not predicted from the end of the previous document.
        return inputs, np.where(ends, IGNORED, targets), documents_in(ends)

    def cut(self, share: float) -> tuple[Stream, Stream]:
        """See DataPart. The target of the last token before the cut is the first token after the cut."""
        samples = len(self) - held_back(len(self), share)
        place = samples * self._seq_len
        before, after = (
            Stream(
                self.tokens[begin:end],
                self._seq_len,
                self.name,
                self.vocab_size,
                self._first + begin,
                self._eos,
                self._ends,
            )
            for begin, end in ((0, place + 1), (place, len(self.tokens)))
        )
        return before, after

    def digest(self) -> bytes:
        """Return the SHA-256 of the tokens. For many tokens, the digest covers only their count and equally spaced ranges."""
        count = len(self.tokens)
        sums = hashlib.sha256(b"" if self._ends is None else self._ends.tobytes())
        if count <= _LOOKS * _STRETCH:
            sums.update(np.ascontiguousarray(self.tokens).tobytes())
            return sums.digest()
        sums.update(f"{count} {self.tokens.dtype.str}".encode())
        for place in np.linspace(0, count - _STRETCH, _LOOKS).astype(np.int64):
            sums.update(self.tokens[place : place + _STRETCH].tobytes())
        return sums.digest()


@dataclass(frozen=True)
class Corpus:
    """The parts of the data, and a description of their source."""

    parts: tuple[DataPart, ...]
    digest: bytes
    """A digest that must be equal on every rank; otherwise ranks train on different data."""
    size: int = 0
    """The total size of all parts, in `unit`."""
    unit: str = "bytes of text"
    files: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()
    """The share of each part in an epoch. If empty, each sample occurs once per epoch."""
    shuffled: bool = True
    """Whether each epoch has another order. If False, sample n of the only part is the n-th that the training reads."""
    validation: Corpus | None = None
    """The data for evaluation."""
    note: str = ""
    """What a user should know of the data before training."""

    @property
    def samples(self) -> int:
        """Number of samples in all parts."""
        return sum(len(part) for part in self.parts)

    def cut(self, share: float) -> Corpus:
        """Return the corpus with the last `share` of each part's samples set aside for validation."""
        if not share:
            return self
        pairs = [part.cut(share) for part in self.parts]
        kept, held = ([part for part in halves if len(part)] for halves in zip(*pairs, strict=True))
        if not kept:
            raise TrainingError(
                "no samples remain for training",
                given=f"data.validation = {share} of {self.samples} samples",
                expected="one or more samples for training",
                hint="a smaller share, or more data",
            )
        weights = tuple(w for w, (part, _) in zip(self.weights, pairs, strict=False) if len(part))
        return replace(
            self, parts=tuple(kept), weights=weights, validation=replace(self, parts=tuple(held), weights=())
        )


def documents_in(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the document number of each token. ends: an array (samples, sequence) that is True where a document ends.

    >>> documents_in(np.array([[False, True, False, False], [False, False, False, False]])).tolist()
    [[0, 0, 1, 1], [0, 0, 0, 0]]
    """
    numbers = np.zeros(ends.shape, dtype=np.int64)
    numbers[:, 1:] = ends[:, :-1].cumsum(1)
    return numbers


def outside(token: int, vocab_size: int | None, where: str, hint: str = "") -> TrainingError:
    """Return the error for a token outside the vocabulary, whose size may be unknown. where: the token's position in its file."""
    if token < 0:
        hint = "inputs have no masked tokens: only labels may be -100. Otherwise, write the tokens with their actual type"
    known = "" if vocab_size is None else f", but the model's vocabulary is 0 to {vocab_size - 1}"
    return TrainingError(
        f"the data has token {token}{known}",
        given=f"{token} at {where}",
        expected=f"tokens of 0 or more and below {'2**63' if vocab_size is None else f'model.vocab_size = {vocab_size}'}",
        hint=hint
        or "set model.vocab_size to the data tokenizer's size, or data.token_type to the file's actual type",
    )


@contextmanager
def of_function(name: str, what: str) -> Iterator[None]:
    """Turn an error of a user's dataset into a TrainingError. name: the function that returned it. what: what is read."""
    try:
        yield
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            f"data.build: {what} cannot be read: {type(error).__name__}: {error}",
            given=f"{what} of what {name} returned",
            expected="a dataset that returns each of its samples, on every rank",
            hint="read it in Python, without meshcomm: the error is raised by the dataset's own code",
        ) from error


def checked(parts: Sequence[DataPart], given: str, seq_len: int) -> None:
    """Raise TrainingError if the data contain less than one sample."""
    if not any(len(part) for part in parts):
        raise TrainingError(
            "the data is less than one sample",
            given=f"{given}, seq_len = {seq_len}",
            expected=f"{seq_len + 1} tokens or more: a sample, and the token after it",
            hint="more data, or a shorter sequence",
        )


def held_back(count: int, share: float) -> int:
    """Return how many of `count` samples to set aside for validation (at least one)."""
    return min(count, max(1, round(count * share)))


def eos_id_of(config: DataConfig, of_tokenizer: int | None, vocab_size: int | None) -> int | None:
    """Return the token after each document, or None if attention may cross documents.

    of_tokenizer: the tokenizer's. vocab_size: the number of tokens that the data or the model can have; None if it is unknown.
    Raises TrainingError if no such token is defined, or if it is not among them.
    """
    if not config.document_mask:
        return None
    eos_id = of_tokenizer if config.eos_id is None else config.eos_id
    if eos_id is None:
        raise TrainingError(
            "the end of a document is not defined",
            given="data.document_mask = true, no eos and no eos_id",
            expected="the token that ends a document",
            hint="set data.eos with a tokenizer, or data.eos_id",
        )
    if vocab_size is not None and eos_id >= vocab_size:
        raise TrainingError(
            "no document would end: the token that ends a document is outside the vocabulary",
            given=f"token {eos_id}, from {'the tokenizer' if config.eos_id is None else 'data.eos_id'}",
            expected=f"0 to {vocab_size - 1}, the tokens that the model and the data can have",
            hint="data.eos_id of the tokenizer that made the tokens, or a larger model.vocab_size",
        )
    return eos_id
