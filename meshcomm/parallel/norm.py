"""The 2-norm of all gradients over a whole mesh, every parameter counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import LayoutError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.parameters import local, parts_of

# Elements that are squared at once: float64 copies of whole gradients would double their memory.
_BLOCK = 1 << 20


class _Held(NamedTuple):
    name: str
    parameter: nn.Parameter


@final
class GradientNorm:
    """The norm of the gradients of all parameters on all ranks of a mesh.

    Along a dim on which a parameter is split its parts are disjoint, so their squares are added; along
    every other dim its gradient is the same on all ranks and counts once.

    Args:
        mesh: an open mesh.
        parameters: each with the dims along which it is split, by name: ("tp",), ("fsdp", "tp"),
            ("ep", "tp"), a merged dim's name, or () for one that every rank has whole. Dims of size 1
            change nothing. Those that need no gradient are left out. After fully_shard: the parameters
            that it put into the module.
        pipeline: the dim along which ranks hold different parameters.
        skip: parameters that another coord along the pipeline counts (tied embeddings), out of
            `parameters`; they are clipped all the same.
        names: of the parameters, in their order, for errors.

    Called by: every rank, with the same dims for the same parameter.
    Raises:    UnknownDim; LayoutError where dims name a dim twice, differ from those a DTensor is
               sharded along, or where a parameter comes twice or is skipped without being there.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Iterable[tuple[nn.Parameter, Sequence[str]]],
        *,
        pipeline: str | None = None,
        skip: Iterable[nn.Parameter] = (),
        names: Iterable[str] = (),
    ) -> None:
        self._mesh = mesh
        self._pipeline = pipeline if pipeline is not None and mesh.size(pipeline) > 1 else None
        pairs = list(parameters)
        named = list(names) or [f"number {i}, {tuple(p.shape)}" for i, (p, _) in enumerate(pairs)]
        if len(named) != len(pairs):
            raise LayoutError(
                "names and parameters of a norm do not go together",
                given=f"{len(named)} names, {len(pairs)} parameters",
                expected="one name for each, or none at all",
            )
        skipped = {id(parameter) for parameter in skip}
        seen: set[int] = set()
        self._held: list[_Held] = []
        self._uncounted: list[_Held] = []
        self._classes: dict[tuple[str, ...], list[_Held]] = {}
        for (parameter, given), name in zip(pairs, named, strict=True):
            if id(parameter) in seen:
                raise LayoutError(
                    f"parameter {name} is in the norm twice",
                    given=f"dims {tuple(given)} and others",
                    expected="every parameter once",
                    hint="module.parameters() names each once",
                )
            seen.add(id(parameter))
            dims = _checked(mesh, parameter, given, name, pipeline)
            if not parameter.requires_grad:
                continue
            self._held.append(_Held(name, parameter))
            if id(parameter) in skipped:
                self._uncounted.append(self._held[-1])
            else:
                self._classes.setdefault(dims, []).append(self._held[-1])
        if skipped - seen:
            raise LayoutError(
                "a parameter is to be skipped that is not there",
                given=f"{len(skipped - seen)} of {len(skipped)} in skip are not among the parameters",
                expected="parameters of this rank",
                hint="skip=[parameter] only on the rank that holds the second copy",
            )
        # Classes and dims are sorted: ranks may have met their parameters in different orders.
        self._dims = sorted({dim for dims in self._classes for dim in dims})

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm, float64 (), equal on all ranks; inf or nan where a gradient is.

        Along dims on which something is split, and along the pipeline, a gradient that is not finite on one
        rank alone, as after a fault of its memory, is seen by all, also of a parameter that all have whole.

        Called by: every rank, once all gradients are summed (finish() of what sums them has returned).
        Sends:     one message along each dim on which something is split, then one along the pipeline,
                   each of 8 bytes per class of parameters and 8 more. Nothing waits for the device.
        Raises:    TrainingError, naming the parameters, where gradients are missing, or are DTensors
                   placed otherwise than their parameters; nothing has been sent then.
        """
        self._complete()
        squares = {
            dims: _squares([_gradient(held) for held in self._classes[dims]]).to(self._mesh.device)
            for dims in sorted(self._classes)
        }
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for square in squares.values():
            total = total + square
        if self._uncounted:
            total = total + _squares([_gradient(held) for held in self._uncounted]).to(total.device)
        # 0, inf or nan: this travels also along dims along which what it comes from is no summand.
        total = torch.where(total.isfinite(), 0.0, total)
        for dim in self._dims:
            along = [dims for dims in squares if dim in dims]
            stacked = torch.stack([*(squares[dims] for dims in along), total])
            *sums, total = self._mesh.all_reduce(dim, stacked).unbind()
            squares.update(zip(along, sums, strict=True))
        for square in squares.values():
            total = total + square
        if self._pipeline is not None:
            total = self._mesh.all_reduce(self._pipeline, total)
        return total.sqrt()

    @torch.no_grad()
    def clip_(self, max_norm: float) -> Tensor:
        """Scale all gradients in place by min(1, max_norm / norm); return the norm before.

        A norm that is not finite changes nothing. Called by and raises as `norm`; TrainingError where
        max_norm is not positive.
        """
        if not max_norm > 0:
            raise TrainingError(
                "gradients cannot be clipped to this norm",
                given=f"max_norm = {max_norm}",
                expected="more than 0",
                hint="max_norm = 1.0, or norm() where nothing is to be clipped",
            )
        norm = self.norm()
        scale = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
        # On an accelerator, looking would wait for it; multiplying by 1 does not.
        if scale.device.type == "cpu" and scale.item() == 1.0:
            return norm
        for held in self._held:
            gradient = _gradient(held)
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
        return norm

    def _complete(self) -> None:
        missing = [held.name for held in self._held if held.parameter.grad is None]
        if missing:
            raise TrainingError(
                f"{len(missing)} of {len(self._held)} parameters have no gradient, so there is no norm",
                given=", ".join(missing[:8]) + (", ..." if len(missing) > 8 else ""),
                expected="a .grad on every parameter that needs one",
                hint="call norm() after backward and before zero_grad, or set requires_grad = False",
            )
        for name, parameter in self._held:
            grad = parameter.grad
            if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
                continue
            if grad.placements != parameter.placements:
                raise TrainingError(
                    f"the gradient of {name} is placed otherwise than the parameter",
                    given=f"gradient {grad.placements}, parameter {parameter.placements}",
                    expected="the parameter's placements, with nothing left to be summed",
                    hint="grad.redistribute(placements=parameter.placements)",
                )


def _checked(
    mesh: Mesh, parameter: nn.Parameter, given: Sequence[str], name: str, pipeline: str | None
) -> tuple[str, ...]:
    """The dims of more than one rank along which a parameter is split, in one order."""
    dims = (given,) if isinstance(given, str) else tuple(given)
    for dim in dims:
        mesh.size(dim)
    mesh.layout.home((*dims, *([pipeline] if pipeline else [])))
    flat = mesh.layout.expand(dims)
    twice = sorted({dim for dim in flat if flat.count(dim) > 1} | ({pipeline or ""} & set(flat)))
    if twice:
        raise LayoutError(
            f"parameter {name} cannot be split along {', '.join(twice)} twice",
            given=f"dims {dims}, pipeline {pipeline}",
            expected="dims that share none, and not the pipeline's",
            hint="either a merged dim or the dims it merges; the pipeline is counted for all",
        )
    split = {dim for dim in flat if mesh.size(dim) > 1}
    sharded = _sharded(mesh, parameter)
    if sharded is not None and sharded != split:
        raise LayoutError(
            f"parameter {name} is split along other dims than it is said to be",
            given=f"dims {dims}; a DTensor with placements {_placements(parameter)}",
            expected=f"the dims that it is sharded along: {tuple(sorted(sharded))}",
            hint="split_dims(parameter) reads them",
        )
    return tuple(sorted(dim for dim in dims if mesh.size(dim) > 1))


def split_dims(parameter: Tensor) -> tuple[str, ...]:
    """The dims that a parameter is split along, as it says itself: what GradientNorm asks for.

    Those a DTensor is sharded along; in the simulator, where parameters are plain, those that whoever
    split it has noted; () for other plain tensors. Raises LayoutError for a DTensor on a DeviceMesh without
    names, which is none of a mesh's own.
    """
    if not isinstance(parameter, DTensor):
        return tuple(part.dim for part in parts_of(parameter) if part.mesh.size(part.dim) > 1)
    where = parameter.device_mesh
    if where.mesh_dim_names is None:
        raise LayoutError(
            "the dims of a parameter's DeviceMesh have no names",
            given=f"a DTensor of shape {tuple(parameter.shape)} on {where}",
            expected='a DeviceMesh such as mesh["tp"]',
        )
    # Whatever is neither whole nor a summand is a shard; FSDP's on top of another's has its own type.
    return tuple(
        name
        for axis, (name, placement) in enumerate(zip(where.mesh_dim_names, parameter.placements, strict=True))
        if not placement.is_replicate() and not placement.is_partial() and where.size(axis) > 1
    )


def _sharded(mesh: Mesh, parameter: Tensor) -> set[str] | None:
    """`split_dims` without merged names; None where no names say it."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names is None:
        return None
    return {dim for dim in mesh.layout.expand(split_dims(parameter)) if mesh.size(dim) > 1}


def _placements(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "none"
    return f"{parameter.placements} on {parameter.device_mesh.mesh_dim_names}"


def _gradient(held: _Held) -> Tensor:
    """This rank's part of a gradient that is there."""
    gradient = held.parameter.grad
    assert gradient is not None
    return local(gradient)


def _squares(gradients: list[Tensor]) -> Tensor:
    """The sum of all elements' squares, float64 ().

    On CPU all of it is added up in float64: a long float32 sum loses digits there. An accelerator adds
    up in a tree, so its float32 sums are good, and float64 may be slow.
    """
    if gradients[0].device.type == "cpu":
        norms = [
            torch.linalg.vector_norm(block, dtype=torch.float64)
            for gradient in gradients
            for block in gradient.reshape(-1).split(_BLOCK)
        ]
    else:
        norms = [
            torch.linalg.vector_norm(
                gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)
            ).double()
            for gradient in gradients
        ]
    return torch.stack(norms).square().sum()
