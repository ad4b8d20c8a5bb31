"""What a backend refuses in a call of torch.distributed: dtypes, reductions, and the shapes of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from meshcomm.collectives import ALL_REDUCE, ALL_TO_ALL, GATHER, REDUCE_SCATTER, Collective
from meshcomm.transport.support import backend_refusal, name_of

# The dtypes that other collectives on Gloo carry, but gather does not (torch 2.15).
_GATHER_LACKS: Final = (torch.complex64, torch.complex128)


def check_tensors(
    backend: str,
    row: Collective,
    op: str | None,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    where: str,
) -> None:
    """Raise RuntimeError, as backends do, if `backend` cannot carry or reduce a tensor of a call, or if their dtypes differ."""
    for x in (*inputs, *outputs):
        reason = backend_refusal(backend, op, x.dtype)
        what = name_of(x.dtype) if op is None else f"{op} of {name_of(x.dtype)}"
        if backend == "gloo" and row is GATHER and x.dtype in _GATHER_LACKS:
            reason = "real numbers", "torch.view_as_real(x)"
        is_summed = (row, op, x.layout) == (ALL_REDUCE, "sum", torch.sparse_coo)
        if x.layout != torch.strided and not is_summed:
            reason = "a dense tensor, or the sum of an all_reduce in COO layout", "x.to_dense()"
            what = f"{x.layout}"
        if reason is not None:
            raise RuntimeError(
                f"{where}: {what} is not possible on {backend}; expected {reason[0]}; try {reason[1]}"
            )
    if len(kinds := {x.dtype: None for x in (*inputs, *outputs)}) > 1:
        raise RuntimeError(f"{where}: tensors of different dtypes: {', '.join(map(name_of, kinds))}")


def check_shapes(row: Collective, data: Any, result: Any, coord: int, size: int, where: str) -> None:
    """Raise RuntimeError unless Gloo takes an input and an output of these shapes. Tried on torch 2.15.

    Each tensor of a list has the shape of the tensor on the other side; so does each rank's part along the first dim of a tensor
    that has the parts of all ranks.
    """
    whole, part = (result, data) if row.joins else (data, result)
    if isinstance(data, list) and isinstance(result, list):
        same = [x.shape for x in (*data, *result)]
    elif row is REDUCE_SCATTER and isinstance(whole, list):
        same = [part.shape, whole[coord].shape]
    elif isinstance(whole, list):
        same = [part.shape, *(x.shape for x in whole)]
    elif row is ALL_TO_ALL:
        return
    else:
        same = [whole.shape, torch.Size([*(n * size for n in part.shape[:1]), *part.shape[1:]])]
    if len(shapes := {tuple(shape): None for shape in same}) > 1:
        raise RuntimeError(f"{where}: Gloo needs equal shapes, not {' and '.join(map(str, shapes))}")
