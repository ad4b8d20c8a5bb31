"""Data for training: text, token files and functions; the order of samples; and data that are refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshcomm.config import DataConfig, load_config
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train import data as text
from meshcomm.train.data import Batches, Corpus, Stream
from meshcomm.train.data.batches import Order, permuted
from tests.sizes import model_of, train_of

TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)
ABC = Corpus((Stream(TEXT, 7),), b"")


def batches(coord: int = 0, size: int = 1, seed: int = 0, corpus: Corpus = ABC) -> Batches:
    return Batches(corpus, global_batch_size=12, seed=seed, coord=coord, size=size)


# -- the order of samples -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_a_permutation_takes_each_place_once_and_every_key_another(size: int) -> None:
    places = np.arange(size)
    orders = [permuted(places, size, [seed, 0, 0]) for seed in range(3)]
    assert all(sorted(order.tolist()) == places.tolist() for order in orders)
    if size >= 64:
        assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[0], places)
        # Neighbours are separated: about one pair in `size` remains.
        assert (np.diff(orders[0]) == 1).sum() < 8


def test_a_place_in_a_billion_samples_needs_no_list_of_them() -> None:
    places = permuted(np.arange(5_000_000_000, 5_000_001_000), 10**10, [1])
    assert len(set(places.tolist())) == 1000 and places.min() >= 0 and places.max() < 10**10
    # The places are spread over the whole range, and their distance is not constant.
    assert places.min() < 10**8 and places.max() > 99 * 10**8 and len(set(np.diff(places).tolist())) == 999


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_data_ranks_share_out_the_same_global_batch(size: int) -> None:
    for step in (1, 2, 50):
        whole_batch = batches()(step)
        parts = [batches(coord, size)(step) for coord in range(size)]
        for index in (0, 1):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole_batch[index])
            assert whole_batch[index].shape == (12, 7)


def test_an_epoch_reads_every_sample_once_and_the_next_in_another_order() -> None:
    # 142 samples: some epochs end within a step of 12.
    read = np.concatenate([batches().places(step)[1] for step in range(1, 143)])
    epochs = [read[start : start + 142].tolist() for start in range(0, 12 * 142, 142)]
    assert all(sorted(epoch) == list(range(142)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 12
    assert batches(seed=1).places(1)[1].tolist() != read[:12].tolist()


def test_samples_lie_side_by_side_and_targets_follow() -> None:
    _, numbers = batches().places(4)
    tokens, targets = batches()(4)
    for number, token, target in zip(numbers, tokens, targets, strict=True):
        assert token.tolist() == [value % 256 for value in range(7 * number, 7 * number + 7)]
        assert target.tolist() == [value % 256 for value in range(7 * number + 1, 7 * number + 8)]


def test_weights_are_shares_of_the_samples_and_no_part_repeats_before_its_end() -> None:
    order = Order([100, 300], [3.0, 1.0], seed=5)
    assert order.epoch == 400
    parts, samples = order.at(np.arange(1200))
    assert [(parts == part).sum() for part in (0, 1)] == [900, 300]
    assert np.bincount(samples[parts == 0], minlength=100).tolist() == [9] * 100
    assert np.bincount(samples[parts == 1], minlength=300).tolist() == [1] * 300
    # Every epoch of the whole has its share of each part, well mixed.
    assert all(250 < (parts[first : first + 400] == 0).sum() < 350 for first in (0, 400, 800))


def test_parts_with_epochs_of_their_own_are_in_another_order_by_seed_part_and_epoch() -> None:
    running = np.arange(200)
    orders = {
        (seed, part): Order([100, 100, 400], [1.0, 1.0, 1.0], seed)._again(running, 100, part).tolist()
        for seed in (1, 2)
        for part in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(order[:100] != order[100:] for order in orders.values())
    assert all(sorted(order[:100]) == list(range(100)) for order in orders.values())


def test_another_batch_goes_on_where_the_samples_are() -> None:
    before = [batches().places(step)[1] for step in (1, 2, 3, 4)]
    larger = Batches(ABC, global_batch_size=24, seed=0, after=(2, 24))
    assert larger.places(3)[1].tolist() == np.concatenate(before[2:]).tolist()
    assert larger.read(3) == 48


def test_a_share_for_validation_is_cut_off_the_end_and_never_trained_on() -> None:
    corpus = ABC.cut(0.1)
    held = corpus.validation
    assert held is not None and (corpus.samples, held.samples) == (128, 14)
    trained = {tuple(row) for step in range(1, 12) for row in batches(corpus=corpus)(step)[0].tolist()}
    evaluated = [tuple(row) for tokens, _ in batches(corpus=held).in_order(None) for row in tokens.tolist()]
    assert len(evaluated) == 12  # whole global batches
    assert evaluated[0][0] == 128 * 7 % 256 and len(trained) == 128
    with pytest.raises(TrainingError, match="no samples remain for training"):
        Corpus((Stream(TEXT[:8], 7),), b"").cut(0.5)


# -- text -----------------------------------------------------------------------------------------


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    corpus = text.load(DataConfig(seq_len=8, max_bytes=100_000))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert corpus.size == 100_000
    (part,) = corpus.parts
    assert isinstance(part, Stream)
    assert part.tokens.tobytes() == b"".join(file.read_bytes() for file in files)[:100_000]
    assert list(corpus.files) == files[: len(corpus.files)]


def tokens_of(corpus: Corpus) -> list[int]:
    found = []
    for part in corpus.parts:
        assert isinstance(part, Stream)
        found += part.tokens.tolist()
    return found


def test_files_and_globs_are_read_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name * 3)
    corpus = text.load(DataConfig(files=(f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"), seq_len=4))
    assert bytes(tokens_of(corpus)) == b"a.txta.txta.txtb.txtb.txtb.txt"
    assert [file.name for file in corpus.files] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("files", "what", "given"),
    [
        ("nowhere/*.txt", "no training data matches 'nowhere/*.txt'", "data.files has 'nowhere/*.txt'"),
        (
            "short.txt",
            "4 bytes of data.files are less than one sample",
            "1 files, seq_len = 4",
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


# -- a tokenizer ----------------------------------------------------------------------------------


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
    # The tokens are read from there, not made again.
    np.save(kept, np.full(6, 3, np.uint16))
    assert tokens_of(text.load(config, cache=tmp_path / "out")) == [3] * 6
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


# -- token files ----------------------------------------------------------------------------------


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
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.uint16))
    np.save(tmp_path / "real.npy", np.zeros(40))
    np.save(tmp_path / "high.npy", np.full(40, 300, np.uint16))
    np.save(tmp_path / "short.npy", np.zeros(3, np.uint16))
    (tmp_path / "text.npy").write_text("no array")
    for name, what, given in (
        ("odd.bin", "a token file cannot be read", "3 bytes are not a whole number of 2-byte tokens"),
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
        "a.txt.gz": (gzip.compress(plain), "a gzip file"),
        "b.bz2": (bz2.compress(plain), "a bzip2 file"),
        "c.xz": (lzma.compress(plain), "an xz file"),
        "d.parquet": (b"PAR1" + ids.tobytes() + b"PAR1", "a Parquet file"),
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
        ("h.jsonl", b'{"text": "one"}\n' * 9, "JSON lines"),
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


def test_narrow_tokens_are_read(tmp_path: Path) -> None:
    for most in (2, 300, 65_536):
        ids = np.random.default_rng(0).integers(0, most, 4000)
        ids.astype("<u2").tofile(tmp_path / "a.bin")
        config = DataConfig(tokens=(f"{tmp_path}/a.bin",), seq_len=8)
        assert tokens_of(text.load(config))[:8] == ids[:8].tolist()


# -- functions ------------------------------------------------------------------------------------

SOURCE = """
import torch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return torch.full((3 + index % 3,), index)

def by_index(seed, seq_len):
    assert (seed, seq_len) == (7, 4)
    return Squares()

def sample(kind):
    return [{
        "pair": ([1, 2, 3], [4, -100, 6]),
        "dict": {"input_ids": [1, 2, 3], "labels": [-100, 8, 9]},
        "image": (torch.zeros(2, 2), torch.tensor(3.0)),
        "features": ([1, 2, 3], 2), "regression": ([1, 2, 3], [0.5, 1.5, 2.5]), "several": ([1, 2, 300], [[1, 0]]),
        "long": list(range(6)), "empty": [], "text": "abc", "triple": (1, 2, 3), "nameless": {"x": 1},
        "negative": [3, -1, 3], "high": [3, 999, 3], "uneven": ([1, 2], [1]), "alone": torch.zeros(2, 2),
    }[kind]]

def rows(add, drawn):
    class Rows(Squares):
        def __getitem__(self, index):
            return super().__getitem__(index) + (add if index > 9 else 0) + (torch.randint(9, ()) if drawn else 0)
    return Rows()

def raises():
    raise ValueError("no such folder")

def nothing():
    return 5

def batches_of_it():
    return torch.utils.data.DataLoader(Squares())

def generator():
    return ([n, n] for n in range(3))

def without():
    return []"""


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "some_loaders.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("some_loaders", None)


def named(function: str, sequence: int = 4, **more: Any) -> DataConfig:
    return DataConfig(build=f"some_loaders:{function}", seq_len=sequence, **more)


def test_a_dataset_by_index_is_padded_and_read_in_epochs(loaders: None) -> None:
    corpus = text.load(named("by_index", validation=0.2), seed=7, vocab_size=20)
    assert corpus.validation is not None and (corpus.samples, corpus.validation.samples) == (16, 4)
    seen: list[int] = []
    for step in (1, 2):
        tokens, targets = Batches(corpus, global_batch_size=8, seed=0)(step)
        assert tokens.shape == targets.shape == (8, 4)
        for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
            number, count = row[0], 2 + row[0] % 3
            assert row == [number] * count + [0] * (4 - count)
            assert wanted == [number] * count + [-100] * (4 - count)
            seen.append(number)
    held = [
        row[0]
        for tokens, _ in Batches(corpus.validation, global_batch_size=4, seed=0).in_order(None)
        for row in tokens
    ]
    assert sorted([*seen, *map(int, held)]) == list(range(20))


def test_the_content_of_a_dataset_is_in_its_digest_unless_it_is_random(loaders: None) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    same, again, other = (
        text.load(named("rows", args={"add": add, "drawn": False})).digest for add in (0, 0, 1)
    )
    assert same == again != other
    drawn = {text.load(named("rows", args={"add": add, "drawn": True})).digest for add in (0, 1)}
    assert len(drawn) == 1
    text.load(named("rows", args={"add": 0, "drawn": False}))
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("kind", "inputs", "targets"),
    [
        ("pair", [1, 2, 3, 0], [4, -100, 6, -100]),
        ("dict", [1, 2, 0, 0], [8, 9, -100, -100]),
        ("image", [[0, 0], [0, 0]], 3),
        ("features", [1, 2, 3], 2),
        ("regression", [1, 2, 3], [0.5, 1.5, 2.5]),
        ("several", [1, 2, 300], [[1, 0]]),
    ],
)
def test_kinds_of_samples(loaders: None, kind: str, inputs: Any, targets: Any) -> None:
    corpus = text.load(named("sample", args={"kind": kind}), vocab_size=10)
    x, y = Batches(corpus, global_batch_size=1, seed=0)(1)
    assert x.tolist() == [inputs] and y.tolist() == [targets]


@pytest.mark.parametrize(
    ("config", "what", "given"),
    [
        (("raises",), "data.build could not be called: ValueError: no such folder", "some_loaders:raises"),
        (("missing",), "data.build could not be called: AttributeError", "some_loaders:missing"),
        (("nothing",), "data.build does not return an indexable dataset", "returned int"),
        (("without",), "data.build does not return an indexable dataset", "returned list, without samples"),
        (("batches_of_it",), "data.build does not return an indexable dataset", "returned DataLoader, which yields batches"),
        (("generator",), "data.build does not return an indexable dataset", "returned generator"),
        *(
            (("sample", {"args": {"kind": kind}}), "sample 0 of data.build is invalid", given)
            for kind, given in (
                ("long", "6 tokens, with data.seq_len = 4"),
                ("empty", "inputs of shape (0,)"),
                ("text", "str"),
                ("triple", "a tuple of 3"),
                ("nameless", "a dict with x"),
                ("uneven", "2 tokens and 1 targets. Integers that are not tokens have"),
                ("alone", "without targets"),
            )
        ),
        (("sample", {"args": {"kind": "negative"}}), "the data has token -1", "sample 0"),
        (("sample", {"args": {"kind": "high"}}), "the data has token 999", "sample 0"),
    ],
)  # fmt: skip
def test_what_a_function_must_return_is_said(loaders: None, config: Any, what: str, given: str) -> None:
    function, more = (*config, {})[:2]
    with pytest.raises(TrainingError) as caught:
        text.load(named(function, **more), vocab_size=10)
    assert caught.value.what.startswith(what), caught.value.what
    assert given in str(caught.value.given) and caught.value.expected


# -- the token that ends a document ---------------------------------------------------------------


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
