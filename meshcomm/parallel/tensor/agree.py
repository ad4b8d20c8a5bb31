"""Do ranks hold the same weights? Compared by digests."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor, nn

from meshcomm.errors import MeshMismatchError
from meshcomm.mesh import Mesh

_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same(mesh: Mesh, dim: str, module: nn.Module, plan: str) -> None:
    """Raises MeshMismatchError on every rank along `dim` where plan, names, weights or buffers differ.

    Sends 16 bytes for each tensor. The digest is that of bits, so it tells -0.0 from 0.0.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in tensors.items()]
    said = hashlib.sha256(repr((plan, shapes)).encode()).digest()
    head = torch.tensor([[int.from_bytes(said[:7]), int.from_bytes(said[7:14])]])
    # What was said first: the rest can only be compared where it is about the same tensors.
    _compare(mesh, dim, head, ["the plan, or the names and shapes of the parameters,"])
    if tensors:
        _compare(mesh, dim, torch.stack([digest(x) for x in tensors.values()]), list(tensors))


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """Two sums over the bits of `x`, one weighted by place: int64 (2,), modulo 2^64, on the CPU."""
    flat = x.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    found = torch.zeros(2, dtype=torch.int64, device=x.device)
    for first in range(0, words.numel(), _CHUNK):
        some = words[first : first + _CHUNK].to(torch.int64)
        place = torch.arange(first, first + some.numel(), device=x.device) * 2654435761 + 1
        found += torch.stack([some.sum(), (some * place).sum()])
    return found.cpu()


def _compare(mesh: Mesh, dim: str, mine: Tensor, names: list[str]) -> None:
    rows: Tensor = mesh.all_gather(dim, mine.unsqueeze(0).to(mesh.device)).cpu()
    for place, name in enumerate(names):
        values = [tuple(row[place].tolist()) for row in rows]
        common, often = Counter(values).most_common(1)[0]
        if often == len(values):
            continue
        odd = tuple(rank for rank, value in zip(mesh.ranks(dim), values, strict=True) if value != common)
        ranks = "rank " + str(odd[0]) if len(odd) == 1 else "ranks " + ", ".join(map(str, odd))
        error = MeshMismatchError(
            f'{name} differs along "{dim}" before it is split',
            given=f"{ranks} of {mesh.ranks(dim)}, as {mesh.label} sees it: another value than most have",
            expected=f"the same module, weights and plan on every rank along {dim}",
            hint=f"torch.manual_seed(seed) alike along {dim} before the module is made, the same file for "
            f'all, or for each parameter p: mesh.broadcast("{dim}", p.data, src=0)',
        )
        error.mismatched_ranks = odd
        raise error
