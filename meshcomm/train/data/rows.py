"""Read files that are compressed, or that consist of rows: JSON lines, Parquet and Arrow."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

from meshcomm.errors import MeshcommError, TrainingError

_OPENS: Final[dict[str, Callable[..., Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_STREAMS: Final[dict[str, Callable[[], Any]]] = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
_JSON: Final = (".jsonl", ".ndjson", ".json")
_COLUMNS: Final = (".parquet", ".arrow")
# The number of rows of a Parquet file that are decoded together.
_AT_ONCE: Final = 1024
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


def has_rows(path: Path) -> bool:
    """Return whether a file has rows, by its suffix, which may precede that of a compression."""
    return _kind(path) in (*_JSON, *_COLUMNS)


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row, from 1, and its values in the `columns` that it has. In JSON lines, the number is that of
    the line, and blank lines are skipped.

    Raises TrainingError, which names the file and the row, if the file has another format or is incomplete.
    """
    number, kind = 0, _kind(path)
    try:
        with opened(path) as file:
            rows: Iterable[Any] = _columns(path, file, kind, columns) if kind in _COLUMNS else file
            if kind in _JSON and file.peek(1)[:1] == b"[":
                rows = json.load(file)
            for number, row in enumerate(rows, 1):
                if isinstance(row, bytes):
                    if not row.strip():
                        continue
                    row = json.loads(row)
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, not an object with columns")
                yield number, row
    except MeshcommError:
        raise
    except Exception as error:
        raise TrainingError(
            "a row of the data cannot be read",
            given=f"{path}:{number}: {type(error).__name__}: {error}",
            expected=f"a complete file that has the format of its suffix, {kind}, "
            f"with a column {' or '.join(map(repr, columns))}",
            hint="the suffixes .jsonl, .ndjson, .json (JSON lines, or one list), .parquet and .arrow; .gz, .bz2, .xz and .zst after "
            "them; data.column names the column of texts",
        ) from error


def opened(path: Path) -> io.BufferedReader:
    """Open a file for reading bytes, decompressed if its last suffix is that of a compression."""
    suffix = suffix_of(path)
    if suffix == ".zst":
        arrow = _pyarrow(path)
        return io.BufferedReader(arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd"))
    if suffix in _STREAMS and not is_table(path):
        return io.BufferedReader(_Streams(path, _STREAMS[suffix]))
    return _OPENS.get(suffix, open)(path, "rb")  # type: ignore[no-any-return]


def suffix_of(path: Path) -> str:
    """Return a file's last suffix, in lower case."""
    return path.suffix.lower()


def is_table(path: Path) -> bool:
    """Return whether the rows of a file are stored by columns."""
    return _kind(path) in _COLUMNS


def _kind(path: Path) -> str:
    return suffix_of(path.with_suffix("") if suffix_of(path) in (*_OPENS, ".zst") else path)


@final
class _Streams(io.RawIOBase):
    """The streams of a .bz2 or .xz file, one after the other; Python's own readers stop in silence at a stream that is damaged
    at its start. They are used for tables, which say where they end and which are not read in order.
    """

    def __init__(self, path: Path, new: Callable[[], Any]) -> None:
        self._file, self._new, self._part = path.open("rb"), new, new()

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        data = b""
        while not data:
            block = b""
            if self._part.eof:
                # Streams may be padded with zeros.
                block = self._part.unused_data.lstrip(b"\0")
                while not block and (more := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                    block = more.lstrip(b"\0")
                if not block:
                    return 0
                self._part = self._new()
            elif self._part.needs_input and not (block := self._file.read(io.DEFAULT_BUFFER_SIZE)):
                raise EOFError("the file ends before the end of its last stream")
            data = self._part.decompress(block, len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _columns(
    path: Path, file: io.BufferedReader, kind: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that is stored by columns. Raises ValueError if it has none of the columns."""
    arrow = _pyarrow(path)
    if kind == ".parquet":
        table = arrow.parquet.ParquetFile(file, page_checksum_verification=True)
        names = table.schema_arrow.names
    else:
        in_order = file.peek(6)[:6] != b"ARROW1"
        table = arrow.ipc.open_stream(file) if in_order else arrow.ipc.open_file(file)
        names = table.schema.names
    some = [column for column in columns if column in names]
    if not some:
        raise ValueError(f"the columns are {', '.join(names)}")
    if kind == ".parquet":
        batches = table.iter_batches(_AT_ONCE, columns=some)
    else:
        batches = table if in_order else map(table.get_batch, range(table.num_record_batches))
    for batch in batches:
        yield from batch.select(some).to_pylist()


def _pyarrow(path: Path) -> Any:
    """Return the package. Raises TrainingError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise TrainingError(
            "pyarrow is not installed",
            given=f"{path}",
            expected="the package pyarrow, which reads .parquet, .arrow and .zst",
            hint="pip install 'meshcomm[data]'",
        ) from error
    return pyarrow


def foreign_format(start: bytes) -> str:
    """Return the format of a file that starts like this, or "" if it is none of `_FORMATS`."""
    return next((name for magic, name in _FORMATS.items() if start.startswith(magic)), "")
