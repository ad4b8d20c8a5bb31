"""Datasets that a function returns."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshcomm.config import DataConfig
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.train import data as text
from meshcomm.train.data import Batches

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
        "extra": {"input_ids": [1, 2], "text": "a"}, "rows": [[1, 2], [3, 4]], "none": None, "column": {"body": "a"},
        "letters": {"input_ids": [1, 2], "labels": "ab"}, "negative": [3, -1, 3], "high": [3, 999, 3], "uneven": ([1, 2], [1]), "alone": torch.zeros(2, 2),
    }[kind]]

def changing(add, drawn):
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
    return []

def splits():
    return {"train": [[1, 2, 3]]}

class Counted(torch.utils.data.IterableDataset):
    def __init__(self, rows, **more):
        self.rows, self.epoch, self.more = rows, 0, more
    def __len__(self):
        return self.rows
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        import random
        numbers = list(range(self.rows))
        random.Random(None if self.more.get("drawn") else self.epoch).shuffle(numbers)
        for number in numbers:
            yield {"content": "word " * number} if self.more.get("texts") else [number] * 3

def stream(**args):
    return Counted(**args)

class Failing(Squares):
    def __init__(self, place):
        self.place = place
    def __len__(self):
        if self.place == "len":
            raise OSError("no such disk")
        return 20
    def __getitem__(self, index):
        return [[index] * 3 for _ in range(7)][index] if self.place == "end" else [1] * (3 + 1 // (index - 7))

def failing(place):
    return Failing(place)

class Ending(torch.utils.data.IterableDataset):
    def __init__(self, place, texts):
        self.place, self.texts = place, texts
    def __iter__(self):
        for number in range(self.place):
            yield {"text": "word " * 9} if self.texts else [number] * 3
        next(iter([]))

def ending(place, texts=False):
    return Ending(place, texts)

def rows():
    return [{"content": "word " * number} for number in range(30)]

def wrong_rows(**row):
    return [{"content": "a"}, row or 5]"""


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
        text.load(named("changing", args={"add": add, "drawn": False})).digest for add in (0, 0, 1)
    )
    assert same == again != other
    drawn = {text.load(named("changing", args={"add": add, "drawn": True})).digest for add in (0, 1)}
    assert len(drawn) == 1
    text.load(named("changing", args={"add": 0, "drawn": False}))
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
        (("nothing",), "data.build does not return a dataset", "returned int"),
        (("without",), "data.build does not return a dataset", "returned list, without samples"),
        (("splits",), "data.build does not return a dataset", "returned dict of train"),
        (("batches_of_it",), "data.build does not return a dataset", "returned DataLoader, which yields batches"),
        (("generator",), "data.build does not return a dataset", "returned generator, which can be read only once"),
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
                ("none", "NoneType"),
                ("extra", "a dict with input_ids, text"),
                ("letters", "labels: str"),
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


@pytest.mark.parametrize(
    ("function", "args", "hint"),
    [
        ("sample", {"kind": "long"}, "data.seq_len"),
        ("sample", {"kind": "text"}, 'for rows of texts, {"text": "..."}, set data.tokenizer'),
        ("sample", {"kind": "column"}, 'data.column = "body"'),
        ("sample", {"kind": "extra"}, "dataset.remove_columns(['text'])"),
        ("sample", {"kind": "letters"}, "dataset.remove_columns(['labels'])"),
        ("sample", {"kind": "rows"}, "return one sample for each index, not a batch"),
        ("sample", {"kind": "none"}, "leave out this sample"),
        ("sample", {"kind": "negative"}, "only labels may be -100"),
        ("sample", {"kinds": 1}, "data.args has the arguments of some_loaders:sample(kind)"),
        ("raises", {}, "the function itself raises the error"),
        ("missing", {}, "PYTHONPATH"),
    ],
)
def test_the_way_out_fits_what_was_returned(loaders: None, function: str, args: Any, hint: str) -> None:
    with pytest.raises(TrainingError) as caught:
        text.load(named(function, args=args))
    assert hint in str(caught.value.hint)
    assert ("seq_len to the length" in str(caught.value.hint)) == (args == {"kind": "long"})


@pytest.mark.parametrize(
    ("function", "args", "more", "what"),
    [
        ("failing", {"place": 7}, {}, "sample 7 of 20 cannot be read: ZeroDivisionError"),
        ("failing", {"place": "end"}, {}, "sample 7 of 20 cannot be read: IndexError"),
        ("failing", {"place": 7}, {"tokenizer": "bytes"}, "a row has no text in the column 'text'"),
        ("failing", {"place": "len"}, {}, "could not be called: OSError: no such disk"),
        ("ending", {"place": 9}, {}, "sample 9 cannot be read: RuntimeError: generator raised StopIteration"),
        ("ending", {"place": 4, "texts": True}, {"tokenizer": "bytes"}, "row 5 cannot be read: RuntimeError"),
    ],
)
def test_an_error_of_a_dataset_names_the_function_and_the_sample(
    loaders: None, function: str, args: Any, more: Any, what: str
) -> None:
    with pytest.raises(TrainingError) as caught:
        Batches(text.load(named(function, args=args, **more)), global_batch_size=20, seed=0)(1)
    assert what in caught.value.what
    assert f"some_loaders:{function}" in str(caught.value.given) and caught.value.hint


# -- streams --------------------------------------------------------------------------------------


def read(config: DataConfig, steps: range, ranks: int, batch: int, before: int = 0) -> list[list[int]]:
    """The tokens of all samples in some steps, in the order of the ranks. before: samples of earlier steps."""
    found = []
    corpora = [text.load(config) for _ in range(ranks)]
    data = [
        Batches(
            corpus, global_batch_size=batch, seed=0, coord=coord, size=ranks, after=(steps[0] - 1, before)
        )
        for coord, corpus in enumerate(corpora)
    ]
    for step in steps:
        for rank in data:
            found += rank(step)[0].tolist()
    return found


def test_a_stream_is_read_once_an_epoch_and_continues_on_another_number_of_ranks(loaders: None) -> None:
    config = named("stream", args={"rows": 20})
    whole = read(config, range(1, 16), 1, 4)
    # Three epochs of 20 samples, each in the order that the stream has in this epoch.
    for epoch in range(3):
        numbers = list(range(20))
        random.Random(epoch).shuffle(numbers)
        assert [row[0] for row in whole[20 * epoch : 20 * epoch + 20]] == numbers
    assert read(config, range(1, 16), 4, 4) == whole
    # The batch of the second part is larger, and its first step is in the second epoch.
    resumed = read(config, range(1, 8), 2, 4) + read(config, range(8, 12), 4, 8, before=28)
    assert resumed == whole
    # Back to an earlier step, as after a loss of ranks.
    (part,) = text.load(config).parts
    later, earlier = part.read(np.arange(30, 34))[0], part.read(np.arange(2, 6))[0]
    assert later[:, 0].tolist() == [row[0] for row in whole[30:34]]
    assert earlier[:, 0].tolist() == [row[0] for row in whole[2:6]]


def test_a_stream_of_texts_is_packed_as_a_file_of_its_rows(loaders: None, tmp_path: Path) -> None:
    stream = named("stream", args={"rows": 30, "texts": True}, tokenizer="bytes", column="content")
    order = list(range(30))
    random.Random(0).shuffle(order)
    (tmp_path / "a.txt").write_text("".join("word " * number + "\n" for number in order))
    for more in ({}, {"document_mask": True, "eos_id": 10}):
        (part,) = text.load(stream.model_copy(update=more)).parts
        (plain,) = text.load(DataConfig(files=(f"{tmp_path}/a.txt",), seq_len=4, **more)).parts  # type: ignore[arg-type]
        for found, expected in zip(
            *(each.read(np.arange(len(plain))) for each in (part, plain)), strict=True
        ):
            assert np.array_equal(found, expected)
    # The second epoch begins with a sample of its own.
    random.Random(1).shuffle(order := list(range(30)))
    assert (
        bytes(part.read(np.array([len(plain)]))[0][0].astype(np.uint8))
        == ("word " * order[0] + "\n" + "word ")[:4].encode()
    )
    # A dataset by index is the file of its rows, in its own order.
    indexed = text.load(named("rows", tokenizer="bytes", column="content", validation=0.5))
    assert indexed.validation is not None and indexed.unit == "bytes of text"
    (first,), content = indexed.parts, "".join("word " * number + "\n" for number in range(30))
    assert bytes(first.tokens.tolist()) == content.encode()[: len(first.tokens)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("args", "more", "kind", "what"),
    [
        ({"rows": 0}, {}, TrainingError, "the stream of data.build has no samples"),
        ({"rows": 20, "drawn": True}, {}, TrainingError, "begins with other samples when it is read again"),
        ({"rows": 20}, {"workers": 2}, ConfigError, "data.workers: not possible with a stream"),
        ({"rows": 20}, {"validation": 0.5}, ConfigError, "data.validation: not possible with a stream"),
        ({"rows": 20, "texts": True}, {}, TrainingError, "sample 0 of data.build is invalid"),
        ({"rows": 20}, {"tokenizer": "bytes"}, TrainingError, "a row has no text in the column 'text'"),
        (
            {"rows": 20, "texts": True},
            {"tokenizer": "bytes"},
            TrainingError,
            "a row has no text in the column 'text'",
        ),
    ],
)
def test_streams_that_cannot_be_continued_are_refused(
    loaders: None, args: Any, more: Any, kind: type[Exception], what: str
) -> None:
    with pytest.raises(kind, match=what) as caught:
        text.load(named("stream", args=args, **more))
    assert caught.value.given and caught.value.expected  # type: ignore[attr-defined]


def test_rows_without_text_are_named(loaders: None) -> None:
    for row, said in (
        ({}, "some_loaders:wrong_rows:2: only a int"),
        ({"content": 5}, "some_loaders:wrong_rows:2: 5"),
    ):
        with pytest.raises(TrainingError) as caught:
            text.load(named("wrong_rows", args=row, tokenizer="bytes", column="content"))
        assert caught.value.given == said
    for settings in ({"eos": "x"}, {"eos_id": 1, "document_mask": True}, {"column": "x"}):
        with pytest.raises(ConfigError, match="no effect"):
            named("rows", **settings)
    assert text.load(named("rows", tokenizer="bytes", column="content"), vocab_size=256).size > 100
    with pytest.raises(TrainingError, match="the model's vocabulary is 0 to 99") as caught:
        text.load(named("rows", tokenizer="bytes", column="content"), vocab_size=100)
    assert caught.value.given == "119 at position 0 of some_loaders:rows:2"


def test_hugging_face_datasets_by_name_and_as_streams(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"row {number}"} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = {
        "path": "json",
        "data_files": f"{tmp_path}/a.jsonl",
        "split": "train",
        "cache_dir": f"{tmp_path}/cache",
    }
    loaded = datasets.load_dataset(**args)["text"]
    expected = "".join(f"{row}\n" for row in loaded).encode()
    settings: Any = {"build": "datasets:load_dataset", "seq_len": 8, "tokenizer": "bytes"}
    (part,) = text.load(DataConfig(args=args, **settings)).parts
    assert bytes(part.tokens.tolist()) == expected  # type: ignore[attr-defined]
    samples = (len(expected) - 1) // 8
    streams = DataConfig(args=args | {"streaming": True}, **settings)
    whole = b"".join(map(bytes, read(streams, range(1, samples + 1), 1, 1)))
    assert whole == expected[: 8 * samples]
    resumed = read(streams, range(1, 4), 2, 4) + read(streams, range(4, samples // 4 + 1), 4, 4, before=12)
    assert b"".join(map(bytes, resumed)) == expected[: 32 * (samples // 4)]
