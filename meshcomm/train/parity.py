"""Does a mesh compute what one process computes? The same steps on both, in float64, compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshcomm.config import Config, load
from meshcomm.errors import ConfigError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import whole
from meshcomm.train import data as text
from meshcomm.train.data import Batches, Corpus
from meshcomm.train.loop import trainer_for
from meshcomm.train.rates import learning_rate


@dataclass(frozen=True)
class Record:
    """What some steps of a run gave. Gradients are those of the last step.

    losses, norms: of each step. weights, gradients: whole tensors by global name, float64 on CPU; of
    a rank of a pipeline, those of its stages.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity between two runs, and where it is.

    relative: the absolute one by the largest value of the quantity in the reference, 1 at least: so
    what is large is judged by its digits, and what is about zero by how far from it.
    """

    kind: str
    name: str
    absolute: float
    relative: float


def reference(config: Config) -> Config:
    """The same training as `config`, on one process: no part of it is split or repeated."""
    if config.parallel is None or config.train is None:
        raise ConfigError(
            f"{config.source} says nothing about training",
            given="a mesh without [parallel], [model], [data] and [train]",
            expected="all four sections",
            hint="configs/quickstart.toml has them all",
        )
    facts = config.model_dump(exclude_unset=True, mode="python")
    train = {key: value for key, value in facts["train"].items() if key not in ("compile", "recompute")}
    return load(
        {
            "mesh": {"dims": {"one": 1}, "device": config.mesh.device, "timeout_s": config.mesh.timeout_s},
            "parallel": {},
            "model": facts["model"],
            "data": facts["data"],
            "train": train,
        }
    )


def record(mesh: Mesh, config: Config, steps: int, corpus: Corpus | None = None) -> Record:
    """Run the first `steps` steps of `config` on an open mesh. Called by: every rank.

    Every rank returns the same losses and norms, and its own stages' weights and gradients, whole.
    """
    trainer = trainer_for(mesh, config)
    _, _, data, train = trainer.sections
    batches = Batches(
        text.load(data) if corpus is None else corpus,
        sequence=data.sequence,
        global_batch=train.global_batch,
        seed=train.seed,
        coord=trainer.data_coord,
        size=trainer.data_size,
        device=mesh.device,
    )
    done = [trainer.step(*batches(step), learning_rate(train, step), step) for step in range(1, steps + 1)]
    weights, gradients = {}, {}
    for name, parameter in trainer.named_parameters():
        if trainer.sections.model.tied_embeddings and name == "head.weight":
            name = "embed.weight"
        assert parameter.grad is not None
        weights[name] = whole(parameter).double().cpu()
        gradients[name] = whole(parameter.grad, of=parameter).double().cpu()
    return Record(
        tuple(each.loss for each in done), tuple(each.gradient_norm for each in done), weights, gradients
    )


def merged(records: list[Record]) -> Record:
    """The records of all ranks as one: every rank has the same of what it has."""
    weights: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for each in records:
        weights.update(each.weights)
        gradients.update(each.gradients)
    return Record(records[0].losses, records[0].norms, weights, gradients)


def compare(ours: Record, theirs: Record) -> list[Difference]:
    """Differences of `ours` from the reference `theirs`: losses, norms, then each parameter, worst first."""
    found = [
        _difference("loss", _worst_step(ours.losses, theirs.losses), ours.losses, theirs.losses),
        _difference("gradient norm", _worst_step(ours.norms, theirs.norms), ours.norms, theirs.norms),
    ]
    names = [*theirs.weights, *(name for name in ours.weights if name not in theirs.weights)]
    parameters = []
    for name in names:
        for kind, mine, other in (
            ("weight", ours.weights, theirs.weights),
            ("gradient", ours.gradients, theirs.gradients),
        ):
            parameters.append(_difference(kind, name, mine.get(name), other.get(name)))
    return [*found, *sorted(parameters, key=lambda each: -each.relative)]


def _difference(kind: str, name: str, mine: Any, other: Any) -> Difference:
    if mine is None or other is None:
        return Difference(kind, f"{name}, on one side only", float("inf"), float("inf"))
    a, b = torch.as_tensor(mine, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    if a.shape != b.shape:
        return Difference(kind, f"{name}, {tuple(a.shape)} and {tuple(b.shape)}", float("inf"), float("inf"))
    absolute = float((a - b).abs().max()) if a.numel() else 0.0
    if absolute != absolute:
        absolute = float("inf")
    return Difference(kind, name, absolute, absolute / max(1.0, float(b.abs().max()) if b.numel() else 0.0))


def _worst_step(mine: tuple[float, ...], other: tuple[float, ...]) -> str:
    gaps = [abs(a - b) for a, b in zip(mine, other, strict=True)]
    return f"step {gaps.index(max(gaps)) + 1}" if gaps else "no step"
