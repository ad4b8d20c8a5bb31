"""The norm of all gradients over all ranks, with every parameter counted once, and clipping to it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshcomm.errors import LayoutError, TrainingError
from meshcomm.layout.names import listed
from meshcomm.mesh import Mesh
from meshcomm.parallel.data import check_summed
from meshcomm.parallel.tensor.parameters import (
    SplitGroup,
    as_mesh_errors,
    local,
    split_dims,
    split_groups,
)
from meshcomm.parallel.torch_private import norms, scale_all, wrapper_of

# The number of elements that are squared at a time: float64 copies of full gradients would take twice their memory.
_BLOCK = 1 << 20

# A dim's name, or a group's.
K = TypeVar("K", bound=Hashable)


@torch.no_grad()
@as_mesh_errors()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pipeline: DeviceMesh | None = None,
    skip: Iterable[Tensor] = (),
) -> Tensor:
    """Clip gradients as torch.nn.utils.clip_grad_norm_ does in one process, wherever the parameters are split.

        meshcomm.clip_grad_norm_(model.parameters(), 1.0)

    Parameters may be of FSDP2, tensor parallel (DTensors), in a GradientSync or DistributedDataParallel, or plain, in any
    mixture, on any DeviceMeshes. A DTensor records along which dims it is split. Along these dims, its parts are added, each
    once. Every other tensor is assumed to be equal on all ranks. A DTensor's gradient that is a pending sum, as after torch's
    SequenceParallel, is summed first.

    Args:
        norm_type: more than 0; inf is the largest absolute value.
        error_if_nonfinite: whether a norm that is inf or nan raises an error. If not, gradients are multiplied by
            `max_norm / norm` as in torch, so they become 0 or nan.
        pipeline: the dim along which ranks hold different parameters, as `mesh["pp"]`.
        skip: parameters that another stage counts (tied embeddings). They are scaled too.

    Called by: every rank, with the same arguments, or the parameters of its stage, after all gradients are summed. On a CPU,
               this is compared along the dims along which a parameter is split. Parameters without a gradient count as 0.
    Sends:     one message of a few bytes along each dim along which a parameter is split, then one along the pipeline.
    Returns:   the norm before clipping, float64 (), equal on all ranks.
    Raises:    TrainingError for arguments of other types, if max_norm or norm_type is not positive, for a norm that is not
               finite, for parameters of FSDP1 or of DistributedDataParallel after parallelize_module, or within the `with sync:`
               of their GradientSync; LayoutError if a parameter is split along the pipeline; MeshClosed.
    """
    held = _tensors(parameters, pipeline)
    check_summed(held, "clip_grad_norm_")
    given_norm = max_norm
    try:
        max_norm, order = float(max_norm), float(norm_type)
    except (TypeError, ValueError):
        max_norm = order = math.nan
    if not (max_norm > 0 and order > 0):
        raise TrainingError(
            "gradients cannot be clipped to this norm",
            given=f"max_norm = {given_norm}, norm_type = {norm_type}",
            expected="more than 0",
            hint="max_norm = 1.0; max_norm = math.inf to clip nothing; norm_type = 2, 1 or math.inf",
        )
    if wrappers := {wrapper_of(parameter) for parameter in held} - {""}:
        raise TrainingError(
            "the parameters do not record how they are split",
            given=f"parameters of {', '.join(sorted(wrappers))}",
            expected="DTensors, as of fully_shard (FSDP2) and tensor parallelism, or parameters that are not split",
            hint='fully_shard(module, mesh=mesh["dp"]); or meshcomm.GradientSync(mesh, "dp", module)',
        )
    of_each = [split_groups([parameter]) for parameter in held]
    keys = [tuple(of_one) for of_one in of_each]
    known = {name: group for of_one in of_each for name, group in of_one.items()}
    groups = dict(sorted(known.items(), key=lambda item: item[1].dim))
    stages = None if pipeline is None or pipeline.size() == 1 else SplitGroup.of(pipeline, 0)
    if stages is not None and stages.group.group_name in groups:
        raise LayoutError(
            "parameters cannot be split along the pipeline dim too",
            given=f"pipeline {pipeline}, and DTensors that are split along it",
            expected="parameters that are not split along the pipeline dim",
            hint="pass no pipeline, or use a DeviceMesh without its dim",
        )
    there = [(key, x) for key, x in zip(keys, held, strict=True) if x.grad is not None]

    meshes = {x.device_mesh for x in held if isinstance(x, DTensor)}
    names_of = {where: {where.get_group(axis).group_name for axis in range(where.ndim)} for where in meshes}

    def has_gradient(name: str) -> Iterator[bool]:
        """Whether each parameter that is equal on all ranks of a group has a gradient."""
        for key, x in zip(keys, held, strict=True):
            if name not in key and (not isinstance(x, DTensor) or name in names_of[x.device_mesh]):
                yield x.grad is not None

    gradients = [_whole_sum(parameter) for _, parameter in there]
    # torch has no largest value of a part without elements.
    measured = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
    each = _norms([_real(gradient, order) for gradient in measured], order)
    join = torch.amax if math.isinf(order) else torch.sum
    if join is torch.sum:
        each = each.pow(order)
    skipped = {id(parameter) for parameter in skip}
    values: dict[tuple[str, ...], list[Tensor]] = {
        # Ranks have other groups, but dims of the same names.
        key: [each.new_zeros(())]
        for key in sorted({*keys}, key=lambda key: [groups[name].dim for name in key])
    }
    for (key, parameter), value in zip(there, each.unbind(), strict=True):
        if id(parameter) not in skipped:
            values[key].append(value)
    norm = join(
        _of_all(
            {key: join(torch.stack(some)) for key, some in values.items()},
            each.sum(),
            groups,
            lambda name, x: _compared(groups[name], x, join, (max_norm, order, *has_gradient(name))),
        )
    )
    if stages is not None:
        norm = _reduce(stages, norm, join)
    if join is torch.sum:
        norm = norm.pow(1 / order)
    if error_if_nonfinite and not norm.isfinite():
        raise TrainingError(
            "the norm of the gradients is not finite",
            given=f"{norm.item()}, of order {order:g}",
            expected="finite gradients",
            hint="skip this step, or error_if_nonfinite=False",
        )
    _scale([_real(gradient) for gradient in gradients], _factor(max_norm, norm))
    return norm


def _tensors(parameters: Any, pipeline: Any) -> list[Tensor]:
    """Return the parameters as a list. Raises TrainingError for arguments of other types."""
    if isinstance(parameters, Iterable) and not isinstance(parameters, Tensor | Mapping):
        parameters = list(parameters)
    held: list[Any] = parameters if isinstance(parameters, list) else [parameters]
    others = [type(x).__name__ for x in held if not isinstance(x, Tensor)]
    if others or not isinstance(pipeline, DeviceMesh | None):
        raise TrainingError(
            "clip_grad_norm_ takes parameters, and a DeviceMesh as pipeline",
            given=f"a {others[0]}" if others else f"pipeline={pipeline!r}",
            expected="tensors; a DeviceMesh of one dim",
            hint='meshcomm.clip_grad_norm_(model.parameters(), 1.0, pipeline=mesh["pp"])',
        )
    return held


def _reduce(where: SplitGroup, values: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum or the largest value of all ranks, element by element. It is nan if a rank's value is nan."""
    sent = values.to(where.device, copy=True)
    if join is torch.sum:
        dist.all_reduce(sent, group=where.group)
    else:
        # A backend's maximum may drop nan.
        sent = torch.stack([sent.nan_to_num(0.0, posinf=math.inf), sent.isnan().double()])
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=where.group)
        sent = torch.where(sent[1] > 0, math.nan, sent[0])
    return sent.to(values.device)


def _compared(
    where: SplitGroup, values: Tensor, join: Callable[[Tensor], Tensor], facts: tuple[Any, ...]
) -> Tensor:
    """Reduce as `_reduce`, and raise TrainingError on every rank if `facts` differ, which would scale copies differently.

    Only on a CPU: elsewhere, the host would have to wait for the device.
    """
    if values.device.type != "cpu":
        return _reduce(where, values, join)
    # Small enough that the sum of the squares is exact.
    digest = float(zlib.crc32(repr(facts).encode()) >> 12)
    sent = [digest, digest * digest if join is torch.sum else -digest]
    *reduced, one, two = _reduce(where, torch.cat([values, values.new_tensor(sent)]), join).unbind()
    ranks = where.group.size()
    if one != -two if join is torch.amax else ranks * int(two) != int(one) ** 2:
        raise TrainingError(
            f'ranks along "{where.dim}" clip their gradients differently',
            given=f"on this rank: max_norm = {facts[0]:g}, norm_type = {facts[1]:g}, {sum(facts[2:])} gradients of "
            f"{len(facts[2:])} parameters that are equal on these ranks",
            expected="the same arguments, and gradients of the same parameters, on every rank",
            hint="compute the loss in the same way on every rank; optimizer.zero_grad(set_to_none=False) keeps gradients of zero",
        )
    return torch.stack(reduced)


def _whole_sum(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient. A gradient that is a pending sum is summed first, and replaced."""
    grad = parameter.grad
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    assert grad is not None
    if grad.is_sparse:
        # Entries with one index add up first.
        parameter.grad = grad = grad.coalesce()
        return grad._values()
    return local(grad)


def _real(gradient: Tensor, order: float = 2.0) -> Tensor:
    """Return a gradient as real numbers with the same norm: for order 2, a view of a complex one as pairs."""
    if not gradient.is_complex():
        return gradient
    return torch.view_as_real(gradient) if order == 2.0 else gradient.abs()


def _factor(max_norm: float, norm: Tensor) -> Tensor:
    # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _of_all(
    parts: dict[tuple[K, ...], Tensor],
    total: Tensor,
    dims: Iterable[K],
    reduce: Callable[[K, Tensor], Tensor],
) -> Tensor:
    """Return the values of all classes of parameters, each reduced along the dims in its key, stacked.

    total: the sum on this rank. If it is not finite, all ranks along all dims get it, even if its class is not reduced.
    """
    total = torch.where(total.isfinite(), 0.0, total)
    for dim in dims:
        along = [key for key in parts if dim in key]
        *reduced, total = reduce(dim, torch.stack([*(parts[key] for key in along), total])).unbind()
        parts.update(zip(along, reduced, strict=True))
    return torch.stack([*parts.values(), total])


class _Named(NamedTuple):
    name: str
    parameter: nn.Parameter

    def gradient(self) -> Tensor:
        """Return this rank's part of the gradient, which must exist. A complex one is viewed as pairs of real numbers."""
        assert self.parameter.grad is not None
        return _real(local(self.parameter.grad))


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
        total = _of_all(squares, total, self._dims, lambda dim, x: self._mesh.all_reduce(dim, x)).sum()
        if self._pipeline is not None:
            total = self._mesh.all_reduce(self._pipeline, total)
        return total.sqrt()

    @torch.no_grad()
    def scale_(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients in place by min(1, max_norm / norm), unless the norm is not finite. Does not communicate."""
        self.multiply_(torch.where(norm.isfinite(), _factor(max_norm, norm), 1.0))

    @torch.no_grad()
    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar, in place. Does not communicate. Raises TrainingError for missing gradients."""
        # If calls are queued, reading the factor would wait for them; multiplying by 1 does not.
        if not self._mesh.is_async and factor.item() == 1.0:
            return
        self._complete()
        _scale([held.gradient() for held in self._held], factor)

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


def _scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    for (device, dtype), places in _by_kind(gradients).items():
        scale_all([gradients[place] for place in places], factor.to(device, dtype))


def _norms(gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
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
            parts.append(
                torch.stack(list(norms(some, torch.promote_types(dtype, torch.float32), order))).double()
            )
        elif max(gradient.numel() for gradient in some) <= _BLOCK:
            parts.append(torch.stack(list(norms(some, torch.float64, order))))
        else:
            parts.append(torch.stack([_norm_of_blocks(gradient, order) for gradient in some]))
    if len(parts) == 1:
        return parts[0]
    places = [place for some in kinds.values() for place in some]
    norm_of = dict(zip(places, torch.cat([part.to(parts[0].device) for part in parts]).unbind(), strict=True))
    return torch.stack([norm_of[place] for place in range(len(gradients))])


def _by_kind(gradients: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Return the tensors' indices, grouped by device and dtype."""
    places_of: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, gradient in enumerate(gradients):
        places_of.setdefault((gradient.device, gradient.dtype), []).append(place)
    return places_of


def _norm_of_blocks(gradient: Tensor, order: float) -> Tensor:
    norm_of = torch.linalg.vector_norm
    blocks = [norm_of(block, order, dtype=torch.float64) for block in gradient.reshape(-1).split(_BLOCK)]
    norm: Tensor = blocks[0] if len(blocks) == 1 else norm_of(torch.stack(blocks), order)
    return norm
