"""The load of each expert: how many choices a step sends to it, and the biases that even the loads out without a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.parallel.expert.packed import EXPERTS
from meshcomm.parallel.expert.routing import BIAS
from meshcomm.parallel.splits import Splits

# The names of a router's bias in the built-in model and in the families of transformers.
_BIASES: Final = (BIAS, "expert_bias")


def bias_of(module: nn.Module, experts: str) -> tuple[nn.Module, str] | None:
    """Return the router's bias, which is a buffer: the part of `module` that has it, and its name.

    experts: the name of the module of packed experts.
    """
    around = module.get_submodule(experts.rpartition(".")[0])
    buffers = (
        (part, key) for part in (around, *around.children()) for key in _BIASES if key in part._buffers
    )
    return next(buffers, None)


@final
class Loads:
    """The loads of a step on all ranks: of each layer with experts on this rank, and of all layers for the metrics.

    With `speed`, the router's bias b_e of each expert e changes by speed * sign(mean load - load_e) after each applied step
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A step's load is that of its global batch.

    modules: this rank's stages.
    """

    def __init__(self, splits: Splits, modules: Iterable[nn.Module], speed: float) -> None:
        self._splits, self._speed = splits, speed
        self._names: list[str] = []
        self._biases: list[tuple[nn.Module, str] | None] = []
        parts: list[Any] = []
        for module in modules:
            for name, part in module.named_modules():
                if hasattr(part, EXPERTS):
                    parts.append(part)
                    self._names.append(name)
                    self._biases.append(bias_of(module, name) if speed else None)
        sizes = [part.meshcomm_count + 1 for part in parts]
        self._counts = torch.zeros(sum(sizes), dtype=torch.int64, device=splits.mesh.device)
        self._loads = self._counts.split(sizes) if sizes else ()
        for part, load in zip(parts, self._loads, strict=True):
            part.meshcomm_load = load
        self._summed = True

    def start(self) -> None:
        """Begin a step."""
        self._counts.zero_()
        self._summed = False

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the loads over ranks, if biases need them. Called by: every rank, after the last forward pass of a step."""
        if any(self._biases):
            self._sum()

    @torch.no_grad()
    def apply(self, spoilt: Tensor) -> None:
        """Change the biases, unless the step is spoilt. Does not wait for the device or communicate."""
        for place, load in zip(self._biases, self._loads, strict=True):
            if place is not None:
                bias: Any = place[0]._buffers[place[1]]
                # The mean, times the number of experts, is exact.
                below = (load[:-1].sum() - load[:-1] * (len(load) - 1)).sign()
                bias += below.to(bias.dtype) * self._speed * (spoilt == 0)

    def facts(self) -> dict[str, Any]:
        """Return the loads of the last step as metrics; {} without experts. Called by: every rank. Waits for the device.

        expert_load: the fraction of the choices that each expert gets, by layer. expert_max_over_mean: the largest load of an
        expert, divided by the mean of its layer. experts_dropped: the fraction of all choices that a capacity dropped.
        """
        self._sum()
        mine = list(zip(self._names, [load.tolist() for load in self._loads], strict=True))
        splits = self._splits
        stages = [mine] if splits.pipeline is None else splits.mesh.objects.all_gather(splits.pipeline, mine)
        rows = {_layer(name): load for stage in stages for name, load in stage}
        sums = {layer: sum(load[:-1]) for layer, load in rows.items()}
        if not any(sums.values()):
            return {}
        shares = {
            layer: [round(count / max(1, sums[layer]), 6) for count in load[:-1]]
            for layer, load in rows.items()
        }
        return {
            "expert_max_over_mean": round(max(max(share) * len(share) for share in shares.values()), 4),
            "experts_dropped": round(sum(load[-1] for load in rows.values()) / sum(sums.values()), 6),
            "expert_load": shares,
        }

    def _sum(self) -> None:
        if not self._summed and self._loads:
            self._counts.copy_(self._splits.summed(self._counts.clone(), self._splits.gradients))
        self._summed = True


def _layer(name: str) -> str:
    """Return the number of the layer in the name of a module, or the name if it has none."""
    return next((component for component in name.split(".") if component.isdecimal()), name)
