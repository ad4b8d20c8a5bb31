"""Runs a module's own forward function on one stage, including all of its code before, between and after the blocks.

Parts on other stages are skipped: absent blocks return their input, and an absent embedding returns nan. The first block
on this stage receives the previous stage's hidden states, and the pass ends after the last block on this stage. The
module itself computes masks, multipliers and everything else around the blocks. If a forward function uses any other value
from another stage, as in a skip connection across stages, it computes with nan, which the first step reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from meshcomm.errors import UnsupportedOp
from meshcomm.parallel.become import become
from meshcomm.parallel.pipeline import Stage
from meshcomm.parallel.tensor import TensorSplit
from meshcomm.parallel.tree import called, first_tensor

# The current pass.
_PASS: Final[ContextVar[OwnForward | None]] = ContextVar("pass", default=None)


@final
class AbsentBlock(nn.Module):
    """Replaces a block on another stage. It has the block's plain attributes, because some loops over blocks read them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and isinstance(value, (bool, int, float, str)):
                setattr(self, name, value)

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the first argument."""
        return next(iter((*args, *named.values())))


@final
class AbsentEmbedding(nn.Module):
    """Replaces an embedding on another stage."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._hidden_size, self._dtype = hidden_size, dtype
        # Some families read the device and dtype of the embedding's weight.
        self.weight = torch.empty(0, hidden_size, dtype=dtype, device=device)

    def forward(self, ids: Tensor, *args: Any, **named: Any) -> Tensor:
        """(...) -> (..., hidden_size), filled with nan. The result occupies the memory of one element."""
        return torch.full((), torch.nan, dtype=self._dtype, device=ids.device).expand(
            *ids.shape, self._hidden_size
        )


class _Ended(Exception):
    """Raised when the last block of a stage has returned y."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = y


def absent_parts(
    module: nn.Module,
    layers: str,
    first: Sequence[str],
    stage: Stage,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, nn.Module | Tensor]:
    """Return replacements, by name, for the blocks and first-stage parts that are not on `stage`.

    module: the unsplit module. layers, first: as in ModelSpec. dtype, device: the dtype and device of hidden states.
    """
    blocks: Any = module.get_submodule(layers)._modules.items()
    absent: dict[str, nn.Module | Tensor] = {
        f"{layers}.{key}": AbsentBlock(block)
        for place, (key, block) in enumerate(blocks)
        if place not in stage.layers
    }
    parts = dict(module.named_modules())
    for name in () if stage.is_first else first:
        if (part := parts.get(name)) is None:
            shape = module.get_parameter(name).shape
            absent[name] = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        elif isinstance(part, nn.Embedding):
            absent[name] = AbsentEmbedding(part.embedding_dim, dtype, device)
        else:
            absent[name] = AbsentBlock(part)
    return absent


def put_in(
    module: nn.Module, layers: str, order: Sequence[str], absent: Mapping[str, nn.Module | Tensor]
) -> None:
    """Add the replacements for absent parts to a stage's module, and route calls to its blocks through the current pass.

    order: the keys of all blocks, in order.
    """
    held = module.get_submodule(layers)
    blocks = list(held.children())
    for name, part in absent.items():
        parent, _, key = name.rpartition(".")
        owner = module.get_submodule(parent)
        if isinstance(part, Tensor):
            del owner._parameters[key]
            owner.__dict__[key] = part
        else:
            owner._modules[key] = part
    held._modules = {key: held._modules[key] for key in order}
    for block in blocks:
        become(block, RoutedBlock)


class RoutedBlock:
    """A base class for blocks. When the module's forward calls such a block, `OwnForward.block` runs it."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Return the result of the block."""
        running = _PASS.get()
        if running is None:
            return super().__call__(*args, **named)  # type: ignore[misc]
        return running.block(self, args, named)


@final
class OwnForward:
    """One forward pass of a stage.

    through: runs a block as configured. entering: the previous stage's hidden states; None on the first stage.
    tensor: how the module is split; with sequence_parallel, it splits full sequences before the first block. gathers: whether
    sequences are gathered after the last block.
    """

    def __init__(
        self,
        stage: Stage,
        blocks: tuple[nn.Module, ...],
        through: Callable[..., Any],
        entering: Tensor | None,
        tensor: TensorSplit,
        gathers: bool = False,
    ) -> None:
        self._gathers = gathers and tensor.sequence_parallel
        self._stage, self._blocks, self._through, self._entering = stage, blocks, through, entering
        self._tensor = tensor
        # Only hidden states can be passed between stages. If there is one stage, it may call its blocks in any order.
        self._waiting: Iterator[nn.Module] | None = iter(blocks) if stage.count > 1 else None

    def run(self, forward: Callable[..., Any], tokens: Any, named: Mapping[str, Any]) -> Any:
        """Return the result of `forward` on the last stage, and the hidden states on all other stages.

        Raises UnsupportedOp if there are several stages and `forward` does not call each block once, in order.
        """
        first = first_tensor(tokens)
        self._tokens = first.shape[1] if first.ndim > 1 else 0
        token = _PASS.set(self)
        try:
            y = called(forward, tokens, **named)
        except _Ended as ended:
            return ended.y
        finally:
            _PASS.reset(token)
        if self._waiting is not None and (uncalled := next(self._waiting, None)) is not None:
            raise self._refused(
                f"a forward that does not call {type(uncalled).__name__} {self._number(uncalled)}"
            )
        return y

    def block(self, block: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the result of a block, whose first argument is the hidden states."""
        if self._waiting is not None and block is not (expected := next(self._waiting, None)):
            which = f"{type(block).__name__} {self._number(block)}"
            raise self._refused(
                f"a forward that calls {which} again"
                if expected is None
                else f"a forward that calls {which} out of order"
            )
        if block is self._blocks[0]:
            args, named = self._begun(args, named)
        token = _PASS.set(None)
        try:
            y = self._through(block, *args, **named)
        finally:
            _PASS.reset(token)
        if block is self._blocks[-1] and not self._stage.is_last:
            # Sent tensors must be contiguous.
            raise _Ended((y[0] if isinstance(y, tuple) else y).contiguous())
        if block is self._blocks[-1] and self._gathers:
            y = (self._tensor.gather(y[0]), *y[1:]) if isinstance(y, tuple) else self._tensor.gather(y)
        return y

    def _begun(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the first block on this stage. The first argument is the hidden states."""
        key = "" if args else next(iter(named))
        x = args[0] if args else named[key]
        if self._entering is not None:
            x = self._entering
        elif self._tensor.sequence_parallel and x.shape[self._tensor.axis] == self._tokens:
            x = self._tensor.scatter(x)
        return ((x, *args[1:]), named) if args else (args, {**named, key: x})

    def _number(self, block: nn.Module) -> int:
        return self._stage.layers[self._blocks.index(block)]

    def _refused(self, given: str) -> UnsupportedOp:
        return UnsupportedOp(
            "the blocks of this model cannot be run one by one",
            given=given,
            expected="a forward that calls each block of ModelSpec.layers once, in order",
            hint="use ModelSpec(forward=...), which runs the blocks with here.through",
        )
