"""The tokens of texts, through a tokenizer or as bytes, concatenated and kept for later runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train.data.corpus import Corpus, Samples, Stream, checked, eos_id_of, outside
from meshcomm.train.data.texts import Document, function_texts, texts_of

# The number of documents that are tokenized together, on all cores.
_AT_ONCE = 256
_NO_TOKENIZER: Final = (
    "set data.tokenizer to this model's tokenizer; without a tokenizer, each byte is a token"
)


def text_files(config: DataConfig, tokens: Tokens, files: list[Path], key: str) -> Corpus:
    documents = partial(texts_of, files, config.max_bytes, config.column, tokens.end)
    return tokenized(config, tokens, documents, key, files)


def tokenized(
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


def packed(config: DataConfig, tokens: Tokens, rows: Iterator[Any]) -> Iterator[Samples]:
    """Yield the samples of one epoch of a stream of texts. The last tokens are dropped if they are less than a sample."""
    held: NDArray[Any] = np.empty(0, np.uint32)
    for _, ids in tokens.each(function_texts(config, tokens.end, rows)):
        held = np.concatenate([held, ids])
        if len(held) > config.seq_len:
            part = Stream(held, config.seq_len, eos=tokens.eos_id)
            yield from (part.read(np.array([number])) for number in range(len(part)))
            held = held[len(part) * config.seq_len :]


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
        self.eos_id = eos_id_of(config, self.eos, most)
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
        if (kept := _mapped(path)) is not None:
            return kept
        tokens = self._made(documents())
        # Ranks of other hosts may write the same file.
        draft = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                np.save(file, tokens)
                file.write(_digest(tokens))
            os.replace(draft, path)
            if (kept := _mapped(path)) is not None:
                return kept
            raise OSError("the file has other content than was written")
        except OSError as error:
            draft.unlink(missing_ok=True)
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


def _mapped(path: Path) -> NDArray[Any] | None:
    """Return the tokens of a file, memory-mapped; None if it is missing, or if it does not end with their digest."""
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r")
        with path.open("rb") as file:
            file.seek(-len(_digest(tokens[:0])), os.SEEK_END)
            return tokens if file.read() == _digest(tokens) else None
    except Exception:
        # Whatever is wrong with the file, it is written again.
        return None


def _digest(tokens: NDArray[Any]) -> bytes:
    sums = hashlib.sha256(f"{tokens.dtype.str} {tokens.shape}".encode())
    sums.update(tokens.data)
    return sums.digest()


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
