"""Does a split module still compute the same? Seen on an example, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from meshcomm.errors import MeshcommError, TrainingError
from meshcomm.parallel.tensor.explain import Calls, explained
from meshcomm.parallel.tensor.fused import joined
from meshcomm.parallel.tensor.parameters import local, whole
from meshcomm.parallel.tensor.plan import Rule
from meshcomm.parallel.tensor.split import TensorSplit
from meshcomm.parallel.tensor.state import fused_sizes

# Of the largest value of a tensor: what another order of additions makes of it, and some room.
_ROOM = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@final
class Seen:
    """Outputs of a module on an example, and every gradient of a fixed random sum over them; whole.

    like: what was seen before the module was split. Outputs that are slices of those are taken as
        such, and gathered. rules: what it was split by. Raises TrainingError where the module fails now.
    """

    def __init__(
        self,
        split: TensorSplit,
        module: nn.Module,
        example: Sequence[Any] | Mapping[str, Any],
        like: Seen | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        training = {part: part.training for part in module.modules()}
        module.eval()
        self.calls = Calls(module)
        try:
            with torch.enable_grad(), self.calls:
                y = module(**example) if isinstance(example, Mapping) else module(*example)
        except MeshcommError:
            raise
        except Exception as error:
            if like is None:
                raise
            raise explained(error, split, module, rules or {}, example, like.calls, self.calls) from error
        finally:
            for part, mode in training.items():
                part.training = mode
        ys = [each for each in _tensors(y) if each.is_floating_point()]
        axes = [None if like is None else _axis(split, y, ref) for y, ref in _paired(ys, like)]
        total = torch.zeros((), device=split.device)
        for number, (y, axis) in enumerate(zip(ys, axes, strict=True)):
            shape = list(y.shape)
            if axis is not None:
                shape[axis] *= split.size
            # Drawn on the CPU: the same numbers on every rank and kind of device.
            weights = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            if axis is not None:
                weights = weights.chunk(split.size, axis)[split.coord]
            total = total + (y * weights.to(y)).sum()
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        grads: Sequence[Tensor | None] = [None] * len(named)
        if named and total.requires_grad:
            grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        if like is not None:
            partial = split.partial_parameters(module)
            parts = [
                local(g) for name, g in zip(named, grads, strict=True) if name in partial and g is not None
            ]
            if parts:
                split.mesh.all_reduce(split.dim, parts)
        sizes = fused_sizes(module)
        self.values: dict[str, Tensor] = {}
        for number, (y, axis) in enumerate(zip(ys, axes, strict=True)):
            value = y.detach()
            self.values[f"output {number}"] = (
                value if axis is None else split.mesh.all_gather(split.dim, value, axis)
            )
        for (name, parameter), grad in zip(named.items(), grads, strict=True):
            value = torch.zeros_like(parameter) if grad is None else grad
            value = whole(value, parameter)
            self.values[f"gradient of {name}"] = joined(value, sizes[name]) if name in sizes else value


def compare(split: TensorSplit, before: Seen, after: Seen) -> None:
    """Raises TrainingError, on every rank alike, where the two differ by more than rounding."""
    odd = []
    for name, expected in before.values.items():
        value = after.values.get(name)
        if value is None or value.shape != expected.shape:
            given = "missing" if value is None else f"of shape {tuple(value.shape)}"
            odd.append(f"{name}: {given}, was of shape {tuple(expected.shape)}")
            continue
        most = float(expected.abs().max()) if expected.numel() else 0.0
        off = float((value - expected).abs().max()) if expected.numel() else 0.0
        # Not "off > room": nan must not pass.
        if not off <= _ROOM.get(expected.dtype, 1e-3) * max(most, 1e-6):
            odd.append(f"{name}: off by {off:.2g}, where the largest value is {most:.2g}")
    count = torch.tensor([len(odd)], device=split.device)
    split.mesh.all_reduce(split.dim, count, op="max")
    if int(count):
        shown = odd[:8] + ([f"and {len(odd) - 8} more"] if len(odd) > 8 else [])
        raise TrainingError(
            f'the module split along "{split.dim}" does not compute what it did before',
            given="\n".join(shown) or "other ranks see differences",
            expected="outputs and gradients on the example equal up to rounding",
            hint='"set": {"heads": "split"} for numbers of heads; "column:3" for q, k and v in one weight; '
            'a "row" behind every "column"',
        )


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _tensors(item)]
    return []


def _paired(ys: list[Tensor], like: Seen | None) -> list[tuple[Tensor, Tensor]]:
    refs = [] if like is None else [v for k, v in like.values.items() if k.startswith("output ")]
    return (
        list(zip(ys, refs + ys[len(refs) :], strict=True)) if len(refs) <= len(ys) else [(y, y) for y in ys]
    )


def _axis(split: TensorSplit, y: Tensor, ref: Tensor) -> int | None:
    """Along which axis `y` is a slice of something like `ref`."""
    if y.ndim != ref.ndim:
        return None
    other = [axis for axis in range(y.ndim) if y.shape[axis] != ref.shape[axis]]
    if len(other) == 1 and y.shape[other[0]] * split.size == ref.shape[other[0]]:
        return other[0]
    return None
