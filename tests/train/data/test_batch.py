"""Batches as dictionaries: which entries are inputs, targets and documents, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import meshcomm
from meshcomm.config import Config
from meshcomm.errors import MeshcommError, ShapeError, TrainingError, UnsupportedOp
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.data.batch import named_of
from meshcomm.train.data.corpus import IGNORED
from tests.train.data.test_loader import SEQUENCE, STEPS, on, rows


def test_a_dictionary_of_transformers_is_inputs_targets_and_documents() -> None:
    tokens = rows([5, 6, 7, 8, 9], [1, 2, 3, 0, 0])
    mask = rows([1, 1, 1, 1, 1], [1, 1, 1, 0, 0])
    inputs, targets = named_of({"input_ids": tokens, "attention_mask": mask}, "step 1")
    none = IGNORED
    assert inputs is tokens
    assert targets.tolist() == [[6, 7, 8, 9, none], [2, 3, none, none, none]]
    labels = rows([none, none, 7, 8, 9], [1, 2, 3, 4, 5])
    _, targets = named_of({"input_ids": tokens, "labels": labels}, "step 1")
    assert targets.tolist() == [[none, 7, 8, 9, none], [2, 3, 4, 5, none]]
    _, targets, documents = named_of(
        {"input_ids": tokens, "position_ids": rows([0, 1, 0, 1, 2], [0, 1, 2, 3, 4])}, "step 1"
    )
    assert documents.tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert targets.tolist() == [[6, none, 8, 9, none], [2, 3, 0, 0, none]]
    whole = {"input_ids": tokens, "position_ids": torch.arange(5).expand(2, 5), "attention_mask": mask}
    assert len(named_of(whole, "step 1")) == 2
    given = {"targets": tokens, "inputs": mask}
    assert [each.tolist() for each in named_of(given, "step 1")] == [mask.tolist(), tokens.tolist()]


TOKENS = rows([5, 6, 7])


WRONG: list[tuple[dict[str, Any], type[MeshcommError], str]] = [
    ({"tokens": TOKENS}, TrainingError, "leave out tokens"),
    (
        {"input_ids": TOKENS, "token_type_ids": TOKENS},
        TrainingError,
        "loss=lambda outputs, targets: outputs.loss",
    ),
    (
        {"input_ids": TOKENS, "num_items_in_batch": TOKENS[0, 0]},
        TrainingError,
        "leave out num_items_in_batch",
    ),
    ({"input_ids": [5, 6, 7]}, TrainingError, "input_ids: list"),
    ({"inputs": TOKENS}, TrainingError, "a dictionary of inputs: Tensor"),
    ({"input_ids": TOKENS, "labels": TOKENS[:, 1:]}, ShapeError, r"labels \(1, 2\)"),
    (
        {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": rows([1, 1, 0])},
        TrainingError,
        "masked_fill",
    ),
    ({"input_ids": TOKENS[0]}, ShapeError, r"input_ids \(3,\)"),
    ({"input_ids": TOKENS, "attention_mask": rows([0, 1, 1])}, UnsupportedOp, "padding_side"),
    ({"input_ids": TOKENS, "attention_mask": rows([1, 0, 1])}, UnsupportedOp, "masks tokens in the middle"),
    ({"input_ids": TOKENS, "attention_mask": rows([1, 0, 1]) != 0}, UnsupportedOp, "in the middle"),
    ({"input_ids": TOKENS, "position_ids": rows([1, 2, 3])}, TrainingError, r"position_ids \[1, 2, 3\]"),
    ({"input_ids": TOKENS, "position_ids": rows([0, 2, 4])}, TrainingError, "in each document"),
]


@pytest.mark.parametrize(("batch", "error", "says"), WRONG, ids=[each[2][:24] for each in WRONG])
def test_a_dictionary_that_would_be_misread_is_refused(
    batch: dict[str, Any], error: type[MeshcommError], says: str
) -> None:
    with pytest.raises(error, match=says):
        named_of(batch, "step 1")


def by_dictionary(config: Config) -> list[list[float]]:
    """The losses of steps and of an evaluation, first with pairs and then with dictionaries."""
    found = []
    tokens = torch.randint(256, (STEPS, 8, SEQUENCE), generator=torch.Generator().manual_seed(1))
    for as_dictionary in (False, True):
        with meshcomm.init(config) as mesh:
            trainer = Trainer(mesh, config)
            for each in tokens:
                targets = torch.cat([each[:, 1:], torch.full((8, 1), IGNORED)], 1)
                if as_dictionary:
                    trainer.step({"input_ids": each, "labels": each})
                else:
                    trainer.step(each, targets)
            loss = trainer.evaluate([{"input_ids": each}] if as_dictionary else [(each, targets)])
            found.append([done.loss for done in trainer.results()] + [loss])
    return found


def test_steps_and_evaluations_take_dictionaries(pool: Pool, tmp_path: Path) -> None:
    ((pairs, dictionaries),) = pool.run(by_dictionary, on("one=1", tmp_path), ranks=1)
    assert pairs == dictionaries and len(pairs) == STEPS + 1
