"""Sparse gradients of tables, optimizers that take them, and batches without targets or with ragged tensors."""

from __future__ import annotations

import threading
from collections import UserDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.config import Config, load_config
from meshcomm.errors import MeshcommError
from meshcomm.mesh import Mesh
from meshcomm.models import ModelSpec
from meshcomm.train import Trainer
from tests.oracles import retrieval, sequence
from tests.oracles.kind import SEED, alone, sgd


def config_of(ranks: int, out: Path, micro: int = 2, **train: Any) -> Config:
    return load_config(
        {
            "mesh": {"dims": {"dp": ranks}, "device": "cpu"},
            "parallel": {"data": "dp"},
            "train": {
                "steps": 4,
                "global_batch_size": 8,
                "micro_batch_size": micro,
                "lr": 0.1,
                "schedule": "constant",
                "dtype": "float64",
                "seed": SEED,
                "out": str(out),
                **train,
            },
        }
    )


def mine(mesh: Mesh, batch: Any) -> Any:
    size, coord = mesh.size("dp"), mesh.coord("dp")
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.chunk(size)[coord], batch)


def lazily(mesh: Mesh, config: Config, steps: range, folder: Path, loads: bool) -> list[float]:
    torch.manual_seed(SEED)
    loss = F.binary_cross_entropy_with_logits
    trainer = Trainer(mesh, config, retrieval.Clicks(), loss=loss, optimizer=retrieval.Lazily)
    if loads:
        trainer.load(folder)
    for step in steps:
        trainer.step(*mine(mesh, retrieval.clicks(step)))
    if not loads:
        trainer.save(folder)
    return [done.loss for done in trainer.results()]


def test_two_optimizers_in_one_are_saved_and_resumed_on_another_mesh(tmp_path: Path) -> None:
    folder, losses = tmp_path / "state", []
    for ranks, steps, loads in ((2, range(1, 3), False), (1, range(3, 5), True)):
        config = config_of(ranks, tmp_path)
        body = partial(lazily, config=config, steps=steps, folder=folder, loads=loads)
        losses += meshcomm.simulate(body, config)[0]
    assert losses == pytest.approx(alone(retrieval.LAZY_CLICKS)[0], abs=1e-9)


class Row(nn.Module):
    """Rows of a table times numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True)

    def forward(self, ids: Tensor, factors: Tensor) -> Tensor:
        """(samples,), (samples,) -> (samples, 3)."""
        return self.table(ids) * factors[:, None]  # type: ignore[no-any-return]


def rows_of(step: int) -> tuple[tuple[Tensor, Tensor], None]:
    """In later steps, a row of the second half has a gradient of 0, and some rows are unused."""
    factors = torch.ones(8, dtype=torch.float64)
    factors[7] = float(step == 1)
    return (torch.arange(8) + step // 3, factors), None


def squares(outputs: Tensor, targets: None) -> Tensor:
    return (outputs - 1).square().mean()


def test_a_row_that_a_step_has_used_is_updated_also_if_its_gradient_is_zero(tmp_path: Path) -> None:
    def on_a_mesh(mesh: Mesh) -> Tensor:
        torch.manual_seed(SEED)
        module = Row()
        lazy = partial(torch.optim.SparseAdam, lr=0.1)
        trainer = Trainer(mesh, config, module, loss=squares, optimizer=lazy)
        for step in range(1, 5):
            trainer.step(*mine(mesh, rows_of(step)))
        return module.table.weight.detach().clone()

    config = config_of(2, tmp_path)
    torch.manual_seed(SEED)
    module = Row().double()
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
    for step in range(1, 5):
        optimizer.zero_grad()
        inputs, targets = rows_of(step)
        squares(module(*inputs), targets).backward()
        optimizer.step()
    for found in meshcomm.simulate(on_a_mesh, config):
        torch.testing.assert_close(found, module.table.weight.detach(), rtol=0, atol=1e-12)


class Bags(nn.Module):
    """Sums of rows. Each sum begins at an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 6, mode="sum")

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """(all samples' ids,), (samples,) -> (samples, 6)."""
        return self.bag(ids, offsets)  # type: ignore[no-any-return]


def test_offsets_into_the_ids_of_all_samples_are_refused_by_name(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> str:
        trainer = Trainer(mesh, config, Bags(), loss=squares, optimizer=sgd)
        with pytest.raises(MeshcommError) as caught:
            trainer.step({"ids": torch.arange(12), "offsets": torch.tensor([0, 3, 6, 9])})
        return str(caught.value)

    config = config_of(2, tmp_path)
    for text in meshcomm.simulate(body, config):
        assert "inputs['ids'] of shape (12,)" in text
        assert "padding to (samples, length)" in text


@pytest.mark.parametrize("runs", ["step", "run"])
def test_a_loss_of_its_own_needs_no_targets(runs: str, tmp_path: Path) -> None:
    def body(mesh: Mesh) -> tuple[list[float], float]:
        torch.manual_seed(SEED)
        module = retrieval.TwoTowers()
        trainer = Trainer(mesh, config, module, loss=retrieval.among_all, optimizer=sgd)
        few, _ = retrieval.pairs(9)
        mean = trainer.evaluate([({name: x[:5] for name, x in few.items()}, None)])
        if runs == "run":
            return list(trainer.run(retrieval.pairs).losses), mean
        for step in range(1, 5):
            trainer.step(retrieval.pairs(step)[0])
        return [done.loss for done in trainer.results()], mean

    config = config_of(1, tmp_path, micro=8)
    torch.manual_seed(SEED)
    module = retrieval.TwoTowers().double()
    few, _ = retrieval.pairs(9)
    with torch.no_grad():
        mean = float(retrieval.among_all(module(**{name: x[:5] for name, x in few.items()}), None))
    losses = alone(retrieval.TWO_TOWERS)[0]
    found = meshcomm.simulate(body, config)[0]
    assert found[0] == pytest.approx(losses, abs=1e-9)
    assert found[1] == pytest.approx(mean, abs=1e-9)


def test_the_built_in_loss_needs_targets(tmp_path: Path) -> None:
    def body(mesh: Mesh) -> str:
        trainer = Trainer(mesh, config, nn.Linear(4, 3))
        with pytest.raises(MeshcommError) as caught:
            trainer.step(torch.ones(8, 4))
        return str(caught.value)

    config = config_of(1, tmp_path, micro=8)
    assert "are not inputs and targets" in meshcomm.simulate(body, config)[0]


def test_a_loss_that_counts_on_all_samples_is_refused(tmp_path: Path) -> None:
    def places(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(8))

    def body(mesh: Mesh) -> str:
        trainer = Trainer(mesh, config, nn.Linear(4, 3), loss=places, optimizer=sgd)
        with pytest.raises(MeshcommError) as caught:
            trainer.step(*mine(mesh, (torch.randn(8, 4), torch.ones(8))))
        return str(caught.value)

    config = config_of(2, tmp_path)
    for text in meshcomm.simulate(body, config):
        assert "on one of its microbatches, also on one process" in text


def test_inputs_may_be_any_mapping_and_calls_may_be_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers return their own mapping classes. Where calls are queued, the ids of tokens are inspected."""
    # Ranks are threads here: if each patched the class, the last one to undo it would restore another's patch.
    queued = threading.local()
    monkeypatch.setattr(Mesh, "is_async", property(lambda mesh: getattr(queued, "on", False)))

    def body(mesh: Mesh) -> list[float]:
        torch.manual_seed(SEED)
        spec = ModelSpec(module=sequence.EncoderDecoder, vocab_size=24, loss=sequence.of_tokens)
        trainer = Trainer(mesh, config, spec, optimizer=sgd)
        for step in range(1, 5):
            inputs, targets = mine(mesh, sequence.translation(step))
            queued.on = True
            trainer.step(UserDict(inputs), targets)
            queued.on = False
        return [done.loss for done in trainer.results()]

    config = config_of(2, tmp_path)
    assert meshcomm.simulate(body, config)[0] == pytest.approx(alone(sequence.ENCODER_DECODER)[0], abs=1e-9)
