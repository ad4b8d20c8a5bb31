"""Batches with leaves that are not tensors of samples: NumPy arrays, lists, numbers and strings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshcomm
from meshcomm.errors import MeshcommError
from meshcomm.train import Trainer

_ROWS = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# From the rows (samples, 5) and the number of a rank to (inputs, targets).
Collate = Callable[[Tensor, int], tuple[Any, Any]]


@dataclass
class Held:
    """A container class that belongs to the program."""

    values: Any
    weights: Any


def weighted(outputs: Tensor, targets: Any) -> Tensor:
    """A loss of the values and the weights of samples."""
    values, weights = targets if isinstance(targets, tuple) else (targets.values, targets.weights)
    return ((outputs - torch.as_tensor(values)).square().mean(1) * torch.as_tensor(weights)).mean()


def scaled(outputs: Tensor, targets: Any) -> Tensor:
    """A loss of values and of a factor that all samples share."""
    values, shared = targets
    return F.mse_loss(outputs, values) * (float(shared) if not isinstance(shared, tuple) else shared[0])


def alone(collate: Collate, loss: Any) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for rows in _ROWS:
        inputs, targets = collate(rows, 0)
        value = loss(net(torch.as_tensor(inputs)), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def on_ranks(mesh: meshcomm.Mesh, collate: Collate, loss: Any, micro: int) -> list[float] | str:
    train = {
        "steps": 3, "global_batch_size": 8, "micro_batch_size": micro, "lr": 0.1, "schedule": "constant",
        "dtype": "float64", "optimizer": "sgd", "weight_decay": 0.0,
    }  # fmt: skip
    config = {"mesh": {"dims": {"dp": 2}, "device": "cpu"}, "parallel": {"data": "dp"}, "train": train}
    torch.manual_seed(0)
    try:
        trainer = Trainer(mesh, meshcomm.config.load_config(config), nn.Linear(2, 2).double(), loss=loss)
        for rows in _ROWS:
            trainer.step(*collate(rows.chunk(2)[mesh.rank], mesh.rank))
        return [done.loss for done in trainer.results()]
    except MeshcommError as error:
        return str(error)


SAME: dict[str, tuple[Collate, Any]] = {
    "arrays": (lambda x, rank: (x[:, :2].numpy(), (x[:, 2:4].numpy(), x[:, 4].numpy())), weighted),
    "arrays in a dataclass": (
        lambda x, rank: (x[:, :2], Held(x[:, 2:4].numpy(), x[:, 4].numpy())),
        weighted,
    ),
    "an equal number": (lambda x, rank: (x[:, :2], (x[:, 2:4], 0.5)), scaled),
    "an equal tensor without axes": (lambda x, rank: (x[:, :2], (x[:, 2:4], torch.tensor(0.5))), scaled),
    "an equal string": (lambda x, rank: (x[:, :2], (x[:, 2:4], "0.5")), scaled),
    "a tuple as long as the samples": (lambda x, rank: (x[:, :2], (x[:, 2:4], (0.5, 1, 2, 3))), scaled),
}


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("micro", [2, 4])
def test_leaves_that_all_samples_share_and_arrays_are_those_of_one_process(case: str, micro: int) -> None:
    collate, loss = SAME[case]
    expected = alone(collate, loss)
    for losses in meshcomm.simulate(on_ranks, dims={"dp": 2}, args=(collate, loss, micro)):
        assert losses == pytest.approx(expected, rel=1e-12)


REFUSED: dict[str, tuple[Collate, str]] = {
    "a tensor without axes": (lambda x, rank: (x[:, :2], (x[:, 2:4], x[:, 4].mean())), "targets[1] = "),
    "a number": (lambda x, rank: (x[:, :2], (x[:, 2:4], x[:, 4].mean().item())), "(sum, count)"),
    "a number of NumPy": (lambda x, rank: (x[:, :2], (x[:, 2:4], np.float64(rank))), "targets[1] = "),
    "a string": (lambda x, rank: (x[:, :2], (x[:, 2:4], str(rank))), "targets[1] = '0' on rank 0, '1' on rank 1"),
    "a number in a dataclass": (lambda x, rank: (x[:, :2], Held(x[:, 2:4], 1.0 + rank)), ".weights = 1.0"),
    "a tuple of numbers": (lambda x, rank: (x[:, :2], (x[:, 2:4], (1.0, rank))), "targets[1][1] = 0"),
    "something that one rank lacks": (
        lambda x, rank: (x[:, :2], {"y": x[:, 2:4], **({"more": 1} if rank else {})}),
        "nothing on rank 0, 1 on rank 1",
    ),
    "a list of numbers": (
        lambda x, rank: (x[:, :2], (x[:, 2:4], x[:, 4].tolist())),
        "torch.tensor(targets[1])",
    ),
    "a list of equal numbers": (lambda x, rank: (x[:, :2], (x[:, 2:4], [1.0] * len(x))), "targets[1], a list"),
    "captions": (lambda x, rank: (x[:, :2], {"y": x[:, 2:4], "text": ["a"] * len(x)}), "targets['text'], a list"),
    "a tuple of captions": (lambda x, rank: (x[:, :2], (x[:, 2:4], ("a",) * len(x))), "ids of the text"),
    "an array of strings": (
        lambda x, rank: (x[:, :2], (x[:, 2:4], np.array(["a"] * len(x)))),
        "cannot become a tensor",
    ),
    "a sparse tensor": (lambda x, rank: (x[:, :2].to_sparse(), x[:, 2:4]), "torch.sparse_coo"),
    "a nested tensor": (lambda x, rank: (torch.nested.nested_tensor([*x[:, :2]], layout=torch.jagged), x[:, 2:4]), "nested tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_leaves_that_steps_cannot_divide_are_refused_by_name(case: str) -> None:
    collate, words = REFUSED[case]
    loss = lambda y, t: y.square().mean()  # noqa: E731
    for said in meshcomm.simulate(on_ranks, dims={"dp": 2}, args=(collate, loss, 2)):
        assert isinstance(said, str), said
        assert words in said
