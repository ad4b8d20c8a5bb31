"""From `[data]` to what is read: text, token files, folders of datasets, functions."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
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
    vocabulary: int | None = None,
    cache: Path | None = None,
    facts: Mapping[str, int] | None = None,
) -> Corpus:
    """What `config` names, ready to be read at any place.

    model:      the folder of `pretrained` has the tokenizer that is the default.
    vocabulary: of the model; None: not known, and not checked.
    cache:      a folder where the tokens of tokenised text are kept, and looked for. None: in memory.
    facts:      what the function of `build` may be given: seed, data_rank, data_world.
    Raises TrainingError where nothing is found, less than one sample is, or tokens are not the model's.
    """
    if config.build is not None:
        from meshcomm.train.data.build import built

        alone = {"seed": 0, "sequence": config.sequence, "data_rank": 0, "data_world": 1}
        return built(config, {**alone, **(facts or {})}, vocabulary)
    if config.tokens:
        return _token_files(config, vocabulary)
    tokens = Tokens(config, cache, model, vocabulary)
    if tokens.tokenizer is None and config.dataset is None:
        return _bytes(config, vocabulary)

    def tokenised(name: str, documents: Any, files: tuple[Path, ...]) -> Corpus:
        found = tokens.of(documents)
        part = Stream(found, config.sequence, name)
        checked([part], f"{len(found)} tokens of {name}", config.sequence)
        return Corpus((part,), part.digest(), len(found), "tokens", files)

    if config.dataset is not None:
        corpus = tokenised("data.dataset", rows_of(config, config.split), (Path(config.dataset),))
        if config.validation_split is not None:
            held = tokenised(
                f"the split {config.validation_split!r}",
                rows_of(config, config.validation_split),
                (Path(config.dataset),),
            )
            return replace(corpus, validation=held)
        return corpus.cut(config.validation)
    files = matches(config.files, "data.files") if config.files else _python_sources()
    corpus = tokenised("data.files", texts_of(files, config.max_bytes), tuple(files))
    if config.validation_files:
        held_files = matches(config.validation_files, "data.validation_files")
        held = tokenised("data.validation_files", texts_of(held_files, config.max_bytes), tuple(held_files))
        return replace(corpus, validation=held)
    return corpus.cut(config.validation)


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


# -- text as bytes ----------------------------------------------------------------------------------


def _bytes(config: DataConfig, vocabulary: int | None) -> Corpus:
    files = matches(config.files, "data.files") if config.files else _python_sources()
    corpus = _of_bytes(files, config, vocabulary)
    if config.validation_files:
        held = _of_bytes(matches(config.validation_files, "data.validation_files"), config, vocabulary)
        return replace(corpus, validation=held)
    return corpus.cut(config.validation)


def _of_bytes(files: list[Path], config: DataConfig, vocabulary: int | None) -> Corpus:
    documents: list[Document] = list(texts_of(files, config.max_bytes))
    if vocabulary is not None:
        for each in documents:
            if (highest := max(each.text, default=0)) >= vocabulary:
                raise outside(
                    highest, vocabulary, f"position {each.text.index(highest)} of {each.name}", NO_TOKENIZER
                )
    text = b"".join(each.text for each in documents)
    if len(text) <= config.sequence:
        raise TrainingError(
            f"{len(text)} bytes of training data are less than one sample",
            given=f"{len(documents)} files, sequence = {config.sequence}"
            + ("" if config.max_bytes is None else f", max_bytes = {config.max_bytes}"),
            expected=f"{config.sequence + 1} bytes or more: a sample, and the byte after it",
            hint="more files, or a shorter sequence",
        )
    part = Stream(np.frombuffer(text, dtype=np.uint8), config.sequence, "data.files")
    used = tuple(files[: len(documents)])
    return Corpus((part,), hashlib.sha256(text).digest(), len(text), files=used)


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


# -- token files ------------------------------------------------------------------------------------


def _token_files(config: DataConfig, vocabulary: int | None) -> Corpus:
    weights: list[float] = []
    parts: list[Stream] = []
    files: list[Path] = []
    for index, pattern in enumerate(config.tokens):
        here = matches((pattern,), "data.tokens")
        some = [_token_file(path, config, vocabulary) for path in here]
        if config.weights:
            total = max(1, sum(len(each) for each in some))
            weights += [config.weights[index] * len(each) / total for each in some if len(each)]
        parts += [each for each in some if len(each)]
        files += here
    given = ", ".join(map(str, files[:4]))
    checked(parts, given, config.sequence)
    corpus = _joined(parts, files, tuple(weights))
    if config.validation_files:
        held = matches(config.validation_files, "data.validation_files")
        evaluated = [_token_file(path, config, vocabulary) for path in held]
        checked(evaluated, "data.validation_files", config.sequence)
        return replace(corpus, validation=_joined(evaluated, held, ()))
    return corpus.cut(config.validation)


def _joined(parts: list[Stream], files: list[Path], weights: tuple[float, ...]) -> Corpus:
    digest = hashlib.sha256(b"".join(part.digest() for part in parts)).digest()
    return Corpus(
        tuple(parts), digest, sum(len(part.tokens) for part in parts), "tokens", tuple(files), weights
    )


def _token_file(path: Path, config: DataConfig, vocabulary: int | None) -> Stream:
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
    stream = Stream(tokens, config.sequence, str(path), vocabulary)
    if len(stream):
        # The ends, so that a wrong type or vocabulary is told before the first step.
        stream.read(np.unique(np.linspace(0, len(stream) - 1, 256).astype(np.int64)))
    return stream
