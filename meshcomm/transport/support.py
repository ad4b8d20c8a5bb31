"""What can each backend do? One table, for the check before a call and for the documentation."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import torch

from meshcomm.errors import UnsupportedOp

ReduceOp: TypeAlias = Literal["sum", "avg", "product", "min", "max"]

REDUCE_OPS: Final[tuple[str, ...]] = ("sum", "avg", "product", "min", "max")

_FLOAT8: Final[frozenset[torch.dtype]] = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith("float8_")
)


def check_reduce(backend: str, op: str, dtype: torch.dtype, where: str) -> None:
    """Raise UnsupportedOp unless a reduction `op` of `dtype` exists and is exact on `backend`.

    Called on every rank with the same arguments, so that it fails on all of them or on none.
    `where` opens the message, as in `all_reduce along "dp"`.
    """
    if op not in REDUCE_OPS:
        raise UnsupportedOp(
            f"{where}: no reduce op {op!r}",
            given=f"op={op!r}",
            expected="one of " + ", ".join(REDUCE_OPS),
            hint='op="sum"',
        )
    reason = reduce_refusal(backend, op, dtype)
    if reason is not None:
        raise UnsupportedOp(
            f"{where}: {op} of {name_of(dtype)} is not possible on {backend}",
            given=f"op={op!r}, dtype {name_of(dtype)}, backend {backend}",
            expected=reason[0],
            hint=reason[1],
        )


def reduce_refusal(backend: str, op: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """Why `backend` cannot reduce `dtype` with `op`, and what to do instead; None where it can."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return "a dtype that can hold an average", 'op="sum", then divide, or x.float()'
    if op in ("min", "max") and dtype.is_complex:
        return "a dtype whose values have an order", "torch.view_as_real(x), if that is meant"
    if op == "product" and dtype.is_complex:
        return "sum or avg for complex numbers", "multiply after all_gather"
    if dtype == torch.bool and op in ("sum", "product", "avg"):
        return "min (and) or max (or) for bool", 'op="max" for "any", op="min" for "all"'
    if dtype in _FLOAT8:
        return "a dtype that the backend can add", "x.to(torch.bfloat16)"
    return None


def name_of(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
