"""Datasets that a function returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshcomm.config import DataConfig
from meshcomm.errors import TrainingError
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
        (("nothing",), "data.build does not return a dataset", "returned int"),
        (("without",), "data.build does not return a dataset", "returned list, without samples"),
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
