"""Routing of tokens to experts: the router, the balance loss, capacity limits, and the exchange of rows between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh
from meshcomm.parallel.recompute import once
from meshcomm.parallel.tensor import TensorSplit, local
from meshcomm.parallel.torch_private import has_memory, in_backward

BIAS: Final = "e_score_correction_bias"
"""The name of a router's buffer (experts), which is added to the scores when experts are chosen, and not to their weights."""


class Choice(NamedTuple):
    """The experts that each token chooses; `slots` is the number of experts per token.

    weights:       (samples, tokens, slots), the factor by which each expert's output is multiplied.
    chosen:        (samples, tokens, slots) int64, expert indices, the most probable first.
    probabilities: (samples, tokens, experts), the softmax over all experts.
    """

    weights: Tensor
    chosen: Tensor
    probabilities: Tensor


@final
class Router(nn.Module):
    """Computes a score for each expert with a linear layer and a softmax, and chooses the `slots` most probable experts.

    The router is replicated along the tensor dim. It computes in float32, or in the tokens' dtype if that is wider,
    with or without autocast, because in bfloat16 two experts tie or swap places far too often.

    biased: whether the router has a bias for each expert, which `Loads` updates.
    """

    def __init__(
        self,
        split: TensorSplit,
        hidden_size: int,
        experts: int,
        slots: int,
        normalised: bool = True,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.slots, self.normalised = slots, normalised
        self.weight = split.parameter(experts, hidden_size, axis=None)
        if biased:
            wide = torch.promote_types(split.dtype, torch.float32)
            self.register_buffer(BIAS, torch.zeros(experts, dtype=wide, device=split.device))

    def forward(self, x: Tensor) -> Choice:
        """(samples, tokens, width) -> the experts of each token.

        Weights are the probabilities of the chosen experts. With `normalised`, the weights are divided by their sum (Mixtral,
        Jiang et al. 2024). With one slot, the weight is not divided (Switch Transformer, Fedus et al. 2021): the result would
        be the constant 1, without a gradient for the router. If probabilities are equal, the expert with the lower index comes
        first. With a bias, the experts with the largest sums of probability and bias are chosen.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(wide), local(self.weight).to(wide))
            probabilities = scores.softmax(-1)
            # topk does not define the order of equal values.
            bias = self._buffers.get(BIAS)
            ranked = probabilities if bias is None else probabilities.detach() + bias
            chosen = ranked.sort(stable=True, dim=-1, descending=True)[1][..., : self.slots]
            weights = probabilities.gather(-1, chosen)
            if self.slots > 1 and self.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
        return Choice(weights, chosen, probabilities)


def counts(chosen: Tensor, experts: int) -> Tensor:
    """(samples, ...) expert indices -> (samples, experts) int64: how often each expert occurs in each sample."""
    flat = chosen.flatten(1)
    zeros = flat.new_zeros(flat.shape[0], experts)
    return zeros.scatter_add_(1, flat, torch.ones_like(flat))


def count_choices(part: Any, chosen: Tensor, keep: Tensor | None = None) -> None:
    """Add a microbatch's choices to the load of `part`, a module of experts, if a step counts it: see `Loads`.

    chosen, keep: (..., slots), the experts that tokens choose, and whether their capacity admits the choice. Evaluations and
    forward passes that are recomputed for the backward pass do not count.
    """
    load = part.__dict__.get("meshcomm_load")
    if load is None or not part.training or in_backward():
        return
    load[:-1] += counts(chosen.detach().reshape(1, -1), len(load) - 1)[0]
    if keep is not None:
        load[-1] += (~keep).sum()


def balance(mesh: Mesh, context: str | None, choice: Choice) -> Tensor:
    """Return how unevenly tokens are distributed over the experts, from 1 (evenly) to `experts` in the worst case.

    The result is the mean over samples of experts * sum over e of f_e * P_e. f_e is the fraction of the sample's choices
    that are expert e, and P_e is the mean probability of e over the sample's tokens. This is Switch Transformer's formula
    (Fedus et al. 2021), computed per sample as in DeepSeek-V3 (2024). Choices that a capacity drops count too.

    Called by:  every rank along `context`, the dim along which samples are split, if any.
    Returns:    a scalar, equal along `context`; 0 without tokens.
    Gradient:   through P, for this rank's tokens. The loss counts once along `context`.
    """
    samples, tokens, experts = choice.probabilities.shape
    often = counts(choice.chosen, experts)
    mass = choice.probabilities.sum(1)
    if context is not None:
        tokens *= mesh.size(context)
        of_rank = often
        (often,) = once(lambda: [mesh.all_reduce(context, of_rank.clone())], of_rank)
        mass = mesh.functional.all_reduce(context, mass, grad="identity")
    # Without tokens, the sum is 0.
    samples, tokens = max(1, samples), max(1, tokens)
    # Dividing integers would give torch's default dtype, regardless of the tokens' dtype.
    fraction = often.to(mass.dtype) / (tokens * choice.chosen.shape[-1])
    return (fraction * mass).sum() * (experts / (tokens * samples))


def attach(y: Tensor, loss: Tensor, weight: float, scale: Tensor | None = None) -> Tensor:
    """Return `y` unchanged. A backward pass through the result gives `loss` the gradient `weight`, times `scale`.

    This adds `weight * loss` to the total loss, even if the rest of the loss is computed on another pipeline stage.
    """
    attached: Tensor = _Attach.apply(y, loss, weight, scale)
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: float, scale: Tensor | None) -> Tensor:
        ctx.gradient = torch.full_like(loss, weight)
        if scale is not None:
            ctx.gradient *= scale
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, ctx.gradient, None, None


def capacity(factor: float, tokens: int, slots: int, experts: int) -> int:
    """Return the number of choices that an expert keeps per sample: ceil(factor * tokens * slots / experts).

    >>> capacity(1.1, 45, 2, 1)  # in floating point 1.1 * 45 * 2 is above 99
    99
    """
    return math.ceil(Fraction(repr(factor)) * tokens * slots / experts)


def within_capacity(
    mesh: Mesh, context: str | None, chosen: Tensor, positions: Tensor | None, experts: int, factor: float
) -> Tensor:
    """Return which choices are within their expert's capacity, sample by sample.

    An expert keeps the first `capacity` choices of a sample: first choices before second choices (GShard, Lepikhin et
    al. 2020), and choices in the same slot in order of position.

    Shape:      chosen (samples, tokens, slots) int64; positions (tokens) int64, the positions of this rank's
                tokens in their samples, or None for 0, 1, ... -> (samples, tokens, slots) bool.
    Called by:  every rank along `context`, the dim along which samples are split, if any.
    Raises:     ShapeError if positions are missing or have the wrong shape.
    """
    tokens, slots = chosen.shape[1:]
    if context is not None and positions is None:
        raise ShapeError(
            "experts with a capacity need the positions of the tokens",
            given=f'samples split along "{context}", positions=None',
            expected=f"the positions of this rank's {tokens} tokens in their samples",
            hint="experts(x, positions)",
        )
    if positions is not None and positions.shape != (tokens,):
        raise ShapeError(
            "the positions do not match the tokens",
            given=f"positions of shape {tuple(positions.shape)}, {tokens} tokens in each sample",
            expected=f"shape ({tokens},), equal for all samples",
            hint="pass the positions of this rank's tokens only",
        )
    if context is not None and positions is not None:
        mine = chosen, positions
        chosen, positions = once(
            lambda: [mesh.all_gather(context, mine[0], axis=1), mesh.all_gather(context, mine[1])], chosen
        )
    limit = capacity(factor, chosen.shape[1], slots, experts)
    if positions is None:
        return _first(chosen, experts, limit)
    order = positions.argsort()
    within = torch.empty_like(chosen, dtype=torch.bool)
    within[:, order] = _first(chosen[:, order], experts, limit)
    return within if context is None else within.narrow(1, mesh.coord(context) * tokens, tokens)


def _first(chosen: Tensor, experts: int, limit: int) -> Tensor:
    """Return whether each choice is among its sample's first `limit` choices of the same expert, slot by slot."""
    line = chosen.transpose(1, 2).flatten(1)
    within = places(line, experts) < limit
    first: Tensor = within.unflatten(1, (chosen.shape[2], chosen.shape[1]))
    return first.transpose(1, 2)


def places(line: Tensor, experts: int) -> Tensor:
    """(samples, n) expert indices -> (samples, n) int64: how many equal indices precede each index in its sample."""
    order = line.argsort(stable=True, dim=1)
    often = counts(line, experts)
    starts = (often.cumsum(1) - often).gather(1, line.gather(1, order))
    place = torch.arange(line.shape[1], device=line.device) - starts
    return torch.empty_like(place).scatter_(1, order, place)


# -- rows on their way to experts and back -----------------------------------------------------------


def exchange(mesh: Mesh, dim: str, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send the first sent[0] rows to coord 0, the next sent[1] to coord 1, and so on. Return the rows received, in order.

    Shape:      (sum of sent, width) -> (sum of received, width).
    Called by:  every rank along `dim`. received[c] must be the entry for this rank in coord c's `sent`.
    Gradient:   the same exchange in reverse. Every rank must run backward. Sizes are not exchanged again.
    """
    arrived: Tensor = _Exchange.apply(rows, mesh, dim, sent, received)
    return arrived


def each_choice(
    mesh: Mesh,
    dim: str | None,
    x: Tensor,
    chosen: Tensor,
    experts: int,
    compute: Callable[[Tensor, Tensor | None, Tensor, list[int] | None], Tensor],
) -> Tensor:
    """Send each token to the experts that it has chosen, and return their results: (n, width), (n, slots) -> (n * slots, width).

    compute: (rows; each row's expert on this rank, or None if rows are sorted by it; the number of rows for each of this rank's
             experts; the same on the host, if it is known) -> the result for each row.
    Called by: every rank along `dim`, along which the experts are distributed. The host then waits once for the numbers of rows to
               send and receive; backward does not wait.
    """
    slots, chosen = chosen.shape[-1], chosen.flatten()
    often = counts(chosen.unsqueeze(0), experts)[0]
    order = chosen.argsort(stable=True)
    back = inverse(order)
    rows = move(x, order, back, slots)
    if dim is None:
        return move(compute(rows, None, often, None), back, order)
    ranks, per_rank = mesh.size(dim), experts // mesh.size(dim)
    (theirs,) = once(lambda: [mesh.all_to_all(dim, often)], often)
    sides = sizes_of(torch.stack([often, theirs]), len(rows))
    # For each rank: the number of rows for each of its experts, or from it for each of this rank's experts.
    sizes = [[side[begin : begin + per_rank] for begin in range(0, experts, per_rank)] for side in sides]
    sent, received = ([sum(of_peer) for of_peer in side] for side in sizes)
    arrived = exchange(mesh, dim, rows, sent, received)
    number = torch.arange(per_rank, device=rows.device).repeat(ranks)
    number = number.repeat_interleave(theirs, output_size=len(arrived))
    sizes_of_experts = [sum(of_expert) for of_expert in zip(*sizes[1], strict=True)]
    done = compute(arrived, number, theirs.view(ranks, per_rank).sum(0), sizes_of_experts)
    return move(exchange(mesh, dim, done, received, sent), back, order)


def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def sizes_of(often: Tensor, total: int) -> Any:
    """Return the sizes as lists on the host. For tensors without values, as in a dry run, divide `total` evenly."""
    if has_memory(often):
        return often.tolist()
    per_expert, more = divmod(total, often.shape[-1])
    even = [per_expert + (place < more) for place in range(often.shape[-1])]
    return even if often.ndim == 1 else [even] * len(often)


def move(x: Tensor, there: Tensor, back: Tensor, slots: int = 1, blanks: bool = False) -> Tensor:
    """Return a tensor whose row i is row there[i] // slots of x, or zeros if there[i] // slots is the number of rows in x.

    Shape:    x (n, width), there (m) int64 in 0 .. n * slots, each number below n * slots at most once -> (m, width).
              back (n * slots) int64: the index of number j in `there`, or m if j is absent.
    blanks:   whether `there` contains n * slots, or `back` contains m.
    Gradient: exact, and bitwise the same in every run, because a row's slots are added in order. On a GPU, the backward pass
              of indexing adds slots in an arbitrary order.
    """
    moved: Tensor = _Move.apply(x, there, back, slots, blanks)
    return moved


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: Mesh, dim: str, sent: list[int], received: list[int]) -> Tensor:
        ctx.mesh, ctx.dim, ctx.sent, ctx.received = mesh, dim, sent, received
        held = rows.detach()
        (arrived,) = once(
            lambda: [mesh.all_to_all(dim, held, input_split_sizes=sent, output_split_sizes=received)], held
        )
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dx = ctx.mesh.all_to_all(ctx.dim, dy, input_split_sizes=ctx.received, output_split_sizes=ctx.sent)
        return dx, None, None, None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, slots: int, blanks: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.slots, ctx.blanks = slots, blanks
        return _rows(x, there if slots == 1 else there // slots, blanks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        dx = _rows(dy, back, ctx.blanks)
        return dx if ctx.slots == 1 else dx.unflatten(0, (-1, ctx.slots)).sum(1), None, None, None, None


def _rows(x: Tensor, which: Tensor, blanks: bool) -> Tensor:
    """Return x[which]. An index equal to the number of rows returns zeros."""
    return (torch.cat([x, x.new_zeros(1, x.shape[1])]) if blanks else x).index_select(0, which)
