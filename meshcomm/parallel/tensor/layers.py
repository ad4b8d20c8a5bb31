"""Linear layers, embeddings and the loss with split weights, for models that use them directly or are split by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from meshcomm.comm.torch_private import transforming
from meshcomm.errors import ShapeError, UnsupportedOp
from meshcomm.parallel.recompute import added_up
from meshcomm.parallel.tensor.parameters import local
from meshcomm.parallel.tensor.split import TensorSplit, as_autocast, wide_dtype
from meshcomm.parallel.torch_private import hooked
from meshcomm.transfer.fused import FUSED, joined

Reduction: TypeAlias = Literal["mean", "sum"]
# F.linear, or the same in float8.
Product: TypeAlias = Callable[..., Tensor]


def entered(x: Tensor) -> Tensor:
    """Return `x`, which has already been through `enter`."""
    return x


def is_conv1d(part: nn.Module) -> bool:
    """Return whether `part` is transformers' Conv1D, a linear layer whose weight is (inputs, outputs)."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nx")


def held(module: Any, name: str) -> Any:
    """Return this rank's part of a parameter of `module`, or None if the parameter does not exist. The rows of a
    multi-part weight are in the parts' order.
    """
    parameter = getattr(module, name)
    if isinstance(parameter, DTensor):
        parameter = local(parameter)
    if parameter is None:
        return None
    if (rows := getattr(module, "meshcomm_rows", None)) is not None:
        return parameter[rows]
    parts = getattr(module, FUSED, {}).get(name)
    return joined(parameter, parts) if parts else parameter


def _matrix(module: Any) -> Tensor:
    """Return this rank's part of a linear layer's weight, (outputs, inputs)."""
    weight: Tensor = held(module, "weight")
    return weight.T if module.meshcomm_transposed else weight


# Attributes whose names begin with meshcomm_ are also set on a user's module that becomes one of these classes: see `apply`.


class ColumnParallel(nn.Module):
    """y = x W^T + b, W (n_out, n_in) and b split over n_out: x (..., n_in), full -> (..., n_out / ranks).

    `x` must have been through `split.enter`, once for all column-parallel layers that read it.

    heads: if the outputs are those of fewer heads than ranks, groups of neighbors compute the same head: -> (..., n_out / heads).
        Every rank then holds all of W and b, whose gradients are partial.
    uneven: the ranks need not divide n_out, a vocabulary: see `TensorSplit.rows`.
    """

    meshcomm_split: TensorSplit
    meshcomm_entry: Callable[[Tensor], Tensor]
    meshcomm_output = "split"
    meshcomm_transposed = False
    meshcomm_rows: slice | None = None
    meshcomm_product: Product = staticmethod(F.linear)

    def __init__(
        self,
        split: TensorSplit,
        n_in: int,
        n_out: int,
        *,
        bias: bool = False,
        heads: int = 0,
        uneven: bool = False,
    ) -> None:
        super().__init__()
        self.meshcomm_split, self.meshcomm_entry = split, entered
        axis = None if split.shares_heads(heads) else 0
        self.weight = split.parameter(n_out, n_in, axis=axis, uneven=uneven)
        self.bias = split.parameter(n_out, axis=axis, uneven=uneven) if bias else None
        if axis is None:
            split.share_heads(self, heads, n_out)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        y = self.meshcomm_product(self.meshcomm_entry(x), _matrix(self), held(self, "bias"))
        split = self.meshcomm_split
        if self.meshcomm_output == "whole" and split.size > 1:
            return split.mesh.functional.all_gather(split.dim, y, -1, grad="slice")
        return y


def columns(x: Tensor, *layers: ColumnParallel) -> tuple[Tensor, ...]:
    """Return the results of column-parallel layers that read the same `x`, (..., n_in), which has not been through `enter`.

    Equivalent to `enter` and each layer. In backward, the gradient of `x` is summed over the ranks while the gradients of
    the weights are computed, as in Megatron-LM's layers. Its sum and its rounding do not depend on that.

    Raises: UnsupportedOp for layers of another kind, or of splits that enter differently; ShapeError if `x` does not fit.
    """
    split = _shared_split(layers)
    if torch.compiler.is_compiling():
        x = split.enter(x)
        return tuple(layer(x) for layer in layers)
    try:
        if (
            not split.overlaps
            or transforming()
            or any(
                type(layer) is not ColumnParallel
                or layer.bias is not None
                or "meshcomm_product" in vars(layer)
                or hooked(layer)
                for layer in layers
            )
        ):
            entered_x = split.enter(x)
            return tuple(layer(entered_x) for layer in layers)
        weights = (as_autocast(_matrix(layer)) for layer in layers)
        results: tuple[Tensor, ...] = _Columns.apply(split, as_autocast(x), *weights)
        return results
    except (AttributeError, RuntimeError, TypeError):
        # Only now, because a check reads the layers again.
        _check_fit(x, layers)
        raise


def _shared_split(layers: Sequence[Any]) -> TensorSplit:
    """Return the split whose `enter` the layers of `columns` share."""
    split: TensorSplit | None = None
    for layer in layers:
        if not isinstance(layer, ColumnParallel):
            split = None
            break
        other = layer.meshcomm_split
        if split is None:
            split = other
        elif other is not split and other.entry != split.entry:
            raise UnsupportedOp(
                f"columns on {split.mesh.label}: the layers do not share one `enter`",
                given=f"layers split along {split} and along {other}",
                expected="layers with the same mesh, dim, sequence_parallel and axis",
                hint="a call of columns for each TensorSplit; the gradients of x add up",
            )
    if split is None:
        given = f"a {type(layer).__name__}" if layers else "no layers"
        raise UnsupportedOp(
            "columns takes column-parallel layers",
            given=given,
            expected="one or more ColumnParallel, each as an argument",
            hint="columns(x, *layers)" if given == "a list" else "split.enter(x), and the layer itself",
        )
    return split


def _check_fit(x: Any, layers: Sequence[Any]) -> None:
    """Raise if `x` is not what every layer of `columns` takes."""
    is_tensor = isinstance(x, Tensor)
    for layer in layers:
        weight = layer.weight
        n_in = weight.shape[0 if layer.meshcomm_transposed else -1]
        if is_tensor and x.shape[-1:] == (n_in,) and as_autocast(x).dtype == as_autocast(weight).dtype:
            continue
        raise ShapeError(
            f"columns on {layer.meshcomm_split.mesh.label}: x does not fit a layer",
            given=(f"x of shape {tuple(x.shape)}, {x.dtype}" if is_tensor else f"a {type(x).__name__}")
            + f"; a layer of {n_in} inputs, {weight.dtype}",
            expected=f"a tensor of shape (..., {n_in}), {weight.dtype}",
            hint="the layers that read x, which all have its last size as n_in"
            if is_tensor and x.dtype == weight.dtype
            else f"{'x' if is_tensor else 'torch.as_tensor(x)'}.to({weight.dtype})",
        ) from None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: TensorSplit, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x = split.enter(x)
        ctx.split = split
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split: TensorSplit = ctx.split
        x, *weights = ctx.saved_tensors
        rows = [grad.flatten(0, -2) for grad in grads]
        finish: Callable[[], Tensor | None] = lambda: None  # noqa: E731
        if ctx.needs_input_grad[1]:
            dx = rows[0] @ weights[0]
            for grad, weight in zip(rows[1:], weights[1:], strict=True):
                dx += grad @ weight
            finish = split.leave_while(dx.view(x.shape))
        needed = ctx.needs_input_grad[2:]
        of_weights = [
            grad.T @ x.flatten(0, -2) if need else None for grad, need in zip(rows, needed, strict=True)
        ]
        return None, finish(), *of_weights


class RowParallel(nn.Module):
    """y = x W^T + b, W (n_out, n_in) split over n_in: x (..., n_in / ranks) -> (..., n_out), full.

    With sequence_parallel, y is this rank's slice of the sequence, and the gradient of b is partial.
    """

    meshcomm_split: TensorSplit
    meshcomm_input = "split"
    meshcomm_transposed = False
    meshcomm_product: Product = staticmethod(F.linear)

    def __init__(self, split: TensorSplit, n_in: int, n_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.meshcomm_split = split
        self.weight = split.parameter(n_out, n_in, axis=1)
        self.bias = split.parameter(n_out, axis=None) if bias else None
        split.partial(self, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """Runs one all_reduce in forward and no collective in backward; with sequence_parallel, a reduce_scatter in
        forward and an all_gather in backward. The bias is added once.
        """
        split = self.meshcomm_split
        if self.meshcomm_input == "whole" and split.size > 1:
            x = split.mesh.functional.slice(split.dim, x, -1)
        summed = split.size > 1 and not torch.compiler.is_compiling()
        with added_up() if summed else nullcontext():
            y = self.meshcomm_product(x, _matrix(self))
        y = split.leave(y)
        bias = held(self, "bias")
        return y if bias is None else y + bias.to(y.dtype)


class VocabParallelEmbedding(nn.Module):
    """Rows of a (vocab, width) table split over vocab: ids (...) int64 -> (..., width), full. The ranks need not divide vocab.

    With sequence_parallel: ids (batch, sequence), full -> this rank's slice of the sequence.
    dtype: the dtype in which rows are sent and returned. If None, the weight's dtype is used. Summing does not round the rows.
    Raises ShapeError for ids outside 0 .. vocab - 1. If checking would wait for the device, such ids get rows of nan instead.
    """

    meshcomm_split: TensorSplit
    meshcomm_dtype: torch.dtype | None = None
    num_embeddings: int
    padding_idx: int | None = None

    def __init__(
        self, split: TensorSplit, vocab: int, hidden_size: int, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.meshcomm_split, self.meshcomm_dtype, self.num_embeddings = split, dtype, vocab
        self.weight = split.parameter(vocab, hidden_size, axis=0, uneven=True)

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""
        split, table, padding = self.meshcomm_split, held(self, "weight"), self.padding_idx
        dtype = self.meshcomm_dtype or table.dtype
        if split.size == 1 and not split.mesh.is_async:
            # If ids are outside the vocabulary, `outside_of` names them.
            with nullcontext() if torch.compiler.is_compiling() else suppress(IndexError):
                return F.embedding(ids, table, padding).to(dtype)
        outside = outside_of(split, ids, self.num_embeddings, "an embedding's ids")
        row, mine = owned(ids, table.shape[0], split.rows(self.num_embeddings)[0])
        embedded = F.embedding(row, table).to(dtype)
        if padding is not None:
            # F.embedding's padding_idx cannot be used, because ids of other ranks are also looked up in row 0.
            embedded = embedded.detach().where((ids == padding).unsqueeze(-1), embedded)
        # Rows that another rank owns become zeros; `leave` sums over the ranks.
        embedded = embedded * mine.unsqueeze(-1)
        if outside is not None:
            embedded = embedded.masked_fill(outside.unsqueeze(-1), torch.nan)
        return split.leave(embedded)


def owned(ids: Tensor, rows: int, first: int) -> tuple[Tensor, Tensor]:
    """Return each id's local row (0 if another rank owns the id), and a mask of the ids that this rank owns. first: the id of
    this rank's first row.
    """
    row = ids - first
    mine = (row >= 0) & (row < rows)
    return row.where(mine, 0), mine


def outside_of(split: TensorSplit, ids: Tensor, vocab: int, what: str) -> Tensor | None:
    """Return a mask of the ids that no rank holds, or None if the ids can be checked without waiting for the device.

    Raises ShapeError for ids outside 0 .. vocab - 1 if the check does not wait for the device.
    """
    if torch.compiler.is_compiling() or split.mesh.is_async:
        return (ids < 0) | (ids >= vocab)
    if not ids.numel():
        return None
    lowest, highest = ids.aminmax()
    if lowest < 0 or highest >= vocab:
        raise ShapeError(
            f"{what} are outside the vocabulary on {split.mesh.label}",
            given=f"{int(lowest)} to {int(highest)}",
            expected=f"0 to {vocab - 1}"
            + (f", the {vocab} rows that the ranks along {split.dim} hold together" if split.dim else ""),
            hint="set the table's size to the tokenizer's, or use ignore_index for targets that do not count",
        )
    return None


def cross_entropy(
    split: TensorSplit,
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Compute the mean or sum over targets of -log softmax(logits)[target], for logits split over the vocabulary.

    Shape:      logits (..., vocab / ranks) of the full sequence, from `enter` and a ColumnParallel;
                targets (...) int64 in 0 .. vocab - 1, or ignore_index -> ().
    ignore_index: the value of targets that do not count. Such targets add nothing to the sum, to the divisor of the mean, or
                to any gradient. As in torch, the mean over no targets is nan.
    reduction:  "sum" for callers that divide by a different number of tokens, such as the total over all ranks and
                microbatches.
    label_smoothing: as in torch: the share of a target that is spread evenly over the vocabulary.
    vocab_size: the number of logits of all ranks. Required if the ranks do not divide it: see `TensorSplit.rows`.
    z_loss:     the factor of log(sum(exp(logits)))^2, which is added for each target (PaLM, Chowdhery et al. 2022).
    Called by:  every rank along the dim, with equal targets. All ranks return the same value.
    Gradient:   exact, for this rank's logits. Forward runs two small all_reduces: one for the maximum, and one for the sums
                and the target's logit. Backward runs none. Logits are never gathered. For half-precision logits, the
                loss is computed in float32.
    Raises:     ShapeError for any other target. If checking would wait for the device, the loss is nan instead.
    """
    if reduction not in ("mean", "sum"):
        raise UnsupportedOp(
            f"cross_entropy has no reduction {reduction!r}",
            given=f"reduction={reduction!r}",
            expected='reduction="mean" or reduction="sum"',
            hint='reduction="sum", and divide by your own count',
        )
    if targets.is_floating_point():
        raise ShapeError(
            f"cross_entropy takes no probabilities as targets on {split.mesh.label}",
            given=f"{targets.dtype} targets of shape {tuple(targets.shape)}",
            expected=f"int64 targets of shape {tuple(logits.shape[:-1])}",
            hint="a loss of your own, such as torch.nn.functional.cross_entropy",
        )
    waits = not (torch.compiler.is_compiling() or split.mesh.is_async)
    # torch's own kernel, where its float32 copies are small.
    whole = split.size == 1 and not z_loss and logits.numel() <= _FEW
    if whole and waits:
        # If targets are outside the vocabulary, `outside_of` names them.
        with suppress(IndexError):
            return _whole(logits, targets, ignore_index, reduction, label_smoothing)
    counted = targets != ignore_index
    vocab = logits.shape[-1] * split.size if vocab_size is None else vocab_size
    outside = outside_of(split, targets.where(counted, 0), vocab, "targets")
    if outside is not None:
        counted = counted & ~outside
    if whole:
        total: Tensor = _whole(
            logits, targets.where(counted, ignore_index), ignore_index, "sum", label_smoothing
        )
    else:
        total = _CrossEntropy.apply(logits, targets, counted, split, vocab, label_smoothing, z_loss)
    if outside is not None:
        total = torch.where(outside.any(), torch.nan, total)
    return total / counted.sum() if reduction == "mean" else total


def _whole(
    logits: Tensor, targets: Tensor, ignore_index: int, reduction: Reduction, smoothing: float
) -> Tensor:
    rows = logits.flatten(0, -2).to(wide_dtype(logits.dtype))
    return F.cross_entropy(
        rows, targets.flatten(), ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
    )


# The smallest number of elements in one computation: 64 MB in float32.
_FEW = 2**24


class _CrossEntropy(torch.autograd.Function):
    """Processes a few rows at a time, so that only the logits and their gradient, both in the logits' dtype, are held in
    full."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        counted: Tensor,
        split: TensorSplit,
        vocab: int,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        rows, wide = logits.flatten(0, -2), wide_dtype(logits.dtype)
        place, mine = owned(targets.flatten(), logits.shape[-1], split.rows(vocab)[0])
        counted = counted.flatten()
        highest = rows.amax(-1).to(wide)
        if split.size > 1:
            highest = split.mesh.all_reduce(split.dim, highest, op="max")
        total = torch.cat(
            [
                (part.to(wide) - most.unsqueeze(-1)).exp_().sum(-1)
                for part, most in zip(_parts(rows), _parts(highest, rows), strict=True)
            ]
        )
        target = (rows.gather(-1, place.unsqueeze(-1)).squeeze(-1).to(wide) - highest).where(
            mine & counted, 0
        )
        sums = [total, target]
        if smoothing:
            # The mean of all logits of a row, less the highest one.
            sums.append(
                torch.cat([part.sum(-1, dtype=wide) for part in _parts(rows)]) / vocab - highest / split.size
            )
        if split.size > 1:
            sums = [*split.mesh.all_reduce(split.dim, torch.stack(sums), op="sum").unbind()]
        total, target, *mean = sums
        ctx.save_for_backward(logits, highest, total, place, mine & counted, counted)
        ctx.smoothing, ctx.z_loss, ctx.vocab = smoothing, z_loss, vocab
        loss = total.log() - target
        if mean:
            loss = loss.lerp(total.log() - mean[0], smoothing)
        if z_loss:
            loss = loss + z_loss * (total.log() + highest).square()
        return loss.where(counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, *of_rows = ctx.saved_tensors
        rows, gradient = logits.flatten(0, -2), torch.empty_like(logits)
        every = (
            _parts(rows),
            _parts(gradient.flatten(0, -2), rows),
            *(_parts(row_parts, rows) for row_parts in of_rows),
        )
        for part, into, most, total, place, mine, counted in zip(*every, strict=True):
            softmax = (part.to(most.dtype) - most.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
            if ctx.z_loss:
                softmax *= (1 + 2 * ctx.z_loss * (total.log() + most)).unsqueeze(-1)
            if ctx.smoothing:
                softmax -= ctx.smoothing / ctx.vocab
            target = mine.unsqueeze(-1).to(most.dtype) * (ctx.smoothing - 1)
            softmax.scatter_add_(-1, place.unsqueeze(-1), target)
            torch.mul(softmax, (grad * counted).unsqueeze(-1), out=into)
        return gradient, *[None] * 6


def _parts(x: Tensor, of: Tensor | None = None) -> tuple[Tensor, ...]:
    """Split `x` into at most eight runs of rows, of at least `_FEW` elements. If given, `of` determines the run length."""
    rows, width = (x if of is None else of).shape
    parts: tuple[Tensor, ...] = x.split(max(1, _FEW // width, -(-rows // 8)))
    return parts
