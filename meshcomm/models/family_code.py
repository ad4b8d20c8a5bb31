"""Context managers for running the code of a transformers family.

A float64 model ignores casts to float32, which are meant to provide more precision than bfloat16. Each sample is treated
as one document, so that the code does not search the positions for boundaries between packed documents. The host would
have to wait for the device during such a search, and a dry run has no values to search.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WHOLE_SAMPLES: Final[ContextVar[bool]] = ContextVar("whole_samples", default=False)
_WIDE: Final[ContextVar[bool]] = ContextVar("wide", default=False)
# A product of tensors with different dtypes raises an error; a sum is computed in the wider dtype.
_PRODUCTS: Final = (Tensor.__matmul__, Tensor.matmul, torch.matmul)
_BOTH: Final = {torch.float32, torch.float64}


class _KeepFloat64(TorchFunctionMode):
    """Keeps float64 where a model casts tensors to float32 for more precision: in norms, routers and rotary angles."""

    def __enter__(self) -> Any:
        self._token = _WIDE.set(True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _WIDE.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            if func is Tensor.float:
                return x
            if func in (Tensor.to, Tensor.type) and torch.float32 in args[1:]:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        if func in _PRODUCTS and {getattr(arg, "dtype", None) for arg in args} == _BOTH:
            # transformers 5.17 multiplies float32 positions by a table, here in float64, to compute rotary angles.
            args = tuple(arg.to(torch.float64) for arg in args)
        return func(*args, **named)


def wide(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which a float64 model computes only in float64. Other dtypes are unaffected."""
    return _KeepFloat64() if dtype == torch.float64 and not _WIDE.get() else nullcontext()


@contextmanager
def family_code(dtype: torch.dtype) -> Iterator[None]:
    """In this context, a family's code treats each sample as one document. dtype: the dtype in which the code computes."""
    token = WHOLE_SAMPLES.set(True)
    try:
        with wide(dtype):
            yield
    finally:
        WHOLE_SAMPLES.reset(token)
