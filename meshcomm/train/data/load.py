"""Open the data that `[data]` names: text, token files, conversations, or the result of a function."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.config.write import whole_toml
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train.data.corpus import Corpus, Samples
from meshcomm.train.data.rows import has_rows, suffix_of
from meshcomm.train.data.texts import function_texts
from meshcomm.train.data.token_files import index_of, token_files
from meshcomm.train.data.tokens import Tokens, packed, text_files, tokenized


def load(
    config: DataConfig,
    *,
    model: ModelConfig | None = None,
    vocab_size: int | None = None,
    cache: Path | None = None,
    seed: int = 0,
) -> Corpus:
    """Open the data that `config` names, with random access.

    model:      the model configuration. The tokenizer in its `pretrained` folder is the default.
    vocab_size: the model's vocabulary size. If None, token values are not checked.
    cache:      a folder that caches the tokens of text. If None, tokens are kept in memory.
    seed:       the seed to pass to the `build` function if it accepts one.
    Raises TrainingError if no data are found, if there is less than one sample, or if tokens do not fit the vocabulary.
    """
    read: Callable[[list[Path], str], Corpus]
    if config.chat:
        from meshcomm.train.data.chat import chats

        read = partial(chats, config, model, vocab_size)
    elif config.tokens:
        read = partial(token_files, config, vocab_size)
    elif config.texts_from:
        tokens = Tokens(config, cache, model, vocab_size)
        read = partial(text_files, config, tokens)
    if config.build is not None:
        from meshcomm.train.data.build import built, by_index, called, streamed

        data = called(config, seed)
        if not config.texts_from:
            return built(config, data, vocab_size)
        if not by_index(data):
            return streamed(config, data, _concatenated, partial(packed, config, tokens))
        documents = partial(function_texts, config, tokens.end, data)
        return tokenized(config, tokens, documents, "data.build").cut(config.validation)
    corpus = _mixed(config, read)
    if not config.validation_files:
        corpus = corpus.cut(config.validation)
    else:
        key = "data.validation_files"
        corpus = replace(corpus, validation=read(matches(config.validation_files, key), key))
    _check_settings(config, [*corpus.files, *(corpus.validation.files if corpus.validation else ())])
    return corpus


def _mixed(config: DataConfig, read: Callable[[list[Path], str], Corpus]) -> Corpus:
    """Return the data of all entries of the source; with weights, the data of each entry have its weight."""
    key, entries = f"data.{config.source}", getattr(config, config.source)
    groups = [(entry,) for entry in entries] if config.weights else [entries]
    some = [read(matches(group, key) if group else _library(), key) for group in groups]
    if len(some) == 1:
        return some[0]
    weights = [
        weight * len(part) / corpus.samples
        for weight, corpus in zip(config.weights, some, strict=True)
        for part in corpus.parts
    ]
    return replace(
        some[0],
        parts=tuple(part for corpus in some for part in corpus.parts),
        digest=hashlib.sha256(b"".join(corpus.digest for corpus in some)).digest(),
        size=sum(corpus.size for corpus in some),
        files=tuple(path for corpus in some for path in corpus.files),
        note="\n".join(corpus.note for corpus in some if corpus.note),
        weights=tuple(weights),
    )


def matches(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Return the files that paths and globs match, sorted. A file that several of them match is there as many times. A folder
    that a Hugging Face dataset was saved to stands for its files. Raises TrainingError if nothing matches.
    """
    paths: list[Path] = []
    for pattern in patterns:
        some = {file for path in glob.glob(pattern, recursive=True) for file in _files(Path(path))}
        if not some:
            splits = [str(state.parent) for state in sorted(Path(pattern).glob("*/state.json"))]
            raise TrainingError(
                f"no training data matches {pattern!r}",
                given=f"{key} has {pattern!r}" + ", a folder of several splits" * bool(splits),
                expected="a file, a folder written by Dataset.save_to_disk, or a glob that matches at least one",
                hint=f"{key} = {whole_toml(splits[:1])}"
                if splits
                else "use paths relative to the config file",
            )
        paths += some
    return sorted(paths)


def named_files(config: DataConfig) -> dict[str, int]:
    """Return the number of files of each setting that names some, for a program that does not read them. Raises as `matches`."""
    settings = {f"data.{name}": getattr(config, name) for name in (config.source, "validation_files")}
    return {
        key: len(matches(entries, key))
        for key, entries in settings.items()
        if entries and key != "data.build"
    }


def _files(path: Path) -> list[Path]:
    """Return a file, or the files of a folder that `datasets` wrote; none for another folder."""
    if path.is_file():
        return [path]
    try:
        facts = json.loads((path / "state.json").read_text())
        return [path / file["filename"] for file in facts["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _check_settings(config: DataConfig, files: Sequence[Path]) -> None:
    """Raise ConfigError for settings that are for other kinds of files than these."""
    plain = [path for path in files if not index_of(path)]
    for setting, some, expected in (
        ("column", filter(has_rows, files), "a file with rows, such as .jsonl or .parquet"),
        ("token_type", [path for path in plain if suffix_of(path) != ".npy"], "a .bin file without an index"),
        ("eos_id", plain, "a file without an index of documents"),
    ):
        if config.given(setting) and not any(some):
            raise ConfigError(
                f"data.{setting}: no effect on these files",
                given=f"{config.written(setting)}; {', '.join(map(str, files[:4]))}",
                expected=expected,
                hint=f"remove data.{setting}",
            )


def _library() -> list[Path]:
    """Return the sources of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TrainingError(
            "this Python installation lacks the sources of its standard library, which are the default training data",
            given=f"data.files is empty, and {folder} has no *.py",
            hint='name your own text files: [data] files = ["books/*.txt"]',
        )
    return files


def _concatenated(samples: Sequence[tuple[int, Samples]]) -> Samples:
    return tuple(np.concatenate(arrays) for arrays in zip(*(sample for _, sample in samples), strict=True))
