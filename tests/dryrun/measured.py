"""A real step, measured in the terms of a dry run: memory by purpose, and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from meshcomm.dryrun.ledger import COMPOSED, Ledger, LedgerMode
from meshcomm.dryrun.torch_private import fake_tensors_on, wraps_tensors
from meshcomm.train.torch_private import flops_of
from meshcomm.transport.torch_private import explicit_kernel, leaves_of


@final
class Watched(LedgerMode):
    """Within its block, record every tensor that an operator allocates, and the operator's FLOPs, in a ledger."""

    def __init__(self, ledger: Ledger, calls: object = None) -> None:
        super().__init__(ledger)
        self._formulas: dict[Any, Callable[..., int] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        if types and wraps_tensors(types):
            # DTensor and similar classes call operators on this rank's tensors, and those calls come here.
            return NotImplemented
        if func.namespace in COMPOSED:
            return self.inside(explicit_kernel, func, *args, **(kwargs or {}))
        found = func(*args, **(kwargs or {}))
        if fake_tensors_on():
            # DTensor infers shapes by running operators on tensors without memory.
            return found
        if func not in self._formulas:
            self._formulas[func] = flops_of(func)
        if (formula := self._formulas[func]) is not None:
            self._ledger.flops += int(formula(*args, **(kwargs or {}), out_val=found))
        name = str(func)
        if name.startswith("fsdp."):
            self._ledger.copied(leaves_of(args))
        for each in (found,) if isinstance(found, Tensor) else leaves_of(found):
            if isinstance(each, Tensor) and each.device.type != "meta":
                storage = each.untyped_storage()
                self._ledger.made(storage, storage.nbytes(), name)
        return found
