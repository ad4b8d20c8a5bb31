"""Whether tensors have changed, or have got other memory, since they were looked at."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from meshcomm.transfer.tensors import Parted, base_of, memory_of

_WORD_BYTES: Final = 8
_WORDS: Final = 1 << 16
# An odd number, so that the words of each run count.
_FACTOR: Final = 0x9E3779B97F4A7C15


def mark_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that differs once the tensor's elements on this rank have changed.

    torch counts changes in place of ordinary tensors, except those through `.data`. It counts no change of an inference tensor
    and, of DTensors, none by `torch._foreach_*`, as optimizers use them (torch 2.15). Of these, the values are hashed.
    """
    memory = memory_of(tensor)
    is_counted = not isinstance(tensor, DTensor) and not memory.is_inference()
    counts = tuple(-1 if counted.is_inference() else counted._version for counted in (tensor, memory))
    return (*counts, None if is_counted else fingerprint(memory))


def marks_of(tensors: Mapping[str, Parted]) -> dict[str, tuple[object, ...]]:
    """Return the mark of each tensor, by name. A tensor that has the values of several is looked at once."""
    bases = {name: base_of(tensor) for name, tensor in tensors.items()}
    marks = {id(base): mark_of(base) for base in {id(base): base for base in bases.values()}.values()}
    return {name: marks[id(base)] for name, base in bases.items()}


def fingerprint(memory: Tensor) -> int:
    """Return a hash of the bytes of a tensor, which reads them once."""
    data = memory.detach().contiguous().view(-1).view(torch.uint8)
    weights, total = _weights(data.device), data.numel()
    if data.data_ptr() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    last = total - total % _WORD_BYTES
    words = [
        run.view(torch.int64)
        for run in (*data[:last].split(_WORDS * _WORD_BYTES), pad(data[last:], (0, -total % _WORD_BYTES)))
    ]
    sums = [(run * weights[: len(run)]).sum() for run in words]
    for run in torch.stack(sums).tolist():
        total = (total * _FACTOR + run) % (1 << 64)
    return total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers of 63 bits, one for each word of a run."""
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):
        drawn = torch.randint(1 << 62, (_WORDS,), generator=draw, dtype=torch.int64)
        return (2 * drawn + 1).to(device)


def places_of(tensors: Mapping[str, Parted]) -> dict[str, tuple[Any, ...]]:
    """Return where in memory this rank's part of each tensor lies."""
    places = {}
    for name, tensor in tensors.items():
        memory = memory_of(tensor)
        places[name] = memory.data_ptr(), memory.dtype, tuple(memory.shape), memory.stride()
    return places
