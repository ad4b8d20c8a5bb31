"""What a training program in plain torch consists of, and its loop on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

STEPS, SAMPLES, SEED = 4, 8, 3


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Kind:
    """A training program.

    module: builds the model, with values from torch's default generator. batch: (step) -> inputs and targets of the global
    batch, in float64. loss: (outputs, targets) -> a mean over the samples; or a sum and a count; or a dictionary. call: calls
    the model with inputs. optimizer: of parameters or groups. of_inputs: whether the loss also takes the inputs.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[..., Any]
    call: Callable[[nn.Module, Any], Any] = lambda module, inputs: module(inputs)
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = sgd
    of_inputs: bool = False


def alone(kind: Kind) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one process with whole batches. Return the losses, and all weights and buffers after the last step."""
    torch.manual_seed(SEED)
    module = kind.module().double().train()
    optimizer = kind.optimizer(module.parameters())
    losses = []
    for step in range(1, STEPS + 1):
        inputs, targets = kind.batch(step)
        optimizer.zero_grad()
        given = (targets, inputs) if kind.of_inputs else (targets,)
        found = kind.loss(kind.call(module, inputs), *given)
        found = found["loss"] if isinstance(found, dict) else found
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: each.detach() for name, each in module.state_dict().items()}
