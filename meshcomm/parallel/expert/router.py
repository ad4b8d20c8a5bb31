"""Which experts a token goes to, with what weight, and how unevenly the tokens of a sample spread."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import TensorSplit, local


class Choice(NamedTuple):
    """Where tokens go. `slots` is the number of experts that each token chooses.

    Fields:
        weights: (samples, tokens, slots), what each expert's output is multiplied by.
        chosen: (samples, tokens, slots) int64, expert numbers, the most probable first.
        probabilities: (samples, tokens, experts), of the softmax over all experts.
    """

    weights: Tensor
    chosen: Tensor
    probabilities: Tensor


@final
class Router(nn.Module):
    """A linear map to one score for each expert, softmax, and the `slots` most probable experts.

    Replicated along the tensor's dim, where every rank routes the same tokens alike. It computes in
    float32, or in the tokens' type where that is wider, autocast or not: in bfloat16 two experts
    tie or swap places far too often.
    """

    def __init__(self, split: TensorSplit, width: int, experts: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.weight = split.parameter(experts, width, axis=None)

    def forward(self, x: Tensor) -> Choice:
        """(samples, tokens, width) -> where each token goes.

        Weights are the probabilities of the chosen experts, divided by their sum (Mixtral, Jiang et
        al. 2024). With one slot they stay as they are (Switch Transformer, Fedus et al. 2021):
        divided they would be the constant 1, and no gradient of the task would reach the router.
        Of equal probabilities the lower expert number comes first.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(wide), local(self.weight).to(wide))
            probabilities = scores.softmax(-1)
            # topk leaves the order of equal values open.
            ordered, experts = probabilities.sort(stable=True, dim=-1, descending=True)
            weights, chosen = ordered[..., : self.slots], experts[..., : self.slots]
            if self.slots > 1:
                weights = weights / weights.sum(-1, keepdim=True)
        return Choice(weights, chosen, probabilities)


def counts(chosen: Tensor, experts: int) -> Tensor:
    """(samples, ...) expert numbers -> (samples, experts) int64: how often each one stands there."""
    flat = chosen.flatten(1)
    found = flat.new_zeros(flat.shape[0], experts)
    return found.scatter_add_(1, flat, torch.ones_like(flat))


def balance(mesh: Mesh, context: str | None, choice: Choice) -> Tensor:
    """How unevenly tokens spread over the experts: 1 where they spread evenly, `experts` at worst.

    For each sample experts * sum over e of f_e * P_e, with f_e the fraction of the sample's choices
    that are expert e, and P_e the mean probability of e over the sample's tokens; then the mean over
    the samples. The formula is Switch Transformer's (Fedus et al. 2021), taken sample by sample as in
    DeepSeek-V3 (2024). Choices count before capacity drops any.

    Called by:  every rank along `context`, the dim along which samples are split, if any.
    Returns:    a scalar, equal along `context`.
    Gradient:   through P, for this rank's tokens, of a loss that counts once along `context`.
    """
    samples, tokens, experts = choice.probabilities.shape
    often = counts(choice.chosen, experts)
    mass = choice.probabilities.sum(1)
    if context is not None:
        tokens *= mesh.size(context)
        often = mesh.all_reduce(context, often)
        mass = mesh.functional.all_reduce(context, mass, grad="identity")
    # Dividing integers gives torch's default type, whatever the tokens' is.
    fraction = often.to(mass.dtype) / (tokens * choice.chosen.shape[-1])
    return (fraction * mass).sum() * (experts / (tokens * samples))
