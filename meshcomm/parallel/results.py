"""Keeps step results on the device until they are read, and decides whether a step is applied. Errors name the rank whose result
is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from meshcomm.config import ParallelConfig, TrainConfig
from meshcomm.errors import TrainingError
from meshcomm.layout.names import listed
from meshcomm.layout.sizes import fold, ranks_text
from meshcomm.mesh import Mesh
from meshcomm.mesh.all_ranks import of_every_rank, ranks_of
from meshcomm.parallel.loss import StepSum
from meshcomm.parallel.norm import GradientNorm
from meshcomm.parallel.splits import Splits
from meshcomm.parallel.tensor import local

# The largest number of steps whose results stay on the device.
_MOST = 100


class Done(NamedTuple):
    """One optimizer step; all fields are equal on every rank.

    loss: the mean over the global batch's tokens, before the step. gradient_norm: the norm of all gradients together,
    before clipping. lr: the step's learning rate. fault: "" if the step was applied. If the step was skipped because its
    loss or norm is not finite, a message that names the rank and the parameter whose gradient is not finite. terms: the
    further terms that the loss function returned, by name. loss_scale: the factor of the step's loss in the backward pass; None
    without float16.
    """

    number: int
    loss: float
    gradient_norm: float
    fault: str = ""
    lr: float = 0.0
    terms: Mapping[str, float] = {}
    loss_scale: float | None = None


class _Pending(NamedTuple):
    """A step whose results have not been read. values: the loss, the second value that `add` sends, the norm and the terms.
    counted: the number of targets on all ranks. ids: the lowest and the highest id. apart: whether the ranks' data have been
    restarted at different steps; None if that is not known. missing: this rank's parameters without a gradient.
    """

    number: int
    lr: float
    values: Tensor
    norms: Tensor
    counted: Tensor
    loss: Tensor | None
    ids: Tensor | None
    apart: Tensor | None = None
    missing: Sequence[str] = ()


@final
class Results:
    """Collects step results and decides which steps must not be applied, without reading the results on the host.

    Args:
        splits: the dims along which gradients are summed, and the pipeline.
        settings: [parallel] and [train]. `on_nonfinite` decides whether the steps after a skipped one are applied. In float16, a
            step whose gradients alone are not finite is always skipped.
        norm: computes the gradient norm of `parameters`, which are in the order of the forward pass.
        stage: the stage that contains the last parameter.
        vocab_size: the exclusive upper bound of the ids.
        names: the names of the loss's terms; see `StepLoss.names`.
    """

    def __init__(
        self,
        splits: Splits,
        settings: tuple[ParallelConfig, TrainConfig],
        norm: GradientNorm,
        parameters: Sequence[tuple[str, nn.Parameter]],
        stage: int,
        vocab_size: int,
        names: Sequence[str] = (),
    ) -> None:
        self._parallel, train = settings
        self._names = names
        self._splits, self._mesh = splits, splits.mesh
        self._norm, self._parameters, self._stage = norm, parameters, stage
        self._train, self._vocab_size, self._stop = train, vocab_size, train.on_nonfinite == "stop"
        self._scales = train.compute_dtype == "float16"
        self._pieces = math.prod(map(self._mesh.size, splits.gradients))
        self._epoch, self._epochs = -1, list[Tensor]()
        self._spoilt = self._ended = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        self._steps: list[_Pending] = []
        self._seen: list[Done] = []
        self._last = torch.zeros(3, dtype=torch.float64)

    def outcome(self) -> tuple[list[float], float]:
        """Return the values from the most recent `add` (the loss, the second value that it sends, and the norm), and
        the value that it returned.
        """
        return self._last.tolist(), float(self._spoilt)

    @torch.no_grad()
    def take(self, number: int, lr: float, count: Tensor, outcome: tuple[Sequence[float], float]) -> Tensor:
        """Add a step with an outcome that another rank has computed. Return the same value as `add`."""
        values, spoilt = outcome
        self._last = held = torch.tensor(values, dtype=torch.float64, device=self._spoilt.device)
        self._steps.append(_Pending(number, lr, held, self._norm.each, count, None, None))
        self._spoilt = torch.full_like(self._spoilt, spoilt)
        if self._stop:
            self._ended = torch.maximum(self._ended, self._ends(held))
        return self._spoilt

    def drop(self, after: int) -> None:
        """Drop the pending steps after step `after`, which have not been applied."""
        self._steps = [step for step in self._steps if step.number <= after]

    def pending(self) -> list[Done]:
        """Return the steps that `collect` has not returned, without asking other ranks why a value is not finite."""
        steps = [*self._seen]
        for step in self._steps:
            mean, elsewhere, norm, *terms = step.values.tolist()
            steps.append(self._done(step, mean, norm + elsewhere, terms))
            if not math.isfinite(mean + norm + elsewhere):
                steps[-1] = steps[-1]._replace(fault="its loss or gradient norm is not finite")
        return steps

    def _done(self, step: _Pending, loss: float, norm: float, terms: list[float]) -> Done:
        scale = terms.pop() if self._scales else None
        return Done(
            step.number, loss, norm, "", step.lr, dict(zip(self._names, terms, strict=True)), loss_scale=scale
        )

    @torch.no_grad()
    def add(
        self,
        number: int,
        lr: float,
        step_sum: StepSum,
        norm: Tensor,
        *ids: Tensor,
        epoch: int = 0,
        missing: Sequence[str] = (),
    ) -> Tensor:
        """Add a step: what its losses add up to, and the norm of all gradients.

        If a value is not finite on one rank, all ranks receive a value that is not finite: through the norm along the tensor
        and pipeline dims, and through a second value, sent with the loss, along the dims along which gradients are summed.

        ids:       tokens and targets. If calls are queued, the ids are checked here, because layers then cannot check them.
        epoch:     how often this rank's data have been restarted. A step in which that differs is not applied.
        missing:   this rank's parameters without a gradient, with which `norm` is not finite.
        Called by: every rank of the mesh. Does not wait for the device, except once in a hundred steps.
        Returns:   float32 (): 0, or 1 if the step must not be applied; the same on every rank.
        """
        if len(self._steps) >= _MOST:
            self._seen = self.collect()
        loss, count = step_sum.loss, step_sum.divisor
        loss_value = torch.zeros_like(norm) if loss is None else loss.double()
        spoilt = torch.where(norm.isfinite(), 0.0, norm)
        if epoch != self._epoch:
            self._epoch = epoch
            self._epochs = [loss_value.new_tensor(float(power)) for power in (epoch, epoch**2)]
        values = torch.stack([loss_value, spoilt.to(loss_value.dtype), *self._epochs])
        if loss is not None:
            values = self._splits.summed(values, self._splits.gradients)
        values = self._splits.of_last_stage(values)
        apart = None
        if self._pieces > 1:
            # Numbers are equal if and only if the square of their sum is that of their squares, times how many there are.
            apart = values[2].square() != values[3] * self._pieces
            norm = torch.where(apart, torch.nan, norm)
        values = torch.cat([values[:2].double(), norm.reshape(1)])
        ends = torch.stack([end for batch_ids in ids for end in batch_ids.aminmax()]) if ids else None
        not_finite = (~values.isfinite().all()).float()
        self._last = values = torch.cat([values, step_sum.terms])
        self._steps.append(_Pending(number, lr, values, self._norm.each, count, loss, ends, apart, missing))
        self._spoilt = torch.maximum(self._ended, not_finite)
        if self._stop:
            self._ended = torch.maximum(self._ended, self._ends(values))
        return self._spoilt

    def _ends(self, values: Tensor) -> Tensor:
        """Return whether a step with these values ends the run, if `on_nonfinite` is "stop": float32 (), 0 or 1."""
        return (~values[: 1 if self._scales else 3].isfinite().all()).float()

    def collect(self) -> list[Done]:
        """Return the steps since the previous call, in order. Waits for the device.

        Called by: every rank of the mesh.
        Raises:    TrainingError on every rank if a step's loss or gradient norm is not finite and train.on_nonfinite is
                   "stop". Neither that step nor any later step was applied.
        """
        # A loss of ranks may interrupt the exchanges that name a fault: `pending` still has the steps then.
        try:
            rows = torch.stack([step.values for step in self._steps]).tolist() if self._steps else []
            for mean, elsewhere, norm, *terms in rows:
                self._seen.append(self._judged(self._steps[0], mean, norm + elsewhere, terms))
                del self._steps[0]
        except TrainingError:
            self._steps, self._seen = [], []
            raise
        collected, self._seen = self._seen, []
        return collected

    def _judged(self, step: _Pending, loss: float, norm: float, terms: list[float]) -> Done:
        """Return a step with the reason why it was not applied, if any. Raises the errors of `collect`."""
        done = self._done(step, loss, norm, terms)
        if math.isfinite(loss + norm):
            return done
        if step.apart is not None and step.apart.item():
            raise _apart(done.number)
        self.check_used(done.number, step.missing)
        done = done._replace(fault=self._fault(step))
        if ends(done, self._train):
            raise stopped(done, self._train, not step.counted.item())
        return done

    def check_used(self, number: int, missing: Sequence[str]) -> None:
        """Raise TrainingError on every rank if parameters of one rank got no gradient. Called by: every rank of the mesh."""
        every = dict(zip(ranks_of(self._mesh), of_every_rank(self._mesh, [*missing]), strict=True))
        if any(every.values()):
            ranks = [rank for rank, names in sorted(every.items()) if names]
            names = list(dict.fromkeys(name for rank in ranks for name in every[rank]))
            raise TrainingError(
                f"{len(names)} parameters got no gradient in step {number}",
                given=f"{listed(names)}, on {ranks_text(ranks)}",
                expected="every parameter of the model to contribute to the loss; this step is not applied",
                hint='remove them, use them in forward, or freeze them: train.frozen; or train.on_unused = "zero"',
            )

    def _fault(self, step: _Pending) -> str:
        if not step.counted.item():
            return (
                "nothing in the global batch counts, so the mean is 0/0: all targets are -100, or the counts that the loss "
                "returned add up to 0"
            )
        norms = dict(zip(self._norm.names, step.norms.tolist(), strict=True))
        outside = ""
        if step.ids is not None:
            ends = step.ids.tolist()
            for kind, lowest, highest in zip(("tokens", "targets"), ends[::2], ends[1::2], strict=True):
                if lowest < 0 or highest >= self._vocab_size:
                    outside = f"{kind} range from {lowest} to {highest}, the vocabulary has 0 to {self._vocab_size - 1}"
        lost = "" if step.loss is None or _finite(step.loss) else "nan" if step.loss.isnan() else "inf"
        return self._blamed(norms, lost, outside)

    @torch.no_grad()
    def _blamed(self, norms: Mapping[str, float], lost: str, outside: str) -> str:
        """Return one or more lines, the same on every rank, that name the first non-finite gradient in backward order.

        The first gradient is nearest to the loss, and backward propagates its values to the gradients of earlier layers.
        Gradients that are summed along a dim are equal on all its ranks, so the loss of each rank's samples is more specific.

        norms:     the norms of this rank's parts of the gradients, which have been summed over ranks.
        lost:      "nan" or "inf" if the loss of this rank's samples is not finite; else "".
        outside:   the reason why this rank's tokens are invalid, or "".
        Called by: every rank of the mesh. Gathers objects once along each dim.
        """
        mesh, parameters = self._mesh, self._parameters
        bad = [
            (index, name, "nan" if math.isnan(norms[name]) else "inf")
            for index, (name, _) in enumerate(parameters)
            if not math.isfinite(norms.get(name, 0.0))
        ]
        mine: dict[str, Any] = {
            "rank": mesh.rank,
            "label": mesh.label,
            "first": [self._stage, *bad[-1]] if bad else None,
            "more": len(bad) - 1,
            "of": len(parameters),
            "loss": lost,
            "outside": outside,
            "weight": next((name for name, parameter in parameters if not _finite(parameter)), None),
        }
        table = sorted(of_every_rank(mesh, mine), key=lambda row: int(row["rank"]))
        if blamed := [row for row in table if row["first"]]:
            _, _, name, kind = max(row["first"] for row in blamed)
            of_first = [row for row in blamed if row["first"][2] == name]
            first = of_first[0]
            more = f", and of {first['more']} more of its {first['of']} parameters" if first["more"] else ""
            lines = [f"{first['label']}: {kind} in the gradient of {name}{more}"]
            lines += _dims(mesh, self._parallel, [row["rank"] for row in of_first])
        elif any(row["loss"] for row in table):
            lines = ["every element of every gradient is finite, but the loss is not"]
        else:
            lines = ["every element of every gradient is finite, but the sum of their squares overflows"]
        if strange := [row for row in table if row["outside"]]:
            lines.insert(0, f"{strange[0]['label']}: {strange[0]['outside']}")
        for kind, why in (("nan", ": a mean over no elements is 0/0"), ("inf", "")):
            if ranks_of_loss := [row["rank"] for row in table if row["loss"] == kind]:
                lines.append(f"the loss of its samples is {kind} on rank {fold(ranks_of_loss)}{why}")
        if weights := [row for row in table if row["weight"]]:
            lines.append(f"{weights[0]['label']}: the weight {weights[0]['weight']} itself is not finite")
        return "\n".join(lines)


def ends(done: Done, train: TrainConfig) -> bool:
    """Return whether a step ends the run because its loss or gradient norm is not finite."""
    goes_on = train.on_nonfinite == "skip" or (train.compute_dtype == "float16" and math.isfinite(done.loss))
    return bool(done.fault) and not goes_on


def stopped(done: Done, train: TrainConfig, nothing: bool = False) -> TrainingError:
    """Return the error for a step that ends the run. nothing: whether no target of its global batch counts."""
    finite = math.isfinite(done.loss)
    quantity, size = ("gradient norm", done.gradient_norm) if finite else ("loss", done.loss)
    return TrainingError(
        f"the {quantity} of step {done.number} is {size}",
        given=f"{done.fault}\nloss {done.loss:.4g}, gradient norm {done.gradient_norm:.4g}, lr {done.lr:.3g}",
        expected="finite numbers on every rank; this step is not applied, and no later state is saved",
        hint='use data with targets that count in each step, or train.on_nonfinite = "skip"'
        if nothing
        else f"continue from the last checkpoint (train.resume = true) with a smaller train.lr than "
        f'{train.lr:g}, or with train.on_nonfinite = "skip"'
        + ("; if a mask may be empty, return (sum, count) from the loss" if math.isnan(done.loss) else ""),
    )


def _apart(number: int) -> TrainingError:
    return TrainingError(
        f"the data of some ranks ended before step {number}, and those of others did not",
        given="an iterable that yields different numbers of batches on the ranks, and is restarted when it ends",
        expected="equally many batches on every rank; this step is not applied, and no later state is saved",
        hint="end __iter__ after the same number of samples on each rank: the total // mesh.data_world_size; or let it never end",
    )


def _dims(mesh: Mesh, parallel: ParallelConfig, ranks: list[int]) -> list[str]:
    """Return the coords that the ranks have in common, and the dims along which a sum has spread non-finite values."""
    roles: dict[str, str] = {dim: role for role, dim in parallel.parts.items()}
    only, summed = [], []
    for dim, size in mesh.layout.dims.items():
        coords = {mesh.get_coords(rank)[dim] for rank in ranks}
        role = f" ({roles[dim]})" if dim in roles else ""
        if size > 1 and len(coords) == 1:
            only.append(f"{dim}={coords.pop()}{role}")
        elif size > 1 and len(coords) == size and dim in parallel.gradient_dims:
            summed.append(f"{dim}{role}")
    lines = [f"only at {' '.join(only)}, on rank {fold(ranks)}"] if only else []
    if summed:
        lines.append(f"the same along {', '.join(summed)}, where gradients are summed")
    return lines


def _finite(tensor: Tensor) -> bool:
    return bool(local(tensor).isfinite().all())
