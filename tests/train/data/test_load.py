"""Data that `[data]` names: text, tokenizers, token files, and data that are refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshcomm.config import DataConfig, load_config
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train import data as text
from meshcomm.train.data import Batches, Corpus, Stream
from tests.sizes import model_of, train_of


def tokens_of(corpus: Corpus) -> list[int]:
    found = []
    for part in corpus.parts:
        assert isinstance(part, Stream)
        found += part.tokens.tolist()
    return found


def tokenizer(folder: Path) -> Path:
    """A word tokenizer for every word of the texts and <eos>; the folder names <eos> as transformers does."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<eos>": 4}, "[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    return folder


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    corpus = text.load(DataConfig(seq_len=8, max_bytes=100_000))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert corpus.size == 100_000
    (part,) = corpus.parts
    assert isinstance(part, Stream)
    assert part.tokens.tobytes() == b"".join(file.read_bytes() for file in files)[:100_000]
    assert list(corpus.files) == files[: len(corpus.files)]


def test_files_are_sorted_and_read_as_often_as_entries_match_them(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name * 3)
    once = text.load(DataConfig(files=(f"{tmp_path}/b.txt", f"{tmp_path}/a*"), seq_len=4))
    assert bytes(tokens_of(once)) == b"a.txta.txta.txtb.txtb.txtb.txt"
    entries = f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"
    twice = text.load(DataConfig(files=entries, seq_len=4))
    assert bytes(tokens_of(twice)) == b"a.txt" * 3 + b"b.txt" * 6
    assert [file.name for file in twice.files] == ["a.txt", "b.txt", "b.txt"]
    mixed = text.load(DataConfig(files=entries, weights=(1.0, 1.0), seq_len=4))
    assert bytes(tokens_of(mixed)) == bytes(tokens_of(twice))
    np.save(tmp_path / "a.npy", np.arange(9))
    tokens = text.load(DataConfig(tokens=(f"{tmp_path}/a.npy",) * 3, seq_len=4))
    assert tokens_of(tokens) == [*range(9)] * 3


@pytest.mark.parametrize(
    ("files", "what", "given"),
    [
        ("nowhere/*.txt", "no training data matches 'nowhere/*.txt'", "data.files has 'nowhere/*.txt'"),
        (
            "short.txt",
            "the data is less than one sample",
            "4 bytes of text of data.files, seq_len = 4",
        ),
    ],
)
def test_missing_and_short_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, what: str, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("abcd")
    with pytest.raises(TrainingError) as caught:
        text.load(DataConfig(files=(files,), seq_len=4))
    assert (caught.value.what, caught.value.given) == (what, given) and caught.value.hint


def test_text_through_a_tokenizer_ends_each_document_and_is_tokenised_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two four")
    (tmp_path / "b.txt").write_text("three")
    words = tokenizer(tmp_path / "model")
    files = (f"{tmp_path}/*.txt",)
    for named in (words, words / "tokenizer.json"):
        config = DataConfig(files=files, tokenizer=str(named), seq_len=2)
        corpus = text.load(config, vocab_size=5, cache=tmp_path / "out")
        assert tokens_of(corpus) == [1, 2, 0, 4, 3, 4] and corpus.unit == "tokens" and corpus.size == 6
    (kept,) = (tmp_path / "out").iterdir()
    assert np.load(kept).dtype == np.uint16
    # The tokens are read from there, not made again, unless they were changed.
    made, content = kept.stat().st_ino, kept.read_bytes()
    assert tokens_of(text.load(config, cache=tmp_path / "out")) == [1, 2, 0, 4, 3, 4]
    assert kept.stat().st_ino == made
    flipped = [
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in range(len(content))
    ]
    for other in (b"", content[:-1], content[:-32], content[:60], content + b"\0", *flipped[::5]):
        kept.unlink()
        kept.write_bytes(other)
        assert tokens_of(text.load(config, cache=tmp_path / "out")) == [1, 2, 0, 4, 3, 4]
        assert kept.read_bytes() == content and len([*kept.parent.iterdir()]) == 1
    assert tokens_of(text.load(config)) == [1, 2, 0, 4, 3, 4]
    (tmp_path / "b.txt").write_text("three three")
    assert tokens_of(text.load(config, cache=tmp_path / "out")) == [1, 2, 0, 4, 3, 3, 4]
    other = config.model_copy(update={"eos": "[UNK]"})
    assert tokens_of(text.load(other, cache=tmp_path / "out")) == [1, 2, 0, 0, 3, 3, 0]
    cut = config.model_copy(update={"max_bytes": 7})
    assert tokens_of(text.load(cut)) == [1, 2, 4]


def test_what_a_tokenizer_cannot_do_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "latin.txt").write_bytes("één".encode("latin-1"))
    words = str(tokenizer(tmp_path / "model"))
    base = DataConfig(files=(f"{tmp_path}/a.txt",), tokenizer=words, seq_len=2)
    cases: list[tuple[dict[str, Any], int | None, str]] = [
        ({"tokenizer": str(tmp_path / "none")}, None, "the tokenizer cannot be read"),
        ({"tokenizer": str(tmp_path / "a.txt")}, None, "the tokenizer cannot be read"),
        ({"eos": "</s>"}, None, "the tokenizer has no token '</s>'"),
        ({"files": (f"{tmp_path}/latin.txt",)}, None, "the text is not UTF-8"),
        ({}, 4, "the data has token 4, but the model's vocabulary is 0 to 3"),
        ({"seq_len": 9}, None, "the data is less than one sample"),
    ]
    for change, vocab_size, what in cases:
        with pytest.raises(TrainingError) as caught:
            text.load(base.model_copy(update=change), vocab_size=vocab_size)
        assert caught.value.what == what and caught.value.given and caught.value.hint


def test_token_files_are_mapped_and_mixed_by_weight(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(101, dtype=np.int32))
    np.arange(1000, 1201, dtype="<u2").tofile(tmp_path / "b.bin")
    paths = (f"{tmp_path}/a.npy", f"{tmp_path}/b.bin")
    corpus = text.load(DataConfig(tokens=paths, weights=(3.0, 1.0), seq_len=10), vocab_size=1201)
    assert [len(part) for part in corpus.parts] == [10, 20] and corpus.size == 302
    assert all(isinstance(part, Stream) and isinstance(part.tokens, np.memmap) for part in corpus.parts)
    many = [Batches(corpus, global_batch_size=6, seed=0)(step)[0] for step in range(1, 101)]
    share = float((torch.cat(many) < 1000).float().mean())
    assert 0.7 < share < 0.8
    assert {row[0] % 10 for row in torch.cat(many).tolist()} == {0}
    validated = text.load(DataConfig(tokens=paths, seq_len=10, validation=0.1))
    assert validated.validation is not None and (validated.samples, validated.validation.samples) == (27, 3)
    own = DataConfig(tokens=paths[:1], validation_files=paths[1:], seq_len=10)
    held = text.load(own).validation
    assert held is not None and held.samples == 20


def test_digests_of_token_files_tell_them_apart(tmp_path: Path) -> None:
    tokens = np.zeros(5_000_000, np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    tokens[-1] = 1
    np.save(tmp_path / "b.npy", tokens)
    np.save(tmp_path / "c.npy", tokens)
    digests = [text.load(DataConfig(tokens=(f"{tmp_path}/{name}.npy",), seq_len=8)).digest for name in "abc"]
    assert digests[0] != digests[1] == digests[2]


def test_token_files_that_cannot_be_trained_on_are_told(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "zero.bin").write_bytes(b"")
    (tmp_path / "zero.npy").write_bytes(b"")
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.uint16))
    np.save(tmp_path / "real.npy", np.zeros(40))
    np.save(tmp_path / "high.npy", np.full(40, 300, np.uint16))
    np.save(tmp_path / "short.npy", np.zeros(3, np.uint16))
    (tmp_path / "text.npy").write_text("no array")
    for name, what, given in (
        ("odd.bin", "a token file cannot be read", "3 bytes are not a whole number of 2-byte tokens"),
        ("zero.bin", "a token file cannot be read", "zero.bin: it is empty"),
        ("zero.npy", "a token file cannot be read", "zero.npy: No data left"),
        ("square.npy", "a token file cannot be read", "shape (4, 4)"),
        ("real.npy", "a token file cannot be read", "float64"),
        ("text.npy", "a token file cannot be read", "text.npy"),
        ("high.npy", "the data has token 300, but the model's vocabulary is 0 to 255", "high.npy"),
        ("short.npy", "the data is less than one sample", "short.npy"),
        ("none.bin", "no training data matches", "data.tokens"),
    ):
        with pytest.raises(TrainingError) as caught:
            text.load(DataConfig(tokens=(f"{tmp_path}/{name}",), seq_len=8), vocab_size=256)
        assert what in caught.value.what and given in str(caught.value.given), str(caught.value)


def test_files_of_other_formats_are_named(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 400)
    plain = b"a line of text that is not one token\n" * 400
    files: dict[str, tuple[bytes, str]] = {
        "a.txt": (gzip.compress(plain), "a gzip file"),
        "b.txt": (bz2.compress(plain), "a bzip2 file"),
        "c.txt": (lzma.compress(plain), "an xz file"),
        "d.txt": (b"PAR1" + ids.tobytes() + b"PAR1", "a Parquet file"),
        "e.idx": (b"MMIDIDX\0\0" + ids.tobytes(), "the index of a Megatron dataset"),
        "f.bin": (
            np.array([20240520, 1, 400, *[0] * 253], "<i4").tobytes() + ids.astype("<u2").tobytes(),
            "llm.c",
        ),
        "g.bin": (b"\x93NUMPY\x01\x00" + ids.tobytes(), "needs the suffix .npy"),
    }
    for name, (content, form) in files.items():
        (tmp_path / name).write_bytes(content + b"\n" * (len(content) % 2))
        for config in (
            DataConfig(files=(f"{tmp_path}/{name}",), seq_len=8),
            DataConfig(tokens=(f"{tmp_path}/{name}",), seq_len=8),
        ):
            with pytest.raises(
                TrainingError, match="not text" if config.files else "cannot be read"
            ) as caught:
                text.load(config)
            assert form in str(caught.value.given)
    for name, content, form in (
        ("i.txt", plain.decode().encode("utf-16"), "bytes of 0"),
        ("j.safetensors", np.arange(9).tobytes(), "bytes of 0"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrainingError) as caught:
            text.load(DataConfig(files=(f"{tmp_path}/{name}",), seq_len=8))
        assert form in str(caught.value.given) and "data.build" in str(caught.value.hint)


@pytest.mark.parametrize("wide", ["<u4", ">u4", "<i8"])
@pytest.mark.parametrize("kind", ["uint16", "uint32"])
@pytest.mark.parametrize("most", [300, 50_000, 128_000])
def test_tokens_of_another_width_are_not_misread(tmp_path: Path, wide: str, kind: str, most: int) -> None:
    ids = np.random.default_rng(0).integers(0, most, 4000)
    ids.astype(wide).tofile(tmp_path / "a.bin")
    config = DataConfig(tokens=(f"{tmp_path}/a.bin",), token_type=kind, seq_len=8)  # type: ignore[arg-type]
    if (wide, kind) == ("<u4", "uint32"):
        assert tokens_of(text.load(config, vocab_size=most))[:8] == ids[:8].tolist()
        return
    with pytest.raises(TrainingError, match=r"as if tokens were wider|the model's vocabulary"):
        text.load(config, vocab_size=most)


def test_tokens_that_look_wider_are_read_from_a_file_that_states_their_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = np.array([100, 1, 2, 3, 400, 1, 2, 3] * 20, "<u2")
    records.tofile("a.bin")
    with pytest.raises(TrainingError, match="as if tokens were wider") as caught:
        text.load(DataConfig(tokens=("a.bin",), seq_len=8))
    (call,) = re.findall(r"np\.save\(.*\)\)", str(caught.value.hint))
    exec(call, {"np": np})
    assert tokens_of(text.load(DataConfig(tokens=("a.npy",), seq_len=8))) == records.tolist()


@pytest.mark.parametrize("vocab_size", [None, 100])
def test_negative_tokens_are_refused_with_their_place(tmp_path: Path, vocab_size: int | None) -> None:
    for kind, token in (("<i4", -100), ("<i8", -5), ("<u8", 2**64 - 5)):
        tokens = np.full(40, 7, kind)
        tokens[21] = token
        np.save(tmp_path / "a.npy", tokens)
        with pytest.raises(TrainingError, match=f"the data has token {token}") as caught:
            text.load(DataConfig(tokens=(f"{tmp_path}/a.npy",), seq_len=8), vocab_size=vocab_size)
        assert str(caught.value.given).endswith(f"at position 21 of {tmp_path}/a.npy")
        assert "0 to -1" not in str(caught.value)
        assert (token < 0) == ("only labels may be -100" in str(caught.value.hint))


def test_suffixes_in_capitals_are_those_in_lower_case(tmp_path: Path) -> None:
    lines = b'{"text": "some"}\n{"text": "more"}\n'
    for name, content in (
        ("A.JSONL", lines),
        ("A.Json", b"[" + lines.strip().replace(b"\n", b",") + b"]"),
        ("A.JSONL.GZ", gzip.compress(lines)),
        ("a.jsonl.Bz2", bz2.compress(lines)),
        ("a.NDJSON.XZ", lzma.compress(lines)),
    ):
        (tmp_path / name).write_bytes(content)
        corpus = text.load(DataConfig(files=(f"{tmp_path}/{name}",), column="text", seq_len=4))
        assert bytes(tokens_of(corpus)) == b"some\nmore\n", name
    np.save(tmp_path / "a.npy", np.arange(40, dtype="<u2"))
    (tmp_path / "a.npy").rename(tmp_path / "B.NPY")
    np.arange(40, dtype="<u2").tofile(tmp_path / "C.BIN")
    for name in ("B.NPY", "C.BIN"):
        assert tokens_of(text.load(DataConfig(tokens=(f"{tmp_path}/{name}",), seq_len=4))) == [*range(40)]
    with pytest.raises(ConfigError, match="token_type"):
        text.load(DataConfig(tokens=(f"{tmp_path}/B.NPY",), token_type="uint16", seq_len=4))


def test_narrow_tokens_are_read(tmp_path: Path) -> None:
    for most in (2, 300, 65_536):
        ids = np.random.default_rng(0).integers(0, most, 4000)
        ids.astype("<u2").tofile(tmp_path / "a.bin")
        config = DataConfig(tokens=(f"{tmp_path}/a.bin",), seq_len=8)
        assert tokens_of(text.load(config))[:8] == ids[:8].tolist()


def test_an_end_of_documents_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, dtype=np.uint8) % 10)

    def ends(eos: int, vocab_size: int | None) -> None:
        config = DataConfig(tokens=(str(path),), seq_len=4, document_mask=True, eos_id=eos)
        text.load(config, vocab_size=vocab_size)

    ends(9, 10)
    ends(255, None)
    for eos, vocab_size, most in ((10, 10, 9), (256, None, 255), (256, 1000, 255)):
        with pytest.raises(TrainingError, match="no document would end") as caught:
            ends(eos, vocab_size)
        assert caught.value.given == f"token {eos}, from data.eos_id"
        assert str(caught.value.expected).startswith(f"0 to {most},")
    with pytest.raises(ConfigError, match=r"data\.eos_id: no document would end.*outside the model"):
        load_config(
            {
                "mesh": {"dims": {"dp": 1}, "device": "cpu"},
                "parallel": {"data": "dp"},
                "model": model_of(1, 16, 2, 2, 32, vocab_size=300),
                "data": {"tokens": ["x.npy"], "seq_len": 4, "document_mask": True, "eos_id": 300},
                "train": train_of(1, 2, 1),
            }
        )
