"""Documents that are packed into samples give the same loss, gradients and weights as the documents one by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import meshcomm
from meshcomm.config import Config, DataConfig, load_config
from meshcomm.errors import MeshcommError, TrainingError, UnsupportedOp
from meshcomm.parallel.batch import Batch
from meshcomm.testing import Pool
from meshcomm.train import Trainer
from meshcomm.train.data.batch import named_of
from meshcomm.train.data.build import SampleForm
from meshcomm.train.data.corpus import IGNORED, Stream
from meshcomm.train.data.load import load
from meshcomm.train.parity import Record, _recorded, compare, reference
from tests.models.families import config_of, folder_of
from tests.models.table import smallest
from tests.sizes import model_of

SEQ = 32
# The lengths of the documents in each sample, in tokens.
LENGTHS = [[10, 22], [32], [1, 5, 26], [16, 16]]
BUILT_IN, OWN = "built in", "tests.models.own:spec"
MESHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dp2 tp2 sequence": (BUILT_IN, "dp=2 tp=2", {"sequence_parallel": True}),
    "cp2 ring": (BUILT_IN, "dp=2 cp=2", {}),
    "cp4 ring recompute": (BUILT_IN, "cp=4", {"train": {"activation_checkpointing": True}}),
    "cp2 ulysses": (BUILT_IN, "tp=2 cp=2", {"attention": "ulysses"}),
    "pp2 tp2": (BUILT_IN, "pp=2 tp=2", {}),
    "llama, pp2 tp2": ("llama", "pp=2 tp=2", {}),
    "llama, fsdp4": ("llama", "fsdp=4", {}),
    "llama, dp2 cp2 ring": ("llama", "dp=2 cp=2", {"train": {"activation_checkpointing": True}}),
    "a window, cp2 ulysses": ("mistral window", "dp=2 cp=2", {"attention": "ulysses"}),
    "soft caps, cp2 ulysses": ("gemma2", "dp=2 cp=2", {"attention": "ulysses"}),
    "own, pp2 cp2": (OWN, "pp=2 cp=2", {}),
}
_IN_THE_GATE = ("cp2 ring", "own, pp2 cp2")


def documents() -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each document, in order."""
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randint(128, (length + 1,), generator=generator) for each in LENGTHS for length in each)
    return [(tokens[:-1], tokens[1:]) for tokens in drawn]


def packed() -> Batch:
    """All documents in four samples."""
    numbers = [torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each)) for each in LENGTHS]
    inputs, targets = (torch.cat(each).view(4, SEQ) for each in zip(*documents(), strict=True))
    return Batch(inputs, targets, torch.stack(numbers))


def one_by_one() -> Batch:
    """Each document in a separate sample, followed by padding only."""
    found = documents()
    inputs = torch.zeros(len(found), SEQ, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, (x, y) in enumerate(found):
        inputs[row, : len(x)], targets[row, : len(y)] = x, y
    return Batch(inputs, targets)


def stepped(config: Config, batch: Batch) -> tuple[Record, float]:
    """The record of one step, and the loss after it."""
    with meshcomm.init(config) as mesh:
        trainer = Trainer(mesh, config)
        engine = trainer.engine
        share = len(batch.inputs) // engine.data_size
        mine = slice(engine.data_coord * share, (engine.data_coord + 1) * share)
        here = Batch(*(None if each is None else each[mine] for each in batch))  # type: ignore[arg-type]
        trainer.step(*here)
        found = _recorded(engine, engine.results())
        return found, engine.evaluate([here])


def settings_of(path: Path, kind: str, dims: str, samples: int, masks: bool, **more: Any) -> Config:
    if kind == BUILT_IN:
        model: dict[str, Any] = model_of(4, 32, 8, 4, 48)
    elif kind == OWN:
        model = {"build": OWN}
    else:
        if kind == "gemma2":
            smallest(kind).save_pretrained(path)
        else:
            folder_of(kind, path)
        model = {"pretrained": str(path), "random_weights": True}
    train = {"global_batch_size": samples, "lr": 0.01, **more.pop("train", {})}
    config = config_of(model, dims, train=train, tokenizer=None if kind == OWN else "bytes", **more)
    return load_config(config, [f"data.document_mask={str(masks).lower()}"] + ["data.eos_id=0"] * masks)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in _IN_THE_GATE else pytest.mark.parity) for each in MESHES]
)
def test_packed_documents_train_as_one_by_one(pool: Pool, tmp_path: Path, name: str) -> None:
    kind, dims, more = MESHES[name]
    alone = reference(settings_of(tmp_path, kind, "dp=1", len(documents()), False))
    ((one, after),) = pool.run(stepped, alone, one_by_one(), ranks=1)
    config = settings_of(tmp_path, kind, dims, len(LENGTHS), True, **more)
    for made, evaluated in pool.run(stepped, config, packed(), ranks=4, timeout_s=120):
        assert max(each.relative for each in compare(made, one)) < 1e-9
        assert evaluated == pytest.approx(after, rel=1e-9)
    # Without the masks, the loss differs.
    crossing = settings_of(tmp_path, kind, "dp=1", len(LENGTHS), False)
    ((crossed, _),) = pool.run(stepped, crossing, packed()._replace(documents=None), ranks=1)
    assert abs(crossed.losses[0] / one.losses[0] - 1) > 1e-6


def test_a_stream_tells_where_its_documents_end() -> None:
    stream = Stream(np.array([5, 6, 0, 7, 8, 9, 0, 0, 4, 3, 2], dtype=np.uint16), 5, eos=0)
    inputs, targets, numbers = stream.read(np.array([0, 1]))
    assert inputs.tolist() == [[5, 6, 0, 7, 8], [9, 0, 0, 4, 3]]
    assert targets.tolist() == [[6, 0, IGNORED, 8, 9], [0, IGNORED, IGNORED, 3, 2]]
    assert numbers.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 2, 2]]
    assert [len(each.read(np.array([0]))) for each in stream.cut(0.5)] == [3, 3]


def refused(config: Config, batch: Batch) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(MeshcommError) as caught:
        Trainer(mesh, config).step(*batch)
    return caught.value.what


def refused_module(config: Config) -> str:
    with meshcomm.init(config) as mesh, pytest.raises(MeshcommError) as caught:
        _ = Trainer(mesh, config, torch.nn.Embedding(256, 256)).engine
    return caught.value.what


def test_documents_that_are_not_masked_and_masks_that_cannot_be_are_refused(
    pool: Pool, tmp_path: Path
) -> None:
    plain = settings_of(tmp_path, BUILT_IN, "dp=1", 4, False)
    (what,) = pool.run(refused, plain, packed(), ranks=1)
    assert what == "document numbers were given, but this model's attention crosses documents"
    masked, batch = settings_of(tmp_path, BUILT_IN, "dp=1", 4, True), packed()
    assert batch.documents is not None
    shorter = batch._replace(documents=batch.documents[:, 1:])
    assert pool.run(refused, masked, shorter, ranks=1) == [
        "the documents do not contain one number per token"
    ]
    (what,) = pool.run(refused_module, masked, ranks=1)
    assert what == "this model cannot be trained with data.document_mask"
    unknown = DataConfig(seq_len=8, tokenizer="bytes", document_mask=True)
    with pytest.raises(TrainingError, match="the end of a document is not defined"):
        load(unknown)


def test_a_function_gives_packed_documents_as_transformers_does() -> None:
    sample = {"input_ids": [5, 6, 7, 8, 9, 4], "position_ids": [0, 1, 2, 0, 1, 0]}
    form = SampleForm("samples", 6, 256, packed=True)
    inputs, targets, numbers = form.joined([(0, sample), (1, [1, 2, 3])])
    assert inputs.tolist() == [[5, 6, 7, 8, 9, 0], [1, 2, 0, 0, 0, 0]]
    assert targets.tolist() == [[6, 7, IGNORED, 9, IGNORED, IGNORED], [2, 3, *[IGNORED] * 4]]
    assert numbers.tolist() == [[0, 0, 0, 1, 1, 1], [0] * 6]
    with pytest.raises(UnsupportedOp, match="consists of several documents"):
        SampleForm("samples", 6, 256).joined([(0, sample)])


def test_a_function_and_a_loop_read_dictionaries_alike() -> None:
    tokens = [5, 6, 7, 8, 9, 4, 0, 0]
    mask, positions = [1] * 6 + [0] * 2, [0, 1, 2, 0, 1, 2, 0, 0]
    for names in itertools.product((False, True), repeat=3):
        given = zip(
            ("attention_mask", "position_ids", "labels"),
            (mask, positions, [*tokens[:1:-1], -100, -100]),
            names,
            strict=True,
        )
        sample = {"input_ids": tokens, **{name: values for name, values, is_given in given if is_given}}
        arrays = {name: np.array(values, np.int32) for name, values in sample.items()}
        if names[1] and not names[0]:
            # Without the mask, the padding is numbered as two documents.
            assert SampleForm("samples", 7, 256, packed=True).joined([(0, arrays)])[2][0, -1] == 2
        here = SampleForm("samples", 7, 256, packed=names[1]).joined([(0, arrays)])
        there = named_of({name: torch.tensor(each)[None] for name, each in arrays.items()}, "step 1")
        assert len(here) == len(there) == 2 + names[1]
        for ours, theirs in zip(here, there, strict=True):
            assert ours.tolist() == theirs[:, :-1].tolist()
    masked = SampleForm("samples", 7, 256).joined([(0, {"input_ids": tokens, "attention_mask": mask})])
    assert masked[1].tolist() == [[6, 7, 8, 9, 4, IGNORED, IGNORED]]
    for more, match in (
        ({"attention_mask": [0] + [1] * 7}, "padded at the start"),
        ({"text": [1] * 8}, "inputs and targets"),
        ({"attention_mask": mask, "labels": tokens}, "count in the padding"),
    ):
        with pytest.raises(MeshcommError, match=match):
            SampleForm("samples", 7, 256).joined([(0, {"input_ids": tokens, **more})])
