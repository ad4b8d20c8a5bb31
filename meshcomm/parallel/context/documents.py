"""Documents packed into one sample: which tokens attend to each other, and each token's position in its document."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm.errors import ShapeError

_DOCUMENTS: Final[ContextVar[Tensor | None]] = ContextVar("documents", default=None)


def current_documents() -> Tensor | None:
    """Return each token's document number, int64 (batch, full sequence), or None if the current samples are not packed."""
    return _DOCUMENTS.get()


def within(documents: Tensor | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` so that attention stays within documents, even when `call` runs again in backward."""
    return call if documents is None else partial(_attending, documents, call)


def _attending(documents: Tensor, call: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    token = _DOCUMENTS.set(documents)
    try:
        return call(*args, **named)
    finally:
        _DOCUMENTS.reset(token)


def places(documents: Tensor) -> Tensor:
    """Return each token's position in its document, starting at 0. int64 (..., sequence) -> the same.

    >>> places(torch.tensor([0, 0, 0, 1, 1, 2])).tolist()
    [0, 1, 2, 0, 1, 0]
    """
    along = torch.arange(documents.shape[-1], device=documents.device)
    begins = F.pad(documents[..., 1:] != documents[..., :-1], (1, 0), value=True)
    return along - torch.where(begins, along, 0).cummax(-1).values


def check_documents(documents: Tensor, tokens: Tensor) -> None:
    """Raise ShapeError unless `documents` is int64 and has the shape of `tokens`, (samples, sequence)."""
    if documents.shape != tokens.shape or documents.dtype != torch.int64:
        raise ShapeError(
            "the documents do not contain one number per token",
            given=f"documents {tuple(documents.shape)}, {documents.dtype}; tokens {tuple(tokens.shape)}",
            expected="int64 document numbers in the shape of the tokens, ascending in each sample",
            hint="0 for each token of a sample's first document, 1 for the next: "
            "torch.nn.functional.pad((tokens == eos).long().cumsum(1)[:, :-1], (1, 0))",
        )


def runs_of(documents: Tensor) -> list[list[slice]]:
    """Return the slice of each document in each sample. The host waits for the document numbers.

    >>> runs_of(torch.tensor([[0, 0, 1], [0, 0, 0]]))
    [[slice(0, 2, None), slice(2, 3, None)], [slice(0, 3, None)]]
    """
    runs = []
    for row in documents.tolist():
        ends = [index for index in range(1, len(row)) if row[index] != row[index - 1]]
        runs.append([slice(a, b) for a, b in zip([0, *ends], [*ends, len(row)], strict=True)])
    return runs
