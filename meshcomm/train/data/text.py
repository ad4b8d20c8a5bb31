"""From text to tokens: documents, a tokenizer, and a file that keeps what it made."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from meshcomm.config import DataConfig, ModelConfig
from meshcomm.errors import TrainingError
from meshcomm.train.data.corpus import outside

NO_TOKENIZER: Final = "data.tokenizer = the tokenizer of this model: without one a byte is a token"
# Documents that are tokenised at once, by all cores.
_AT_ONCE = 256


class Document(NamedTuple):
    """One text, or the tokens of one."""

    name: str
    text: bytes = b""
    tokens: Any = None
    cut: bool = False
    """Whether it was read in part."""


def texts_of(files: Iterable[Path], most: int | None) -> Iterator[Document]:
    """The files, each a document, `most` bytes of all of them; None: all. Raises TrainingError where one cannot be read."""
    left = sys.maxsize if most is None else most
    for path in files:
        if left <= 0:
            return
        try:
            with path.open("rb") as file:
                text = file.read(-1 if most is None else left)
                cut = bool(len(text) == left and file.read(1))
        except OSError as error:
            raise TrainingError(
                f"the training data cannot be read: {error.strerror}", given=f"data.files: {path}"
            ) from error
        left -= len(text)
        yield Document(str(path), text, cut=cut)


def rows_of(config: DataConfig, split: str | None) -> Iterator[Document]:
    """The rows of a folder that save_to_disk wrote, each a document."""
    folder = str(config.dataset)
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise _missing("datasets", f"data.dataset = {folder}") from error
    try:
        found: Any = datasets.load_from_disk(folder)
    except Exception as error:
        raise TrainingError(
            "a folder of datasets cannot be read",
            given=f"data.dataset = {folder}: {type(error).__name__}: {error}",
            expected="a folder that save_to_disk of datasets wrote",
        ) from error
    splits = list(found) if isinstance(found, dict) else []
    if (split not in splits) if splits else split is not None:
        raise TrainingError(
            "the folder of datasets has no such split"
            if split
            else "the folder of datasets has several splits",
            given=f"data.dataset = {folder}, split = {split!r}",
            expected=f"one of {', '.join(splits)}" if splits else "no split: the folder holds one dataset",
            hint=f'data.split = "{splits[0]}"' if splits else "remove data.split",
        )
    rows = found[split] if splits else found
    if config.column not in rows.column_names:
        raise TrainingError(
            f"the dataset has no column {config.column!r}",
            given=f"data.column = {config.column!r}",
            expected=f"one of {', '.join(rows.column_names)}",
        )
    left = sys.maxsize if config.max_bytes is None else config.max_bytes
    for index in range(len(rows)):
        value = rows[index][config.column]
        name = f"row {index} of {folder}"
        if isinstance(value, str):
            text = value.encode()
            if left <= 0:
                return
            yield Document(name, text[:left], cut=len(text) > left)
            left -= len(text)
        elif isinstance(value, list) and all(type(each) is int for each in value):
            yield Document(name, tokens=value)
        else:
            raise TrainingError(
                f"the column {config.column!r} holds neither text nor tokens",
                given=f"{name}: {type(value).__name__}",
                expected="str, or lists of int",
            )


@final
class Tokens:
    """Text through a tokenizer, or as bytes where there is none. Raises TrainingError.

    model: its folder's tokenizer is the default. vocabulary: tokens are below it; None: not known.
    """

    def __init__(
        self,
        config: DataConfig,
        cache: Path | None,
        model: ModelConfig | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._cache, self._config, self._vocab_size = cache, config, vocab_size
        self.tokenizer: Any = None
        self.eos: int | None = None
        self._facts = b""
        self._path = config.tokenizer_of(None if model is None else model.pretrained)
        self._refuses_bytes = config.tokenizer is None and model is not None and model.reads_weights
        # Rows that are tokens already are complete, unless a tokenizer is named for them.
        self._ends_rows = config.tokenizer is not None or config.eos is not None
        if self._path is not None:
            self._open(self._path)

    def of(self, documents: Iterable[Document]) -> NDArray[Any]:
        """The tokens of all documents, one after the other, the token of `eos` after each.

        They are kept in the cache, mapped from there, and made once for the same text and tokenizer.
        """
        held = list(documents)
        tokens = self._kept(held)
        if self._vocab_size is not None and len(tokens) and int(tokens.max()) >= self._vocab_size:
            raise self._outside(held, self._vocab_size)
        return tokens

    def _kept(self, held: list[Document]) -> NDArray[Any]:
        if self._cache is None:
            return self._made(held)
        sums = hashlib.sha256(self._facts + f"{self.eos} {self._ends_rows}".encode())
        for each in held:
            content = each.text if each.tokens is None else json.dumps(each.tokens).encode()
            sums.update(hashlib.sha256(content).digest())
        path = self._cache / f"tokens-{sums.hexdigest()[:16]}.npy"
        try:
            if not path.exists():
                self._cache.mkdir(parents=True, exist_ok=True)
                draft = path.with_name(f".{path.name}.{os.getpid()}")
                with draft.open("wb") as file:
                    np.save(file, self._made(held))
                os.replace(draft, path)
            return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
        except (OSError, ValueError) as error:
            raise TrainingError(
                "tokens cannot be kept", given=f"{path}: {error}", expected="a folder with space, train.out"
            ) from error

    def _outside(self, documents: list[Document], vocab_size: int) -> TrainingError:
        """The error of the first token that the model does not have."""
        document, ids = next(
            each for each in self._tokenised(documents) if each[1].max(initial=0) >= vocab_size
        )
        place = int((ids >= vocab_size).argmax())
        if self.tokenizer is None:
            hint = NO_TOKENIZER
        else:
            size = self.tokenizer.get_vocab_size()
            hint = f"the tokenizer of this model: {self._path} has {size} tokens"
        return outside(int(ids[place]), vocab_size, f"position {place} of {document.name}", hint)

    def _made(self, documents: list[Document]) -> NDArray[Any]:
        found = [ids for _, ids in self._tokenised(documents)]
        tokens = np.concatenate(found) if found else np.empty(0, np.uint32)
        return tokens.astype(np.uint16) if not len(tokens) or tokens.max() < 65_536 else tokens

    def _tokenised(self, documents: list[Document]) -> Iterator[tuple[Document, NDArray[np.uint32]]]:
        end = [] if self.eos is None else [self.eos]
        for first in range(0, len(documents), _AT_ONCE):
            some = documents[first : first + _AT_ONCE]
            for each, ids in zip(some, self._encoded(some), strict=True):
                ends = end if each.tokens is None or self._ends_rows else []
                try:
                    yield each, np.array([*ids, *ends], dtype=np.uint32)
                except (OverflowError, ValueError) as error:
                    raise TrainingError(
                        f"{each.name} has tokens below 0", given=str(error), expected="ids of 0 or more"
                    ) from error

    def _encoded(self, documents: list[Document]) -> Iterable[Any]:
        if any(each.tokens is not None for each in documents):
            return [each.tokens for each in documents]
        if self.tokenizer is None:
            if self._refuses_bytes:
                raise TrainingError(
                    "the weights were trained on tokens of a tokenizer, which their folder does not have",
                    given=f"{documents[0].name}, which is text, and no data.tokenizer",
                    expected='a tokenizer.json; or "bytes", if a byte is a token of these weights',
                    hint='data.tokenizer = "FOLDER"; or data.tokenizer = "bytes"',
                )
            return [np.frombuffer(each.text, np.uint8) for each in documents]
        texts = [_text(each) for each in documents]
        # Special tokens of a template would stand in every document, and ours ends it.
        return (each.ids for each in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _open(self, path: Path) -> None:
        given = (
            f"{'data.tokenizer' if self._config.tokenizer else 'the tokenizer of model.pretrained'} = {path}"
        )
        try:
            import tokenizers  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise _missing("tokenizers", given) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_bytes()
            self.tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:
            raise TrainingError(
                "the tokenizer cannot be read",
                given=f"{given}: {error}",
                expected="a tokenizer.json of tokenizers, or a folder with one",
                hint="AutoTokenizer.from_pretrained(...).save_pretrained(folder) writes one",
            ) from error
        # What a sample is, is said by data.seq_len.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        said = self._config.eos or _eos_beside(file)
        if said is not None:
            self.eos = self.tokenizer.token_to_id(said)
            if self.eos is None:
                raise TrainingError(
                    f"the tokenizer has no token {said!r}",
                    given=f"{given}, eos = {said!r}",
                    expected="a token of its vocabulary",
                    hint="data.eos = the token that ends a text",
                )
        self._facts = hashlib.sha256(content).digest()


def _text(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        # A text that was cut may end within a character.
        if document.cut and error.start >= len(document.text) - 3:
            return document.text[: error.start].decode()
        raise TrainingError(
            "the text is not UTF-8",
            given=f"{document.name}: byte {error.start}",
            expected="UTF-8, which the tokenizer takes",
            hint="other files; or no data.tokenizer, which trains on bytes",
        ) from error


def _eos_beside(file: Path) -> str | None:
    """The eos_token that a folder of transformers names."""
    try:
        said = json.loads((file.parent / "tokenizer_config.json").read_text()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    said = said.get("content") if isinstance(said, dict) else said
    return said if isinstance(said, str) else None


def _missing(package: str, given: str) -> TrainingError:
    return TrainingError(
        f"{package} is not installed",
        given=given,
        expected=f"the package {package}",
        hint="pip install datasets" if package == "datasets" else "pip install 'meshcomm[hf]'",
    )
