"""Whether tensors have changed, or have got other memory, since they were looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from meshcomm.transfer.tensors import Parted, base_of, memory_of

_WORD_BYTES: Final = 8
_WORDS: Final = 1 << 16
# An odd number, so that the words of each run count.
_FACTOR: Final = 0x9E3779B97F4A7C15


def mark_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that differs once the tensor's elements on this rank have changed.

    torch counts most changes in place, so that values which change back are seen, too. It does not count those of fused
    optimizers, through `.data` and NumPy, of inference tensors, and of DTensors by `torch._foreach_*` (torch 2.15), so the values
    are hashed as well.
    """
    memory = memory_of(tensor)
    counts = tuple(-1 if counted.is_inference() else counted._version for counted in (tensor, memory))
    return (*counts, fingerprint(memory))


def marks_of(tensors: Mapping[str, Parted]) -> dict[str, tuple[object, ...]]:
    """Return the mark of each tensor, by name. A tensor that has the values of several is looked at once."""
    bases = {name: base_of(tensor) for name, tensor in tensors.items()}
    marks = {id(base): mark_of(base) for base in {id(base): base for base in bases.values()}.values()}
    return {name: marks[id(base)] for name, base in bases.items()}


def fingerprint(memory: Tensor) -> int:
    """Return a hash of the bytes of a tensor, which reads them once, and allocates less than a megabyte."""
    total = memory.nbytes
    for part in _contiguous(memory.detach().resolve_conj().resolve_neg()):
        data = part.view(-1).view(torch.uint8)
        for run in _of_host(data) if data.device.type == "cpu" else _of_device(data):
            total = (total * _FACTOR + run) % (1 << 64)
    return total


def _contiguous(memory: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in contiguous memory: its own, or copies of bounded size."""
    if memory.is_contiguous():
        yield memory
    elif memory.nbytes <= _WORDS * _WORD_BYTES:
        yield memory.contiguous()
    else:
        rows = max(1, len(memory) * _WORDS * _WORD_BYTES // memory.nbytes)
        for part in memory.split(rows) if rows < len(memory) else memory:
            yield from _contiguous(part)


def _of_host(data: Tensor) -> Iterator[int]:
    """Yield the sum of each run's words, times odd numbers. torch's product would need memory for each run."""
    content, factors = data.numpy(), _weights(data.device).numpy()
    words = content[: len(content) // _WORD_BYTES * _WORD_BYTES].view(np.int64)
    for at in range(0, len(words), _WORDS):
        run = words[at : at + _WORDS]
        yield int(np.dot(run, factors[: len(run)]))
    yield int.from_bytes(content[words.nbytes :].tobytes())


def _of_device(data: Tensor) -> list[int]:
    """Return the same of memory of a device, waiting for it once."""
    factors, sums = _weights(data.device), []
    for run in data.split(_WORDS * _WORD_BYTES):
        if run.numel() % _WORD_BYTES or run.storage_offset() % _WORD_BYTES:
            run = pad(run, (0, -run.numel() % _WORD_BYTES))
        words = run.view(torch.int64)
        sums.append((words * factors[: len(words)]).sum())
    return torch.stack(sums).tolist() if sums else []


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
