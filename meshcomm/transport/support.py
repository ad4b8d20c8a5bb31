"""The reductions of each backend. The checks before each call of the mesh and of torch, and the documentation, use one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from meshcomm.errors import UnsupportedOp
from meshcomm.layout.names import nearest_name
from meshcomm.reductions import ANY_ALL, REDUCTIONS, Kind

_WHOLE: Final = frozenset((torch.int8, torch.uint8, torch.int32, torch.int64))
_FLOATS: Final = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_COMPLEX: Final = frozenset((torch.complex64, torch.complex128))

# These dtypes are reduced in a wider dtype and converted back. The result is exact, because the wider dtype holds all of
# its low bits.
WIDENED: Final = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

# Backends whose calls return once they are queued and run in queue order on a device stream. The last one is the
# meshcomm.testing backend that replaces NCCL on hosts without a GPU.
STREAM_ORDERED: Final = frozenset(("nccl", "nccl-legacy", "nccl2", "xccl", "emulated_nccl"))


def by_device(backend: str) -> dict[str, str]:
    """Return the backend for each device type in a backend string. The key "" means all devices.

    >>> by_device("cpu:gloo,cuda:nccl"), by_device("gloo")
    ({'cpu': 'gloo', 'cuda': 'nccl'}, {'': 'gloo'})
    """
    return dict(part.split(":", 1) for part in backend.split(",")) if ":" in backend else {"": backend}


def backend_on(backend: str, device: torch.device) -> str:
    """Return the backend for a device: "gloo" for cpu in "cpu:gloo,cuda:nccl"; the whole string if no part matches."""
    parts = by_device(backend)
    return parts.get(device.type) or parts.get("", backend)


# The dtypes that collectives of a backend carry (Gloo: tried on torch 2.15). A backend that is not listed does its own checks.
CARRIED: Final[dict[str, frozenset[torch.dtype]]] = {
    "gloo": _WHOLE | _FLOATS | _COMPLEX | {torch.bool},
    "nccl": _WHOLE | _FLOATS | _COMPLEX | {torch.bool},
}
# The dtypes that calls of the mesh reduce on it, directly or widened.
REDUCED: Final = {backend: dtypes | frozenset(WIDENED) for backend, dtypes in CARRIED.items()}


def check_reduce(backend: str, op: str, dtype: torch.dtype, where: Callable[[], str]) -> None:
    """Raise UnsupportedOp unless a reduction `op` of `dtype` exists and is exact on `backend`.

    All ranks call this with the same arguments, so the check fails on all ranks or on none.
    `where()` returns the beginning of the error message, as in `all_reduce along "dp"`.
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
    """Return why a call of the mesh cannot reduce `dtype` with `op` on `backend`, and an alternative, or None if it can.

    The mesh prepares values, and widens them. It refuses sums and products of bool, whose results are any and all.
    """
    row = REDUCTIONS[op]
    reason = backend_refusal(backend, row.wire.name, WIDENED.get(dtype, dtype))
    return reason or row.refuses.get(_kind_of(dtype))


def backend_refusal(backend: str, op: str | None, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return why `backend` itself cannot reduce `dtype` with `op`, or carry it if `op` is None; see `reduce_refusal`."""
    broken = dtype.is_floating_point or dtype.is_complex
    backend = "nccl" if backend in STREAM_ORDERED and backend != "xccl" else backend
    row = None if op is None else REDUCTIONS[op]
    if row is not None and backend in row.wire.lacking:
        return f"an operation that {backend} has", 'a Gloo dim for it: options.DIM.backend = "gloo"'
    if row is not None and row.factor and backend == "gloo":
        return f"an operation that {backend} has", "multiply, then ReduceOp.SUM"
    if backend in CARRIED and dtype not in CARRIED[backend]:
        verb = "carry" if row is None else "add"
        hint = "x.to(torch.bfloat16)" if broken else "x.to(torch.int64)"
        return f"a dtype that the backend can {verb}", hint if row else "x.view(torch.uint8)"
    reason = None if row is None else row.refuses.get(_kind_of(dtype))
    return None if reason is ANY_ALL else reason


def _kind_of(dtype: torch.dtype) -> Kind:
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float8" if dtype.itemsize == 1 else "float"
    return "complex" if dtype.is_complex else "whole"


def name_of(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
