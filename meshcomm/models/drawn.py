"""Random values that follow from a parameter's name: the same on every mesh, whoever draws them."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """The whole parameter, float32, from (seed, name)."""
    # NumPy's generators give the same numbers on every kind of processor; torch's need not.
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16])
    return torch.from_numpy(
        np.random.default_rng(key).standard_normal(shape, dtype=np.float32) * np.float32(std)
    )
