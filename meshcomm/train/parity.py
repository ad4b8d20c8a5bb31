"""The first steps of a training, on a mesh or on one process, recorded so that they can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshcomm.config import Config, load
from meshcomm.errors import ConfigError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import whole
from meshcomm.train import data as text
from meshcomm.train.data import Corpus
from meshcomm.train.loop import batches_of, trainer_for
from meshcomm.train.rates import learning_rate


@dataclass(frozen=True)
class Record:
    """What some steps of a run gave. Gradients are those of the last step, after clipping.

    losses, norms: of each step; a norm is that before clipping. weights, gradients: whole tensors by
    global name, float64 on CPU; of a rank of a pipeline, those of its stages.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Write it as one file."""
        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        tensors["norms"] = torch.tensor(self.norms, dtype=torch.float64)
        tensors |= {f"weight {name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"gradient {name}": tensor for name, tensor in self.gradients.items()}
        torch.save(tensors, path)

    @staticmethod
    def read(path: Path) -> Record:
        """What `save` wrote. Tensors are mapped: ranks of one host share their memory."""
        tensors: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
        losses, norms = (tuple(tensors.pop(name).tolist()) for name in ("losses", "norms"))
        found: dict[str, dict[str, Tensor]] = {"weight": {}, "gradient": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(" ")
            found[kind][name] = tensor
        return Record(losses, norms, found["weight"], found["gradient"])


def in_float64(config: Config) -> tuple[Config, tuple[str, ...]]:
    """The same training in float64, and what was changed for it, in words.

    Raises ConfigError where `config` describes no training.
    """
    if config.train is None:
        raise _no_training(config)
    changes: list[str] = []
    said: list[str] = []
    if config.train.compute_dtype is not None:
        changes.append("train.compute_dtype=")
        said.append(f'train.compute_dtype left out, was "{config.train.compute_dtype}"')
    if config.train.dtype != "float64":
        changes.append('train.dtype="float64"')
        said.append(f'train.dtype = "float64", was "{config.train.dtype}"')
    return (load(config, changes) if changes else config), tuple(said)


def reference(config: Config) -> Config:
    """The same training as `config`, on one process: no part of it is split or repeated.

    Raises ConfigError where `config` describes no training.
    """
    if config.parallel is None or config.train is None:
        raise _no_training(config)
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
    Nothing is written, and no checkpoint is read.
    """
    # What is not finite is compared too.
    trainer = trainer_for(mesh, load(config, ['train.nonfinite="skip"']))
    _, _, data, train = trainer.sections
    batches = batches_of(trainer, text.load(data) if corpus is None else corpus)
    done = []
    for step in range(1, steps + 1):
        done.append(trainer.step(*batches(step), learning_rate(train, step), step))
        mesh.step(step)
    weights, gradients = {}, {}
    for name, parameter in trainer.named_parameters():
        assert parameter.grad is not None
        weights[name] = whole(parameter).detach().double().cpu()
        gradients[name] = whole(parameter.grad, of=parameter).double().cpu()
    return Record(
        tuple(each.loss for each in done), tuple(each.gradient_norm for each in done), weights, gradients
    )


def finite(found: Record) -> Record:
    """`found`, where it can be compared with. Raises TrainingError where a loss or norm is not finite."""
    for step, (loss, norm) in enumerate(zip(found.losses, found.norms, strict=True), start=1):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"on one process step {step} gives nothing that a mesh could be compared with",
                given=f"loss {loss}, gradient norm {norm}",
                expected="finite numbers",
                hint="a smaller train.lr, or --steps " + str(max(1, step - 1)),
            )
    return found


def _no_training(config: Config) -> ConfigError:
    return ConfigError(
        f"{config.source} says nothing about training",
        given="a mesh without [parallel], [model], [data] and [train]",
        expected="all four sections",
        hint="configs/quickstart.toml has them all",
    )
