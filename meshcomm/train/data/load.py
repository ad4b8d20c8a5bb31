"""Open the data that `[data]` names, such as text, token files, conversations, or the result of a function."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.config.write import whole_toml
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train.data.corpus import Corpus, Samples, Stream, checked, outside
from meshcomm.train.data.megatron import indexed
from meshcomm.train.data.rows import BROKEN, has_rows, opened, rows_of

# The number of documents that are tokenized together, on all cores.
_AT_ONCE = 256
_NO_TOKENIZER: Final = (
    "set data.tokenizer to this model's tokenizer; without a tokenizer, each byte is a token"
)


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
        read = partial(_token_files, config, vocab_size)
    elif config.texts_from:
        tokens = Tokens(config, cache, model, vocab_size)
        read = partial(_text_files, config, tokens)
    if config.build is not None:
        from meshcomm.train.data.build import built, by_index, called, streamed

        data = called(config, seed)
        if not config.texts_from:
            return built(config, data, vocab_size)
        if not by_index(data):
            return streamed(config, data, _concatenated, partial(_packed, config, tokens))
        documents = partial(_rows, config, tokens, data)
        return _texts(config, tokens, documents, "data.build").cut(config.validation)
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
        weights=tuple(weights),
    )


def matches(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Return the files that paths and globs match, sorted and without duplicates. A folder that a Hugging Face dataset was
    saved to stands for its files. Raises TrainingError if nothing matches.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        some = [file for path in glob.glob(pattern, recursive=True) for file in _files(Path(path))]
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
        paths.update(some)
    return sorted(paths)


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
    plain = [path for path in files if not _has_index(path)]
    for setting, some, expected in (
        ("column", filter(has_rows, files), "a file with rows, such as .jsonl or .parquet"),
        ("token_type", [path for path in plain if path.suffix != ".npy"], "a .bin file without an index"),
        ("eos_id", plain, "a file without an index of documents"),
    ):
        if config.given(setting) and not any(some):
            raise ConfigError(
                f"data.{setting}: no effect on these files",
                given=f"{config.written(setting)}; {', '.join(map(str, files[:4]))}",
                expected=expected,
                hint=f"remove data.{setting}",
            )


def _text_files(config: DataConfig, tokens: Tokens, files: list[Path], key: str) -> Corpus:
    documents = partial(texts_of, files, config.max_bytes, config.column, tokens.end)
    return _texts(config, tokens, documents, key, files)


def _texts(
    config: DataConfig,
    tokens: Tokens,
    documents: Callable[[], Iterator[Document]],
    key: str,
    files: Sequence[Path] = (),
) -> Corpus:
    """Return the tokens of all documents. documents: reads them from the start. files: those that have them."""
    read: set[Path] = set()

    def noted() -> Iterator[Document]:
        for document in documents():
            read.add(document.path)
            yield document

    ids, unit = tokens.of(noted), "bytes of text" if tokens.tokenizer is None else "tokens"
    part = Stream(ids, config.seq_len, key, eos=tokens.eos_id)
    most = "" if config.max_bytes is None else f", max_bytes = {config.max_bytes}"
    checked([part], f"{len(ids)} {unit} of {key}{most}", config.seq_len)
    digest = hashlib.sha256(ids.data).digest() if tokens.tokenizer is None else part.digest()
    return Corpus((part,), digest, len(ids), unit, tuple(path for path in files if path in read))


def _rows(config: DataConfig, tokens: Tokens, data: Any) -> Iterator[Document]:
    """Yield the texts of the rows that a function returned."""
    rows = data if isinstance(data, Iterable) else map(data.__getitem__, range(len(data)))
    return _row_texts(enumerate(rows, 1), Path(str(config.build)), config.column, tokens.end)


def _packed(config: DataConfig, tokens: Tokens, rows: Iterator[Any]) -> Iterator[Samples]:
    """Yield the samples of one epoch of a stream of texts. The last tokens are dropped if they are less than a sample."""
    held: NDArray[Any] = np.empty(0, np.uint32)
    for _, ids in tokens.each(_rows(config, tokens, rows)):
        held = np.concatenate([held, ids])
        if len(held) > config.seq_len:
            part = Stream(held, config.seq_len, eos=tokens.eos_id)
            yield from (part.read(np.array([number])) for number in range(len(part)))
            held = held[len(part) * config.seq_len :]


def _concatenated(samples: Sequence[tuple[int, Samples]]) -> Samples:
    return tuple(np.concatenate(arrays) for arrays in zip(*(sample for _, sample in samples), strict=True))


def _eos_id(config: DataConfig, of_tokenizer: int | None, vocab_size: int | None) -> int | None:
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


def _token_files(config: DataConfig, vocab_size: int | None, files: list[Path], key: str) -> Corpus:
    """Return token files, each of which is a part."""
    parts = [part for path in files if len(part := _token_file(path, config, vocab_size))]
    checked(parts, ", ".join(map(str, files[:4])), config.seq_len)
    digest = hashlib.sha256(b"".join(part.digest() for part in parts)).digest()
    size = sum(len(part.tokens) for part in parts)
    return Corpus(tuple(parts), digest, size, "tokens", tuple(files))


def _has_index(path: Path) -> bool:
    """Return whether a .bin file has an index beside it, as Megatron-LM writes it."""
    return path.suffix == ".bin" and path.with_suffix(".idx").is_file()


def _token_file(path: Path, config: DataConfig, vocab_size: int | None) -> Stream:
    """Return a memory-mapped token file, which is read lazily."""
    wanted = (
        "a one-dimensional .npy file of an integer type, a .bin file with the .idx file of Megatron-LM beside it, or raw "
        "little-endian tokens of type data.token_type"
    )
    ends = None
    try:
        if path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(path, mmap_mode="r")
        elif _has_index(path):
            tokens, ends = indexed(path, path.with_suffix(".idx"))
        else:
            kind = np.dtype(config.token_type).newbyteorder("<")
            if path.stat().st_size % kind.itemsize or not path.stat().st_size:
                raise ValueError(
                    f"{path.stat().st_size} bytes are not a whole number of {kind.itemsize}-byte tokens"
                )
            tokens = np.memmap(path, dtype=kind, mode="r")
            if form := _foreign(tokens[:4].tobytes()):
                raise ValueError(f"it begins like {form}")
            if _other_width(tokens):
                raise ValueError(
                    f"every second token is below 16, as if tokens were wider than {config.token_type}"
                )
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ValueError(f"an array of shape {tokens.shape} and type {tokens.dtype}")
    except (OSError, ValueError) as error:
        raise TrainingError(
            "a token file cannot be read", given=f"{path}: {error}", expected=wanted
        ) from error
    most = int(np.iinfo(tokens.dtype).max) + 1
    eos = _eos_id(config, None, min(vocab_size or most, most)) if ends is None else None
    ends = ends if config.document_mask else None
    stream = Stream(tokens, config.seq_len, str(path), vocab_size, eos=eos, ends=ends)
    if len(stream):
        # Check both ends, so that a wrong type or vocabulary is found before the first step.
        stream.read(np.unique(np.linspace(0, len(stream) - 1, 256).astype(np.int64)))
    return stream


# How files begin that are not plain tokens or text, and how to read them.
_FORMATS: Final = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b\x08": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"PK\x03\x04": "a zip archive, such as .npz or a file of torch.save",
    b"\x93NUMPY": "a NumPy array, which needs the suffix .npy",
    b"MMIDIDX": "the index of a Megatron dataset, whose tokens are in its .bin file",
    b"TNTIDX": "the index of a fairseq dataset",
    b"LITPKDS": "a packed dataset of LitGPT",
    b"\x89HDF": "an HDF5 file",
    # llm.c: int32 20240520 for uint16 tokens, 20240801 for uint32 tokens.
    (20240520).to_bytes(4, "little"): "a token file of llm.c, with a header of 1024 bytes",
    (20240801).to_bytes(4, "little"): "a token file of llm.c, with a header of 1024 bytes",
}


def _foreign(start: bytes) -> str:
    """Return the format of a file that starts like this, or "" if it is none of `_FORMATS`."""
    return next((name for magic, name in _FORMATS.items() if start.startswith(magic)), "")


def _other_width(tokens: NDArray[Any]) -> bool:
    """Return whether the file's tokens seem to be wider: every second value is tiny, as the upper half of a small integer."""
    some = tokens[: 2 * (min(len(tokens), 65_536) // 2)]
    # In either byte order.
    halves = ((half, half.byteswap()) for half in (some[::2], some[1::2]))
    highs = sorted(min(int(tokens.max(initial=0)) for tokens in half) for half in halves)
    return len(some) >= 64 and highs[0] < 16 <= highs[1]


class Document(NamedTuple):
    """A text, its file and, if the file has rows, the number of its row. cut: whether the text was truncated."""

    path: Path
    text: bytes
    row: int = 0
    cut: bool = False

    @property
    def name(self) -> str:
        """The place of the text, for errors."""
        return f"{self.path}:{self.row}" if self.row else str(self.path)


def texts_of(files: Iterable[Path], most: int | None, column: str, end: bytes) -> Iterator[Document]:
    """Yield each file without rows, and each row of the others, as a document, up to `most` bytes in total.

    column: has the texts of rows. end: is appended to them. Raises TrainingError if a file or a row has no text.
    """
    bytes_left = sys.maxsize if most is None else most
    for path in files:
        if has_rows(path):
            documents = _row_texts(rows_of(path, (column,)), path, column, end)
        else:
            documents = iter([Document(path, _text_in(path, -1 if most is None else bytes_left + 1))])
        for document in documents:
            text = document.text
            yield document._replace(text=text[:bytes_left], cut=len(text) > bytes_left)
            bytes_left -= len(text)
            if bytes_left <= 0:
                return


def _row_texts(rows: Iterable[tuple[int, Any]], path: Path, column: str, end: bytes) -> Iterator[Document]:
    """Yield the text in a column of each row. path: a file, or the name of a function. Raises TrainingError."""
    for number, row in rows:
        try:
            yield Document(path, row[column].encode() + end, number)
        except (LookupError, AttributeError, TypeError, UnicodeEncodeError) as error:
            columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            given = (
                f"{row[column]!r:.40}"
                if isinstance(row, Mapping) and column in row
                else f"only {columns or 'nothing'}"
            )
            raise TrainingError(
                f"a row has no text in the column {column!r}",
                given=f"{path}:{number}: {given}",
                expected="a string of Unicode characters in each row",
                hint="data.column names the column; data.chat reads conversations, and pairs of prompt and completion",
            ) from error


def _text_in(path: Path, most: int) -> bytes:
    """Return the first bytes of a text file; all of them if `most` is -1."""
    try:
        with opened(path) as file:
            text = file.read(most)
    except BROKEN as error:
        raise TrainingError(
            "the training data cannot be read",
            given=f"data.files: {path}: {error}",
            expected="a file of text, compressed if its suffix is .gz, .bz2, .xz or .zst",
        ) from error
    form = _foreign(text[:8])
    if form or b"\0" in text[:8000]:
        raise TrainingError(
            "a file of the training data is not text",
            given=f"data.files: {path} is {form or 'binary: it has bytes of 0'}",
            expected="plain text, all of which is trained on, or a format that its suffix names, such as .txt.gz, .jsonl or .parquet",
            hint="data.tokens for token files, data.chat for conversations, or a function in data.build that reads "
            "the texts in other formats",
        )
    return text


@final
class Tokens:
    """Tokenizes text. `tokenizer` is None if each byte is a token. `eos_id`: the token that ends a document, if attention may
    not cross documents. Raises TrainingError; ConfigError if the model's weights were trained with a tokenizer that is missing.

    model: the model configuration, whose folder has the default tokenizer.
    vocab_size: an upper bound for the tokens; None if it is unknown.
    cache: a folder for memory-mapped token files, one per text and tokenizer. If None, tokens stay in memory.
    """

    def __init__(
        self,
        config: DataConfig,
        cache: Path | None,
        model: ModelConfig | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._cache, self._config, self.vocab_size = cache, config, vocab_size
        self.tokenizer: Any = None
        self.eos: int | None = None
        self._facts = b""
        self._path = config.tokenizer_of(None if model is None else model.pretrained)
        if config.tokenizer is None and self._path is None and model is not None and model.reads_weights:
            raise ConfigError(
                "data.tokenizer: the weights were trained with a tokenizer that is not in their folder",
                given=f"no tokenizer.json in {model.pretrained}",
                expected='a tokenizer.json, or "bytes" if the weights were trained on bytes',
                hint='data.tokenizer = "bytes" or "FOLDER"; or data.tokens, with the same texts already tokenized; '
                "or Trainer.run(data), with batches of your own",
            )
        if self._path is not None:
            self._open(self._path)
        most = vocab_size if self.tokenizer else min(vocab_size or 256, 256)
        self.eos_id = _eos_id(config, self.eos, most)
        # The end of a row whose bytes are tokens.
        self.end = b"" if self.tokenizer else b"\n" if self.eos_id is None else bytes([self.eos_id])

    def of(self, documents: Callable[[], Iterator[Document]]) -> NDArray[Any]:
        """Return the concatenated tokens of all documents, with the `eos` token after each document.

        documents: reads them from the start. They are read several times, instead of being held in memory.
        """
        if self._cache is None or self.tokenizer is None:
            return self._made(documents())
        tokens = self._kept(documents, self._cache)
        if self.vocab_size is not None and len(tokens) and int(tokens.max()) >= self.vocab_size:
            # Finds the document.
            self._made(documents())
        return tokens

    def each(self, documents: Iterator[Document]) -> Iterator[tuple[Document, NDArray[Any]]]:
        """Yield each document with its tokens. Raises TrainingError for a token outside the vocabulary."""
        end = [] if self.eos is None else [self.eos]
        while some := list(islice(documents, _AT_ONCE)):
            if self.tokenizer is None:
                tokens = [np.frombuffer(document.text, np.uint8) for document in some]
            else:
                # A template's special tokens would be added to every document, including a second end token.
                texts = [_text(document) for document in some]
                encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                tokens = [np.array([*encoding.ids, *end], np.uint32) for encoding in encoded]
            for document, ids in zip(some, tokens, strict=True):
                if self.vocab_size is not None and ids.max(initial=0) >= self.vocab_size:
                    place, hint = int((ids >= self.vocab_size).argmax()), _NO_TOKENIZER
                    if self.tokenizer is not None:
                        hint = f"use this model's tokenizer; {self._path} has {self.tokenizer.get_vocab_size()} tokens"
                    raise outside(
                        int(ids[place]), self.vocab_size, f"position {place} of {document.name}", hint
                    )
                yield document, ids

    def _kept(self, documents: Callable[[], Iterator[Document]], cache: Path) -> NDArray[Any]:
        sums = hashlib.sha256(self._facts + f"{self.eos}".encode())
        for document in documents():
            sums.update(hashlib.sha256(document.text).digest())
        path = cache / f"tokens-{sums.hexdigest()[:16]}.npy"
        try:
            if not path.exists():
                tokens = self._made(documents())
                cache.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f".{path.name}.{os.getpid()}")
                with draft.open("wb") as file:
                    np.save(file, tokens)
                os.replace(draft, path)
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise TrainingError(
                "tokens cannot be saved",
                given=f"{path}: {error}",
                expected="a folder train.out with enough space",
            ) from error

    def _made(self, documents: Iterator[Document]) -> NDArray[Any]:
        pieces = [ids for _, ids in self.each(documents)]
        tokens: NDArray[Any] = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        narrow = self.tokenizer is None or (len(tokens) and tokens.max() >= 65_536)
        return tokens if narrow else tokens.astype(np.uint16)

    def _open(self, path: Path) -> None:
        given = (
            f"{'data.tokenizer' if self._config.tokenizer else 'the tokenizer of model.pretrained'} = {path}"
        )
        try:
            import tokenizers  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise TrainingError(
                "tokenizers is not installed",
                given=given,
                expected="the package tokenizers",
                hint="pip install 'meshcomm[hf]'",
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_bytes()
            self.tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:
            raise TrainingError(
                "the tokenizer cannot be read",
                given=f"{given}: {error}",
                expected="a tokenizer.json that the tokenizers package can read, or a folder with such a file",
                hint="AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes one",
            ) from error
        # Samples always have data.seq_len tokens, so the tokenizer must not truncate or pad.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        eos = self._config.eos or _eos_beside(file)
        if eos is not None:
            self.eos = self.tokenizer.token_to_id(eos)
            if self.eos is None:
                raise TrainingError(
                    f"the tokenizer has no token {eos!r}",
                    given=f"{given}, eos = {eos!r}",
                    expected="a token of its vocabulary",
                    hint="set data.eos to the token that ends a text",
                )
        self._facts = hashlib.sha256(content).digest()


def _text(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        # A truncated text may end inside a character.
        if document.cut and error.start >= len(document.text) - 3:
            return document.text[: error.start].decode()
        raise TrainingError(
            "the text is not UTF-8",
            given=f"{document.name}: byte {error.start}",
            expected="UTF-8, as the tokenizer requires",
            hint="use other files, or remove data.tokenizer to train on bytes",
        ) from error


def _eos_beside(file: Path) -> str | None:
    """Return the eos_token that the tokenizer_config.json next to `file` names."""
    try:
        eos = json.loads((file.parent / "tokenizer_config.json").read_text()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return eos if isinstance(eos, str) else None
