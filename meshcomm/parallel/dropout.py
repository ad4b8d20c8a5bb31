"""Random numbers in a forward pass: dropout by element position, and random numbers that a user's modules draw."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from meshcomm.errors import ShapeError, TrainingError, UnsupportedOp
from meshcomm.layout.names import listed
from meshcomm.mesh import Mesh
from meshcomm.parallel.tensor import TensorSplit

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _signed(value: int) -> int:
    """Return the 64 bits of `value` as a torch int64."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


# SplitMix64 (Steele, Lea, Flood 2014): the increment of the state, and the two multipliers.
_STEP: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


class Drops(NamedTuple):
    """The samples and tokens of one microbatch, which determine its dropout masks. Passed to forward and never changed.

    Activation checkpointing stores this object with the other arguments, even if a pipeline has started other
    microbatches in between. There is no other state, so a run can resume from its seed and step number.
    """

    keys: Tensor
    """int64 (batch,): each sample's key, computed from (seed, step, sample)."""
    positions: Tensor
    """int64 (sequence,): the positions of this rank's tokens in their full sample."""

    @staticmethod
    def at(seed: int, step: int, samples: Tensor, positions: Tensor) -> Drops:
        """Return the Drops of these samples at a step.

        samples:   int64 (batch,): indices in the global batch, equal on ranks with the same samples.
        positions: as in Drops.
        """
        for name, values in (("samples", samples), ("positions", positions)):
            if values.dtype != torch.int64 or values.ndim != 1:
                raise ShapeError(
                    f"dropout cannot number elements with these {name}",
                    given=f"{name} of shape {tuple(values.shape)}, {values.dtype}",
                    expected="one axis of int64",
                    hint="torch.arange(first, first + count), numbered over all ranks",
                )
        return Drops(_number(torch.full_like(samples, _hash(f"{seed} {step}")), samples), positions)


@final
class Dropout(nn.Module):
    """Sets each element to zero with probability `p`, and divides the remaining elements by 1 - p. With eval() or p = 0,
    returns x.

    Only (seed, step, site, sample, position, feature) determine whether an element is dropped,
    so every mesh drops exactly the elements that a single process would drop, with no generator, state or communication.

    p:    0 <= p < 1, rounded to a multiple of 2^-32. Raises TrainingError if p is not in [0, 1).
    site: the name of the place in the model, such as "3.attn", numbered over all stages. Sites with equal names drop the
          same elements.
    """

    def __init__(self, p: float, site: str) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise TrainingError(
                f"dropout {site} has an invalid probability",
                given=f"p = {p}",
                expected="0 <= p < 1",
                hint="p = 0.1",
            )
        self.p = p
        self.site = site
        self._site = _hash(site)
        # The threshold for 32 random bits that are read as a signed number.
        self._threshold = min(round(p * 2**32), 2**32 - 1) - 2**31

    def forward(self, x: Tensor, drops: Drops | None = None, first_feature: int = 0) -> Tensor:
        """(batch, sequence, features) -> the same shape. The gradient of dropped elements is zero.

        drops:         the Drops of these samples and tokens. May be None only if nothing is dropped.
        first_feature: the index of x[..., 0] among all features, if features are split over ranks.
        Raises:        TrainingError if drops is needed but None; ShapeError if drops does not fit the shape of x.
        """
        if not self.training or self.p == 0:
            return x
        if drops is None:
            raise TrainingError(
                f"dropout {self.site} does not know which samples these are",
                given=f"p = {self.p}, training, no drops",
                expected="a Drops, which determines the mask",
                hint="Drops.at(seed, step, samples, positions), or eval()",
            )
        return torch.where(self.keep(drops, x.shape, first_feature), x * (1 / (1 - self.p)), 0.0)

    def keep(self, drops: Drops, shape: torch.Size, first_feature: int = 0) -> Tensor:
        """Return a bool tensor of `shape`, (batch, sequence, features): True for elements that are not dropped.

        The other arguments are as in forward.
        """
        drawn = (drops.keys.shape[0], drops.positions.shape[0])
        if len(shape) != 3 or shape[:2] != drawn:
            raise ShapeError(
                f"dropout {self.site}: x and drops have different samples or tokens",
                given=f"x of shape {tuple(shape)}; {drawn[0]} samples, {drawn[1]} positions",
                expected=f"x of shape ({drawn[0]}, {drawn[1]}, features)",
                hint="the samples of this microbatch, and the positions of this rank's tokens",
            )
        tokens = _number(_mixed(drops.keys ^ self._site)[:, None], drops.positions)
        # Each 64-bit number covers two neighboring elements.
        first, end = first_feature // 2, (first_feature + shape[2] + 1) // 2
        words = torch.arange(first, end, device=tokens.device)
        bits = _number(tokens[..., None], words).view(torch.int32)
        return bits[..., first_feature % 2 :][..., : shape[2]] >= self._threshold


def _hash(text: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _number(state: Tensor, index: Tensor) -> Tensor:
    """Return element `index` of the SplitMix64 sequence that starts at `state`. This is counter-based, as in Salmon et
    al. 2011.
    """
    return _mixed(state + (index + 1) * _STEP)


def _mixed(z: Tensor) -> Tensor:
    """Return SplitMix64's output for a state. int64 products wrap around, and the shifts do not preserve the sign."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


# -- modules that draw from torch's default generators ------------------------------------------------


@final
class Draws:
    """Seeds torch's default generators on the CPU and the device before each part of a forward pass.

    (seed, step, microbatch, block) determine the random numbers. Microbatches are numbered over all ranks along data and
    shard, and blocks over all stages, as in one process with the same train.micro_batch_size. Ranks along context have
    different tokens of the same microbatch, so their coord is part of the key. Ranks along tensor draw equal random numbers:
    see `check_dropouts`. No state is kept: a resumed run and a recomputed block draw the same numbers again.

    seed:  the run's seed.
    apart: dims along which ranks have different tokens of the same samples.
    """

    def __init__(self, mesh: Mesh, seed: int, apart: Iterable[str] = ()) -> None:
        self._mesh, self._seed = mesh, seed
        self._apart = tuple(dim for dim in apart if mesh.size(dim) > 1)
        self._step, self._first, self._microbatch = "", 0, 0
        self._blocks: Counter[int] = Counter()

    def step(self, name: str, first: int) -> AbstractContextManager[None]:
        """Run a step's forward passes in this context, which restores the generators. first: this rank's first microbatch."""
        self._step, self._first = name, first
        device = self._mesh.device
        return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)

    def microbatch(self, number: int, place: str) -> None:
        """Called before each forward pass of a stage. number: the microbatch's index on this rank. place: the stage's name."""
        self._blocks.clear()
        self._microbatch = self._first + number
        self.seed(self._seed, self._step, self._microbatch, place)

    def seeded(self, number: int, block: Callable[..., Any]) -> Callable[..., Any]:
        """Return block `number` of the model, wrapped for one forward pass.

        Each call of the returned block draws the same random numbers.
        """
        self._blocks[number] += 1
        key = (self._seed, self._step, self._microbatch, f"block {number}", self._blocks[number])
        return partial(self._drawn, key, block)

    def _drawn(
        self, key: tuple[int | str, ...], block: Callable[..., Any], /, *args: Any, **named: Any
    ) -> Any:
        self.seed(*key)
        return block(*args, **named)

    def seed(self, *key: int | str) -> None:
        """Seed the generators with `key` and this rank's coords."""
        seed_generators(self._mesh.device, self._mesh.seed(*key, along=self._apart))

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        return self


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of `device`, which must be the current one of its type.

    `torch.manual_seed` seeds the generators of all devices. For each CUDA device that the program does not use, torch formats a stack.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        # Does not synchronize with the device.
        torch.get_device_module(device).manual_seed(seed)


def check_dropouts(parts: Iterable[tuple[str, nn.Module]], split: TensorSplit) -> None:
    """Raise UnsupportedOp for dropout modules with tensor parallelism: ranks would draw equal random numbers for different
    activations.

    `torch.nn.functional.dropout` is not detected.
    """
    names = [name for name, part in parts if isinstance(part, DROPOUTS) and part.p > 0]
    if split.size > 1 and names:
        raise UnsupportedOp(
            f"the dropout in a module that is split along {split.dim} would depend on the mesh",
            given=listed(names),
            expected="p = 0 in each, or dropout by element position, which is the same on every mesh",
            hint='ModelSpec(dropped={"blocks.*.mlp": 0.1}), and p = 0 in the module; or remove parallel.tensor',
        )
