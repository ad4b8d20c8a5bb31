"""The reductions of each backend. Both the check before a call and the documentation use this table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from meshcomm.errors import UnsupportedOp
from meshcomm.layout.names import nearest_name
from meshcomm.reductions import REDUCTIONS, Kind

_WHOLE: Final = frozenset((torch.int8, torch.uint8, torch.int32, torch.int64))
_FLOATS: Final = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_COMPLEX: Final = frozenset((torch.complex64, torch.complex128))

# Reduced in a wider dtype and converted back, which is exact because the wider dtype holds all low bits of the result.
WIDENED: Final = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

# Backends whose calls return when they are queued, and run in this order on a stream of the device. The last one is
# the backend of meshcomm.testing that replaces NCCL on hosts without a GPU.
STREAM_ORDERED: Final = frozenset(("nccl", "nccl-legacy", "nccl2", "xccl", "emulated_nccl"))


def by_device(backend: str) -> dict[str, str]:
    """Return the parts of a backend string by device type; a backend for all devices has the key "".

    >>> by_device("cpu:gloo,cuda:nccl"), by_device("gloo")
    ({'cpu': 'gloo', 'cuda': 'nccl'}, {'': 'gloo'})
    """
    return dict(part.split(":", 1) for part in backend.split(",")) if ":" in backend else {"": backend}


def backend_on(backend: str, device: torch.device) -> str:
    """Return the backend for a device: "gloo" for cpu in "cpu:gloo,cuda:nccl"; the whole string if no part matches."""
    parts = by_device(backend)
    return parts.get(device.type) or parts.get("", backend)


# dtypes that a backend reduces, directly or widened; a backend that is not listed decides itself.
REDUCED: Final[dict[str, frozenset[torch.dtype]]] = {
    "gloo": _WHOLE | _FLOATS | _COMPLEX | frozenset(WIDENED) | {torch.bool},
    "nccl": _WHOLE | _FLOATS | _COMPLEX | frozenset(WIDENED) | {torch.bool},
}


def check_reduce(backend: str, op: str, dtype: torch.dtype, where: Callable[[], str]) -> None:
    """Raise UnsupportedOp unless a reduction `op` of `dtype` exists and is exact on `backend`.

    Called on every rank with the same arguments, so that it fails on all of them or on none.
    `where()` is the beginning of the error, as in `all_reduce along "dp"`.
    """
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise UnsupportedOp(
            f"{where()}: no reduce op {op!r}",
            given=f"op={op!r}",
            expected="one of " + ", ".join(REDUCTIONS),
            hint=f'op="{"avg" if op == "mean" else nearest_name(str(op), REDUCTIONS) or "sum"}"',
        )
    reason = reduce_refusal(backend, op, dtype)
    if reason is not None:
        raise UnsupportedOp(
            f"{where()}: {op} of {name_of(dtype)} is not possible on {backend}",
            given=f"op={op!r}, dtype {name_of(dtype)}, backend {backend}",
            expected=reason[0],
            hint=reason[1],
        )


def reduce_refusal(backend: str, op: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return why `backend` cannot reduce `dtype` with `op`, and an alternative; None if it can."""
    row = REDUCTIONS[op]
    broken = dtype.is_floating_point or dtype.is_complex
    backend = "nccl" if backend in STREAM_ORDERED and backend != "xccl" else backend
    if backend in row.wire.lacking:
        return f"an operation that {backend} has", 'a Gloo dim for it: options.DIM.backend = "gloo"'
    if backend in REDUCED and dtype not in REDUCED[backend]:
        return "a dtype that the backend can add", "x.to(torch.bfloat16)" if broken else "x.to(torch.int64)"
    return row.refuses.get(_kind_of(dtype))


def _kind_of(dtype: torch.dtype) -> Kind:
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float8" if dtype.itemsize == 1 else "float"
    return "complex" if dtype.is_complex else "whole"


def name_of(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
