"""Dropout whose masks follow from where an element stands in the run, so they are the same on every mesh."""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from meshcomm.errors import ShapeError, TrainingError


def _signed(value: int) -> int:
    """The 64 bits of `value` as a torch int64 has them."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


# SplitMix64 (Steele, Lea, Flood 2014): the step from one state to the next, and the two multipliers.
_STEP: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


class Drops(NamedTuple):
    """What the masks of one microbatch follow from; an argument of forward, never changed.

    As an argument it is kept with the others where a block runs again in backward (activation
    checkpointing), also when a pipeline has begun other microbatches in between. Nothing else
    remembers anything: to go on from a checkpoint, the run's seed and the step are enough.
    """

    keys: Tensor
    """int64 (batch,), of (seed, step, sample). Rows of it are the keys of these samples."""
    positions: Tensor
    """int64 (sequence,): where this rank's tokens stand in their whole sample."""

    @staticmethod
    def at(seed: int, step: int, samples: Tensor, positions: Tensor) -> Drops:
        """The drops of these samples at a step.

        samples:   int64 (batch,): indices in the global batch. So ranks that differ along data's dims
                   drop differently, ranks with the same samples (along tp, cp, pp) alike.
        positions: as in Drops.
        """
        for name, values in (("samples", samples), ("positions", positions)):
            if values.dtype != torch.int64 or values.ndim != 1:
                raise ShapeError(
                    f"dropout cannot number elements by these {name}",
                    given=f"{name} of shape {tuple(values.shape)}, {values.dtype}",
                    expected="one axis of int64",
                    hint="torch.arange(first, first + count), counted over all ranks",
                )
        return Drops(_number(torch.full_like(samples, _hash(f"{seed} {step}")), samples), positions)


@final
class Dropout(nn.Module):
    """Sets elements to zero with probability `p` and divides the others by 1 - p.

    Whether an element is dropped follows from (seed, step, site, sample, position, feature) alone,
    so any mesh drops exactly what one process drops, with no generator, state or communication.
    p is kept to 2^-32. In eval(), or with p = 0, x is returned as it is.

    Args:
        p: 0 <= p < 1.
        site: the place in the model, such as "3.attn", counted through all stages. Two places with one
            name drop alike.

    Raises TrainingError for another p.
    """

    def __init__(self, p: float, site: str) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise TrainingError(
                f"dropout {site} cannot drop this share of its elements",
                given=f"p = {p}",
                expected="0 <= p < 1",
                hint="p = 0.1",
            )
        self.p = p
        self.site = site
        self._site = _hash(site)
        # Of 32 random bits read as a signed number.
        self._threshold = min(round(p * 2**32), 2**32 - 1) - 2**31

    def forward(self, x: Tensor, drops: Drops | None = None, first_feature: int = 0) -> Tensor:
        """(batch, sequence, features) -> the same shape; the gradient of what is dropped is zero.

        drops:         of these samples and tokens. None only where nothing is dropped.
        first_feature: the number of x[..., 0], where features are split over ranks.
        Raises:        TrainingError without drops; ShapeError where they are those of another shape.
        """
        if not self.training or self.p == 0:
            return x
        if drops is None:
            raise TrainingError(
                f"dropout {self.site} is not told which samples these are",
                given=f"p = {self.p}, training, no drops",
                expected="a Drops, from which the mask follows",
                hint="Drops.at(seed, step, samples, positions), or eval()",
            )
        return torch.where(self.keep(drops, x.shape, first_feature), x * (1 / (1 - self.p)), 0.0)

    def keep(self, drops: Drops, shape: torch.Size, first_feature: int = 0) -> Tensor:
        """Bool of `shape`, (batch, sequence, features): what is not dropped. Arguments as in forward."""
        known = (drops.keys.shape[0], drops.positions.shape[0])
        if len(shape) != 3 or shape[:2] != known:
            raise ShapeError(
                f"dropout {self.site}: x and drops are of different samples or tokens",
                given=f"x of shape {tuple(shape)}; {known[0]} samples, {known[1]} positions",
                expected=f"x of shape ({known[0]}, {known[1]}, features)",
                hint="the samples of this microbatch, and the positions of this rank's tokens",
            )
        tokens = _number(_mixed(drops.keys ^ self._site)[:, None], drops.positions)
        # 64 bits are enough for two neighbours.
        first, end = first_feature // 2, (first_feature + shape[2] + 1) // 2
        words = torch.arange(first, end, device=tokens.device)
        bits = _number(tokens[..., None], words).view(torch.int32)
        return bits[..., first_feature % 2 :][..., : shape[2]] >= self._threshold

    def extra_repr(self) -> str:
        """What the module's repr shows."""
        return f"p={self.p}, site={self.site!r}"


def _hash(text: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _number(state: Tensor, index: Tensor) -> Tensor:
    """Number `index` of the SplitMix64 sequence that starts at `state`: a counter in place of a state.

    That random numbers can be computed from their index is Salmon et al. 2011.
    """
    return _mixed(state + (index + 1) * _STEP)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's output of a state. int64 products wrap around; its shifts do not keep the sign."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))
