"""Texts as documents: text files, the rows of files, and the rows that a function returned."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from meshcomm.config import DataConfig
from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.train.data.corpus import of_function
from meshcomm.train.data.rows import foreign_format, has_rows, opened, rows_of


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


def function_texts(config: DataConfig, end: bytes, data: Any) -> Iterator[Document]:
    """Yield the texts of the rows that a function returned."""
    return _row_texts(_function_rows(str(config.build), data), Path(str(config.build)), config.column, end)


def _function_rows(name: str, data: Any) -> Iterator[tuple[int, Any]]:
    rows = iter(data if isinstance(data, Iterable) else map(data.__getitem__, range(len(data))))
    for number in count(1):
        with of_function(name, f"row {number}"):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield number, row


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
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            "the training data cannot be read",
            given=f"data.files: {path}: {error}",
            expected="a file of text, compressed if its suffix is .gz, .bz2, .xz or .zst",
        ) from error
    form = foreign_format(text[:8])
    if form or b"\0" in text[:8000]:
        raise TrainingError(
            "a file of the training data is not text",
            given=f"data.files: {path} is {form or 'binary: it has bytes of 0'}",
            expected="plain text, all of which is trained on, or a format that its suffix names, such as .txt.gz, .jsonl or .parquet",
            hint="data.tokens for token files, data.chat for conversations, or a function in data.build that reads "
            "the texts in other formats",
        )
    return text
