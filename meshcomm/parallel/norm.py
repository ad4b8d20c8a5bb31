"""The 2-norm of all gradients over a full mesh, with every parameter counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.errors import LayoutError, TrainingError
from meshcomm.layout.names import listed
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.parameters import local, split_dims
from meshcomm.parallel.torch_private import norms, scale_all

# The number of elements that are squared at a time: float64 copies of full gradients would take twice their memory.
_BLOCK = 1 << 20


class _Named(NamedTuple):
    name: str
    parameter: nn.Parameter

    def gradient(self) -> Tensor:
        """Return this rank's part of the gradient, which must exist. A complex one is viewed as pairs of real numbers."""
        part = self.parameter.grad
        assert part is not None
        if isinstance(part, DTensor):
            part = local(part)
        return torch.view_as_real(part) if part.is_complex() else part


@final
class GradientNorm:
    """The norm of the gradients of all parameters on all ranks of a mesh.

    Along a dim that splits a parameter, the parameter's parts are disjoint, so their squares are added. Along every other dim,
    its gradient is the same on all ranks and counts once.

    Args:
        model: a module, or (name, parameter) pairs. A DTensor records how it is split. Any other tensor is assumed to be equal on all ranks. Frozen parameters are left out, and a
            parameter with two names counts once. After fully_shard, pass the module's new parameters.
        pipeline: the dim along which ranks hold different parameters.
        skip: parameters that another coord along the pipeline counts (tied embeddings). Skipped parameters are clipped too.

    Called by: every rank, with parameters that are split in the same way.
    Raises:    UnknownDim; LayoutError if a DTensor is on no DeviceMesh of this mesh, if it is split along the pipeline
               dim, or if a parameter to skip does not belong to the model.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        *,
        pipeline: str | None = None,
        skip: Iterable[nn.Parameter] = (),
    ) -> None:
        self._mesh = mesh
        self._pipeline = pipeline if pipeline is not None and mesh.size(pipeline) > 1 else None
        named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
        skipped = {id(parameter) for parameter in skip}
        if unknown := skipped - {id(parameter) for _, parameter in named}:
            raise LayoutError(
                "a parameter to skip does not exist",
                given=f"{len(unknown)} of {len(skipped)} in skip are not among the parameters",
                expected="parameters of this rank",
                hint="skip=[parameter] only on the rank that holds the second copy",
            )
        needed = {parameter: name for name, parameter in reversed(named) if parameter.requires_grad}
        self._frozen = [_Named(name, parameter) for name, parameter in named if parameter not in needed]
        classes: dict[tuple[str, ...], list[_Named]] = {}
        uncounted: list[_Named] = []
        for parameter, name in reversed(needed.items()):
            counted = _Named(name, parameter)
            if id(parameter) in skipped:
                uncounted.append(counted)
            else:
                classes.setdefault(_dims_of(mesh, counted, pipeline), []).append(counted)
        # Classes and dims are sorted, because parameters may be in different orders on different ranks.
        self._dims = sorted({dim for dims in classes for dim in dims})
        self._classes = {dims: len(classes[dims]) for dims in sorted(classes)}
        self._held = [counted for dims in self._classes for counted in classes[dims]] + uncounted
        self.each = torch.zeros(len(self._held), dtype=torch.float64)

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of `each`."""
        return [held.name for held in self._held]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the norm, float64 (), equal on all ranks. The norm is inf or nan if a gradient contains inf or nan.

        If only one rank has a gradient that is not finite, for example after a memory fault, all ranks along the split dims
        and the pipeline dim see it, even if the parameter itself is not split.

        Called by: every rank, after all gradients are summed (after `GradientSync.finish`).
        Sends:     one message along each dim along which a parameter is split, then one along the pipeline.
                   Each message has at most 8 bytes per class of parameters, plus 8. Does not wait for the device.
        Raises:    TrainingError that names the parameters, before anything is sent, if gradients are missing,
                   or are DTensors whose placements differ from their parameters'.
        Afterwards `each` holds the norms of this rank's parts, float64 (n,), in the order of `names`.
        """
        self._complete()
        self.each = _norms([held.gradient() for held in self._held]).to(self._mesh.device)
        counts = [*self._classes.values()]
        if not self._dims and self._pipeline is None and sum(counts) == len(self._held):
            return self.each.square().sum().sqrt()
        parts = self.each.square().split([*counts, len(self._held) - sum(counts)])
        squares = {dims: part.sum() for dims, part in zip(self._classes, parts, strict=False)}
        total = sum([part.sum() for part in parts], torch.zeros_like(self.each[:0].sum()))
        # The value 0, inf or nan is sent along all dims, even if the gradient itself is not added.
        total = torch.where(total.isfinite(), 0.0, total)
        for dim in self._dims:
            along = [dims for dims in squares if dim in dims]
            stacked = torch.stack([*(squares[dims] for dims in along), total])
            *sums, total = self._mesh.all_reduce(dim, stacked).unbind()
            squares.update(zip(along, sums, strict=True))
        total = sum(squares.values(), total)
        if self._pipeline is not None:
            total = self._mesh.all_reduce(self._pipeline, total)
        return total.sqrt()

    @torch.no_grad()
    def clip_(self, max_norm: float) -> Tensor:
        """Scale all gradients in place by min(1, max_norm / norm), and return the norm before scaling.

        If the norm is not finite, nothing changes. Callers and errors are as for `norm`. Also raises
        TrainingError if max_norm is not positive.
        """
        if not max_norm > 0:
            raise TrainingError(
                "gradients cannot be clipped to this norm",
                given=f"max_norm = {max_norm}",
                expected="more than 0",
                hint="max_norm = 1.0, or norm() to clip nothing",
            )
        norm = self.norm()
        self.scale_(max_norm, norm)
        return norm

    @torch.no_grad()
    def scale_(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients in place as `clip_` does, for a known norm. Does not communicate."""
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.multiply_(torch.where(norm.isfinite(), factor, 1.0))

    @torch.no_grad()
    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar, in place. Does not communicate. Raises TrainingError for missing gradients."""
        # If calls are queued, reading the factor would wait for them; multiplying by 1 does not.
        if not self._mesh.is_async and factor.item() == 1.0:
            return
        self._complete()
        gradients = [held.gradient() for held in self._held]
        for (device, dtype), places in _by_kind(gradients).items():
            scale_all([gradients[place] for place in places], factor.to(device, dtype))

    def _complete(self) -> None:
        if unfrozen := [held.name for held in self._frozen if held.parameter.requires_grad]:
            raise TrainingError(
                f"{unfrozen[0]} was unfrozen after GradientNorm was created, and would not be counted",
                given=listed(unfrozen),
                expected="the same frozen parameters as before",
                hint="create a new GradientNorm; with a Trainer, save a checkpoint and load it into a new Trainer",
            )
        missing = [held.name for held in self._held if held.parameter.grad is None]
        if missing:
            raise TrainingError(
                f"{len(missing)} of {len(self._held)} parameters have no gradient, so there is no norm",
                given=listed(missing),
                expected="a .grad on every parameter that needs one",
                hint="call norm() after backward and before zero_grad, or set requires_grad = False",
            )
        for name, parameter in self._held:
            grad = parameter.grad
            if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
                continue
            if grad.placements != parameter.placements:
                raise TrainingError(
                    f"the gradient of {name} and the parameter have different placements",
                    given=f"gradient {grad.placements}, parameter {parameter.placements}",
                    expected="the parameter's placements, without pending sums",
                    hint="grad.redistribute(placements=parameter.placements)",
                )


def _dims_of(mesh: Mesh, held: _Named, pipeline: str | None) -> tuple[str, ...]:
    """Return the dims of size above 1 along which a parameter is split, sorted."""
    dims = tuple(sorted(dim for dim in split_dims(held.parameter) if mesh.size(dim) > 1))
    if pipeline in mesh.layout.expand(dims):
        raise LayoutError(
            f"parameter {held.name} cannot be split along {pipeline} twice",
            given=f"dims {dims}, pipeline {pipeline}",
            expected="parameters that are not split along the pipeline dim",
            hint="pass no pipeline, or use a DeviceMesh without its dim",
        )
    return dims


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, float64 (n,).

    On a CPU, sums are computed in float64, because long float32 sums lose precision. An accelerator adds in a tree, so its
    float32 sums are accurate, and its float64 arithmetic may be slow.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    kinds = _by_kind(gradients)
    parts = []
    for (device, dtype), places in kinds.items():
        some = [gradients[place] for place in places]
        if device.type != "cpu":
            parts.append(torch.stack(list(norms(some, torch.promote_types(dtype, torch.float32)))).double())
        elif max(gradient.numel() for gradient in some) <= _BLOCK:
            parts.append(torch.stack(list(norms(some, torch.float64))))
        else:
            parts.append(torch.stack([_norm_of_blocks(gradient) for gradient in some]))
    if len(parts) == 1:
        return parts[0]
    places = [place for some in kinds.values() for place in some]
    norm_of = dict(zip(places, torch.cat(parts).unbind(), strict=True))
    return torch.stack([norm_of[place] for place in range(len(gradients))])


def _by_kind(gradients: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the tensors' indices, grouped by device and dtype."""
    places_of: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, gradient in enumerate(gradients):
        places_of.setdefault((gradient.device, gradient.dtype), []).append(place)
    return places_of


def _norm_of_blocks(gradient: Tensor) -> Tensor:
    norm_of = torch.linalg.vector_norm
    blocks = [norm_of(block, dtype=torch.float64) for block in gradient.reshape(-1).split(_BLOCK)]
    norm: Tensor = blocks[0] if len(blocks) == 1 else norm_of(torch.stack(blocks))
    return norm
