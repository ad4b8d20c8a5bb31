"""What "size" means for each operation, as nccl-tests counts it, and which sizes there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshcomm.costs.operations import Operation
from meshcomm.errors import ConfigError

# float32: what is measured.
DTYPE_BYTES: Final = 4

# Of which tensor the bytes are counted.
COUNTED: Final[Mapping[Operation, str]] = {
    "all_reduce": "the tensor, which is input and output",
    "all_gather": "the output: all ranks' parts together",
    "reduce_scatter": "the input: all ranks' parts together",
    "all_to_all": "the input, what a rank keeps for itself included",
    "broadcast": "the tensor",
    "reduce": "the tensor",
    "sendrecv": "the message",
}
_IN_PARTS: Final = frozenset(("all_gather", "reduce_scatter", "all_to_all"))


def counted_bytes(operation: Operation, size_bytes: int, dim: str, ranks: int) -> int:
    """The largest size up to `size_bytes` of whole float32, for equal parts where there are parts.

    Raises ConfigError where there is none.

    >>> counted_bytes("all_reduce", 4099, "dp", 3), counted_bytes("all_gather", 4099, "dp", 3)
    (4096, 4092)
    """
    unit = DTYPE_BYTES * (ranks if operation in _IN_PARTS else 1)
    if size_bytes < unit:
        parts = f", one for each of {ranks} ranks along {dim}" if operation in _IN_PARTS else ""
        raise ConfigError(
            f"{size_bytes} bytes are too few for {operation} along {dim}",
            given=f"--bytes {size_bytes}",
            expected=f"at least {unit} bytes: float32 of {DTYPE_BYTES} bytes{parts}",
            hint=f"--bytes {unit}, or other operations by --op",
        )
    return size_bytes - size_bytes % unit
