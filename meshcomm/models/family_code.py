"""Context managers for running the code of a transformers family.

In float64, casts to float32, meant for more precision than bfloat16 has, keep float64. Samples are treated as whole
documents, so that the code does not search positions for the borders of packed ones: the host would wait for the
device, and a dry run has no values to search.
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
# A product of tensors with different dtypes is an error, where a sum takes the wider one.
_PRODUCTS: Final = (Tensor.__matmul__, Tensor.matmul, torch.matmul)
_BOTH: Final = {torch.float32, torch.float64}


class _KeepFloat64(TorchFunctionMode):
    """Tensors that a model casts to float32 for more precision keep float64: norms, routers, rotary angles."""

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
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        if func in _PRODUCTS and {getattr(each, "dtype", None) for each in args} == _BOTH:
            # transformers 5.17: rotary angles as a product of a table, which is float64 here, and float32 positions.
            args = tuple(each.to(torch.float64) for each in args)
        return func(*args, **named)


def wide(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """In this context, a model in float64 computes in float64 only. Other dtypes are unaffected."""
    return _KeepFloat64() if dtype == torch.float64 and not _WIDE.get() else nullcontext()


@contextmanager
def family_code(dtype: torch.dtype) -> Iterator[None]:
    """In this context, a family's code runs on whole samples. dtype: the dtype in which the code computes."""
    token = WHOLE_SAMPLES.set(True)
    try:
        with wide(dtype):
            yield
    finally:
        WHOLE_SAMPLES.reset(token)
