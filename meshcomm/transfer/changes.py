"""Whether tensors have changed, or have got other memory, since they were looked at, and whether what was sent has arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from meshcomm.transfer.tensors import Parted, base_of, memory_of

_WORD_BYTES: Final = 8
_WORDS: Final = 1 << 16
# An odd number, so that the words of each run count.
_FACTOR: Final = 0x9E3779B97F4A7C15

# 64 bits. Of memory of a device, a tensor there, so that nobody waits for it.
Digest: TypeAlias = int | Tensor


def counts_of(tensors: Mapping[str, Parted]) -> dict[str, tuple[int, ...]]:
    """Return numbers that differ once torch has counted a change of a tensor, by name: changes that are undone are seen, too.

    torch counts most changes in place, but not those of fused optimizers, through `.data` and NumPy, of inference tensors, and of
    DTensors by `torch._foreach_*` (torch 2.15).
    """
    return {
        name: tuple(
            -1 if counted.is_inference() else counted._version
            for counted in (base_of(tensor), memory_of(tensor))
        )
        for name, tensor in tensors.items()
    }


def digest_of(values: Tensor) -> Digest:
    """Return a hash of the bytes of a tensor's elements in their order. It reads them once, and allocates less than a megabyte if
    they are contiguous.
    """
    plain = values.detach().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous whatever its stride, but is not seen as bytes then.
    data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    if data.device.type != "cpu":
        return _of_device(data)
    total = data.numel()
    for run in _of_host(data):
        total = (total * _FACTOR + run) % (1 << 64)
    return total


def summed(digests: Iterable[tuple[int, int, Digest]]) -> dict[int, int]:
    """Return the sum of the digests of each number, in 64 bits. digests: a number, a factor, and a digest."""
    sums: dict[int, int] = {}
    listed = list(digests)
    on_device = [digest for _, _, digest in listed if isinstance(digest, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    for number, factor, digest in listed:
        value = next(read) if isinstance(digest, Tensor) else digest
        sums[number] = (sums.get(number, 0) + value * factor) % (1 << 64)
    return sums


def signed(value: int) -> int:
    """Return 64 bits as torch counts them."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _of_host(data: Tensor) -> Iterator[int]:
    """Yield the sum of each run's words, times odd numbers. torch's product would need memory for each run."""
    content, factors = data.numpy(), _weights(data.device).numpy()
    for at in range(0, len(content), _WORDS * _WORD_BYTES):
        run = content[at : at + _WORDS * _WORD_BYTES]
        if len(run) % _WORD_BYTES:
            run = np.pad(run, (0, -len(run) % _WORD_BYTES))
        words = run.view(np.int64)
        yield int(np.dot(words, factors[: len(words)]))


def _of_device(data: Tensor) -> Tensor:
    """Return the same of memory of a device."""
    factors = _weights(data.device)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for run in data.split(_WORDS * _WORD_BYTES):
        if run.numel() % _WORD_BYTES or run.storage_offset() % _WORD_BYTES:
            run = pad(run, (0, -run.numel() % _WORD_BYTES))
        words = run.view(torch.int64)
        total = total * signed(_FACTOR) + (words * factors[: len(words)]).sum()
    return total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers of 63 bits, one for each word of a run."""
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):
        drawn = torch.randint(1 << 62, (_WORDS,), generator=draw, dtype=torch.int64, device="cpu")
        return (2 * drawn + 1).to(device)


def places_of(tensors: Mapping[str, Parted]) -> dict[str, tuple[Any, ...]]:
    """Return where in memory this rank's part of each tensor lies."""
    places = {}
    for name, tensor in tensors.items():
        memory = memory_of(tensor)
        places[name] = memory.data_ptr(), memory.dtype, tuple(memory.shape), memory.stride()
    return places
