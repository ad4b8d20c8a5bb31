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


def digest_of(values: Tensor, dtype: torch.dtype | None = None) -> Digest:
    """Return a hash of a tensor's elements in their order, as a dtype. It reads them once, and allocates less than a megabyte.

    Equal for tensors of equal shapes, dtypes and bytes, whatever their strides and devices are.
    """
    is_host, total = values.device.type == "cpu", values.numel()
    digest: Digest = total if is_host else torch.full((), total, dtype=torch.int64, device=values.device)
    for part in _parts(values.detach(), (dtype or values.dtype).itemsize):
        plain = part.to(dtype).resolve_conj().resolve_neg().contiguous()
        # A single element counts as contiguous whatever its stride, but is not seen as bytes then.
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        if isinstance(digest, Tensor):
            digest = digest * signed(_FACTOR) + _of_device(data)
        else:
            digest = (digest * _FACTOR + _of_host(data)) % (1 << 64)
    return digest


def _parts(values: Tensor, itemsize: int) -> Iterator[Tensor]:
    """Yield parts of at most a run's bytes, which follow from the shape and the size of an element alone."""
    most = _WORDS * _WORD_BYTES // itemsize
    if values.numel() <= most:
        yield values
        return
    rows = max(1, len(values) * most // values.numel())
    for part in values.split(rows) if rows < len(values) else values:
        yield from _parts(part, itemsize)


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


def _of_host(data: Tensor) -> int:
    """Return the sum of words, times odd numbers. torch's product would need memory for it."""
    content = data.numpy()
    if len(content) % _WORD_BYTES:
        content = np.pad(content, (0, -len(content) % _WORD_BYTES))
    words = content.view(np.int64)
    return int(np.dot(words, _weights(data.device).numpy()[: len(words)]))


def _of_device(data: Tensor) -> Tensor:
    """Return the same of memory of a device."""
    if data.numel() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = pad(data, (0, -data.numel() % _WORD_BYTES))
    words = data.view(torch.int64)
    return (words * _weights(data.device)[: len(words)]).sum()


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
