"""What steps gave: on the device until somebody looks, and where it is not finite, which rank's gradient is to blame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from meshcomm.config import ParallelConfig, TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.layout.sizes import fold
from meshcomm.mesh import Mesh
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.tensor import local


class Done(NamedTuple):
    """One optimiser step.

    loss: mean over the tokens of the global batch, before the step. gradient_norm: of all gradients
    together, before clipping. lr: that it was made with. fault: "" where the step was applied; where one of both is not finite, so that
    it was left out, which rank's gradient of which parameter is not. All are equal on every rank.
    """

    number: int
    loss: float
    gradient_norm: float
    fault: str = ""
    lr: float = 0.0


class _Step(NamedTuple):
    """One that nobody has looked at.

    values: loss, what is not finite elsewhere, norm. ids: lowest and highest. counted: number of targets, over all ranks.
    """

    number: int
    lr: float
    values: Tensor
    norms: Tensor
    counted: Tensor
    loss: Tensor | None
    ids: Tensor | None


# Steps whose results lie on the device at once.
_MOST = 100


@final
class Results:
    """Collects what each step gives, and says, without a look, which of them must not be applied.

    Args:
        norm: of the gradients of `parameters`, which are in the order of the forward pass.
        stage: that the last of them belong to.
        vocabulary: the ids that there are are below it.
        train: its `nonfinite` says whether after a step that is not applied none is.
    """

    def __init__(
        self,
        mesh: Mesh,
        parallel: ParallelConfig,
        norm: GradientNorm,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        stage: int,
        vocabulary: int,
        train: TrainConfig,
    ) -> None:
        self._mesh, self._parallel, self._norm = mesh, parallel, norm
        self._parameters, self._stage = parameters, stage
        self._vocabulary, self._lr, self._stop = vocabulary, train.lr, train.nonfinite == "stop"
        self._spoilt = torch.zeros((), dtype=torch.float32, device=mesh.device)
        self._steps: list[_Step] = []
        self._seen: list[Done] = []

    @torch.no_grad()
    def add(
        self, number: int, lr: float, loss: Tensor | None, norm: Tensor, count: Tensor, *ids: Tensor
    ) -> Tensor:
        """This rank's share of the loss, if it has one, and the norm of all gradients.

        What is not finite on one rank is so on every rank: the norm covers the dims of the tensor and the
        pipeline, and what travels beside the loss those along which gradients are summed.

        count:     what the losses of all ranks were divided by, of their dtype.
        ids:       tokens and targets, looked at here where the layers cannot, on a queue of work.
        Called by: every rank of the mesh. Nothing waits for the device, but for one look in a hundred steps.
        Returns:   float32 (): 0, or 1 where the step must not be applied; the same on every rank.
        """
        if len(self._steps) >= _MOST:
            self._seen = self.look()
        pipeline = self._parallel.pipeline
        own = torch.zeros_like(norm, dtype=count.dtype) if loss is None else loss
        spoilt = torch.where(norm.isfinite(), 0.0, norm)
        values = torch.stack([own, spoilt.to(own.dtype)])
        if loss is not None:
            for dim in self._parallel.gradient_dims:
                values = self._mesh.all_reduce(dim, values)
        if pipeline is not None:
            values = self._mesh.broadcast(pipeline, values, src=self._mesh.size(pipeline) - 1)
        values = torch.cat([values.double(), norm.reshape(1)])
        ends = torch.stack([end for each in ids for end in each.aminmax()]) if ids else None
        self._steps.append(_Step(number, lr, values, self._norm.each, count, loss, ends))
        now = (~values.isfinite().all()).float()
        self._spoilt = torch.maximum(self._spoilt, now) if self._stop else now
        return self._spoilt

    def look(self) -> list[Done]:
        """The steps since the last look, in order: the one wait for the device.

        Called by: every rank of the mesh.
        Raises:    TrainingError on every rank, with stop, where one of them is not finite. It was not applied
                   then, nor were those after it.
        """
        steps, self._steps = self._steps, []
        found, self._seen = self._seen, []
        if not steps:
            return found
        for step, (mean, elsewhere, norm) in zip(
            steps, torch.stack([step.values for step in steps]).tolist(), strict=True
        ):
            done = Done(step.number, mean, norm + elsewhere, lr=step.lr)
            if not math.isfinite(mean + done.gradient_norm):
                done = done._replace(fault=self._fault(step))
                if self._stop:
                    raise _stopped(done, step.lr, self._lr, not step.counted.item())
            found.append(done)
        return found

    def _fault(self, step: _Step) -> str:
        if not step.counted.item():
            return "no target of the global batch counts: all of them are -100, so there is nothing to take a mean of"
        norms = dict(zip(self._norm.names, step.norms.tolist(), strict=True))
        outside = ""
        if step.ids is not None:
            ends = step.ids.tolist()
            for what, lowest, highest in zip(("tokens", "targets"), ends[::2], ends[1::2], strict=True):
                if lowest < 0 or highest >= self._vocabulary:
                    outside = (
                        f"{what} are {lowest} to {highest}, the vocabulary has 0 to {self._vocabulary - 1}"
                    )
        lost = step.loss is not None and not _finite(step.loss)
        return nonfinite(self._mesh, self._parallel, self._stage, self._parameters, norms, lost, outside)


def _stopped(done: Done, lr: float, most: float, nothing: bool) -> TrainingError:
    finite = math.isfinite(done.loss)
    what, size = ("gradient norm", done.gradient_norm) if finite else ("loss", done.loss)
    return TrainingError(
        f"the {what} of step {done.number} is {size}",
        given=f"{done.fault}\nloss {done.loss:.4g}, gradient norm {done.gradient_norm:.4g}, lr {lr:.3g}",
        expected="finite numbers on every rank; this step is not applied, and nothing is saved after it",
        hint='data with targets that are not -100 in each step, or train.nonfinite = "skip"'
        if nothing
        else f"go on from the last checkpoint (train.resume = true) with a smaller train.lr than "
        f'{most:g}, or with train.nonfinite = "skip"',
    )


@torch.no_grad()
def nonfinite(
    mesh: Mesh,
    parallel: ParallelConfig,
    stage: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    norms: Mapping[str, float],
    lost: bool,
    outside: str = "",
) -> str:
    """One line or more: the first gradient, as backward computes them, that is not finite, and where it is.

    First is the one nearest to the loss, since backward carries it on to those before it. Gradients that are
    summed along a dim are the same on all its ranks, so there the losses of the ranks' own samples tell more.

    stage:      of the last of `parameters`, which are in the order of the forward pass.
    norms:      of this rank's parts of their gradients, summed over ranks.
    lost:       whether the loss of this rank's own samples is not finite.
    outside:    what is wrong with this rank's tokens.
    Called by:  every rank of the mesh. One gather of objects per dim.
    Returns:    the same text on every rank.
    """
    bad = [
        (index, name, "nan" if math.isnan(norms[name]) else "inf")
        for index, (name, _) in enumerate(parameters)
        if not math.isfinite(norms.get(name, 0.0))
    ]
    mine: dict[str, Any] = {
        "rank": mesh.rank,
        "label": mesh.label,
        "first": [stage, *bad[-1]] if bad else None,
        "more": len(bad) - 1,
        "of": len(parameters),
        "loss": lost,
        "outside": outside,
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
    if strange := [row for row in table if row["outside"]]:
        lines.insert(0, f"{strange[0]['label']}: {strange[0]['outside']}")
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
