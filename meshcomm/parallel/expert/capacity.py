"""Which choices an expert of limited capacity keeps: the same ones on every mesh."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from meshcomm.errors import ShapeError
from meshcomm.mesh import Mesh
from meshcomm.parallel.expert.router import counts


def capacity(factor: float, tokens: int, slots: int, experts: int) -> int:
    """Choices that an expert keeps of one sample: ceil(factor * tokens * slots / experts).

    >>> capacity(1.1, 10, 1, 1)  # in floating point 1.1 * 10 is above 11
    11
    """
    return math.ceil(Fraction(repr(factor)) * tokens * slots / experts)


def kept(
    mesh: Mesh, context: str | None, chosen: Tensor, positions: Tensor | None, experts: int, factor: float
) -> Tensor:
    """Which choices stay within their expert's capacity, sample by sample.

    In each sample the first choices of all tokens come before the second ones (GShard, Lepikhin et
    al. 2020), and within them tokens in order of position; an expert keeps the first `capacity`.

    Shape:      chosen (samples, tokens, slots) int64; positions (tokens) int64, of this rank's tokens
                in their samples; None: 0, 1, ... -> (samples, tokens, slots) bool.
    Called by:  every rank along `context`, the dim along which samples are split, if any.
    Raises:     ShapeError where positions are missing or of another shape.
    """
    tokens, slots = chosen.shape[1:]
    if context is not None and positions is None:
        raise ShapeError(
            "experts of limited capacity need to know where tokens stand",
            given=f'samples split along "{context}", positions=None',
            expected=f"the positions of this rank's {tokens} tokens in their samples",
            hint="experts(x, positions)",
        )
    if positions is not None and positions.shape != (tokens,):
        raise ShapeError(
            "the positions are not those of the tokens",
            given=f"positions of shape {tuple(positions.shape)}, {tokens} tokens in each sample",
            expected=f"shape ({tokens},), equal for all samples",
            hint="positions of this rank's tokens only",
        )
    if context is not None and positions is not None:
        chosen = mesh.all_gather(context, chosen, axis=1)
        positions = mesh.all_gather(context, positions)
    limit = capacity(factor, chosen.shape[1], slots, experts)
    if positions is None:
        return _first(chosen, experts, limit)
    order = positions.argsort()
    found = torch.empty_like(chosen, dtype=torch.bool)
    found[:, order] = _first(chosen[:, order], experts, limit)
    return found if context is None else found.narrow(1, mesh.coord(context) * tokens, tokens)


def _first(chosen: Tensor, experts: int, limit: int) -> Tensor:
    """Whether a choice is among the first `limit` of its sample and expert; slot by slot."""
    line = chosen.transpose(1, 2).flatten(1)
    order = line.argsort(stable=True, dim=1)
    often = counts(line, experts)
    starts = (often.cumsum(1) - often).gather(1, line.gather(1, order))
    place = torch.arange(line.shape[1], device=line.device) - starts
    within = torch.empty_like(place).scatter_(1, order, place) < limit
    found: Tensor = within.unflatten(1, (chosen.shape[2], chosen.shape[1]))
    return found.transpose(1, 2)
