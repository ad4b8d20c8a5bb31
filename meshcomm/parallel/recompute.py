"""Activation checkpointing: keeps some of a block's tensors for its backward pass, and recomputes the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

ActivationCheckpointing: TypeAlias = bool | Literal["selective"] | int
"""False: keep all tensors. True: keep only each block's inputs. N: keep only the inputs of every N-th block. "selective": keep
each block's inputs and the results of the operators in `_KEPT`."""

# The result of a collective is kept, because all its ranks would have to repeat the call at the same point to recompute it.
_KEPT: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math_for_mps",
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "once"),
    }
)
"""Operators whose results "selective" keeps, as torchtitan does. All other results are cheap to recompute relative to their
size.

Two kinds of products are not kept: attention scores that are computed by the formula (Korthikanti et al. 2022), and
products that are summed over ranks, because the sum is kept."""


def run(
    setting: ActivationCheckpointing, number: int, block: Callable[..., Any], /, *args: Any, **named: Any
) -> Any:
    """Run block `number` of the model and return its result. The block's tensors for backward are kept or recomputed.

    Random state is not kept: a block must draw the same numbers when it is called again with the same arguments.
    """
    if setting == "selective":
        return _checkpointed(block, _contexts, *args, **named)
    if not setting or (number + 1) % setting:  # True is 1: every block
        return block(*args, **named)
    return _checkpointed(block, noop_context_fn, *args, **named)


def compile_blocks(blocks: Iterable[nn.Module], setting: ActivationCheckpointing) -> ActivationCheckpointing:
    """Compile each block with torch.compile. Return the setting that `run` needs for the compiled blocks.

    With "selective", the checkpoint is part of the compiled code, which keeps or recomputes each result depending on its
    operator.
    """
    inside = setting == "selective"
    for block in blocks:
        if inside:
            block.forward = partial(_checkpointed, block.forward, _compiled_contexts)
        block.compile()
    return False if inside else setting


def _checkpointed(block: Callable[..., Any], contexts: Callable[[], Any], /, *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return block(*args, **named)
    return checkpoint(
        block, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named
    )


def _compiled_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


@contextmanager
def added_up() -> Iterator[None]:
    """Matrix products in this context are summed over ranks. The sum is kept instead of the products."""
    token = _ADDED_UP.set(True)
    try:
        yield
    finally:
        _ADDED_UP.reset(token)


def once(call: Callable[[], Sequence[Tensor]], x: Tensor) -> Sequence[Tensor]:
    """Return the result of `call`: new tensors without autograd. When a block is recomputed selectively, it receives
    the same tensors again.

    For code that does not communicate through `mesh.functional`, whose results are always kept. x: any tensor that
    `call` uses.
    """
    if not _SELECTIVE.get():
        return call()
    key = f"{next(_NUMBERS)}"
    _CALLS[key] = call
    try:
        with torch.no_grad():
            results: list[Tensor] = torch.ops.meshcomm_recompute.once.default(x.detach(), key)
    finally:
        del _CALLS[key]
    return results


_SELECTIVE: Final[ContextVar[bool]] = ContextVar("meshcomm_selective", default=False)
_ADDED_UP: Final[ContextVar[bool]] = ContextVar("meshcomm_added_up", default=False)
_NUMBERS: Final = count()
# Calls in progress, by key, because an operator accepts only plain values.
_CALLS: Final[dict[str, Callable[[], Sequence[Tensor]]]] = {}


def _policy(_: object, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    name = op.name().partition("::")[2].partition(".")[0]
    saved = op.namespace in ("aten", "meshcomm", "meshcomm_recompute") and name in _KEPT
    if saved and name in ("bmm", "baddbmm"):
        a, b = args[-2:]
        # Attention scores, (queries, keys), are larger than both inputs.
        saved = a.shape[1] * b.shape[2] <= a.shape[1] * a.shape[2] + b.shape[1] * b.shape[2]
    if saved and _ADDED_UP.get():
        saved = op.namespace != "aten"
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = create_selective_checkpoint_contexts(_policy)
    return _Region(forward, False), _Region(again, True)


@final
class _Region(AbstractContextManager[None]):
    """Runs a block in torch's selective checkpointing mode, which keeps results or returns kept results."""

    def __init__(self, mode: Any, again: bool) -> None:
        self._mode, self._again, self._kept = mode, again, mode.storage
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        if self._again:
            # The mode drops results after their first use, but zero_bubble recomputes a block in each half of backward.
            self._mode.storage = {op: copy(stored) for op, stored in self._kept.items()}
        with ExitStack() as stack:
            token = _SELECTIVE.set(True)
            stack.callback(_SELECTIVE.reset, token)
            stack.enter_context(self._mode)
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def _once(x: Tensor, key: str) -> list[Tensor]:
    return list(_CALLS[key]())


_LIBRARY: Final = torch.library.Library("meshcomm_recompute", "DEF")
_LIBRARY.define("once(Tensor x, str key) -> Tensor[]")
_LIBRARY.impl("once", _once, "CompositeExplicitAutograd")
