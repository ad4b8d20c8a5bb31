"""What autocast does to the tensors that matrices are multiplied with, done before they are sent."""

from __future__ import annotations

import torch
from torch import Tensor


def as_autocast(x: Tensor) -> Tensor:
    """x as autocast hands it to a matrix product, where it is on; its gradient comes back in x's dtype.

    What is sent after this is as wide as what is multiplied. float64 and integers stay, as with autocast.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
