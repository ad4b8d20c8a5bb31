"""Token files: NumPy arrays, raw tokens, and Megatron-LM's indexed datasets."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig
from meshcomm.errors import TrainingError
from meshcomm.train.data.corpus import Corpus, Stream, checked, eos_id_of
from meshcomm.train.data.megatron import indexed
from meshcomm.train.data.rows import foreign_format, suffix_of


def token_files(config: DataConfig, vocab_size: int | None, files: list[Path], key: str) -> Corpus:
    """Return token files, each of which is a part."""
    parts = [part for path in files if len(part := _token_file(path, config, vocab_size))]
    checked(parts, ", ".join(map(str, files[:4])), config.seq_len)
    digest = hashlib.sha256(b"".join(part.digest() for part in parts)).digest()
    size = sum(len(part.tokens) for part in parts)
    return Corpus(tuple(parts), digest, size, "tokens", tuple(files))


def index_of(path: Path) -> Path | None:
    """Return the index beside a .bin file, as Megatron-LM writes it; None if there is none."""
    some = (path.with_suffix(suffix) for suffix in (".idx", ".IDX"))
    return next(filter(Path.is_file, some), None) if suffix_of(path) == ".bin" else None


def _token_file(path: Path, config: DataConfig, vocab_size: int | None) -> Stream:
    """Return a memory-mapped token file, which is read lazily."""
    wanted = (
        "a one-dimensional .npy file of an integer type, a .bin file with the .idx file of Megatron-LM beside it, or raw "
        "little-endian tokens of type data.token_type"
    )
    ends = hint = None
    try:
        if suffix_of(path) == ".npy":
            tokens: NDArray[Any] = np.load(path, mmap_mode="r")
        elif index := index_of(path):
            tokens, ends = indexed(path, index)
        else:
            kind = np.dtype(config.token_type).newbyteorder("<")
            if not (size := path.stat().st_size):
                raise ValueError("it is empty")
            if size % kind.itemsize:
                raise ValueError(f"{size} bytes are not a whole number of {kind.itemsize}-byte tokens")
            hint = (
                f"if they are {config.token_type}, write them into a file that states its type: "
                f'np.save("{path.with_suffix(".npy")}", np.fromfile("{path}", "{kind.str}")); otherwise, set data.token_type'
            )
            tokens = np.memmap(path, dtype=kind, mode="r")
            if form := foreign_format(tokens[:4].tobytes()):
                raise ValueError(f"it begins like {form}")
            if _other_width(tokens):
                raise ValueError(
                    f"every second token is below 16, as if tokens were wider than {config.token_type}"
                )
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(f"an array of shape {tokens.shape} and type {tokens.dtype}")
    except Exception as error:
        raise TrainingError(
            "a token file cannot be read", given=f"{path}: {error}", expected=wanted, hint=hint
        ) from error
    most = int(np.iinfo(tokens.dtype).max) + 1
    eos = eos_id_of(config, None, min(vocab_size or most, most)) if ends is None else None
    ends = ends if config.document_mask else None
    stream = Stream(tokens, config.seq_len, str(path), vocab_size, eos=eos, ends=ends)
    if len(stream):
        # Check both ends, so that a wrong type or vocabulary is found before the first step.
        stream.read(np.unique(np.linspace(0, len(stream) - 1, 256).astype(np.int64)))
    return stream


def _other_width(tokens: NDArray[Any]) -> bool:
    """Return whether the file's tokens seem to be wider: every second value is tiny, as the upper half of a small integer."""
    some = tokens[: 2 * (min(len(tokens), 65_536) // 2)]
    # In either byte order.
    halves = ((half, half.byteswap()) for half in (some[::2], some[1::2]))
    highs = sorted(min(int(tokens.max(initial=0)) for tokens in half) for half in halves)
    return len(some) >= 64 and highs[0] < 16 <= highs[1]
