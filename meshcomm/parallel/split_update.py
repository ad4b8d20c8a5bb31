"""Checks that an optimizer updates split parameters as it updates whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshcomm.errors import MeshcommError, UnsupportedOp
from meshcomm.parallel.tensor.parameters import FUSED, Parts, fused_parts, joined, kept

# Some optimizers use norms or means only after a warm-up of a few steps.
_STEPS: Final = 8
# Elementwise steps are equal to the bit. Norms and means are summed in another order.
_ROOM: Final = 1e-6
# Of a small multi-part parameter.
_UNITS: Final = 4


def check_split(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups_of: Callable[[nn.Module], list[dict[str, Any]]],
    modules: nn.Module,
) -> None:
    """Compare steps of an optimizer on small split parameters with those on whole ones, for each way in which the
    parameters of `modules` are split.

    Called by: every rank that has a part of these parameters.
    Raises:    UnsupportedOp if the results differ, or if the optimizer fails on split parameters only.
    """
    kinds = {
        (each.device_mesh, tuple(map(_plain, each.placements)), each.ndim): each
        for each in modules.parameters()
        if isinstance(each, DTensor) and each.requires_grad and each.ndim
    }
    with torch.random.fork_rng(), torch.enable_grad():
        cases = [(*kind, tall, like) for kind, like in kinds.items() for tall in (True, False)]
        for where, placements, axes, tall, like in cases:
            shape = _shape(axes, where, placements, tall)
            draw = torch.Generator().manual_seed(0)
            values = torch.randn(1 + _STEPS, *shape, generator=draw, dtype=torch.float32)
            values = values.to(like.device, like.dtype)
            try:
                expected = _stepped(make, groups_of, [*values])
            except MeshcommError:
                raise
            except Exception:
                # An optimizer that takes only split parameters has no whole ones to be compared with.
                continue
            given = [distribute_tensor(each, where, placements, src_data_rank=None) for each in values]
            name = ""
            try:
                name, found = _stepped(make, groups_of, given)
                off = float((found - expected[1]).abs().max())
                why = f"an update of a {'matrix' if axes > 1 else 'vector'} is off by {off:.2g}"
                if off <= _ROOM * float(expected[1].abs().max()):
                    continue
            except MeshcommError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise UnsupportedOp(
                f"{name or expected[0]} cannot update parameters that are split over ranks",
                given=f"{why}, if it is split by {', '.join(map(str, placements))}",
                expected="the update of the whole parameter, as by an optimizer that treats each element separately",
                hint="parallel.data, with which every rank has whole parameters; or another optimizer, like AdamW",
            )


def check_fused(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups_of: Callable[[nn.Module], list[dict[str, Any]]],
    modules: nn.Module,
) -> None:
    """Compare steps of an optimizer on small multi-part parameters, which have one more axis if they are split, with those on
    parameters of the original shape.

    Raises UnsupportedOp if the results differ, as those of an optimizer do that looks at the number of axes, or if it fails on
    multi-part parameters only.
    """
    named = dict(modules.named_parameters())
    fused = {name: parts for name, parts in fused_parts(modules).items() if name in named}
    cases: dict[tuple[Parts, int], str] = {}
    for name, parts in fused.items():
        if named[name].requires_grad:
            few = Parts(tuple(_UNITS * size // parts.units for size in parts.sizes), parts.axis)
            cases.setdefault((few, named[name].ndim - 1), name)
    with torch.random.fork_rng(), torch.enable_grad():
        for (parts, axes), name in cases.items():
            like = named[name]
            shape = [5] * axes
            shape[parts.axis] = sum(parts.sizes)
            draw = torch.Generator().manual_seed(0)
            values = torch.randn(1 + _STEPS, *shape, generator=draw).to(like.device, like.dtype)
            try:
                kind, expected = _stepped(make, groups_of, [*values])
            except MeshcommError:
                raise
            except Exception:
                continue
            try:
                _, found = _stepped(make, groups_of, [kept(each, parts) for each in values], parts)
                off = float((joined(found, parts) - expected).abs().max())
                if off <= _ROOM * float(expected.abs().max()):
                    continue
                why = f"an update is off by {off:.2g}"
            except MeshcommError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise UnsupportedOp(
                f"{kind} does not update {name.partition('.')[2]} as on one process",
                given=f"{why}, because tensor parallelism keeps the {len(parts.sizes)} parts of this weight in {axes + 1} axes in "
                f"place of {axes}",
                expected="an update of each element that does not depend on the shape of its parameter",
                hint="use the given groups in place of p.ndim, as groups of vectors and biases have weight_decay 0; or train.optimizer; or "
                "separate modules for the parts, such as q, k and v; or remove parallel.tensor",
            )


def check_apart(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups_of: Callable[[nn.Module], list[dict[str, Any]]],
) -> None:
    """Compare steps of one optimizer on several parameters with those of an optimizer for each, as pipeline stages have.

    Raises UnsupportedOp if the results differ, as those of an optimizer do that divides by a norm of all gradients.
    """
    values = _several()
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            together = _each_stepped(make, groups_of, values)
            halves = (values[:2], values[2:])
            apart = [each for half in halves for each in _each_stepped(make, groups_of, half)]
        except MeshcommError:
            raise
        except Exception:
            return  # Small parameters are not what it expects.
    off = max(float((a - b).abs().max()) for a, b in zip(together, apart, strict=True))
    if off > _ROOM * max(float(each.abs().max()) for each in together):
        raise UnsupportedOp(
            "this optimizer cannot update the stages of a pipeline separately",
            given=f"an update of a parameter is off by {off:.2g} if the optimizer does not hold the others",
            expected="an update of each parameter that does not depend on the others",
            hint="train.clip_norm for clipping by the norm of all gradients; or remove parallel.pipeline",
        )


def check_kept(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups_of: Callable[[nn.Module], list[dict[str, Any]]],
) -> None:
    """Compare steps of an optimizer with gradients in new tensors and in the same tensors, as `GradientSync` has them.

    Raises UnsupportedOp if the results differ, as those of an optimizer do that keeps `p.grad` for its next step.
    """
    values = _several()
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            new = _each_stepped(make, groups_of, values)
            same = _each_stepped(make, groups_of, values, reused=True)
        except MeshcommError:
            raise
        except Exception:
            return
    if not all(map(torch.equal, new, same)):
        off = max(float((a - b).abs().max()) for a, b in zip(new, same, strict=True))
        raise UnsupportedOp(
            "this optimizer keeps gradients from one step to the next, which the next step overwrites",
            given=f"an update of a parameter is off by {off:.2g} if p.grad is the same tensor in each step",
            expected="copies of gradients in the optimizer's state",
            hint="self.state[p]['previous'] = p.grad.clone()",
        )


def _several() -> list[Tensor]:
    """Return the values and the gradients of four small parameters: (1 + _STEPS, ...) each."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1 + _STEPS, *shape, generator=draw) for shape in ((4, 3), (3,), (5, 4), (5,))]


def _each_stepped(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups_of: Callable[[nn.Module], list[dict[str, Any]]],
    values: Sequence[Tensor],
    *,
    reused: bool = False,
) -> list[Tensor]:
    """Return parameters after steps of one optimizer with their gradients. reused: whether a gradient is the same tensor in
    each step."""
    module = nn.Module()
    module.weights = nn.ParameterList(nn.Parameter(each[0].clone()) for each in values)
    optimizer = make(groups_of(module))
    buffers = [torch.zeros_like(each[0]) for each in values]
    for step in range(1, 1 + _STEPS):
        torch.manual_seed(0)
        for parameter, buffer, each in zip(module.weights, buffers, values, strict=True):
            parameter.grad = buffer.copy_(each[step]) if reused else each[step].clone()
        optimizer.step()
    return [each.detach() for each in module.weights]


def _stepped(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    groups_of: Callable[[nn.Module], list[dict[str, Any]]],
    values: Sequence[Tensor],
    parts: Parts | None = None,
) -> tuple[str, Tensor]:
    """Return the optimizer's name and the whole parameter after steps with the gradients values[1:]. parts: those of a
    multi-part parameter."""
    module: Any = nn.Module()
    module.weight = nn.Parameter(values[0].detach().clone())
    if parts is not None:
        setattr(module, FUSED, {"weight": parts})
    optimizer = make(groups_of(module))
    for gradient in values[1:]:
        # Noise that an optimizer draws must not depend on how parameters are split.
        torch.manual_seed(0)
        module.weight.grad = gradient.detach().clone()
        optimizer.step()
    found = module.weight.detach()
    return type(optimizer).__name__, found.full_tensor() if isinstance(found, DTensor) else found


def _plain(placement: Any) -> Any:
    """Return a placement that distribute_tensor accepts: FSDP and tensor parallelism together give strided ones."""
    return Shard(placement.dim) if placement.is_shard() or hasattr(placement, "split_factor") else Replicate()


def _shape(axes: int, where: Any, placements: tuple[Any, ...], tall: bool) -> list[int]:
    """Return a shape of which each rank has several elements, in uneven parts. tall: whether there are more rows than columns."""
    ranks = [
        prod(where.size(dim) for dim, each in enumerate(placements) if each == Shard(axis))
        for axis in range(axes)
    ]
    short = 2 * max(ranks) + 1
    lengths = [short] * axes
    lengths[0 if tall else -1] = 2 * short
    return lengths
