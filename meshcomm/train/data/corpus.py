"""The training data: parts with random access, and digests that tell them apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.errors import TrainingError

# Of a large file, so many stretches of so many tokens are looked at.
_LOOKS = 64
_STRETCH = 32_768
# A target that does not count.
IGNORED = -100


# Inputs and targets of some samples, the samples along axis 0; where attention stays within documents also the number of each
# token's document, ascending.
Samples: TypeAlias = tuple[NDArray[Any], ...]


class DataPart(Protocol):
    """One source of samples."""

    def __len__(self) -> int:
        """Samples that have nothing in common."""
        ...

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """The samples of these numbers."""
        ...

    def cut(self, share: float) -> tuple[DataPart, DataPart]:
        """The samples before the last `share` of them, and those."""
        ...


@final
class Stream:
    """Tokens one after the other, in memory or mapped from a file. A sample may go on over the end of a document.

    tokens: (n,) of an unsigned or signed type. name: for errors. vocab_size: ids are below it; None: not known, or looked
    at before. first: where the tokens begin in what `name` names. eos: the token behind each document, of which samples tell
    the numbers; None: they do not.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        seq_len: int,
        name: str = "",
        vocab_size: int | None = None,
        first: int = 0,
        eos: int | None = None,
    ) -> None:
        self.tokens, self.name, self.vocab_size, self._first = tokens, name, vocab_size, first
        self._eos = eos
        self._window = np.arange(seq_len + 1)
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self._seq_len)

    def read(self, samples: NDArray[np.int64]) -> Samples:
        """See DataPart: int64 (samples, sequence) each, targets one token further."""
        offsets = samples * self._seq_len
        found = self.tokens[offsets[:, None] + self._window].astype(np.int64)
        if self.vocab_size is not None and found.size:
            for worst in (found.argmax(), found.argmin()):
                sample, place = divmod(int(worst), found.shape[1])
                token = int(found[sample, place])
                if not 0 <= token < self.vocab_size:
                    where = f"position {self._first + int(offsets[sample]) + place} of {self.name}"
                    raise outside(token, self.vocab_size, where)
        inputs, targets = found[:, :-1], found[:, 1:]
        if self._eos is None:
            return inputs, targets
        # What follows the end of a document does not follow from it.
        ends = inputs == self._eos
        return inputs, np.where(ends, IGNORED, targets), documents_in(ends)

    def cut(self, share: float) -> tuple[Stream, Stream]:
        """See DataPart. The token after the last sample before the cut is the first after it."""
        kept = len(self) - held_back(len(self), share)
        place = kept * self._seq_len
        before, after = (
            Stream(
                self.tokens[begin:end],
                self._seq_len,
                self.name,
                self.vocab_size,
                self._first + begin,
                self._eos,
            )
            for begin, end in ((0, place + 1), (place, len(self.tokens)))
        )
        return before, after

    def digest(self) -> bytes:
        """SHA-256 of the tokens; of many, of their number and of stretches at equal distances."""
        count = len(self.tokens)
        if count <= _LOOKS * _STRETCH:
            return hashlib.sha256(np.ascontiguousarray(self.tokens).tobytes()).digest()
        sums = hashlib.sha256(f"{count} {self.tokens.dtype.str}".encode())
        for place in np.linspace(0, count - _STRETCH, _LOOKS).astype(np.int64):
            sums.update(self.tokens[place : place + _STRETCH].tobytes())
        return sums.digest()


@dataclass(frozen=True)
class Corpus:
    """Parts, and what they were read from."""

    parts: tuple[DataPart, ...]
    digest: bytes
    """Equal on every rank, or ranks train on different data."""
    size: int = 0
    """Of all parts, in `unit`."""
    unit: str = "bytes of text"
    files: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()
    """Shares of the parts in an epoch; (): each sample once."""
    validation: Corpus | None = None
    """What is evaluated."""

    @property
    def samples(self) -> int:
        """Of all parts."""
        return sum(len(part) for part in self.parts)

    def cut(self, share: float) -> Corpus:
        """Itself, the last `share` of each part's samples for validation."""
        if not share:
            return self
        pairs = [part.cut(share) for part in self.parts]
        kept, held = ([part for part in each if len(part)] for each in zip(*pairs, strict=True))
        if not kept:
            raise TrainingError(
                "nothing is left to train on",
                given=f"data.validation = {share} of {self.samples} samples",
                expected="a sample or more for training",
                hint="a smaller share, or more data",
            )
        weights = tuple(w for w, (part, _) in zip(self.weights, pairs, strict=False) if len(part))
        return replace(
            self, parts=tuple(kept), weights=weights, validation=replace(self, parts=tuple(held), weights=())
        )


def documents_in(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The number of each token's document. ends: which tokens are the last of theirs, (samples, sequence).

    >>> documents_in(np.array([[False, True, False, False], [False, False, False, False]])).tolist()
    [[0, 0, 1, 1], [0, 0, 0, 0]]
    """
    numbers = np.zeros(ends.shape, dtype=np.int64)
    numbers[:, 1:] = ends[:, :-1].cumsum(1)
    return numbers


def outside(token: int, vocab_size: int, where: str, hint: str = "") -> TrainingError:
    """The error of a token that the model does not have. where: its place in its file."""
    return TrainingError(
        f"the data has token {token}, and the model's vocabulary is 0 to {vocab_size - 1}",
        given=f"{token} at {where}",
        expected=f"tokens of 0 or more and below model.vocab_size = {vocab_size}",
        hint=hint
        or "model.vocab_size = the size of the tokenizer that made them; or data.token_type, where the file holds another type",
    )


def checked(parts: Sequence[DataPart], given: str, seq_len: int) -> None:
    """Raises TrainingError where there is less than one sample."""
    if not any(len(part) for part in parts):
        raise TrainingError(
            "the training data is less than one sample",
            given=f"{given}, seq_len = {seq_len}",
            expected=f"{seq_len + 1} tokens or more: a sample, and the token after it",
            hint="more data, or a shorter sequence",
        )


def held_back(count: int, share: float) -> int:
    """How many of `count` samples a share for validation is: one at least."""
    return min(count, max(1, round(count * share)))
