"""The 2-norm of all gradients over a whole mesh, every parameter counted once; and which of them is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshcomm.config import ParallelConfig
from meshcomm.errors import LayoutError, TrainingError
from meshcomm.layout.names import did_you_mean
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor.parameters import local, split_dims
from meshcomm.transport.torch_private import scale_all

# Elements that are squared at once: float64 copies of whole gradients would double their memory.
_BLOCK = 1 << 20


class _Held(NamedTuple):
    name: str
    parameter: nn.Parameter

    def gradient(self) -> Tensor:
        """This rank's part of a gradient that is there."""
        assert self.parameter.grad is not None
        return local(self.parameter.grad)


@final
class GradientNorm:
    """The norm of the gradients of all parameters on all ranks of a mesh.

    Along a dim on which a parameter is split its parts are disjoint, so their squares are added; along
    every other dim its gradient is the same on all ranks and counts once.

    Args:
        model: a module, or (name, parameter). Along which dims a parameter is split it says itself: a DTensor by
            its placements, those of a TensorSplit in the simulator too; any other is the same on all ranks.
            Those that need no gradient are left out, and one with two names counts once. After fully_shard:
            the parameters that it put into the module.
        pipeline: the dim along which ranks hold different parameters.
        split: the dims along which plain tensors are split that you cut yourself, by name; without it such a
            tensor counts as the same on all ranks, and the norm is wrong.
        skip: parameters that another coord along the pipeline counts (tied embeddings), out of
            the model's; they are clipped all the same.

    Called by: every rank, with parameters that are split alike.
    Raises:    UnknownDim, LayoutError where a DTensor is on no DeviceMesh of this mesh, or split along the pipeline's
               dim, or where a parameter is skipped without being there.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        *,
        pipeline: str | None = None,
        split: Mapping[str, Sequence[str]] | None = None,
        skip: Iterable[nn.Parameter] = (),
    ) -> None:
        self._mesh = mesh
        self._pipeline = pipeline if pipeline is not None and mesh.size(pipeline) > 1 else None
        named = list(model.named_parameters() if isinstance(model, nn.Module) else model)
        skipped = {id(parameter) for parameter in skip}
        unknown = skipped - {id(parameter) for _, parameter in named}
        if unknown:
            raise LayoutError(
                "a parameter is to be skipped that is not there",
                given=f"{len(unknown)} of {len(skipped)} in skip are not among the parameters",
                expected="parameters of this rank",
                hint="skip=[parameter] only on the rank that holds the second copy",
            )
        cut = dict(split or {})
        if strangers := [name for name, parameter in named if name in cut and split_dims(parameter)]:
            raise LayoutError(
                f"parameter {strangers[0]} says itself along which dims it is split",
                given=f"split={{{strangers[0]!r}: {tuple(cut[strangers[0]])}}}; its own are {split_dims(dict(named)[strangers[0]])}",
                expected="plain tensors in split",
                hint=f"leave {strangers[0]} out of split",
            )
        if unnamed := cut.keys() - {name for name, _ in named}:
            raise LayoutError(
                "split names parameters that are not there",
                given=f"{', '.join(sorted(unnamed))}",
                expected="names of model.named_parameters()",
                hint=did_you_mean(min(unnamed), [name for name, _ in named])
                or "list(dict(model.named_parameters()))",
            )
        needed = {parameter: name for name, parameter in reversed(named) if parameter.requires_grad}
        self._held = [_Held(name, parameter) for parameter, name in reversed(needed.items())]
        self._uncounted = [held for held in self._held if id(held.parameter) in skipped]
        self._classes: dict[tuple[str, ...], list[_Held]] = {}
        for held in self._held:
            if id(held.parameter) not in skipped:
                self._classes.setdefault(_dims_of(mesh, held, pipeline, cut.get(held.name, ())), []).append(
                    held
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
        device = self._mesh.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        squares = {dims: _squares(self._classes[dims]).to(device) for dims in sorted(self._classes)}
        uncounted = [_squares(self._uncounted).to(device)] if self._uncounted else []
        total = sum([*squares.values(), *uncounted], zero)
        # 0, inf or nan: this travels also along dims along which what it comes from is no summand.
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
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in (held.gradient() for held in self._held):
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in alike.items():
            scale_all(gradients, scale.to(device, dtype))
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


def _dims_of(mesh: Mesh, held: _Held, pipeline: str | None, cut: Sequence[str]) -> tuple[str, ...]:
    """The dims of more than one rank along which a parameter is split, in one order. cut: those the user says."""
    dims = tuple(sorted(dim for dim in split_dims(held.parameter) or cut if mesh.size(dim) > 1))
    if pipeline in mesh.layout.expand(dims):
        raise LayoutError(
            f"parameter {held.name} cannot be split along {pipeline} twice",
            given=f"dims {dims}, pipeline {pipeline}",
            expected="parameters that are not split along the pipeline's dim, which is counted for all",
            hint="no pipeline, or a DeviceMesh without its dim",
        )
    return dims


def _squares(held: Sequence[_Held]) -> Tensor:
    """The sum of the squares of all elements of their gradients, float64 ().

    On CPU all of it is added up in float64: a long float32 sum loses digits there. An accelerator adds
    up in a tree, so its float32 sums are good, and float64 may be slow.
    """
    gradients, norm = [each.gradient() for each in held], torch.linalg.vector_norm
    if gradients[0].device.type == "cpu":
        blocks = [block for gradient in gradients for block in gradient.reshape(-1).split(_BLOCK)]
        norms = [norm(block, dtype=torch.float64) for block in blocks]
    else:
        wide = [torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients]
        norms = [norm(each, dtype=dtype).double() for each, dtype in zip(gradients, wide, strict=True)]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def nonfinite(
    mesh: Mesh,
    parallel: ParallelConfig,
    stage: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    loss: Tensor | None,
) -> str:
    """One line or more: the first gradient, as backward computes them, that is not finite, and where it is.

    First is the one nearest to the loss, since backward carries it on to those before it. Gradients that are
    summed along a dim are the same on all its ranks, so there the losses of the ranks' own samples tell more.

    stage:      of the last of `parameters`, which are in the order of the forward pass, gradients summed.
    loss:       of this rank's own samples; None before the last stage.
    Called by:  every rank of the mesh. One gather of objects per dim.
    Returns:    the same text on every rank.
    """
    bad = [
        (index, name, "nan" if bool(local(parameter.grad).isnan().any()) else "inf")
        for index, (name, parameter) in enumerate(parameters)
        if parameter.grad is not None and not _finite(parameter.grad)
    ]
    mine: dict[str, Any] = {
        "rank": mesh.rank,
        "label": mesh.label,
        "first": [stage, *bad[-1]] if bad else None,
        "more": len(bad) - 1,
        "of": len(parameters),
        "loss": loss is not None and not _finite(loss),
        "weight": next((name for name, parameter in parameters if not _finite(parameter)), None),
    }
    table = [mine]
    for dim in reversed(list(mesh.layout.dims)):
        table = [row for rows in mesh.objects.all_gather(dim, table) for row in rows]
    table.sort(key=lambda row: int(row["rank"]))
    lines = []
    found = [row for row in table if row["first"]]
    if found:
        _, _, name, kind = max(row["first"] for row in found)
        there = [row for row in found if row["first"][2] == name]
        more = (
            f", and of {there[0]['more']} more of its {there[0]['of']} parameters" if there[0]["more"] else ""
        )
        lines.append(f"{there[0]['label']}: {kind} in the gradient of {name}{more}")
        lines += _dims(mesh, parallel, [row["rank"] for row in there])
    else:
        lines.append("every element of every gradient is finite, and their squares are too large to add up")
    if own := [row["rank"] for row in table if row["loss"]]:
        lines.append(f"the loss of its own samples is not finite on rank {fold(own)}")
    if weights := [row for row in table if row["weight"]]:
        lines.append(f"{weights[0]['label']}: the weight {weights[0]['weight']} is not finite itself")
    return "\n".join(lines)


def _dims(mesh: Mesh, parallel: ParallelConfig, ranks: list[int]) -> list[str]:
    """What the ranks have in common, dim by dim, and along which dims a sum has told all of them."""
    parts: dict[str, str] = {dim: part for part, dim in parallel.parts.items()}
    only, summed = [], []
    for dim, size in mesh.layout.dims.items():
        coords = {mesh.coords_of(rank)[dim] for rank in ranks}
        part = f" ({parts[dim]})" if dim in parts else ""
        if size > 1 and len(coords) == 1:
            only.append(f"{dim}={coords.pop()}{part}")
        elif size > 1 and len(coords) == size and dim in parallel.gradient_dims:
            summed.append(f"{dim}{part}")
    lines = [f"only at {' '.join(only)}, on rank {fold(ranks)}"] if only else []
    if summed:
        lines.append(f"alike along {', '.join(summed)}, where gradients are summed")
    return lines


def _finite(tensor: Tensor) -> bool:
    return bool(local(tensor).isfinite().all())
