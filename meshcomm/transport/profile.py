"""Names for torch.profiler, at no cost while nobody profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.autograd.profiler import record_function

from meshcomm.transport.torch_private import profiling

__all__ = ["labelled", "profiling"]


def labelled(name: str) -> AbstractContextManager[object]:
    """A block that the profiler shows under `name`."""
    return record_function(name)
