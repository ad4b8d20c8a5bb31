"""Parameters are created without memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshcomm.parallel.memory import on_meta


class Vast(nn.Module):
    """A module with a parameter of 128 TiB, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 << 15, 1 << 30))
        self.register_buffer("table", torch.arange(4.0))


def test_a_parameter_that_the_host_has_no_memory_for_is_made_without_any() -> None:
    with pytest.raises(RuntimeError):
        Vast()
    with on_meta():
        module = Vast()
    assert module.weight.is_meta and module.get_buffer("table").tolist() == [0, 1, 2, 3]
