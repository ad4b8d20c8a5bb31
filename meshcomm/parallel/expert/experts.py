"""A mixture-of-experts layer whose experts are spread along one dim of the mesh."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from meshcomm.mesh import Mesh
from meshcomm.parallel.expert.capacity import kept
from meshcomm.parallel.expert.checks import check_alike, check_input, check_split
from meshcomm.parallel.expert.exchange import attach, exchange, pick, place
from meshcomm.parallel.expert.load import Load, Tally
from meshcomm.parallel.expert.router import Router, balance, counts
from meshcomm.parallel.expert.weights import ExpertWeights
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.transport.torch_private import outside_graphs


@final
class Experts(nn.Module):
    """y = sum over a token's chosen experts e of weight_e * w2_e(silu(w1_e x) * w3_e x).

    Each coord along `dim` holds `experts / size` of the experts, in order, and every rank along it
    brings tokens of its own: they travel to their experts by an uneven all_to_all, and back. Along the
    tensor's dim the ranks bring the same tokens, and each expert's inner axis is split. The result,
    its gradients and what is dropped do not depend on the mesh.

    Args:
        mesh: an open mesh.
        dim: along which experts are spread: a dim of a view that has the tensor's dim too, or of the
            base. None, or a size of 1: every rank has all experts, and nothing is exchanged.
        tensor: along which each expert is split.
        width: elements of a token.
        ff: elements inside an expert.
        experts: how many; a multiple of the size of `dim`.
        experts_per_token: how many of them each token chooses, at most `experts`.
        capacity_factor: None: dropless. Else an expert takes at most
            ceil(capacity_factor * tokens * experts_per_token / experts) choices of one whole sample,
            as `capacity.kept` says; the others are dropped: they add nothing to y, and the weights of
            a token's other experts stay as they are.
        context: the dim along which samples are split, if any.
        balance_weight: what the balance loss of a microbatch (`router.balance`) is multiplied by in
            what is differentiated: a backward through y adds that gradient by itself. The loss that
            it is part of must not be scaled afterwards. An attribute; may be set later.

    Parameters: `router.weight` (experts, width) is dense: equal on all ranks, its gradient summed
        where those of other dense weights are, and complete on every rank along tensor. `w1`, `w3`
        (experts, ff, width) and `w2` (experts, width, ff) are those of `expert_parameters`; their
        gradients are summed along `expert_gradient_dims` only. Their memory is not yet written.

    Raises ShapeError where sizes do not fit; UnknownDim where dims belong to different views.
    """

    def __init__(
        self,
        mesh: Mesh,
        dim: str | None,
        tensor: TensorSplit,
        *,
        width: int,
        ff: int,
        experts: int,
        experts_per_token: int = 2,
        capacity_factor: float | None = None,
        context: str | None = None,
        balance_weight: float = 0.0,
    ) -> None:
        super().__init__()
        check_split(mesh, dim, tensor, experts, experts_per_token, capacity_factor)
        tensor.share(ff, "the inner axis of the experts")
        self.mesh = mesh
        self.tensor = tensor
        self.dim = dim if dim is not None and mesh.size(dim) > 1 else None
        self.context = context if context is not None and mesh.size(context) > 1 else None
        self.ranks = mesh.size(self.dim) if self.dim else 1
        self.width, self.count, self.slots = width, experts, experts_per_token
        self.capacity_factor = capacity_factor
        self.balance_weight = balance_weight
        self.router = Router(tensor, width, experts, experts_per_token)
        self.experts = ExpertWeights(tensor, self.dim, width, ff, experts)
        self._tally = Tally(experts, mesh.device)
        self._compared = 0

    def take_load(self) -> Load:
        """How this rank's tokens spread since the last call; counting starts again from zero."""
        return self._tally.take()

    @outside_graphs  # how many rows travel follows from the data, which a graph cannot
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Send every token through its experts.

        Shape:      (samples, tokens, width), or (tokens, width) for one sample -> the same. Ranks
                    along `dim` may bring different numbers of samples; along `context` all bring
                    equally many tokens of the same samples.
        positions:  (tokens) int64: where this rank's tokens stand in their samples; None: in order.
                    Only a capacity asks for it, and needs it where samples are split along `context`.
                    With sequence_parallel those of all tokens along the tensor's dim.
        Called by:  every rank along `dim`, the tensor's dim and `context`, in the same program order;
                    along the tensor's dim with equal x, or with sequence_parallel this rank's slice
                    of it. Not yet through `enter`: what the router does with x is the same on all
                    of them.
        Gradient:   exact for x and all parameters. Backward communicates.
        Raises:     ShapeError; TrainingError where ranks along tensor route their tokens differently,
                    compared in the first two calls.
        """
        check_input(self.mesh, x, self.width)
        # Routing looks at whole samples, so what lies along the sequence between layers is gathered.
        samples = self.tensor.gather(x if x.ndim == 3 else x.unsqueeze(0))
        mesh, context = self.mesh, self.context
        choice = self.router(samples)
        if self.tensor.size > 1 and self._compared < 2:
            self._compared += 1
            check_alike(mesh, self.tensor.dim, choice.chosen, self.count)
        uneven = balance(mesh, context, choice)
        keep = None
        if self.capacity_factor is not None:
            keep = kept(mesh, context, choice.chosen, positions, self.count, self.capacity_factor)
        every = counts(choice.chosen, self.count).sum(0)
        y, often = self._through(
            samples.flatten(0, 1), choice.weights.flatten(0, 1), choice.chosen.flatten(), keep
        )
        y = self.tensor.leave(y.unflatten(0, samples.shape[:2]))
        if self.balance_weight:
            y = attach(y, uneven, self.balance_weight)
        share = uneven.detach() / (mesh.size(context) if context else 1)
        return self._tally.watch(y, share, every, every - often).view(x.shape)

    def _through(
        self, x: Tensor, weights: Tensor, chosen: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(n, width) tokens, (n, slots) weights, (n * slots) choices, which to keep, None for all ->
        (n, width), along the tensor's dim a part of the sum; rows that each expert got from here."""
        mesh, tensor = self.mesh, self.tensor
        tokens = x.shape[0]
        kind = x.device.type
        if tensor.size > 1:
            # Each rank has a part of every expert's sum. Adding them up after the weighted sum, not
            # before, sends a row for each token instead of one for each choice; so each rank has a
            # part of the weights' gradient as well.
            x_split = mesh.functional.identity(tensor.dim, x)
            weights = mesh.functional.identity(tensor.dim, weights)
        else:
            x_split = x
        if torch.is_autocast_enabled(kind):
            # Matrices are multiplied in this type anyway; so rows travel in it.
            x_split = x_split.to(torch.get_autocast_dtype(kind))
        if keep is None:
            order = chosen.argsort(stable=True)
        else:
            stay = keep.flatten().nonzero().squeeze(1)
            order = stay[chosen[stay].argsort(stable=True)]
        often = counts(chosen[order].unsqueeze(0), self.count)[0]
        rows = pick(x_split, order, self.slots)
        if self.dim is None:
            rows = self.experts(rows, often.tolist())
        else:
            rows = self._exchanged(rows, often)
        spread = place(rows, order, tokens * self.slots).unflatten(0, (tokens, self.slots))
        return (spread * weights.unsqueeze(-1)).sum(1).to(x.dtype), often

    def _exchanged(self, rows: Tensor, often: Tensor) -> Tensor:
        """Rows sorted by expert, `often` of each -> what comes back for them, in the same order."""
        assert self.dim is not None
        mesh, dim, own = self.mesh, self.dim, self.count // self.ranks
        theirs = mesh.all_to_all(dim, often).view(self.ranks, own)
        sent: list[int] = often.view(self.ranks, own).sum(1).tolist()
        received: list[int] = theirs.sum(1).tolist()
        arrived = exchange(mesh, dim, rows, sent, received)
        # They came by sender and within it by expert; an expert's rows must lie together.
        expert = torch.arange(own, device=rows.device).repeat(self.ranks)
        order = expert.repeat_interleave(theirs.flatten(), output_size=len(arrived)).argsort(stable=True)
        done = self.experts(pick(arrived, order, 1), theirs.sum(0).tolist())
        return exchange(mesh, dim, place(done, order, arrived.shape[0]), received, sent)
