"""Which bytes a rank trains on at a step: real text, sampled the same way on every mesh."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshcomm.config import DataConfig
from meshcomm.errors import TrainingError


@dataclass(frozen=True)
class Corpus:
    """The text, and what it was read from."""

    text: NDArray[np.uint8]
    files: tuple[Path, ...]
    digest: bytes
    """SHA-256 of the text: equal on every rank, or ranks train on different data."""


def load(config: DataConfig) -> Corpus:
    """Read the files of `config`, in sorted order, one after the other, up to max_bytes.

    No files: the *.py files that lie directly in the Python standard library's folder.
    Raises TrainingError where nothing is found or less than one sample is.
    """
    files = _python_sources() if not config.files else _matches(config.files)
    parts: list[bytes] = []
    left = config.max_bytes
    for path in files:
        if left <= 0:
            break
        try:
            with path.open("rb") as file:
                parts.append(file.read(left))
        except OSError as error:
            raise TrainingError(
                f"the training data cannot be read: {error.strerror}", given=f"data.files: {path}"
            ) from error
        left -= len(parts[-1])
    text = b"".join(parts)
    if len(text) <= config.sequence:
        raise TrainingError(
            f"{len(text)} bytes of training data are less than one sample",
            given=f"{len(parts)} files, max_bytes = {config.max_bytes}, sequence = {config.sequence}",
            expected=f"{config.sequence + 1} bytes or more: a sample, and the byte after it",
            hint="more files, or a shorter sequence",
        )
    used = tuple(files[: len(parts)])
    return Corpus(np.frombuffer(text, dtype=np.uint8), used, hashlib.sha256(text).digest())


def _python_sources() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TrainingError(
            "this Python has no sources of its standard library to train on",
            given=f"data.files is empty, and {folder} has no *.py",
            hint='name text files of your own: [data] files = ["books/*.txt"]',
        )
    return files


def _matches(patterns: tuple[str, ...]) -> list[Path]:
    found: set[str] = set()
    for pattern in patterns:
        matches = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
        if not matches:
            raise TrainingError(
                f"no training data matches {pattern!r}",
                given=f"data.files has {pattern!r}",
                expected="a file, or a glob that matches at least one",
                hint="paths are relative to the config file",
            )
        found.update(matches)
    return sorted(Path(path) for path in found)


@final
class Batches:
    """The samples of one data rank, step by step.

    Sample i of step s starts at an offset drawn from (seed, s) alone, so the global batch does
    not depend on the mesh. Coord c of n along data reads samples [c * B / n, (c + 1) * B / n) of
    the B in the global batch; ranks along tensor and pipeline have the same coord and samples.

    Args:
        corpus: the text.
        sequence: tokens per sample.
        global_batch: samples per step, all ranks together.
        seed: of the run.
        coord, size: along data.
        device: where batches are put.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence: int,
        global_batch: int,
        seed: int,
        coord: int = 0,
        size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        share = global_batch // size
        self._text = corpus.text
        self._window = np.arange(sequence + 1)
        self._starts = len(corpus.text) - sequence
        self._global_batch = global_batch
        self._seed = seed
        self._mine = slice(coord * share, (coord + 1) * share)
        self._device = device

    def offsets(self, step: int) -> NDArray[np.int64]:
        """Where this rank's samples of `step` start in the text."""
        draw = np.random.default_rng([self._seed, step]).integers(self._starts, size=self._global_batch)
        return draw[self._mine]

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes that follow them, each (global_batch / size, sequence) int64."""
        samples = self._text[self.offsets(step)[:, None] + self._window].astype(np.int64)
        both = torch.from_numpy(samples)
        if self._device is not None and self._device.type == "cuda":
            # From pinned memory it is copied beside the program; from any other the copy waits for the device.
            both = both.pin_memory().to(self._device, non_blocking=True)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
