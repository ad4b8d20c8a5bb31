"""Muon on split parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshcomm.errors import UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.parallel.expert.packed import EXPERTS
from meshcomm.parallel.tensor.parameters import local
from meshcomm.transfer.fused import Parts, fused_parts, joined, kept


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for matrices that are split over ranks: the results are those of torch on one process.

    Momentum and weight decay are computed on this rank's part. The momentum is then gathered in bfloat16, in which torch
    orthogonalizes it: 2 bytes per element of a matrix, along each dim that splits it. Every rank orthogonalizes every matrix of which
    it has a part, and keeps its part of the result. Experts' stacks are orthogonalized expert by expert, and are not gathered along
    the dims that split only the stack.

    settings: the arguments of torch.optim.Muon. Raises ValueError if ns_steps is not from 1 to 99, which torch checks in a step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        if not 1 <= settings.get("ns_steps", 5) <= 99:
            raise ValueError(f"ns_steps should be from 1 to 99 but is: {settings['ns_steps']}")
        super().__init__(groups, torch.optim.Muon([torch.zeros(1, 1)], **settings).defaults)
        self._parts: dict[Tensor, Parts] = {}
        self._stacks: set[Tensor] = set()

    def know(self, modules: nn.Module) -> None:
        """Find out which parameters have several parts, and which are stacks of matrices.

        Raises UnsupportedOp for parameters that are no matrices.
        """
        fused = fused_parts(modules)
        named = dict(modules.named_parameters(remove_duplicate=False))
        self._parts = {named[name]: parts for name, parts in fused.items() if name in named}
        parts_of_model = [part for part in modules.modules() if hasattr(part, EXPERTS)]
        self._stacks = {parameter for part in parts_of_model for parameter in part.parameters()}
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        others = {
            parameter: name.partition(".")[2]
            for name, parameter in named.items()
            if parameter in held
            and (
                parameter.is_complex()
                or parameter.ndim - (parameter in self._parts) != 2 + (parameter in self._stacks)
            )
        }
        if others:
            raise UnsupportedOp(
                "Muon updates only matrices",
                given=listed([*others.values()]),
                expected="real parameters with two axes, or experts' stacks of them",
                hint=f'train.groups = {{ "{next(iter(others.values()))}" = {{ optimizer = "adamw" }}, ... }}, before patterns of more parameters',
            )

    @property
    def communicates(self) -> bool:
        """Whether a step gathers matrices from other ranks."""
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        return any(
            isinstance(each, DTensor) and {*map(type, each.placements)} != {Replicate} for each in held
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Called by: every rank that has a part of the parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, parts = self.state[parameter], self._parts.get(parameter)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = local(state["momentum_buffer"]).lerp_(local(gradient), 1 - group["momentum"])
        update = local(gradient).lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = self._moved(update.bfloat16(), parameter, gathers=True)
        matrices = update if parts is None else joined(update, parts)
        # Starting from zero, a step of torch.optim.Muon without momentum is the change of the weight.
        change = torch.zeros_like(matrices, dtype=parameter.dtype)
        each = [nn.Parameter(matrix) for matrix in change.reshape(-1, *change.shape[-2:])]
        for one, matrix in zip(each, matrices.reshape(-1, *change.shape[-2:]), strict=True):
            one.grad = matrix.to(one.dtype)
        settings = {**group, "params": each, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        # Without the hooks of torch, which this optimizer's own step calls.
        inspect.unwrap(torch.optim.Muon.step)(torch.optim.Muon([settings]))
        change = self._moved(change if parts is None else kept(change, parts), parameter, gathers=False)
        local(parameter.detach()).mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(change)

    def _moved(self, x: Tensor, parameter: Tensor, *, gathers: bool) -> Tensor:
        """Return whole matrices, gathered from each rank's part; or, without communication, this rank's part of them."""
        if not isinstance(parameter, DTensor):
            return x
        where, split = parameter.device_mesh, parameter.placements
        apart = parameter in self._stacks and {*map(type, split)} <= {Shard, Replicate}
        whole = tuple(each if apart and each == Shard(0) else Replicate() for each in split)
        shape = {"shape": parameter.shape, "stride": parameter.stride()}
        places = split if gathers else whole
        held = DTensor.from_local(x, where, places, run_check=False, **shape)  # type: ignore[arg-type]
        if not gathers:
            return held.redistribute(placements=split).to_local()
        # torch gathers along several dims at once only with a warning. A strided shard is a shard of another one.
        for place in sorted(range(len(split)), key=lambda place: (type(split[place]) is Shard, -place)):
            held = held.redistribute(
                placements=[*held.placements[:place], whole[place], *held.placements[place + 1 :]]
            )
        return held.to_local()
