"""A mixture-of-experts layer whose experts are distributed along one dim of the mesh."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.errors import LayoutError, ShapeError, TrainingError
from meshcomm.mesh import Mesh
from meshcomm.parallel.expert.routing import (
    Router,
    attach,
    balance,
    capacity,
    count_choices,
    each_choice,
    inverse,
    move,
    places,
    sizes_of,
    within_capacity,
)
from meshcomm.parallel.tensor import TensorSplit, local
from meshcomm.parallel.tensor.parameters import parameter_of
from meshcomm.parallel.tensor.split import as_autocast
from meshcomm.transport.torch_private import outside_graphs


@final
class ExpertWeights(nn.Module):
    """Computes w2_e(silu(w1_e x) * w3_e x) for each expert e on this rank.

    This is a separate module because its parameters are sharded, and their gradients summed, along different dims.

    tensor: splits the inner axis of each expert. dim: the dim along which experts are distributed, or None.
    hidden_size, intermediate_size, experts: sizes of the full layer.
    Parameters: w1, w3 (experts, intermediate_size, hidden_size) and w2 (experts, hidden_size, intermediate_size). They
        are not initialized.
    """

    meshcomm_experts = True
    w1: nn.Parameter
    w3: nn.Parameter
    w2: nn.Parameter

    def __init__(
        self, tensor: TensorSplit, dim: str | None, hidden_size: int, intermediate_size: int, experts: int
    ) -> None:
        super().__init__()
        mesh, self.meshcomm_count = tensor.mesh, experts
        for name, shape, inner in (
            ("w1", (intermediate_size, hidden_size), 1),
            ("w3", (intermediate_size, hidden_size), 1),
            ("w2", (hidden_size, intermediate_size), 2),
        ):
            pairs = ((dim, 0), (tensor.dim, inner))
            axes = {along: axis for along, axis in pairs if along}
            part = [experts, *shape]
            for along, axis in axes.items():
                part[axis] //= mesh.size(along)
            data = torch.empty(part, dtype=tensor.dtype, device=mesh.device)
            self.register_parameter(name, parameter_of(mesh, data, axes))

    def forward(self, rows: Tensor, often: Tensor | None = None, known: list[int] | None = None) -> Tensor:
        """For each row, return the result of its expert. If experts are split along the tensor dim, the results must still be
        summed along it.

        Shape:   (experts on this rank, n, width), or (n, width) with the first often[0] rows for this rank's first
                 expert, the next often[1] for its second, ... -> the same. known: `often` on the host, if known.

        An expert without rows gets a zero gradient. The host waits for `often` only if torch has no grouped matmul for
        these matrices and `known` is None.
        """
        w1, w3, w2 = (local(w) for w in (self.w1, self.w3, self.w2))
        if rows.ndim == 3:
            return torch.bmm(F.silu(torch.bmm(rows, w1.mT)) * torch.bmm(rows, w3.mT), w2.mT)
        assert often is not None
        if _has_grouped_product(rows, w1, w2):
            offsets = often.cumsum(0, dtype=torch.int32)
            w1, w3, w2 = (w.to(rows.dtype).mT for w in (w1, w3, w2))
            inner = F.silu(F.grouped_mm(rows, w1, offs=offsets)) * F.grouped_mm(rows, w3, offs=offsets)
            return F.grouped_mm(inner, w2, offs=offsets)
        parts = rows.split(sizes_of(often, len(rows)) if known is None else known)
        experts = zip(parts, w1, w3, w2, strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c) for x, a, b, c in experts])


def _has_grouped_product(rows: Tensor, *weights: Tensor) -> bool:
    """Return whether torch has a grouped matmul for these tensors that does not read group sizes back from the device.

    In torch 2.11 to 2.15, `grouped_mm` needs rows that start at multiples of 16 bytes. Its CUDA kernels support bfloat16
    on compute capability 8.0 or newer. In other cases, `grouped_mm` runs a loop that waits for the device once per product.
    """
    kind = rows.dtype
    if rows.device.type == "cuda":
        able = kind == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    else:
        # FakeTensors of torch 2.11 do not support grouped_mm, so a dry run would fail.
        able = rows.device.type == "cpu" and kind in (torch.float32, torch.bfloat16, torch.float16)
        able = able and torch.__version__ >= "2.12"
    aligned = all(w.is_contiguous() and w.shape[-1] * kind.itemsize % 16 == 0 for w in weights)
    return able and aligned and rows.numel() > 0


@final
class Experts(nn.Module):
    """Computes y, the sum over a token's chosen experts e of weight_e * w2_e(silu(w1_e x) * w3_e x).

    Each coord along `dim` holds `experts / size` of the experts, in order, and all ranks along `dim` have different tokens.
    One all_to_all sends tokens to their experts, and another sends the results back. Along the tensor dim, ranks have
    the same tokens, and each expert's inner axis is split. The result, its gradients and the dropped choices do not
    depend on the mesh.

    With a capacity, the host never waits for the device after the first two calls. Without a capacity, the host waits once per
    call if experts are distributed (for the sizes of the uneven all_to_all) or if torch has no grouped matmul.

    Args:
        dim: the dim along which experts are distributed. It must be a dim of the base, or of a view that also contains the
            tensor dim. If None, or if its size is 1, every rank holds all experts, and nothing is exchanged.
        tensor: the TensorSplit that splits each expert.
        hidden_size, intermediate_size: the number of elements per token, and the number of features inside an expert.
        experts: the number of experts, a multiple of the size of `dim`.
        experts_per_token: the number of experts that each token chooses, at most `experts`.
        normalised: whether the weights of a token's experts are divided by their sum.
        capacity_factor: if None, no choice is dropped. Otherwise an expert keeps at most
            ceil(capacity_factor * tokens * experts_per_token / experts) choices from one full sample. Dropped choices add
            nothing to y (see `within_capacity`).
        context: the dim along which samples are split, if any.
        balance_weight: multiplies a microbatch's balance loss (`routing.balance`). A backward pass through y adds the
            gradient of this product. The loss must not be scaled afterwards, except by the attribute `loss_scale`, which multiplies
            this gradient too. These attributes may be set later.
        biased: whether a bias for each expert is added when experts are chosen. In a Trainer, model.bias_update_speed changes it.

    Parameters: `router.weight` (experts, hidden_size) is dense: it is equal on all ranks, and its gradient is summed along the
        same dims as other dense weights and complete on every rank along tensor. The other parameters belong to
        `ExpertWeights`. Their gradients are summed along the other dims of the view that contains `dim`, except tensor and
        pipeline, because tokens from all ranks along `dim` have already reached the expert. They are not initialized.

    Raises ShapeError if sizes do not fit; UnknownDim if dims belong to different views.
    """

    def __init__(
        self,
        mesh: Mesh,
        dim: str | None,
        tensor: TensorSplit,
        *,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        experts_per_token: int = 2,
        normalised: bool = True,
        capacity_factor: float | None = None,
        context: str | None = None,
        balance_weight: float = 0.0,
        biased: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(mesh, dim, tensor, experts, experts_per_token, capacity_factor)
        tensor.share(intermediate_size, "the inner axis of the experts")
        self.mesh, self.tensor = mesh, tensor
        self.dim = dim if dim is not None and mesh.size(dim) > 1 else None
        self.context = context if context is not None and mesh.size(context) > 1 else None
        self.ranks = mesh.size(self.dim) if self.dim else 1
        self.hidden_size, self.count, self.slots = hidden_size, experts, experts_per_token
        self.capacity_factor, self.balance_weight = capacity_factor, balance_weight
        self.router = Router(tensor, hidden_size, experts, experts_per_token, normalised, biased)
        self.experts = ExpertWeights(tensor, self.dim, hidden_size, intermediate_size, experts)
        self.loss_scale: Tensor | None = None
        self._compared = 0

    @outside_graphs  # the number of sent rows depends on the data, which a graph does not allow
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Send every token through its experts.

        Shape:      (samples, tokens, width), or (tokens, width) for one sample -> the same. Ranks along `dim` may have
                    different numbers of samples, also none. Ranks along `context` have equally many tokens of the same samples.
        positions:  (tokens) int64, the positions of this rank's tokens in their samples, or None if tokens are in order. Used
                    only with a capacity, and required if samples are split along `context`. With sequence_parallel,
                    pass the positions of all tokens along the tensor dim.
        Called by:  every rank along `dim`, the tensor dim and `context`, in the same program order. Ranks along the tensor
                    dim pass equal x, or, with sequence_parallel, their slices of x. x must not have been through `enter`,
                    because the router's work on x is the same on all ranks.
        Gradient:   exact for x and all parameters. Backward communicates.
        Raises:     ShapeError; TrainingError if ranks along tensor route their tokens differently, which the first two
                    calls check.
        """
        if x.ndim not in (2, 3) or x.shape[-1] != self.hidden_size or not x.is_floating_point():
            raise ShapeError(
                f"experts on {self.mesh.label} cannot take this tensor",
                given=f"x of shape {tuple(x.shape)}, {x.dtype}",
                expected=f"(samples, tokens, {self.hidden_size}) or (tokens, {self.hidden_size}), floating point",
                hint="x.unflatten(0, (samples, -1)): capacity and balance are computed per sample",
            )
        # Routing needs full samples, so activations that are split along the sequence are gathered.
        samples = self.tensor.gather(x if x.ndim == 3 else x.unsqueeze(0))
        mesh, context = self.mesh, self.context
        choice = self.router(samples)
        if self.tensor.size > 1 and self._compared < 2:
            self._compared += 1
            _check_routing(mesh, self.tensor.dim, choice.chosen, self.count)
        uneven = balance(mesh, context, choice) if self.balance_weight else None
        keep = None
        if self.capacity_factor is not None:
            keep = within_capacity(mesh, context, choice.chosen, positions, self.count, self.capacity_factor)
        count_choices(self.experts, choice.chosen, keep)
        y = self._through(samples, choice.weights, choice.chosen, keep)
        y = self.tensor.leave(y.unflatten(0, samples.shape[:2]))
        if uneven is not None:
            y = attach(y, uneven, self.balance_weight, self.loss_scale)
        return y.view(x.shape)

    def _through(self, x: Tensor, weights: Tensor, chosen: Tensor, keep: Tensor | None) -> Tensor:
        """(samples, tokens, width) -> (samples * tokens, width), still to be summed along the tensor dim.

        weights, chosen, keep: (samples, tokens, slots). If keep is None, all choices are kept.
        """
        tensor, rows = self.tensor, x
        if tensor.size > 1:
            # Each rank has a part of every expert's sum. Summing over ranks after the weighted sum, not before, sends one
            # row per token instead of one per choice. Each rank then has only a part of the weights' gradient, too.
            rows = self.mesh.functional.identity(tensor.dim, rows)
            weights = self.mesh.functional.identity(tensor.dim, weights)
        rows = as_autocast(rows).flatten(0, 1)
        if keep is None:
            spread = each_choice(self.mesh, self.dim, rows, chosen.flatten(0, 1), self.count, self._computed)
        else:
            spread = self._limited(rows, chosen, keep)
        spread = spread.unflatten(0, (-1, self.slots))
        y: Tensor = (spread * weights.flatten(0, 1).unsqueeze(-1)).sum(1).to(x.dtype)
        return y

    def _computed(
        self, rows: Tensor, number: Tensor | None, often: Tensor, known: list[int] | None
    ) -> Tensor:
        """See `each_choice`. `ExpertWeights` needs each expert's rows to be contiguous, so the rows are sorted first."""
        if number is None:
            done: Tensor = self.experts(rows, often)
            return done
        sorts = number.argsort(stable=True)
        unsorts = inverse(sorts)
        return move(self.experts(move(rows, sorts, unsorts), often, known), unsorts, sorts)

    def _limited(self, x: Tensor, chosen: Tensor, keep: Tensor) -> Tensor:
        """Return each choice's result, or zeros if the choice was not kept: (n, width) -> (n * slots, width).

        For each sample, an expert has one slot for each choice that it may keep, filled or empty. All sizes are therefore
        known, and the host does not wait.
        """
        assert self.capacity_factor is not None
        samples, tokens = chosen.shape[:2]
        whole = tokens * (self.mesh.size(self.context) if self.context else 1)
        limit = capacity(self.capacity_factor, whole, self.slots, self.count)
        # No token chooses an expert twice.
        limit = min(limit, tokens)
        room = samples * limit
        line = torch.where(keep, chosen, self.count).flatten(1)
        sample = torch.arange(samples, device=x.device).unsqueeze(1)
        slot = line * room + sample * limit + places(line, self.count + 1)
        # A dropped choice gets the number after the last slot, and an empty slot gets the number after the last choice.
        back = slot.flatten().clamp_(max=self.count * room)
        to_slots = back.new_full((self.count * room + 1,), back.numel())
        to_slots = to_slots.scatter_(0, back, torch.arange(back.numel(), device=x.device))[:-1]
        rows = move(x, to_slots, back, self.slots, True)
        if self.dim is None:
            done = self.experts(rows.view(self.count, room, -1)).flatten(0, 1)
        else:
            across, shape = self.mesh.functional, (self.ranks, self.count // self.ranks, room, -1)
            arrived = across.all_to_all(self.dim, rows, 0, 0).view(shape)
            mine = self.experts(arrived.transpose(0, 1).flatten(1, 2))
            mine = mine.unflatten(1, (self.ranks, room)).transpose(0, 1).flatten(0, 2)
            done = across.all_to_all(self.dim, mine, 0, 0)
        return move(done, back, to_slots, 1, True)


def _check_sizes(
    mesh: Mesh, dim: str | None, tensor: TensorSplit, experts: int, slots: int, factor: float | None
) -> None:
    """Check the sizes of a layer against the mesh. Raises ShapeError, LayoutError, UnknownDim."""
    if dim is not None and dim == tensor.dim:
        raise LayoutError(
            f'the dim "{dim}" cannot both distribute the experts and split each of them',
            given=f'dim="{dim}", a TensorSplit along "{dim}"',
            expected="two dims of one view: tokens differ along the first and are equal along the second",
            hint=f'views.expert = {{ edp = 1, ep = {mesh.size(dim)} }}, dim="ep"',
        )
    if dim is not None:
        mesh.layout.home((dim, tensor.dim) if tensor.dim else dim)
        TensorSplit(mesh, dim).share(experts, "the number of experts")
    if not 1 <= slots <= experts:
        what, given = (
            f"a token cannot choose {slots} of {experts} experts",
            f"{experts=}, experts_per_token={slots}",
        )
        expected, hint = f"experts_per_token from 1 to {experts}", f"experts_per_token={min(2, experts)}"
    elif factor is not None and not factor > 0:
        what, given = "experts without capacity would drop every token", f"capacity_factor={factor}"
        expected, hint = "a positive number, or None to drop nothing", "capacity_factor=1.25"
    else:
        return
    raise ShapeError(what, given=given, expected=expected, hint=hint)


def _check_routing(mesh: Mesh, dim: str, chosen: Tensor, experts: int) -> None:
    """Raise TrainingError, on every rank along `dim`, if ranks route their tokens differently."""
    if mesh.is_fake:
        # There are no other ranks, and choices have no values.
        return
    mine = torch.bincount(chosen.reshape(-1), minlength=experts)
    # Each rank sends its counts and their negatives, so that one maximum returns both the largest and the smallest counts.
    most, fewest = mesh.all_reduce(dim, torch.stack([mine, -mine]), op="max").unbind()
    if not torch.equal(most, -fewest):
        odd = int((most != -fewest).nonzero()[0])
        raise TrainingError(
            f'ranks along "{dim}" send their tokens to different experts',
            given=f"expert {odd} is chosen {int(mine[odd])} times on {mesh.label}, "
            f"{-int(fewest[odd])} to {int(most[odd])} times along {dim}",
            expected=f"equal tokens and equal router weights along {dim}",
            hint="initialize router.weight, and all layers before it, identically along " + dim,
        )
