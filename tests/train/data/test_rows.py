"""Rows of files: JSON lines, Parquet, Arrow, compressed files and saved Hugging Face datasets, beside their own libraries."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
import pytest

from meshcomm.config import DataConfig
from meshcomm.errors import ConfigError, MeshcommError, TrainingError
from meshcomm.train import data as text
from meshcomm.train.data import Batches
from meshcomm.train.data.rows import rows_of
from tests.train.data.test_chat import folder_of
from tests.train.data.test_load import tokenizer, tokens_of

# A line separator, which JSON need not escape, and an empty text.
TEXTS = [f"row {number} " + "é\u2028\n" * (number % 3) for number in range(1200)] + [""]
TABLE = pa.table({"number": range(len(TEXTS)), "text": TEXTS})


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def as_lines(path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in TABLE.to_pylist()]
    # Blank lines are skipped.
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def as_list(path: Path) -> None:
    path.write_text(json.dumps(TABLE.to_pylist(), indent=1), encoding="utf-8")


def as_parquet(path: Path) -> None:
    pa.parquet.write_table(TABLE, path, row_group_size=999)


def as_arrow(path: Path) -> None:
    with pa.ipc.new_file(str(path), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=700)


def as_stream(path: Path) -> None:
    with pa.ipc.new_stream(str(path), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=700)


def in_libraries(path: Path) -> list[str]:
    """The texts of a file as its own library reads them."""
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path)["text"].to_pylist()  # type: ignore[no-any-return]
    if path.suffix == ".jsonl":
        return pa.json.read_json(path)["text"].to_pylist()  # type: ignore[no-any-return]
    if path.suffix == ".json":
        return [row["text"] for row in json.loads(path.read_text(encoding="utf-8"))]
    with pa.memory_map(str(path)) as file:
        try:
            table = pa.ipc.open_file(file).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_stream(file).read_all()
        return table["text"].to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", as_lines),
        ("a.json", as_list),
        ("a.parquet", as_parquet),
        ("a.arrow", as_arrow),
        ("b.arrow", as_stream),
    ],
)
def test_rows_are_those_that_the_library_of_the_format_reads(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    write(path)
    texts = in_libraries(path)
    assert texts == TEXTS
    plain = text.load(DataConfig(files=(str(path),), seq_len=8))
    assert bytes(tokens_of(plain)) == "".join(f"{each}\n" for each in texts).encode()
    for suffix, pack in (
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstd),
    ):
        packed = tmp_path / f"{name}{suffix}"
        packed.write_bytes(pack(path.read_bytes()))
        if suffix == ".zst" and write in (as_parquet, as_arrow):
            # These are read from their end.
            continue
        again = text.load(DataConfig(files=(str(packed),), seq_len=8))
        assert again.digest == plain.digest and again.files == (packed,)


def test_streams_that_follow_one_another_are_one_text(tmp_path: Path) -> None:
    large = np.random.default_rng(0).bytes(30_000).hex().encode()
    for suffix, pack in ((".bz2", bz2.compress), (".xz", lzma.compress), (".gz", gzip.compress)):
        # Streams may be empty, and followed by zeros.
        content = pack(large) + pack(b"") + pack(b" and more") + b"\0" * 9000
        (tmp_path / f"a.txt{suffix}").write_bytes(content)
        corpus = text.load(DataConfig(files=(f"{tmp_path}/a.txt{suffix}",), seq_len=8))
        assert bytes(tokens_of(corpus)) == large + b" and more", suffix


def test_compressed_text_is_one_document(tmp_path: Path) -> None:
    content = b"one two\nthree\n" * 50
    (tmp_path / "a.txt").write_bytes(content)
    for suffix, pack in (
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", zstd),
    ):
        (tmp_path / f"a.txt{suffix}").write_bytes(pack(content))
        corpus = text.load(DataConfig(files=(f"{tmp_path}/a.txt{suffix}",), seq_len=8))
        assert bytes(tokens_of(corpus)) == content
        words = DataConfig(
            files=(f"{tmp_path}/a.txt{suffix}",), seq_len=8, tokenizer=str(tokenizer(tmp_path / "m"))
        )
        assert tokens_of(text.load(words)) == [1, 2, 3] * 50 + [4]
        cut = DataConfig(files=(f"{tmp_path}/a.txt{suffix}",), seq_len=8, max_bytes=20)
        assert bytes(tokens_of(text.load(cut))) == content[:20]


def test_each_row_ends_as_a_document_and_is_tokenised_once(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({"content": ["one two", "", "three"], "text": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    (tmp_path / "b.txt").write_text("two")
    config = DataConfig(
        files=(f"{tmp_path}/a.parquet", f"{tmp_path}/b.txt"),
        column="content",
        seq_len=2,
        tokenizer=str(tokenizer(tmp_path / "m")),
        document_mask=True,
    )
    corpus = text.load(config, cache=tmp_path / "out")
    assert tokens_of(corpus) == [1, 2, 4, 4, 3, 4, 2, 4] and len(corpus.files) == 2
    (kept,) = (tmp_path / "out").iterdir()
    made = kept.stat().st_ino
    assert text.load(config, cache=tmp_path / "out").digest == corpus.digest and kept.stat().st_ino == made
    # The bytes of a row end with the token that ends a document.
    rows = config.model_copy(update={"tokenizer": "bytes", "eos_id": 0, "files": config.files[:1]})
    assert bytes(tokens_of(text.load(rows))) == b"one two\0\0three\0"
    most = config.model_copy(update={"max_bytes": 8})
    assert tokens_of(text.load(most)) == [1, 2, 4, 4, 0, 4]


def test_a_saved_dataset_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"content": TEXTS[:300], "n": list(range(300))}).filter(
        lambda row: row["n"] % 3
    )
    rows.shuffle(seed=1).save_to_disk(tmp_path / "one", num_shards=3)
    found = text.load(DataConfig(files=(f"{tmp_path}/one",), column="content", seq_len=8))
    expected = datasets.load_from_disk(tmp_path / "one")["content"]
    assert bytes(tokens_of(found)) == "".join(f"{each}\n" for each in expected).encode()
    assert len(found.files) == 3
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    with pytest.raises(TrainingError, match="a folder of several splits") as caught:
        text.load(DataConfig(files=(f"{tmp_path}/two",), seq_len=8))
    assert caught.value.hint == f'data.files = ["{tmp_path}/two/test"]'


def test_broken_files_and_rows_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, write in (("a.jsonl", as_lines), ("a.parquet", as_parquet), ("a.arrow", as_stream)):
        write(Path(name))
    lines = Path("a.jsonl").read_bytes()
    # Random text is not smaller when compressed.
    noise = json.dumps({"text": np.random.default_rng(0).bytes(9000).hex()}).encode()
    parquet, arrow = Path("a.parquet").read_bytes(), Path("a.arrow").read_bytes()
    cases: dict[str, tuple[bytes, str]] = {
        "cut.jsonl": (lines[:-4], "cut.jsonl:2401: JSONDecodeError"),
        "number.jsonl": (b'{"text": "a"}\n\n{"text": 5}\n', "number.jsonl:3: 5"),
        "none.jsonl": (b'{"text": "a"}\n{"text": null}\n', "none.jsonl:2: None"),
        "other.jsonl": (b'{"text": "a"}\n{"txt": "a", "n": 1}\n', "other.jsonl:2: only txt, n"),
        "bare.jsonl": (b'{"text": "a"}\n"b"\n', "bare.jsonl:2: ValueError: a str"),
        "half.jsonl": (b'{"text": "\\ud800"}\n', "half.jsonl:1: '\\ud800'"),
        "latin.jsonl": ('{"text": "é"}\n'.encode("latin-1"), "latin.jsonl:1: UnicodeDecodeError"),
        "short.jsonl.gz": (gzip.compress(lines)[:-9], "short.jsonl.gz:"),
        "bits.jsonl.xz": (lzma.compress(noise)[:-99], "bits.jsonl.xz:"),
        "plain.jsonl.gz": (lines, "plain.jsonl.gz:0: BadGzipFile"),
        "short.jsonl.zst": (zstd(noise)[:-99], "short.jsonl.zst:"),
        "deep.jsonl": (b'{"text": ' + b"[" * 99_999, "deep.jsonl:1: RecursionError"),
        # What follows the first stream: a damaged one, a part of one, and none.
        "junk.txt.bz2": (bz2.compress(b"text") + b"junk", "junk.txt.bz2: Invalid data stream"),
        "junk.txt.xz": (lzma.compress(b"text") + b"junk" * 4, "junk.txt.xz: Input format not supported"),
        "junk.jsonl.xz": (lzma.compress(b'{"text": "a"}\n') + b"\1", "junk.jsonl.xz:1: EOFError"),
        "next.jsonl.bz2": (bz2.compress(b'{"text": "a"}\n') * 2 + b"B", "next.jsonl.bz2:2: EOFError"),
        "empty.jsonl.bz2": (b"", "empty.jsonl.bz2:0: EOFError"),
        "plain.txt.gz": (b"text", "plain.txt.gz: Not a gzipped file"),
        "packed.parquet.zst": (zstd(parquet), "packed.parquet.zst:0: "),
        "short.parquet": (parquet[:-99], "short.parquet:0: ArrowInvalid"),
        "short.arrow": (arrow[: len(arrow) // 2], "short.arrow:"),
        "text.parquet": (b"text", "text.parquet:0: ArrowInvalid"),
        "gone.parquet": (b"", "gone.parquet:0: ArrowInvalid"),
        "other.txt": (parquet, "other.txt is a Parquet file"),
    }  # fmt: skip
    for name, (content, said) in cases.items():
        Path(name).write_bytes(content)
        with pytest.raises(TrainingError) as caught:
            text.load(DataConfig(files=(name,), seq_len=2))
        assert said in str(caught.value.given) and caught.value.expected, (name, caught.value.given)
    pa.parquet.write_table(
        TABLE, "flipped.parquet", compression="none", use_dictionary=False, write_page_checksum=True
    )
    flipped = Path("flipped.parquet").read_bytes().replace(b"row 7 ", b"row 8 ")
    Path("flipped.parquet").write_bytes(flipped)
    with pytest.raises(MeshcommError, match=r"flipped\.parquet:.*CRC"):
        text.load(DataConfig(files=("flipped.parquet",), seq_len=2))
    for files, column, said in (
        (["a.parquet"], "content", "a.parquet:0: ValueError: the columns are number, text"),
        (["a.parquet"], "number", "a.parquet:1: 0"),
        (["a.jsonl"], "content", "a.jsonl:1: only number, text"),
    ):
        with pytest.raises(TrainingError) as caught:
            text.load(DataConfig(files=files, column=column, seq_len=2))
        assert said in str(caught.value.given) and "data.column" in str(caught.value.hint)


def test_settings_without_effect_on_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 9)
    with pytest.raises(ConfigError, match=r"data\.column: no effect on these files"):
        text.load(DataConfig(files=(f"{tmp_path}/a.txt",), column="content", seq_len=2))
    for settings in (
        {"tokens": ("a.bin",), "column": "x"},
        {"build": "a:b", "column": "x"},
        {"weights": (1.0,)},
    ):
        with pytest.raises(ConfigError, match="no effect"):
            DataConfig(seq_len=2, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="1 weights for 2 entries of files"):
        DataConfig(seq_len=2, files=("a", "b"), weights=(1.0,))


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "some"}\n' * 9))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TrainingError, match="pyarrow is not installed") as caught:
        list(rows_of(tmp_path / "a.parquet", ("text",)))
    assert caught.value.hint == "pip install 'meshcomm[data]'"
    assert text.load(DataConfig(files=(f"{tmp_path}/a.jsonl.gz",), seq_len=2)).size == 45


# -- conversations --------------------------------------------------------------------------------


def test_pairs_are_conversations_in_every_format(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pairs = [{"prompt": f"q{number}", "completion": f"a{number}"} for number in range(9)]
    talks: list[Any] = [
        {
            "prompt": pair["prompt"],
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {
                    "role": "assistant",
                    "content": pair["completion"],
                    **({"tools": "x"} if number == 5 else {}),
                },
            ],
        }
        for number, pair in enumerate(pairs)
    ]
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, pairs)).encode()))
    pa.parquet.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    # Arrow gives each message the keys of all others; transformers drops those without a value.
    pa.parquet.write_table(pa.Table.from_pylist(talks), tmp_path / "talks.parquet")
    template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ '!' if 'tools' in m and m.tools != 'x' }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    base = DataConfig(
        chat=("x",),
        answers_only=True,
        document_mask=True,
        seq_len=32,
        tokenizer=str(folder_of(tmp_path / "t", template)),
    )
    digests = set()
    for name in ("pairs.jsonl.gz", "pairs.parquet", "talks.json", "talks.parquet"):
        corpus = text.load(base.model_copy(update={"chat": (f"{tmp_path}/{name}",)}))
        digests.add(corpus.digest)
        (part,) = corpus.parts
        inputs, targets, _ = part.read(np.array([0]))
        assert "".join(map(chr, inputs[0][:16])) == "u:q0;a:a0;u:q1;a:"[:16]
        assert "".join(chr(token) if token > 0 else "_" for token in targets[0][:9]) == "______a0;"
    assert len(digests) == 1
    for row, said in (
        ({"prompt": "a"}, "'prompt': 'a'"),
        ({"prompt": 1, "completion": "b"}, "1"),
        ({"messages": None}, "None"),
        (talks[0] | {"prompt": "another"}, "another"),
        ({"completion": "another"} | talks[0], "another"),
    ):
        (tmp_path / "bad.jsonl").write_text(json.dumps(pairs[0]) + "\n" + json.dumps(row))
        with pytest.raises(TrainingError, match=r"a row (is not a conversation|has messages and)") as caught:
            text.load(base.model_copy(update={"chat": (f"{tmp_path}/bad.jsonl",)}))
        assert "bad.jsonl:2: " in str(caught.value.given) and said in str(caught.value.given)


# -- mixtures -------------------------------------------------------------------------------------


def test_kinds_of_files_are_mixed_by_weight_and_continue_on_another_number_of_ranks(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"text": ["a" * 7] * 60}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("b" * 321)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "ccccccc"}\n' * 30))
    files = tuple(f"{tmp_path}/{name}" for name in ("a.parquet", "b.txt", "c.jsonl.gz"))
    config = DataConfig(files=files, weights=(3.0, 1.0, 1.0), seq_len=8)
    corpus = text.load(config)
    sizes = [len(part) for part in corpus.parts]
    assert sizes == [59, 40, 29]

    def numbers(first: int, last: int, size: int, read: int = 0) -> list[tuple[int, int]]:
        """The parts and samples of some steps, over all ranks."""
        ranks = [
            Batches(
                text.load(config),
                global_batch_size=8,
                seed=3,
                coord=coord,
                size=size,
                after=(first - 1, read),
            )
            for coord in range(size)
        ]
        return [
            pair
            for step in range(first, last + 1)
            for rank in ranks
            for pair in zip(*(places.tolist() for places in rank.places(step)), strict=True)
        ]

    whole = numbers(1, 81, 1)
    assert numbers(1, 10, 2) + numbers(11, 40, 4, read=80) + numbers(41, 81, 1, read=320) == whole
    for part, (size, share) in enumerate(zip(sizes, (77, 26, 26), strict=True)):
        assert sum(index == part for index, _ in whole[:129]) == share
        # After five epochs, every sample of a source was read equally often, or once more.
        times = [whole[: 5 * 129].count((part, sample)) for sample in range(size)]
        assert set(times) <= {5 * share // size, 5 * share // size + 1} and sum(times) == 5 * share
    # The samples are those of the files.
    some = Batches(corpus, global_batch_size=8, seed=3)(1)[0]
    assert {chr(row[0]) for row in some.tolist()} <= {"a", "b", "c"}
