"""Sparse gradients of embeddings, for optimizers that update only the rows that a step has used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from meshcomm.errors import UnsupportedOp
from meshcomm.layout import Dims
from meshcomm.layout.names import listed
from meshcomm.mesh import Mesh


@final
class SparseRows:
    """The rows of tables that the forward passes of a step have used, on all ranks along `dims`.

    Gradients are summed as dense tensors. A row that is used may have a gradient of 0, with which SparseAdam still updates
    its moments, so the rows are recorded.

    optimizer: whose parameters are looked for. An optimizer of torch other than SparseAdam takes dense gradients, with the
    same results or, like Adam, as the only kind. Others are given sparse gradients, as by torch on one process.
    """

    def __init__(
        self, mesh: Mesh, dims: Dims | None, modules: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._mesh, self._dims = mesh, dims
        parts = [part for part in optimizers_in(optimizer) if type(part) is torch.optim.SparseAdam]
        held = {parameter for part in parts for group in part.param_groups for parameter in group["params"]}
        held -= {*_tables(modules)}
        if dense := [
            name.partition(".")[2] for name, parameter in modules.named_parameters() if parameter in held
        ]:
            raise UnsupportedOp(
                "SparseAdam updates only tables with sparse gradients",
                given=listed(dense),
                expected="weights of nn.Embedding(..., sparse=True)",
                hint="two optimizers in one, of which SparseAdam has only these weights; or Adam, which updates every row",
            )
        self._tables = [table for table in _tables(modules) if _takes_sparse(optimizer, table)]
        self._used = [
            torch.zeros(len(table), dtype=torch.int32, device=table.device) for table in self._tables
        ]
        for table, used in zip(self._tables, self._used, strict=True):
            finalize(self, table.register_hook(_recorded(ref(used))).remove)

    def start(self) -> None:
        """Begin a step."""
        for used in self._used:
            used.zero_()

    def finish(self) -> None:
        """Combine the rows of all ranks. Called by: every rank along the dims."""
        if self._dims is not None:
            for used in self._used:
                used.copy_(self._mesh.all_reduce(self._dims, used, op="max"))

    @contextmanager
    def handed(self) -> Iterator[None]:
        """In this context, the gradients of the tables are sparse tensors of the rows that were used."""
        dense = [table.grad for table in self._tables]
        try:
            for table, used, grad in zip(self._tables, self._used, dense, strict=True):
                assert grad is not None
                rows = used.nonzero()[:, 0]
                kind: dict[str, Any] = {"check_invariants": False, "is_coalesced": True}
                table.grad = torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, **kind)
            yield
        finally:
            for table, grad in zip(self._tables, dense, strict=True):
                table.grad = grad


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that an optimizer consists of, and then itself."""
    held = [member for value in vars(optimizer).values() for member in members_of(value)]
    return [*(member for member in held if isinstance(member, torch.optim.Optimizer)), optimizer]


def members_of(value: Any) -> list[Any]:
    """Return the values in a list, tuple or dictionary, and any other value alone."""
    if type(value) is dict:
        return list(value.values())
    return list(value) if type(value) in (list, tuple) else [value]


def _tables(modules: nn.Module) -> list[nn.Parameter]:
    tables: dict[Any, None] = {}
    for part in modules.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
            tables[part.weight] = None
    return list(tables)


def _takes_sparse(optimizer: torch.optim.Optimizer, table: nn.Parameter) -> bool:
    for inner in optimizers_in(optimizer):
        if any(parameter is table for group in inner.param_groups for parameter in group["params"]):
            kind = type(inner)
            return kind is torch.optim.SparseAdam or not kind.__module__.startswith("torch.optim.")
    return False


def _recorded(used: ref[Tensor]) -> Callable[[Tensor], Any]:
    """Return a hook that records the rows of a sparse gradient, or all rows if it is dense."""

    def hook(grad: Tensor) -> None:
        if (rows := used()) is not None:
            if grad.is_sparse:
                rows[grad._indices()[0]] = 1
            else:
                rows.fill_(1)

    return hook
