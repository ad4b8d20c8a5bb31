"""Open the data that `[data]` names: text, token files, folders of datasets, functions."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.errors import TrainingError
from meshcomm.train.data.corpus import Corpus, Stream, checked, outside
from meshcomm.train.data.text import NO_TOKENIZER, Document, Tokens, rows_of, texts_of


def load(
    config: DataConfig,
    *,
    model: ModelConfig | None = None,
    vocab_size: int | None = None,
    cache: Path | None = None,
    facts: Mapping[str, int] | None = None,
) -> Corpus:
    """What `config` names, ready to be read at any place.

    model:      the folder of `pretrained` has the tokenizer that is the default.
    vocabulary: of the model; None: not known, and not checked.
    cache:      a folder where the tokens of tokenised text are kept, and looked for. None: in memory.
    facts:      what the function of `build` may be given: seed, data_rank, data_world_size.
    Raises TrainingError where nothing is found, less than one sample is, or tokens are not the model's.
    """
    if config.build is not None:
        from meshcomm.train.data.build import built

        alone = {"seed": 0, "seq_len": config.seq_len, "data_rank": 0, "data_world_size": 1}
        return built(config, {**alone, **(facts or {})}, vocab_size)
    part: Any = config.files
    held: Any = config.validation_files
    key, held_key = "data.files", "data.validation_files"
    tokens = None if config.tokens else Tokens(config, cache, model, vocab_size)
    if tokens is None:
        part, key, read = config.tokens, "data.tokens", partial(_token_files, config, vocab_size)
    elif config.dataset is not None:
        part, held = config.split, config.validation_split
        key, held_key = "data.dataset", f"the split {config.validation_split!r}"
        read = partial(_rows, config, tokens)
    elif tokens.tokenizer is None:
        read = partial(_bytes, config, vocab_size)
    else:
        read = partial(_texts, config, tokens)
    corpus = read(part, key)
    return replace(corpus, validation=read(held, held_key)) if held else corpus.cut(config.validation)


def matches(patterns: tuple[str, ...], key: str) -> list[Path]:
    """The files of paths and globs, each once, sorted. Raises TrainingError where one of them has none."""
    found: set[str] = set()
    for pattern in patterns:
        some = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
        if not some:
            raise TrainingError(
                f"no training data matches {pattern!r}",
                given=f"{key} has {pattern!r}",
                expected="a file, or a glob that matches at least one",
                hint="paths are relative to the config file",
            )
        found.update(some)
    return sorted(Path(path) for path in found)


def _rows(config: DataConfig, tokens: Tokens, split: str | None, key: str) -> Corpus:
    return _tokenised(config, tokens.of(rows_of(config, split)), (Path(str(config.dataset)),), key)


def _texts(config: DataConfig, tokens: Tokens, patterns: tuple[str, ...], key: str) -> Corpus:
    files = _files(patterns, key)
    return _tokenised(config, tokens.of(texts_of(files, config.max_bytes)), tuple(files), key)


def _tokenised(config: DataConfig, tokens: NDArray[Any], files: tuple[Path, ...], key: str) -> Corpus:
    part = Stream(tokens, config.seq_len, key)
    checked([part], f"{len(tokens)} tokens of {key}", config.seq_len)
    return Corpus((part,), part.digest(), len(tokens), "tokens", files)


def _bytes(config: DataConfig, vocab_size: int | None, patterns: tuple[str, ...], key: str) -> Corpus:
    files = _files(patterns, key)
    documents: list[Document] = list(texts_of(files, config.max_bytes))
    if vocab_size is not None:
        for each in documents:
            if (highest := max(each.text, default=0)) >= vocab_size:
                raise outside(
                    highest, vocab_size, f"position {each.text.index(highest)} of {each.name}", NO_TOKENIZER
                )
    text = b"".join(each.text for each in documents)
    if len(text) <= config.seq_len:
        raise TrainingError(
            f"{len(text)} bytes of training data are less than one sample",
            given=f"{len(documents)} files, seq_len = {config.seq_len}"
            + ("" if config.max_bytes is None else f", max_bytes = {config.max_bytes}"),
            expected=f"{config.seq_len + 1} bytes or more: a sample, and the byte after it",
            hint="more files, or a shorter sequence",
        )
    part = Stream(np.frombuffer(text, dtype=np.uint8), config.seq_len, "data.files")
    used = tuple(files[: len(documents)])
    return Corpus((part,), hashlib.sha256(text).digest(), len(text), files=used)


def _files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Those that match; without patterns, the sources of Python's standard library."""
    if patterns:
        return matches(patterns, key)
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TrainingError(
            "this Python has no sources of its standard library to train on",
            given=f"data.files is empty, and {folder} has no *.py",
            hint='name text files of your own: [data] files = ["books/*.txt"]',
        )
    return files


def _token_files(config: DataConfig, vocab_size: int | None, patterns: tuple[str, ...], key: str) -> Corpus:
    """Files of tokens: data.tokens, by weights, each pattern's files together; or those for validation."""
    weighted = key == "data.tokens"
    weights: list[float] = []
    parts: list[Stream] = []
    files: list[Path] = []
    for index, group in enumerate([(each,) for each in patterns] if weighted else [patterns]):
        here = matches(group, key)
        some = [_token_file(path, config, vocab_size) for path in here]
        if weighted and config.weights:
            total = max(1, sum(len(each) for each in some))
            weights += [config.weights[index] * len(each) / total for each in some if len(each)]
        parts += [each for each in some if len(each)]
        files += here
    checked(parts, ", ".join(map(str, files[:4])) if weighted else key, config.seq_len)
    digest = hashlib.sha256(b"".join(part.digest() for part in parts)).digest()
    size = sum(len(part.tokens) for part in parts)
    return Corpus(tuple(parts), digest, size, "tokens", tuple(files), tuple(weights))


def _token_file(path: Path, config: DataConfig, vocab_size: int | None) -> Stream:
    """A file of tokens, mapped: nothing is read before it is needed."""
    wanted = "a .npy of one axis of an unsigned or signed whole type, or raw little-endian tokens of data.token_type"
    try:
        if path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(path, mmap_mode="r")
        else:
            kind = np.dtype(config.token_type).newbyteorder("<")
            if path.stat().st_size % kind.itemsize or not path.stat().st_size:
                raise ValueError(f"{path.stat().st_size} bytes are no tokens of {kind.itemsize} bytes each")
            tokens = np.memmap(path, dtype=kind, mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(f"an array of shape {tokens.shape} and type {tokens.dtype}")
    except (OSError, ValueError) as error:
        raise TrainingError(
            "a token file cannot be read", given=f"{path}: {error}", expected=wanted
        ) from error
    stream = Stream(tokens, config.seq_len, str(path), vocab_size)
    if len(stream):
        # The ends, so that a wrong type or vocabulary is found before the first step.
        stream.read(np.unique(np.linspace(0, len(stream) - 1, 256).astype(np.int64)))
    return stream
