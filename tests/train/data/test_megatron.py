"""Megatron-LM's indexed datasets, written by numpy as its format is defined."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcomm.config import DataConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train import data as text
from meshcomm.train.data import Batches, Stream

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
# Documents of one or more sequences; the fourth has no tokens.
DOCUMENTS = [[[1, 2, 3], [4, 5]], [[6]], [[7, 8, 9, 10, 11, 12, 13]], [[]], [[14, 15], [16, 17, 18]]]


def write(
    path: Path,
    dtype: str = "int32",
    documents: Sequence[Sequence[Sequence[int]]] = DOCUMENTS,
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
    code: int | None = None,
    **changes: Any,
) -> str:
    """Write PATH.bin and PATH.idx. changes: other arrays in place of those of the index."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    arrays: dict[str, Any] = {
        "lengths": np.array(lengths, np.int32),
        "places": np.array([0, *np.cumsum(lengths)[:-1]], np.int64) * tokens.itemsize,
        "bounds": np.array([0, *np.cumsum([len(document) for document in documents])], np.int64),
        "modes": np.empty(0, np.int8),
    } | changes
    header = magic + struct.pack(
        "<QBQQ", version, code or CODES[dtype], len(sequences), len(arrays["bounds"])
    )
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays.values()))
    tokens.tofile(path.with_suffix(".bin"))
    return str(path.with_suffix(".bin"))


@pytest.mark.parametrize("dtype", [name for name in CODES if "float" not in name])
def test_the_type_is_that_of_the_index_and_documents_are_kept(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "a", dtype)
    flat = list(range(1, 19))
    (part,) = text.load(DataConfig(tokens=(path,), seq_len=4), vocab_size=19).parts
    assert isinstance(part, Stream) and isinstance(part.tokens, np.memmap)
    assert part.tokens.tolist() == flat and part.tokens.dtype == np.dtype(dtype)
    masked = DataConfig(tokens=(path,), seq_len=4, document_mask=True, validation=0.3)
    corpus = text.load(masked, vocab_size=19)
    assert corpus.validation is not None
    # The document of each token, from the documents themselves.
    of_token = [index for index, document in enumerate(DOCUMENTS) for sequence in document for _ in sequence]
    for parts, first in ((corpus.parts, 0), (corpus.validation.parts, 3)):
        for number in range(len(parts[0])):
            (inputs,), (targets,), (numbers,) = parts[0].read(np.array([number]))
            start = 4 * (first + number)
            found = of_token[start : start + 5]
            assert inputs.tolist() == flat[start : start + 4]
            assert targets.tolist() == [
                flat[start + place + 1] if found[place] == found[place + 1] else -100 for place in range(4)
            ]
            assert np.diff(numbers).tolist() == [int(a != b) for a, b in pairwise(found[:4])]
    # Another division into documents is other data.
    write(tmp_path / "a", dtype, bounds=np.array([0, 2, 3, 4, 5, 6, 7]))
    assert text.load(masked).digest != corpus.digest


def test_indexes_that_do_not_describe_the_tokens_are_refused(tmp_path: Path) -> None:
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "another magic": ({"magic": b"TNTIDX\0\0\0"}, "a.idx begins with b'TNTIDX"),
        "another version": ({"version": 2}, "version 2"),
        "an unknown type": ({"code": 9}, "type code 9"),
        "numbers that are not integers": ({"dtype": "float32"}, "type float32"),
        "another type": ({"code": 8}, "sequences that do not follow one another"),
        "modes": ({"modes": np.zeros(7, np.int8)}, "modes of multimodal data"),
        "a longer index": ({"modes": np.zeros(3, np.int8)}, "but its header states"),
        "gaps": ({"places": np.arange(0, 56, 8, np.int64)}, "sequences that do not follow one another"),
        "negative lengths": ({"lengths": -np.ones(7, np.int32)}, "sequences that do not follow one another"),
        "no documents": ({"bounds": np.array([], np.int64)}, "documents that do not cover"),
        "documents out of order": ({"bounds": np.array([0, 5, 3, 7])}, "documents that do not cover"),
        "documents missing": ({"bounds": np.array([0, 2, 3])}, "documents that do not cover"),
    }
    for name, (changes, said) in cases.items():
        path = write(tmp_path / "a", **changes)
        with pytest.raises(TrainingError, match="a token file cannot be read") as caught:
            text.load(DataConfig(tokens=(path,), seq_len=4))
        assert said in str(caught.value.given) and "a.bin: " in str(caught.value.given), name
    path = write(tmp_path / "a")
    tokens, index = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    for name, content in (
        ("a.bin", tokens[:-4]),
        ("a.bin", tokens + tokens),
        ("a.bin", b""),
        ("a.idx", index[:20]),
    ):
        write(tmp_path / "a")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrainingError, match=r"72 bytes of int32|a\.idx begins with b'MMIDIDX"):
            text.load(DataConfig(tokens=(path,), seq_len=4))


def test_settings_of_raw_files_are_refused_for_files_with_an_index(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    np.arange(40, dtype="<u2").tofile(tmp_path / "raw.bin")
    for settings in ({"token_type": "uint16"}, {"document_mask": True, "eos_id": 0}):
        config = DataConfig(tokens=(path,), seq_len=4, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no effect on these files"):
            text.load(config)
        both = text.load(config.model_copy(update={"tokens": (path, f"{tmp_path}/raw.bin")}))
        assert both.samples == 4 + 9
    # The suffixes in capitals.
    for old, new in (("a.bin", "B.BIN"), ("a.idx", "B.IDX")):
        (tmp_path / new).write_bytes((tmp_path / old).read_bytes())
    (part,) = text.load(DataConfig(tokens=(f"{tmp_path}/B.BIN",), seq_len=4)).parts
    assert isinstance(part, Stream) and part.tokens.dtype == np.int32
    with pytest.raises(TrainingError, match=r"whose tokens are in its \.bin file"):
        text.load(DataConfig(tokens=(str(tmp_path / "a.idx"),), seq_len=4))


def test_files_with_an_index_and_others_are_mixed(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "uint16", [[list(range(1, 42))]] * 3)
    np.save(tmp_path / "b0.npy", np.arange(100, 201))
    np.save(tmp_path / "b1.npy", np.arange(300, 341))
    corpus = text.load(DataConfig(tokens=(path, f"{tmp_path}/b*.npy"), weights=(1.0, 1.0), seq_len=4))
    assert [len(part) for part in corpus.parts] == [30, 25, 10]
    data = Batches(corpus, global_batch_size=1, seed=0)
    inputs = [data(step)[0][0, 0].item() for step in range(1, 65)]
    # Half of 65 samples for each entry, whose files share it by their sizes.
    found = [sum(low <= first < low + 100 for first in inputs) for low in (0, 100, 300)]
    assert found == [32, 23, 9]
