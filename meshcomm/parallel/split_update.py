"""Checks that an optimizer updates the parameters of a mesh as it updates those of one process, on a few small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshcomm.errors import MeshcommError, UnsupportedOp
from meshcomm.parallel.dropout import seed_generators
from meshcomm.parallel.tensor.parameters import whole
from meshcomm.transfer.fused import FUSED, Kept, Parts, fused_parts, kept

# Creates an optimizer of a module's parameters.
Build: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]
_Values: TypeAlias = Sequence[Sequence[Tensor] | Tensor]

# Some optimizers use norms or means only after a warm-up of a few steps.
_STEPS: Final = 8
# Elementwise steps are equal to the bit. Norms and means are summed in another order.
_ROOM: Final = 1e-6
# Of a small multi-part parameter.
_UNITS: Final = 4
# Of several small parameters.
_SHAPES: Final = ((4, 3), (3,), (5, 4), (5,))
_OFF: Final = "an update of a parameter is off by"


def check_split(build: Build, modules: nn.Module) -> None:
    """Compare steps on small split parameters with those on whole ones, for each way in which the parameters of `modules` are
    split.

    Called by: every rank that has a part of these parameters.
    Raises:    UnsupportedOp if the results differ, or if the optimizer fails on split parameters only.
    """
    kinds = {
        (parameter.device_mesh, tuple(map(_plain, parameter.placements)), parameter.ndim): parameter
        for parameter in modules.parameters()
        if isinstance(parameter, DTensor) and parameter.requires_grad and parameter.ndim
    }
    cases = [(*kind, tall, like) for kind, like in kinds.items() for tall in (True, False)]
    for where, placements, axes, tall, like in cases:
        values = _drawn(_shape(axes, where, placements, tall), like)
        parts = [distribute_tensor(value, where, placements, src_data_rank=None) for value in values]
        kind, why = _difference(build, [values], [parts])
        if why:
            shape = "matrix" if axes > 1 else "vector"
            raise UnsupportedOp(
                f"{kind} cannot update parameters that are split over ranks",
                given=f"{why} for a {shape}, if it is split by {', '.join(map(str, placements))}",
                expected="the update of the whole parameter, as by an optimizer that treats each element separately",
                hint="parallel.data, with which every rank has whole parameters; or another optimizer, like AdamW",
            )


def check_fused(build: Build, modules: nn.Module) -> None:
    """Compare steps on small multi-part parameters, which have one more axis if they are split, with those on parameters of the
    original shape.

    Raises UnsupportedOp if the results differ, as those of an optimizer do that looks at the number of axes, or if it fails on
    multi-part parameters only.
    """
    named = dict(modules.named_parameters())
    cases: dict[tuple[Parts, int], str] = {}
    for name, parts in fused_parts(modules).items():
        if name in named and named[name].requires_grad:
            few = Parts(tuple(_UNITS * size // parts.units for size in parts.sizes), parts.axis)
            cases.setdefault((few, named[name].ndim - 1), name)
    for (parts, axes), name in cases.items():
        shape = [5] * axes
        shape[parts.axis] = sum(parts.sizes)
        values = _drawn(shape, named[name])
        kind, why = _difference(build, [values], [[kept(value, parts) for value in values]], parts=parts)
        if why:
            raise UnsupportedOp(
                f"{kind} does not update {name.partition('.')[2]} as on one process",
                given=f"{why}, because tensor parallelism keeps the {len(parts.sizes)} parts of this weight in {axes + 1} axes in "
                f"place of {axes}",
                expected="an update of each element that does not depend on the shape of its parameter",
                hint="use the given groups in place of p.ndim, as groups of vectors and biases have weight_decay 0; or train.optimizer; or "
                "separate modules for the parts, such as q, k and v; or remove parallel.tensor",
            )


def check_apart(build: Build) -> None:
    """Compare steps of one optimizer on several parameters with those of an optimizer for each half, as pipeline stages have.

    Raises UnsupportedOp if the results differ, as those of an optimizer do that divides by a norm of all gradients.
    """
    values = [_drawn(shape) for shape in _SHAPES]
    _, why = _difference(build, values, values[:2], values[2:])
    if why.startswith(_OFF):
        raise UnsupportedOp(
            "this optimizer cannot update the stages of a pipeline separately",
            given=f"{why} if the optimizer does not hold the others",
            expected="an update of each parameter that does not depend on the others",
            hint="train.clip_norm for clipping by the norm of all gradients; or remove parallel.pipeline",
        )


def check_kept(build: Build) -> None:
    """Compare steps of an optimizer with gradients in new tensors and in the same tensors, as `GradientSync` has them.

    Raises UnsupportedOp if the results differ, as those of an optimizer do that keeps `p.grad` for its next step.
    """
    values = [_drawn(shape) for shape in _SHAPES]
    _, why = _difference(build, values, values, reused=True)
    if why.startswith(_OFF):
        raise UnsupportedOp(
            "this optimizer keeps gradients from one step to the next, which the next step overwrites",
            given=f"{why} if p.grad is the same tensor in each step",
            expected="copies of gradients in the optimizer's state",
            hint="self.state[p]['previous'] = p.grad.clone()",
        )


def _difference(
    build: Build, usual: _Values, *others: _Values, parts: Parts | None = None, reused: bool = False
) -> tuple[str, str]:
    """Return the optimizer's name, and how its updates of parameters change if they are held in another way: "" if they do not,
    or if steps fail in the usual way, as small parameters are not what every optimizer expects.

    usual, others: for each parameter, its value and then its gradients. Each of `others` has an optimizer of its own.
    parts, reused: see `_stepped`, for `others`.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        kind = ""
        updated: list[Tensor] = []
        try:
            kind, expected = _stepped(build, usual)
            for other in others:
                updated += _stepped(build, other, parts, reused=reused)[1]
        except MeshcommError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            return kind, f"{type(error).__name__}: {reason}" if kind else ""
    off = float(torch.cat([(a - b).flatten() for a, b in zip(updated, expected, strict=True)]).abs().max())
    room = 0.0 if reused else _ROOM * max(float(value.abs().max()) for value in expected)
    # Not "off > room", because nan must not pass.
    return kind, "" if off <= room else f"{_OFF} {off:.2g}"


def _stepped(
    build: Build, values: _Values, parts: Parts | None = None, *, reused: bool = False
) -> tuple[str, list[Tensor]]:
    """Return an optimizer's name, and the whole parameters after its steps.

    parts: those of each parameter. reused: whether a gradient is the same tensor in each step.
    """
    module: Any = nn.Module()
    module.weights = nn.ParameterList(nn.Parameter(value.detach().clone()) for value, *_ in values)
    if parts is not None:
        setattr(module.weights, FUSED, {"0": parts})
    optimizer = build(module)
    buffers = [torch.zeros_like(value) for value, *_ in values] if reused else []
    for step in range(1, 1 + _STEPS):
        # Noise that an optimizer draws must not depend on how parameters are split.
        seed_generators(values[0][0].device, 0)
        for number, (parameter, steps) in enumerate(zip(module.weights, values, strict=True)):
            # As training does, also if the optimizer has dropped the gradient or set another one.
            parameter.grad = buffers[number].copy_(steps[step]) if reused else steps[step].detach().clone()
        optimizer.step()
    return type(optimizer).__name__, [
        whole(weight if parts is None else Kept(weight, parts)) for weight in module.weights
    ]


def _drawn(shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """Return the value and the gradients of a small parameter, (1 + _STEPS, *shape), of the kind of `like`."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1 + _STEPS, *shape, generator=draw, dtype=torch.float32)
    return values if like is None else values.to(like.device, like.dtype)


def _plain(placement: Any) -> Any:
    """Return a placement that distribute_tensor accepts: FSDP and tensor parallelism together give strided ones."""
    return Shard(placement.dim) if placement.is_shard() or hasattr(placement, "split_factor") else Replicate()


def _shape(axes: int, where: Any, placements: tuple[Any, ...], tall: bool) -> list[int]:
    """Return a shape of which each rank has several elements, in uneven parts. tall: whether there are more rows than columns."""
    ranks = [
        prod(where.size(dim) for dim, placement in enumerate(placements) if placement == Shard(axis))
        for axis in range(axes)
    ]
    short = 2 * max(ranks) + 1
    lengths = [short] * axes
    lengths[0 if tall else -1] = 2 * short
    return lengths
