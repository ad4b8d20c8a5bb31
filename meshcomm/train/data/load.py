"""Open the data that `[data]` names, such as text, token files, conversations, or the result of a function."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train.data.corpus import Corpus, Stream, checked, outside

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
    if config.build is not None:
        from meshcomm.train.data.build import built

        return built(config, seed, vocab_size)
    read: Callable[[tuple[str, ...], str], Corpus]
    if config.chat:
        from meshcomm.train.data.chat import chats

        read = lambda patterns, key: chats(config, model, vocab_size, matches(patterns, key), key)  # noqa: E731
        source, key = config.chat, "data.chat"
    elif config.tokens:
        read, source, key = partial(_token_files, config, vocab_size), config.tokens, "data.tokens"
    else:
        tokens = Tokens(config, cache, model, vocab_size)
        if (
            tokens.tokenizer is None
            and config.tokenizer is None
            and model is not None
            and model.reads_weights
        ):
            raise ConfigError(
                "data.tokenizer: the weights were trained with a tokenizer that is not in their folder",
                given=f"no tokenizer.json in {model.pretrained}",
                expected='a tokenizer.json, or "bytes" if the weights were trained on bytes',
                hint='data.tokenizer = "bytes" or "FOLDER"; or data.tokens, with the same texts already tokenized; '
                "or Trainer.run(data), with batches of your own",
            )
        read, source, key = partial(_texts, config, tokens), config.files, "data.files"
    corpus = read(source, key)
    if not config.validation_files:
        return corpus.cut(config.validation)
    return replace(corpus, validation=read(config.validation_files, "data.validation_files"))


def matches(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Return the files that paths and globs match, sorted and without duplicates. Raises TrainingError if nothing matches."""
    paths: set[str] = set()
    for pattern in patterns:
        some = [path for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
        if not some:
            raise TrainingError(
                f"no training data matches {pattern!r}",
                given=f"{key} has {pattern!r}",
                expected="a file, or a glob that matches at least one",
                hint="use paths relative to the config file",
            )
        paths.update(some)
    return sorted(Path(path) for path in paths)


def _texts(config: DataConfig, tokens: Tokens, patterns: tuple[str, ...], key: str) -> Corpus:
    files = _files(patterns, key)
    documents = list(texts_of(files, config.max_bytes))
    if tokens.tokenizer is None:
        return _bytes(config, tokens.vocab_size, documents, files, key)
    ids = tokens.of(documents)
    part = Stream(ids, config.seq_len, key, eos=_eos_id(config, tokens.eos, tokens.vocab_size))
    checked([part], f"{len(ids)} tokens of {key}", config.seq_len)
    return Corpus((part,), part.digest(), len(ids), "tokens", tuple(files))


def _bytes(
    config: DataConfig, vocab_size: int | None, documents: list[Document], files: list[Path], key: str
) -> Corpus:
    """Return the text with one token per byte."""
    if vocab_size is not None:
        for document in documents:
            if (highest := max(document.text, default=0)) >= vocab_size:
                where = f"position {document.text.index(highest)} of {document.name}"
                raise outside(highest, vocab_size, where, _NO_TOKENIZER)
    text = b"".join(document.text for document in documents)
    if len(text) <= config.seq_len:
        raise TrainingError(
            f"{len(text)} bytes of {key} are less than one sample",
            given=f"{len(documents)} files, seq_len = {config.seq_len}"
            + ("" if config.max_bytes is None else f", max_bytes = {config.max_bytes}"),
            expected=f"{config.seq_len + 1} bytes or more: a sample, and the byte after it",
            hint="more files, or a shorter sequence",
        )
    eos = _eos_id(config, None, min(vocab_size or 256, 256))
    part = Stream(np.frombuffer(text, dtype=np.uint8), config.seq_len, "data.files", eos=eos)
    return Corpus((part,), hashlib.sha256(text).digest(), len(text), files=tuple(files[: len(documents)]))


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


def _files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Return the matching files. Without patterns, return the sources of Python's standard library."""
    if patterns:
        return matches(patterns, key)
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise TrainingError(
            "this Python installation lacks the sources of its standard library, which are the default training data",
            given=f"data.files is empty, and {folder} has no *.py",
            hint='name your own text files: [data] files = ["books/*.txt"]',
        )
    return files


def _token_files(config: DataConfig, vocab_size: int | None, patterns: tuple[str, ...], key: str) -> Corpus:
    """Return the token files that match data.tokens or the validation patterns. In data.tokens, the files that match a
    pattern share its weight.
    """
    weighted = key == "data.tokens"
    weights: list[float] = []
    parts: list[Stream] = []
    files: list[Path] = []
    for index, group in enumerate([(pattern,) for pattern in patterns] if weighted else [patterns]):
        paths = matches(group, key)
        some = [_token_file(path, config, vocab_size) for path in paths]
        if weighted and config.weights:
            total = max(1, sum(len(tokens) for tokens in some))
            weights += [config.weights[index] * len(tokens) / total for tokens in some if len(tokens)]
        parts += [tokens for tokens in some if len(tokens)]
        files += paths
    checked(parts, ", ".join(map(str, files[:4])) if weighted else key, config.seq_len)
    digest = hashlib.sha256(b"".join(part.digest() for part in parts)).digest()
    size = sum(len(part.tokens) for part in parts)
    return Corpus(tuple(parts), digest, size, "tokens", tuple(files), tuple(weights))


def _token_file(path: Path, config: DataConfig, vocab_size: int | None) -> Stream:
    """Return a memory-mapped token file, which is read lazily."""
    wanted = (
        "a one-dimensional .npy file of an integer type, or raw little-endian tokens of type data.token_type"
    )
    try:
        if path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(path, mmap_mode="r")
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
    eos = _eos_id(config, None, min(vocab_size or most, most))
    stream = Stream(tokens, config.seq_len, str(path), vocab_size, eos=eos)
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
    """A text. cut: whether the text was truncated."""

    name: str
    text: bytes
    cut: bool = False


def texts_of(files: Iterable[Path], most: int | None) -> Iterator[Document]:
    """Yield each file as a document, up to `most` bytes in total. Raises TrainingError if a file cannot be read."""
    bytes_left = sys.maxsize if most is None else most
    for path in files:
        if bytes_left <= 0:
            return
        try:
            with path.open("rb") as file:
                text = file.read(-1 if most is None else bytes_left)
                cut = bool(len(text) == bytes_left and file.read(1))
        except OSError as error:
            raise TrainingError(
                f"the training data cannot be read: {error.strerror}", given=f"data.files: {path}"
            ) from error
        bytes_left -= len(text)
        form = "JSON lines" if path.suffix in (".jsonl", ".ndjson") else _foreign(text[:8])
        if form or b"\0" in text[:8000]:
            raise TrainingError(
                "a file of the training data is not text",
                given=f"data.files: {path} is {form or 'binary: it has bytes of 0'}",
                expected="plain text, all of which is trained on",
                hint="data.tokens for token files, data.chat for conversations, or a function in data.build that reads "
                "the texts in other formats",
            )
        yield Document(str(path), text, cut)


@final
class Tokens:
    """Tokenizes text. `tokenizer` is None if each byte is a token. Raises TrainingError.

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
        if self._path is not None:
            self._open(self._path)

    def of(self, documents: list[Document]) -> NDArray[Any]:
        """Return the concatenated tokens of all documents, with the `eos` token after each document."""
        tokens = self._made(documents) if self._cache is None else self._kept(documents, self._cache)
        if self.vocab_size is not None and len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise self._outside(documents, self.vocab_size)
        return tokens

    def _kept(self, held: list[Document], cache: Path) -> NDArray[Any]:
        sums = hashlib.sha256(self._facts + f"{self.eos}".encode())
        for document in held:
            sums.update(hashlib.sha256(document.text).digest())
        path = cache / f"tokens-{sums.hexdigest()[:16]}.npy"
        try:
            if not path.exists():
                cache.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f".{path.name}.{os.getpid()}")
                with draft.open("wb") as file:
                    np.save(file, self._made(held))
                os.replace(draft, path)
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise TrainingError(
                "tokens cannot be saved",
                given=f"{path}: {error}",
                expected="a folder train.out with enough space",
            ) from error

    def _outside(self, documents: list[Document], vocab_size: int) -> TrainingError:
        """Return the error for the first token outside the vocabulary."""
        document, ids = next(
            encoded for encoded in self._tokenised(documents) if encoded[1].max(initial=0) >= vocab_size
        )
        place = int((ids >= vocab_size).argmax())
        size = self.tokenizer.get_vocab_size()
        hint = f"use this model's tokenizer; {self._path} has {size} tokens"
        return outside(int(ids[place]), vocab_size, f"position {place} of {document.name}", hint)

    def _made(self, documents: list[Document]) -> NDArray[Any]:
        pieces = [ids for _, ids in self._tokenised(documents)]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        return tokens.astype(np.uint16) if not len(tokens) or tokens.max() < 65_536 else tokens

    def _tokenised(self, documents: list[Document]) -> Iterator[tuple[Document, NDArray[np.uint32]]]:
        end = [] if self.eos is None else [self.eos]
        for first in range(0, len(documents), _AT_ONCE):
            some = documents[first : first + _AT_ONCE]
            texts = [_text(document) for document in some]
            # A template's special tokens would be added to every document, including a second end token.
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for read_document, encoding in zip(some, encoded, strict=True):
                yield read_document, np.array([*encoding.ids, *end], dtype=np.uint32)

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
